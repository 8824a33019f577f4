"""Export of chosen sizes: a sentence-transformers folder per size, with card and ONNX files, and export.json."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from data.ground.errors import ConfigError
from data.ground.whole_folder import written_whole
from data.tokens import left_out_length, tokenizer_fingerprint
from models.direction import is_decoder
from models.encoder import Encoder
from models.heads import save_heads
from models.settings import EmbeddingSettings
from models.sizes import Ladder, Size
from trainer.evaluation.subject import check_sizes, load_model, trained_settings
from trainer.exporting.cards import router_card, size_card, static_card
from trainer.exporting.folders import (
    Cut,
    cut_to,
    save_checkpoint,
    table_tensors,
    weights_megabytes,
    with_idle_pooler,
    write_route,
    write_router,
    write_size,
    write_static,
)
from trainer.exporting.manifest import check_output, write_manifest
from trainer.exporting.model_card import LIMITS, Results, base_model_of, results_section, training_section
from trainer.exporting.onnx_files import PRECISIONS, Check, check_onnx, write_onnx

log = logging.getLogger(__name__)
ENCODER_FOLDER = "encoder"
Checks = dict[str, Check]  # precision -> measurements of that ONNX file


@dataclasses.dataclass(frozen=True)
class Router:
    """A size for queries and one for documents, of one width."""

    query: Size
    document: Size

    def __post_init__(self) -> None:
        if self.query.dim != self.document.dim:
            raise ConfigError(
                f"router {self.query}:{self.document} compares {self.query.dim} dimensions with {self.document.dim}; "
                f"give both sizes one width, for example {self.query}:{self.document.body.of_dim(self.query.dim)}"
            )

    @property
    def name(self) -> str:
        return f"router-{self.query}-{self.document}"

    @property
    def routes(self) -> dict[str, Size]:
        return {"query": self.query, "document": self.document}

    @classmethod
    def parse(cls, text: str, ladder: Ladder) -> Router:
        """Read "3x128:6x128"."""
        query, colon, document = text.partition(":")
        if not colon:
            raise ConfigError(f"router {text!r} is not of the form QUERY_SIZE:DOCUMENT_SIZE, such as 3x128:6x128")
        return cls(ladder.find(query.strip()), ladder.find(document.strip()))


@dataclasses.dataclass(frozen=True)
class Form:
    """The precisions of the files: of weights, of a static encoder's token table, and of each ONNX file."""

    weights: str = "float32"
    table: str = "float32"
    onnx: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.onnx) - set(PRECISIONS)):
            raise ConfigError(f"--onnx {unknown[0]!r} is unknown; use {', '.join(PRECISIONS)}, or both")
        if self.onnx:
            check_onnx()

    def check_against(self, encoder: Encoder, source: Path) -> None:
        """Refuse forms that this kind of encoder cannot have."""
        if not encoder.is_static:
            if self.table != "float32":
                raise ConfigError(
                    f"{source} is no static model and has no token table alone; leave --table int8 out, or give "
                    "--onnx int8, whose table is in int8"
                )
            if self.onnx and is_decoder(encoder.config):
                raise ConfigError(
                    f"{source} is a decoder ({encoder.config.model_type}), which torch writes as an ONNX graph of "
                    "one shape of a batch only; leave --onnx out"
                )
            if self.onnx and not encoder.pool_prompt:
                raise ConfigError(
                    f"{source} leaves the prompt out of its pooling, and an ONNX graph is not told how long a prompt "
                    "is; leave --onnx out"
                )
        elif self.weights != "float32" or self.onnx:
            option = "--onnx" if self.onnx else f"--weights {self.weights}"
            raise ConfigError(f"{source} is a static model, a table alone; leave {option} out, or give --table int8")


