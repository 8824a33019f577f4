"""Command: one folder a size that `SentenceTransformer(path)` loads as it stands, and the whole encoder.

    python -m trainer.export --model runs/x/model --output runs/x/export

The folders keep sentence-transformers' long-standing layout, because its newest one is mis-read by other servers
(FIELD_NOTES.md): Transformer, Pooling, then Dense where dimensions are cut, then Normalize where similarity is cosine.
- Layers are cut out of the checkpoint and out of its config: a config that keeps the old count reloads RANDOM layers.
- Width is cut by a Dense module of the selection matrix [d, D] (ones on the diagonal, no bias, identity activation).
  `truncate_dim` would act behind Normalize and leave vectors that are not of unit length.
- Families with a pooler (BERT, RoBERTa) get one of zeros: it takes no part in the embedding, and a checkpoint without
  it makes every loader report newly initialised weights.
A static encoder (models/static_embedding.py) becomes a StaticEmbedding: its files stand in the root, its width is cut
in the table itself, and its tokenizer adds no special tokens and cuts texts by itself. With `--table int8` the file is
a quarter as large: codes and a scale a token, which sentence-transformers multiplies out when it loads them.
One maximal length has to serve queries and documents in that layout: it is the longer of the two.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from data.command import exit_code_of, log_to_stderr
from data.files import write_atomically
from data.records import Record, read_record
from data.tokens import tokenizer_fingerprint
from models.encoder import EmbeddingSettings, truncate_layers
from models.sizes import Ladder, Size
from trainer.config import ConfigError
from trainer.evaluation.subject import check_sizes, load_model, trained_settings
from trainer.model_card import LIMITS, results_section, training_section
from trainer.options import real
from trainer.quantisation import int8_table
from trainer.whole_folder import check_place, written_whole

log = logging.getLogger(__name__)

ENCODER_FOLDER = "encoder"
RECEIPT_FILE = "export.json"
_MODULES = "sentence_transformers.models"
_USAGE = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
queries = model.encode_query(["what is an espresso?"])
documents = model.encode_document(["Espresso is coffee brewed under pressure."])
print(model.similarity(queries, documents))
```
"""


def export_sizes(
    model_folder: str | Path,
    output: str | Path,
    *,
    sizes: Sequence[str | Size] | None = None,
    results: str | Path | None = None,
    watts_per_rank: float | None = None,
    table: str = "float32",
) -> dict[str, Path]:
    """Write a folder per size and `encoder/` into `output`; returns size name -> folder.

    `model_folder`: a trained folder (Hugging Face files and barista.json). `sizes`: names of its ladder, or any
    LAYERSxDIM; None: the whole ladder. `output` appears whole or not at all; an earlier export there is replaced,
    anything else refused. `results`, `watts_per_rank`: for the model cards (trainer/model_card.py). `table`: float32 or
    int8, how a static encoder's token table is written.
    """
    model_folder, output = Path(model_folder), Path(output)
    settings = trained_settings(model_folder)
    _check_output(output)
    chosen = _chosen_sizes(sizes, settings.sizes)
    results = Path(results) if results is not None else None
    training = training_section(model_folder, watts_per_rank=watts_per_rank)
    facts = {size: f"{training}\n{results_section(results, size)}\n{LIMITS}" for size in chosen.values()}
    encoder, tokenizer, _ = load_model(model_folder)
    if table == "int8" and not encoder.is_static:
        raise ConfigError(f"{model_folder} is no static model and has no token table alone; leave --table int8 out")
    check_sizes(chosen.values(), encoder)
    tokenizer.model_max_length = max(settings.query_max_length, settings.passage_max_length)
    # A padded or truncated call leaves its settings in the tokenizer's file, where other programs obey them.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    with written_whole(output) as partial:
        backbone = _with_idle_pooler(encoder.backbone.float())
        _save_checkpoint(backbone, tokenizer, partial / ENCODER_FOLDER)
        dataclasses.replace(settings, tokenizer=tokenizer_fingerprint(tokenizer)).save(partial / ENCODER_FOLDER)
        tensors = {}
        if encoder.is_static:
            tensors = _table_tensors(encoder.word_embeddings.weight.detach(), in_int8=table == "int8")
        # From the deepest size on, so that one copy in memory can be cut step by step.
        for name, size in sorted(chosen.items(), key=lambda item: item[1], reverse=True):
            if encoder.is_static:
                _write_static(tensors, tokenizer, settings, name, size, partial / name)
            else:
                truncate_layers(backbone, size.layers)
                _write_sentence_transformer(backbone, tokenizer, settings, name, size, partial / name)
            with (partial / name / "README.md").open("a", encoding="utf-8") as card:
                card.write(f"\n{facts[size]}")
        receipt = {
            "format": 1,
            "sizes": {name: [size.layers, size.dim] for name, size in chosen.items()},
            "files": _files_in(partial),
        }
        write_atomically(partial / RECEIPT_FILE, json.dumps(receipt, indent=2) + "\n")
    log.info("exported %s to %s", ", ".join(chosen), output)
    return {name: output / name for name in chosen}


