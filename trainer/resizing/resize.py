"""The steps of `trainer.resize`. Each writes a folder that shows it is done, so that a killed command can go on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import tomli_w
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from data import prepare
from data.corpora.options import DEFAULT_LAYOUT, SourceOptions
from data.corpora.plan import plan_documents, plan_tuples
from data.corpora.read import read_split
from data.corpora.splits import Document, DocumentLayout, InputSplit
from data.ground.errors import ConfigError
from data.ground.files import read_text, write_atomically
from data.ground.records import read_record
from data.ground.secrets import without_secrets
from data.ground.whole_folder import check_place
from data.shards.format import MANIFEST
from models.backbone import longest_input
from models.encoder import Encoder
from models.heads import head_key
from models.nested_feed_forward import check_fractions
from models.settings import EmbeddingSettings
from models.sizes import STARBUCKS_LADDER, Body, Ladder, Size
from trainer.config.load import load_recipe
from trainer.distributed import gather_objects, join
from trainer.evaluation.encoding.across import Searched, SizePair, encoded_sizes
from trainer.evaluation.encoding.encode import embedder_of
from trainer.evaluation.latency import measure_costs
from trainer.evaluation.results.output import results_content, write_json
from trainer.evaluation.results.report import Record
from trainer.evaluation.run import Outputs, evaluate_tasks
from trainer.evaluation.subject import check_sizes, choose_device, load_model
from trainer.evaluation.tasks.read import digest_of_tasks, read_tasks
from trainer.evaluation.tasks.retrieval import RetrievalData
from trainer.evaluation.tasks.sts import STSTask
from trainer.exporting.folders import weights_megabytes
from trainer.exporting.model_folder import write_model_folder
from trainer.exporting.sizes import export_sizes
from trainer.resizing.closed_form import FITTED_TEXTS, HELD_OUT_TEXTS, depth_states, fit_heads
from trainer.resizing.figures import draw
from trainer.resizing.neurons import WEIGHED_TEXTS, sort_neurons
from trainer.resizing.table import AS_IT_IS, CLOSED_FORM, RESIZED, TO_WHOLE, Row, Table, as_markdown, scores_of
from trainer.run import execute
from trainer.teacher_vectors import store_vectors

log = logging.getLogger(__name__)

# Folders in the output folder, beside closed_form/.
START, SHARDS, TRAINING, EVALUATION, EXPORT = "start", "shards", "training", "evaluation", "export"
TEACHER, PAIR_SHARDS, PAIR_TRAINING, PAIR_TEACHER = "teacher", "pair_shards", "pair_training", "pair_teacher"
AGREEMENT = "agreement"  # the task that needs no labels
# A tenth of the texts, up to this number, is held out of training and used for the task above.
_HELD_OUT = 1_000
_HELD_OUT_SHARE = 10
_LEAST_HELD_OUT = 4  # two texts have one cosine, which no order of pairs can agree with
_TIMED_TEXTS = 50
_DS_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"  # absolute, so that any working directory will do
_SHARES = (1 / 12, 1 / 6, 1 / 3, 1 / 2, 2 / 3, 1)  # of the width, for each of six sizes


@dataclass(frozen=True)
class Resize:
    """The arguments of the command."""

    model: str
    texts: tuple[str, ...]
    output: Path
    sizes: str = ""
    trains: str = "all"
    heads: bool = True
    teacher: str = ""
    pairs: tuple[str, ...] = ()
    sts: tuple[str, ...] = ()
    beir: tuple[str, ...] = ()
    text_column: str = "text"
    text_split: str = "blank-lines"
    limit: int | None = None
    max_length: int | None = None
    processes: int | None = None
    overrides: tuple[str, ...] = ()
    stated: Collection[str] = ()  # options of the texts that the command line states

    @cached_property
    def held_out(self) -> list[str]:
        """The first texts, at most a tenth of all unless they are very few; training does not see them."""
        most = _HELD_OUT_SHARE * _HELD_OUT
        texts = itertools.chain.from_iterable(map(_texts_of, self.all_units))
        first = list(itertools.islice(texts, min(most, self.limit or most)))
        return first[: max(_LEAST_HELD_OUT, len(first) // _HELD_OUT_SHARE)]

    @cached_property
    def all_units(self) -> list[InputSplit]:
        """All texts. Raises DataError for texts and options that cannot be read."""
        return self._plan()

    @cached_property
    def units(self) -> list[InputSplit]:
        """The texts of the shards, on which the model is trained."""
        return self._plan(skip=len(self.held_out), limit=self.limit)

    def _plan(self, *, skip: int = 0, limit: int | None = None) -> list[InputSplit]:
        layout = DocumentLayout(self.text_column, self.text_split)
        source = SourceOptions(limit, skip_empty=True, stated=self.stated)
        return plan_documents(self.texts, layout, source, skip=skip)


def propose_ladder(num_layers: int, width: int) -> Ladder:
    """Up to six sizes, depths at even steps and widths from 1/12 to all; for 12 layers of 768 the paper's ladder."""
    if (num_layers, width) == (STARBUCKS_LADDER.full.layers, STARBUCKS_LADDER.full.dim):
        return STARBUCKS_LADDER
    steps = min(len(_SHARES), num_layers, width)
    unit = min(8, width // steps)  # dimensions that every width is a multiple of, where there are enough of them
    sizes = []
    for step in range(1, steps + 1):
        share = _SHARES[round(step * len(_SHARES) / steps) - 1]
        dim = width if share == 1 else max(step * unit, round(width * share / unit) * unit)
        sizes.append(Size(round(num_layers * step / steps), dim))
    return Ladder(tuple(sizes))


def resize(asked: Resize, *, prepare_only: bool = False) -> str:
    """Run the steps that are not done yet; returns the table as Markdown.

    Every rank must call this. Only rank 0 does the steps other than training and returns the table; the other ranks
    return an empty text. `prepare_only` ends before training, with an empty text.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # Read before anything is computed, so that a wrong path fails at once. The digest comes first: should a file change
    # in between, the next command notices.
    tests = digest_of_tasks(asked.sts, asked.beir)
    tasks = read_tasks(asked.sts, asked.beir, taken=[AGREEMENT])
    _ = asked.all_units
    world = join(_device())
    if world.is_main:
        _begin(asked)
        _write_start(asked)
        # Wrong overrides must be refused before the steps that take minutes.
        _write_recipes(asked, asked.output / START, ranks=world.size)
        load_recipe(asked.output / f"{TRAINING}.toml", asked.overrides)
        _write_shards(asked)
        if asked.heads:
            _write_closed_form(asked)
            _write_recipes(asked, asked.output / CLOSED_FORM, ranks=world.size)
    gather_objects(None)
    if prepare_only:
        return ""
    stages = [(TRAINING, asked.units)]
    with tempfile.TemporaryDirectory() as scratch:
        if asked.pairs:
            source = SourceOptions(skip_empty=True)
            stages.append((PAIR_TRAINING, plan_tuples(asked.pairs, source=source, scratch=Path(scratch))))
        for name, units in stages:
            recipe = load_recipe(asked.output / f"{name}.toml", asked.overrides if name == TRAINING else ())
            if (asked.output / name / "DONE").exists():
                continue
            if asked.teacher:
                store_vectors(recipe, units, world)
            execute(recipe, last=name == stages[-1][0])
    return _report(asked, tasks, tests) if world.is_main else ""


def _begin(asked: Resize) -> None:
    """Refuse the output folder of another command; the arguments that decide the result are kept in command.json.

    The secrets in their addresses are not kept, so a password may change.
    """
    check_place(asked.output)
    known = {
        key: value for key, value in dataclasses.asdict(asked).items() if key not in ("output", "processes", "stated")
    }
    shown = {key: _without_secrets(value) for key, value in known.items()}
    text, unhidden = (json.dumps(each, indent=2) + "\n" for each in (shown, known))
    path = asked.output / "command.json"
    # Earlier versions kept the secrets; their file is written anew below.
    if path.exists() and read_text(path, hint="give a new --output") not in (text, unhidden):
        raise ConfigError(f"{asked.output} is of another command ({path}); give a new --output, or the same arguments")
    if asked.output.is_dir() and not path.exists() and any(asked.output.iterdir()):
        raise ConfigError(f"--output {asked.output} holds something else; give a new folder")
    asked.output.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def _without_secrets(value: Any) -> Any:
    """The value of an argument as files may show it."""
    if isinstance(value, tuple):
        return [without_secrets(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


def _write_start(asked: Resize) -> None:
    """Write start/: the unchanged model, with the ladder that was asked for or proposed.

    Where the ladder has narrower feed-forwards, neurons are numbered by importance, which changes no output.
    """
    folder = asked.output / START
    if folder.exists():
        return
    encoder, tokenizer, settings = _load(asked.model)
    if encoder.is_static:
        raise ConfigError(f"{asked.model} is a token table without layers; train it with trainer.finetune")
    if settings.similarity != "cosine":
        raise ConfigError(
            f"{asked.model} is compared by dot product; its vectors' lengths, which are not taught, would be lost"
        )
    full = Size(encoder.num_layers, encoder.embedding_size)
    wanted = _ladder(asked, encoder)
    # With a teacher of another width, the result is as wide as the teacher. The model as it is keeps its own width.
    ladder = wanted
    if wanted.full != full:
        ladder = Ladder((*(size for size in wanted if size.layers < full.layers and size.dim < full.dim), full))
    check_sizes(ladder, encoder)
    check_fractions(encoder.backbone, wanted)
    settings = dataclasses.replace(settings, ladder=tuple(size.numbers for size in ladder))
    if asked.max_length:
        settings = _cut_at(asked.max_length, encoder, tokenizer, settings)
    backbone = encoder.backbone.float()
    if not wanted.has_whole_feed_forwards:
        sort_neurons(encoder, tokenizer, _sampled(asked, WEIGHED_TEXTS), settings, device=_device())
    write_model_folder(folder, backbone.cpu(), tokenizer, settings, encoder.heads)


def _cut_at(tokens: int, encoder: Encoder, tokenizer: Any, settings: EmbeddingSettings) -> EmbeddingSettings:
    """Settings that cut every text at `tokens` tokens, here and wherever the resized model is used."""
    least, most = tokenizer.num_special_tokens_to_add() + 1, longest_input(encoder.backbone)
    if tokens < least or (most is not None and tokens > most):
        room = f"{least} to {most} tokens" if most is not None else f"at least {least} tokens"
        raise ConfigError(f"--max-length {tokens}: the model takes {room}; give a length that it can take")
    return dataclasses.replace(settings, query_max_length=tokens, passage_max_length=tokens)


def _ladder(asked: Resize, encoder: Encoder) -> Ladder:
    """The result's ladder: that of --sizes or, without them, a proposed one.

    Its last size has all layers, and as many dimensions as the vectors that are learned.
    """
    full = Size(encoder.num_layers, encoder.embedding_size)
    is_taught = bool(asked.teacher) and asked.heads  # which map into the teacher's space
    if is_taught:
        full = Size(full.layers, _settings(asked.teacher, EmbeddingSettings.load(asked.teacher)).sizes.full.dim)
    if not asked.sizes:
        return propose_ladder(full.layers, full.dim)
    ladder = Ladder(tuple(Size.parse(each) for each in asked.sizes.split(",")))
    if is_taught and ladder.full.dim != full.dim:
        raise ConfigError(
            f"--sizes end with {ladder.full}, and --teacher {asked.teacher} has vectors of {full.dim} dimensions; end "
            f"them with {full}"
        )
    ladder.check_against(num_layers=full.layers, hidden_size=full.dim)
    return ladder


def _texts_of(unit: InputSplit) -> Iterator[str]:
    return (cast(Document, record)["text"] for _, record in read_split(unit))


def _write_shards(asked: Resize) -> None:
    """Write shards of the texts that are not held out, and of the pairs. Finished shards are left as they are."""
    folder, pairs = asked.output / SHARDS, asked.output / PAIR_SHARDS
    tokenizer = ["--tokenizer", str(asked.output / START)]
    if asked.pairs and not (pairs / MANIFEST).is_file():
        prepare.run(["tuples", *asked.pairs, "--output", str(pairs), *tokenizer, "--skip-empty"])
    if (folder / MANIFEST).is_file():
        return
    command = ["documents", *asked.texts, "--output", str(folder), *tokenizer]
    # Only what differs from the default is passed on: data.prepare refuses a given option that no input reads.
    for option, value, default in (
        ("--text-column", asked.text_column, DEFAULT_LAYOUT.text_column),
        ("--text-split", asked.text_split, DEFAULT_LAYOUT.text_split),
    ):
        command += [option, value] if value != default else []
    command += ["--skip-empty", "--skip-first", str(len(asked.held_out))]
    if asked.limit:
        command += ["--limit", str(asked.limit)]
    if asked.processes:
        command += ["--processes", str(asked.processes)]
    prepare.run(command)


def _sampled(asked: Resize, number: int) -> list[str]:
    """At most `number` of the texts that are trained on, about equally many from each unit."""
    share = -(-number // len(asked.units))
    found = [text for unit in asked.units for text in itertools.islice(_texts_of(unit), share)]
    return found[:number]


def _write_closed_form(asked: Resize) -> None:
    """Write closed_form/: the same weights with a linear map for each body but the last."""
    folder = asked.output / CLOSED_FORM
    if folder.exists():
        return
    encoder, tokenizer, settings = _load(asked.output / START)
    texts = _sampled(asked, FITTED_TEXTS + HELD_OUT_TEXTS)
    if len(texts) < 8:
        raise ConfigError(f"--texts hold {len(texts)} texts beside those held out; give more")
    held_out = min(HELD_OUT_TEXTS, len(texts) // 4)
    log.info("closed form: linear maps from %s texts", f"{len(texts):,}")
    ladder = _ladder(asked, encoder)
    settings = dataclasses.replace(settings, ladder=tuple(size.numbers for size in ladder))
    bodies = ladder.bodies
    if ladder.full.dim != encoder.embedding_size:
        # The heads change the vectors' width. Every depth must give vectors of the same width, so each gets a head.
        bodies = tuple(dict.fromkeys((*bodies, *map(Body, range(1, encoder.num_layers + 1)))))
    states = depth_states(
        encoder,
        tokenizer,
        texts,
        bodies,
        max_length=settings.passage_max_length,
        prompt=settings.passage_prompt,
        device=_device(),
    )
    heads = encoder.heads
    if asked.teacher:
        teacher = _load(asked.teacher)
        targets = torch.from_numpy(_whole_vectors(*teacher, texts, prompt=teacher[2].passage_prompt))
    else:
        deepest = bodies[-1]
        with torch.no_grad():
            targets = nn.functional.normalize(encoder.cpu().head(states.pop(deepest), deepest), dim=1)
    for body, found in fit_heads(states, targets, held_out=held_out).items():
        log.info("%s: cosine %.3f to the whole model (ridge %g)", body.described, found.cosine, found.ridge)
        heads[head_key(body)] = found.head
    write_model_folder(folder, encoder.backbone, tokenizer, settings, heads)


def _whole_vectors(
    encoder: Encoder, tokenizer: Any, settings: EmbeddingSettings, texts: Sequence[str], *, prompt: str
) -> np.ndarray:
    """The whole model's unit vectors of texts, float32 [n, D]."""
    full = settings.sizes.full
    vectors_of = embedder_of(encoder, tokenizer, [full], device=_device())
    return vectors_of(texts, similarity="cosine", max_length=settings.passage_max_length, prompt=prompt)[full]


def _write_recipes(asked: Resize, source: Path, *, ranks: int) -> None:
    """Write the recipes of the two stages: training.toml and, if there are pairs, pair_training.toml.

    Users may read them too. source: the model folder that training starts from.
    """
    settings = EmbeddingSettings.load(source)
    assert settings is not None
    precision = "zero1.json" if torch.cuda.is_available() else "zero1_float32.json"
    teacher: dict[str, Any] = {"model": str(asked.output / START)}
    if asked.teacher:
        teacher = {"model": asked.teacher, "vectors": "stored", "store": str(asked.output / TEACHER)}
    values: dict[str, Any] = {
        "run": {"output": str(asked.output / TRAINING), "resume": "auto"},
        "model": {
            "source": str(source),
            "pooling": settings.pooling,
            **({} if settings.pool_prompt else {"pool_prompt": False}),
            **({"direction": settings.direction} if settings.direction else {}),
            "ladder": [list(pair) for pair in settings.ladder],
            "trains": asked.trains,
            "dropout": 0.0,
        },
        "data": {
            "shards": [str(asked.output / SHARDS)],
            "max_length": settings.passage_max_length,
            "passage_prompts": [settings.passage_prompt] if settings.passage_prompt else [],
        },
        "objective": {"name": "distill", "sizes": "grid"},
        "teacher": teacher,
        "optim": {"lr": 3e-4, "warmup_ratio": 0.1, "weight_decay": 0.01},
        "train": {"global_batch_size": 64, "micro_batch_size": max(1, min(32, 64 // ranks))},
        "engine": {"ds_config": str(_DS_CONFIGS / precision)},
        "checkpoint": {"every_steps": 200},
    }
    write_atomically(asked.output / f"{TRAINING}.toml", tomli_w.dumps(values))
    if not asked.pairs:
        return
    prompts = {"query_prompts": settings.query_prompt, "passage_prompts": settings.passage_prompt}
    paired = {
        **values,
        "run": {"output": str(asked.output / PAIR_TRAINING), "resume": "auto"},
        "model": {**values["model"], "source": str(asked.output / TRAINING / "model")},
        "data": {
            "shards": [str(asked.output / PAIR_SHARDS)],
            "query_max_length": settings.query_max_length,
            "passage_max_length": settings.passage_max_length,
            **{key: [prompt] for key, prompt in prompts.items() if prompt},
        },
        "objective": {"name": "contrastive"},
        "teacher": {**teacher, "store": str(asked.output / PAIR_TEACHER)} if asked.teacher else teacher,
        "optim": {**values["optim"], "lr": 5e-5},
    }
    write_atomically(asked.output / f"{PAIR_TRAINING}.toml", tomli_w.dumps(paired))


def _load(folder: str | Path) -> tuple[Encoder, Any, EmbeddingSettings]:
    encoder, tokenizer, settings = load_model(folder)
    return encoder, tokenizer, _settings(folder, settings)


def _settings(folder: str | Path, settings: EmbeddingSettings | None) -> EmbeddingSettings:
    """The settings of a model, which must have some."""
    if settings is None:
        raise ConfigError(f"{folder} does not say how it pools; give a folder of sentence-transformers")
    return settings


def _device() -> torch.device:
    return choose_device("auto")


def agreement(encoder: Encoder, tokenizer: Any, settings: EmbeddingSettings, texts: Sequence[str]) -> STSTask:
    """A task of held-out texts, each paired with its nearest neighbour and with another text.

    The gold scores are the whole model's cosines. So a size's score on it tells, without any labels, how well the size
    orders pairs as the whole model does.
    """
    vectors = _whole_vectors(encoder, tokenizer, settings, texts, prompt=settings.query_prompt)
    similarities = vectors @ vectors.T
    np.fill_diagonal(similarities, -1.0)
    rows = np.arange(len(texts))
    partners = [similarities.argmax(1), np.roll(rows, 1)]
    pairs = [(texts[row], texts[other]) for of in partners for row, other in zip(rows.tolist(), of.tolist())]
    scores = [float(similarities[row, other]) for of in partners for row, other in zip(rows, of)]
    return STSTask(AGREEMENT, tuple(pairs), tuple(scores))


def _report(asked: Resize, tasks: tuple[list[STSTask], list[RetrievalData]], tests: str) -> str:
    """The table as Markdown. tests: the digest of the files of the tasks.

    The table is measured and the sizes are exported only if there is no resize.json of these tests yet. The table and
    the figures are made from resize.json, every time.
    """
    path = asked.output / "resize.json"
    table = read_record(path, Table, hint="delete it, and the same command evaluates again") if path.exists() else None
    if table is not None and table.tests_sha256 != tests:
        log.info("evaluating again: %s is of other files of --sts and --beir", path)
        table = None
    if table is None:
        table = Table(records=_measured(asked, *tasks), tests_sha256=tests)
        write_atomically(path, table.model_dump_json(indent=2) + "\n")
    text = as_markdown(table.records)
    write_atomically(asked.output / "table.md", text)
    draw(table.records, asked.output / "figures")
    return text


def _measured(asked: Resize, sts: Sequence[STSTask], beir: Sequence[RetrievalData]) -> tuple[Row, ...]:
    """Evaluate all models, export the sizes, and measure their costs: one row per task and size."""
    trained = asked.output / (PAIR_TRAINING if asked.pairs else TRAINING) / "model"
    folders = {AS_IT_IS: asked.output / START, RESIZED: trained}
    if asked.heads:
        folders[CLOSED_FORM] = asked.output / CLOSED_FORM
    sts = [agreement(*_load(asked.teacher or folders[AS_IT_IS]), asked.held_out), *sts]
    scores: dict[tuple[str, Size, str], float | None] = {}
    for method, folder in folders.items():
        log.info("evaluating %s", method.replace("_", " "))
        records = _evaluate(folder, sts, beir)
        scores |= scores_of(method, records)
        if method == RESIZED:
            _write_results(asked, trained, records)
    exported = asked.output / EXPORT  # replaced where it exists, because model cards show scores
    export_sizes(trained, exported, results=asked.output / EVALUATION / "results.json")
    encoder, tokenizer, settings = _load(trained)
    costs = measure_costs(encoder, tokenizer, list(settings.sizes), settings, asked.held_out[:_TIMED_TEXTS])
    columns = [*(f"{method}{to}" for method in (AS_IT_IS, CLOSED_FORM, RESIZED) for to in ("", TO_WHOLE))]
    return tuple(
        Row(
            task=task,
            layers=size.layers,
            dim=size.dim,
            feed_forward=size.feed_forward,
            **{column: scores.get((task, size, column)) for column in columns},
            milliseconds=costs[size].milliseconds,
            megabytes=weights_megabytes(exported / settings.sizes.name(size)),
        )
        for task in (*(task.name for task in sts), *(data.name for data in beir))
        for size in settings.sizes
    )


def _evaluate(folder: Path, sts: Sequence[STSTask], beir: Sequence[RetrievalData]) -> list[Record]:
    """Scores of every size alone, and of its queries against the whole model's documents, cut to the query's width."""
    encoder, tokenizer, settings = _load(folder)
    sizes = list(settings.sizes)
    searched: list[Searched] = [*sizes, *(SizePair(size, Size(sizes[-1].layers, size.dim)) for size in sizes[:-1])]
    embedder = embedder_of(encoder, tokenizer, encoded_sizes(searched), device=_device())
    return evaluate_tasks(embedder, searched, settings, sts=sts, retrieval=beir, outputs=Outputs("trained"))


def _write_results(asked: Resize, model: Path, records: Sequence[Record]) -> None:
    """Write results.json, from which the exported model cards take their scores."""
    settings = EmbeddingSettings.load(model)
    assert settings is not None
    own = [record for record in records if record.document_layers == 0]
    content = results_content(model, list(settings.sizes), settings, own, [])
    write_json(asked.output / EVALUATION / "results.json", content)