def export_sizes(
    model_folder: str | Path,
    output: str | Path,
    *,
    sizes: Sequence[str | Size] | None = None,
    routers: Sequence[str] = (),
    weights: str = "float32",
    table: str = "float32",
    onnx: Sequence[str] = (),
    results: str | Path | None = None,
    watts_per_rank: float | None = None,
    base_model: str | None = None,
) -> dict[str, Path]:
    """Write a folder per size and router, and `encoder/`, into `output`; returns name -> folder.

    `model_folder`: a trained folder (Hugging Face files and barista.json). `sizes`: names of its ladder, or any
    LAYERSxDIM; None: the whole ladder. `routers`: QUERY_SIZE:DOCUMENT_SIZE. `output` appears whole or not at all; an
    earlier export there is replaced, anything else is refused. `weights`: float32 or float16, for encoders with layers.
    `table`: float32 or int8, for a static encoder's token table. `onnx`: float32, int8 or both. `results`,
    `watts_per_rank`, `base_model`: for the model cards (trainer/exporting/model_card.py).
    """
    model_folder, output = Path(model_folder), Path(output)
    settings = trained_settings(model_folder)
    check_output(output)
    chosen = _chosen_sizes(sizes, settings.sizes)
    pairs = list(dict.fromkeys(Router.parse(text, settings.sizes) for text in routers))
    form = Form(weights, table, tuple(dict.fromkeys(onnx)))
    facts = _Facts(
        Results.read(None if results is None else Path(results)),
        training_section(model_folder, watts_per_rank=watts_per_rank),
        base_model or base_model_of(model_folder),
    )
    encoder, tokenizer, _ = load_model(model_folder)
    form.check_against(encoder, model_folder)
    for prompt in () if encoder.pool_prompt else (settings.query_prompt, settings.passage_prompt):
        left_out_length(tokenizer, prompt)
    if encoder.is_static and pairs:
        raise ConfigError(f"{model_folder} is a static model, whose one layer serves both; leave --router out")
    check_sizes([*chosen.values(), *(size for pair in pairs for size in pair.routes.values())], encoder)
    tokenizer = _of_length(tokenizer, settings.max_length)
    content: dict[str, Any] = {"sizes": {name: size.numbers for name, size in chosen.items()}}
    with written_whole(output) as partial:
        with_idle_pooler(encoder.backbone.float())
        encoder.heads.float()
        save_checkpoint(encoder.backbone, tokenizer, partial / ENCODER_FOLDER)
        save_heads(encoder.heads.state_dict(), partial / ENCODER_FOLDER)
        fingerprint = tokenizer_fingerprint(tokenizer)
        dataclasses.replace(settings, tokenizer=fingerprint).save(partial / ENCODER_FOLDER)
        if encoder.is_static:
            _write_static_sizes(chosen, encoder, tokenizer, settings, form, facts, partial)
        else:
            checks = _write_sizes(chosen, pairs, encoder, tokenizer, settings, form, facts, partial)
            content["routers"] = {
                pair.name: {route: size.numbers for route, size in pair.routes.items()} for pair in pairs
            }
            content["weights"] = form.weights
            content["onnx"] = {
                folder: {precision: check.as_json() for precision, check in of_folder.items()}
                for folder, of_folder in checks.items()
                if of_folder
            }
        write_manifest(partial, content)
    names = [*chosen, *(pair.name for pair in pairs)]
    log.info("exported %s to %s", ", ".join(names), output)
    return {name: output / name for name in names}


@dataclasses.dataclass(frozen=True)
class _Facts:
    """The facts in a card that do not depend on its folder."""

    results: Results
    training: str
    base_model: str | None

    def sections(self, size: Size | None) -> str:
        """The card's sections. `size` is None for a router, because results.json has no scores of routers."""
        scores = [] if size is None else [results_section(self.results, size)]
        return "\n" + "\n".join([self.training, *scores, LIMITS])


@dataclasses.dataclass(frozen=True)
class _Job:
    """One cut to write: a size's own folder, or one route of a router."""

    size: Size
    name: str
    router: Router | None = None
    route: str = ""