def _chosen_sizes(sizes: Sequence[str | Size] | None, ladder: Ladder) -> dict[str, Size]:
    wanted = list(ladder) if sizes is None else [s if isinstance(s, Size) else ladder.find(s) for s in sizes]
    if not wanted:
        raise ConfigError("no size to export; name some of the ladder's, or leave the choice out for all of them")
    return {ladder.name(size): size for size in wanted}


class _Receipt(Record):
    """export.json: the sizes by name, and the bytes of every file but itself, by its path in the export."""

    format: Literal[1] = 1
    sizes: dict[str, tuple[int, int]]
    # Exports of earlier versions have none; nothing says which of their files are a user's.
    files: dict[str, int] | None = None


def _check_output(output: Path) -> None:
    """Refuse to touch what no export wrote, and places where none can be written."""
    check_place(output)
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"output {output} is a file; give a new folder")
    check_place(output.absolute().parent)
    present = _files_in(output)
    if not any(output.iterdir()):
        return
    mend = "give a new or an empty folder"
    if not (output / RECEIPT_FILE).is_file():
        raise ConfigError(
            f"output {output} holds something else ({min(path.name for path in output.iterdir())}); {mend}"
        )
    receipt = read_record(output / RECEIPT_FILE, _Receipt, what="export record", mend=mend)
    if receipt.files is None:
        raise ConfigError(
            f"output {output} is an export of an earlier version, which kept no list of its files; {mend}"
        )
    del present[RECEIPT_FILE]
    for name, size in sorted(present.items()):
        if name not in receipt.files:
            raise ConfigError(f"output {output} holds something else ({name}); {mend}")
        if size != receipt.files[name]:
            raise ConfigError(f"output {output} holds a file that was changed after the export ({name}); {mend}")


def _files_in(folder: Path) -> dict[str, int]:
    """Bytes of everything in a folder that is no folder, by its path in it. Links are not followed."""
    found = {}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink() or not path.is_dir():
                found[path.relative_to(folder).as_posix()] = path.lstat().st_size
    return found


def _with_idle_pooler(backbone: PreTrainedModel) -> PreTrainedModel:
    takes_pooler = "add_pooling_layer" in inspect.signature(type(backbone).__init__).parameters
    if takes_pooler and getattr(backbone, "pooler", None) is None:
        with torch.device("meta"):
            pooler: Any = type(backbone)(copy.deepcopy(backbone.config)).pooler
        pooler.to_empty(device="cpu")
        for parameter in pooler.parameters():
            torch.nn.init.zeros_(parameter)
        backbone.pooler = pooler
    return backbone


def _save_checkpoint(backbone: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    backbone.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_sentence_transformer(
    backbone: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: EmbeddingSettings,
    name: str,
    size: Size,
    folder: Path,
) -> None:
    """One size in the long-standing layout; `backbone` is cut to its layers already."""
    width = int(backbone.config.hidden_size)
    _save_checkpoint(backbone, tokenizer, folder)
    _write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": tokenizer.model_max_length, "do_lower_case": False}
    )
    modules = ["Transformer", "Pooling"]
    _write_json(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": width,
            "pooling_mode_cls_token": settings.pooling == "cls",
            "pooling_mode_mean_tokens": settings.pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    if size.dim < width:
        modules.append("Dense")
        dense = folder / f"{len(modules) - 1}_Dense"
        _write_json(
            dense / "config.json",
            {
                "in_features": width,
                "out_features": size.dim,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
        )
        save_file({"linear.weight": torch.eye(size.dim, width)}, dense / "model.safetensors", metadata={"format": "pt"})
    _write_modules(folder, modules, settings)
    (folder / "README.md").write_text(_card(backbone, settings, name, size), encoding="utf-8")


def _table_tensors(table: torch.Tensor, *, in_int8: bool) -> dict[str, torch.Tensor]:
    """A token table [V, D] under the names that StaticEmbedding looks for. One scale a row serves every width of it."""
    if not in_int8:
        return {"embedding.weight": table}
    codes, scales = int8_table(table)
    return {"embeddings": codes, "weights": scales}


def _write_static(
    tensors: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase,
    settings: EmbeddingSettings,
    name: str,
    size: Size,
    folder: Path,
) -> None:
    """One width of a token table. A StaticEmbedding has no maximal length: the tokenizer's file has."""
    folder.mkdir(parents=True)
    cut = {key: each[:, : size.dim].contiguous() if each.ndim == 2 else each for key, each in tensors.items()}
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.enable_truncation(tokenizer.model_max_length - tokenizer.num_special_tokens_to_add())
    backend.save(str(folder / "tokenizer.json"))
    _write_modules(folder, ["StaticEmbedding"], settings)
    rows, stored = len(next(iter(tensors.values()))), "float32" if len(tensors) == 1 else "int8 codes and a scale each"
    card = _static_card(f"{rows:,}, {stored}", tokenizer, settings, name, size)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _write_modules(folder: Path, modules: list[str], settings: EmbeddingSettings) -> None:
    """modules.json and the settings beside it; unit vectors where similarity is cosine."""
    if settings.similarity == "cosine":
        modules.append("Normalize")
        (folder / f"{len(modules) - 1}_Normalize").mkdir()
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"{_MODULES}.{kind}"}
        for i, kind in enumerate(modules)
    ]
    _write_json(folder / "modules.json", listed)
    _write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": settings.query_prompt, "document": settings.passage_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": settings.similarity,
        },
    )