def _write_sizes(
    chosen: dict[str, Size],
    pairs: Sequence[Router],
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerFast,
    settings: EmbeddingSettings,
    form: Form,
    facts: _Facts,
    output: Path,
) -> dict[str, Checks]:
    """Write the folders of an encoder with layers. Returns a Transformer's folder -> checks of its ONNX files."""
    lengths = {"query": settings.query_max_length, "document": settings.passage_max_length}
    routes: dict[Router, dict[str, Cut]] = {pair: {} for pair in pairs}
    checks: dict[str, Checks] = {}
    jobs = [_Job(size, name) for name, size in chosen.items()]
    jobs += [_Job(size, pair.name, pair, route) for pair in pairs for route, size in pair.routes.items()]
    # Sizes are written from the deepest on, so that one copy in memory can be cut step by step.
    for job in sorted(jobs, key=lambda job: job.size, reverse=True):
        cut, folder, own = cut_to(encoder, job.size, settings), output / job.name, tokenizer
        if job.router is None:
            transformer = write_size(cut, own, folder, weights=form.weights)
        else:
            own = _of_length(tokenizer, lengths[job.route])
            transformer = write_route(cut, own, folder, job.route, weights=form.weights)
            routes[job.router][job.route] = cut
        of_folder = write_onnx(cut, own, transformer, form.onnx) if form.onnx else {}
        checks[transformer.relative_to(output).as_posix()] = of_folder
        if job.router is None:
            card = size_card(
                cut,
                job.name,
                base_model=facts.base_model,
                scores=facts.results.of(job.size),
                checks=of_folder,
                weights=_told(form, folder),
            )
            _write_card(folder, card + facts.sections(job.size))
    for pair in pairs:
        cuts, folder = {route: routes[pair][route] for route in pair.routes}, output / pair.name
        transformers = write_router(cuts, folder)
        card = router_card(
            cuts["query"],
            cuts["document"],
            pair.name,
            base_model=facts.base_model,
            checks={route: checks[path.relative_to(output).as_posix()] for route, path in transformers.items()},
            weights=_told(form, folder),
        )
        _write_card(folder, card + facts.sections(None))
    return checks


def _write_static_sizes(
    chosen: dict[str, Size],
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerFast,
    settings: EmbeddingSettings,
    form: Form,
    facts: _Facts,
    output: Path,
) -> None:
    tensors = table_tensors(encoder.word_embeddings.weight.detach(), in_int8=form.table == "int8")
    stored = "float32" if form.table == "float32" else "int8 codes and a scale each"
    for name, size in chosen.items():
        write_static(tensors, tokenizer, settings, size, output / name)
        card = static_card(
            f"{encoder.word_embeddings.num_embeddings:,}, {stored}",
            tokenizer,
            settings,
            name,
            size,
            base_model=facts.base_model,
            scores=facts.results.of(size),
        )
        _write_card(output / name, card + facts.sections(size))


def _write_card(folder: Path, card: str) -> None:
    (folder / "README.md").write_text(card, encoding="utf-8")


def _told(form: Form, folder: Path) -> str:
    return f"{form.weights}, {weights_megabytes(folder):.1f} MB"


def _of_length(tokenizer: PreTrainedTokenizerFast, length: int) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer that cuts texts at `length` tokens when it is asked to cut."""
    own = copy.deepcopy(tokenizer)
    own.model_max_length = length
    # A call with padding or truncation leaves its settings in the tokenizer's file, where other programs obey them.
    own.backend_tokenizer.no_truncation()
    own.backend_tokenizer.no_padding()
    return own


def _chosen_sizes(sizes: Sequence[str | Size] | None, ladder: Ladder) -> dict[str, Size]:
    wanted = list(ladder) if sizes is None else [s if isinstance(s, Size) else ladder.find(s) for s in sizes]
    if not wanted:
        raise ConfigError("no size to export; name some of the ladder's, or leave the choice out for all of them")
    return {ladder.name(size): size for size in wanted}