def _card(backbone: PreTrainedModel, settings: EmbeddingSettings, name: str, size: Size) -> str:
    parameters = sum(p.numel() for key, p in backbone.named_parameters() if not key.startswith("pooler."))
    length = max(settings.query_max_length, settings.passage_max_length)
    title = f"{name} ({size})" if name != str(size) else name
    family = backbone.config.model_type
    layers = f"{size.layers} layers" if size.layers > 1 else "layer"
    kind = "unit vectors, compared by cosine" if settings.similarity == "cosine" else "compared by dot product"
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, starbucks, matryoshka]
---
# Text embeddings, size {title}

One of the sizes of a two-dimensional Matryoshka ("Starbucks") embedding model: the first {layers} and
the first {size.dim} dimensions of one encoder that was trained to work at every size.

| | |
| --- | --- |
| layers | {size.layers} |
| embedding dimensions | {size.dim} ({kind}) |
| parameters | {parameters:,} |
| architecture | {family}, {settings.pooling} pooling |
| longest text | {length} tokens |
| trained with | queries of {settings.query_max_length} tokens, passages of {settings.passage_max_length} |

{_USAGE}"""


def _static_card(
    tokens: str, tokenizer: PreTrainedTokenizerBase, settings: EmbeddingSettings, name: str, size: Size
) -> str:
    title = f"{name} ({size.dim} dimensions)"
    kind = "unit vectors, compared by cosine" if settings.similarity == "cosine" else "compared by dot product"
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, static-embeddings, matryoshka]
---
# Static text embeddings, size {title}

The mean of a text's token vectors, from a table whose every prefix of columns was trained to work on its own.

| | |
| --- | --- |
| embedding dimensions | {size.dim} ({kind}) |
| tokens in the table | {tokens} |
| longest text | {tokenizer.model_max_length - tokenizer.num_special_tokens_to_add()} tokens |

{_USAGE}"""


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.export",
        description="Write one folder a size that SentenceTransformer(path) loads, and encoder/, the whole encoder.",
    )
    parser.add_argument("--model", required=True, type=Path, help="the model folder of a trained run")
    parser.add_argument("--output", required=True, type=Path, help="a new folder, or an earlier export to replace")
    parser.add_argument("--sizes", default="all", help='"all" of the ladder, or names: demi,short,3x48 (%(default)s)')
    parser.add_argument("--results", type=Path, metavar="FILE", help="results.json of the model, for the model cards")
    parser.add_argument(
        "--watts-per-rank",
        type=real(above=0),
        metavar="W",
        help="for the cards' energy estimate (50 on a CPU, 500 on a GPU)",
    )
    parser.add_argument(
        "--table", choices=("float32", "int8"), default="float32", help="of a static model's tokens (%(default)s)"
    )
    args = parser.parse_args(argv)
    log_to_stderr()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    sizes = None if args.sizes == "all" else [name.strip() for name in args.sizes.split(",") if name.strip()]

    def export() -> None:
        folders = export_sizes(
            args.model,
            args.output,
            sizes=sizes,
            results=args.results,
            watts_per_rank=args.watts_per_rank,
            table=args.table,
        )
        sys.stdout.write("".join(f"{name}\t{folder}\n" for name, folder in folders.items()))

    return exit_code_of(export)


if __name__ == "__main__":
    sys.exit(main())
