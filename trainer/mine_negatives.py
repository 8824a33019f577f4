"""Command: hard negatives for pairs, found by a trained model: tuples in, the same tuples with negatives out.

    python -m trainer.mine_negatives pairs.jsonl --model runs/x/model --output mined --relative-margin 0.05
    python -m data.prepare tuples mined/tuples.jsonl --tokenizer T --output shards/mined

The command reads what `data.prepare tuples` reads. It searches the inputs' own passages (of MS MARCO and BEIR folders,
the whole corpus) and those of --corpus. The size `--size` searches; with `--rerank`, a larger size of the same model,
encoded in the same pass, orders and scores the best matches. trainer/mining/rules.py decides which become negatives.

Blocks bound the memory: texts and vectors are on disk (data/passages.py; 4 bytes a dimension of each passage), and a
block of queries searches them exactly, block by block. Finished work is kept: vectors by blocks of passages, results by
blocks of queries. The same command goes on and gives the same bytes; a different command is refused. SIGTERM, SIGUSR1,
the file that BARISTA_STOP_FILE names, or --stop-after-minutes ends it between blocks with code 75.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import logging as hf_logging

from data.corpora.options import TUPLE_FORMATS, SourceOptions, TupleOptions
from data.corpora.plan import check_tuples, corpus_of, plan_tuples
from data.corpora.splits import TupleLayout
from data.ground.command import run_command
from data.ground.errors import ConfigError, UserError
from data.ground.files import sha256_of
from data.ground.options import LARGEST_SEED, Parser, Stated, StatedEach, count, real, stated_in
from data.ground.records import read_record
from data.ground.secrets import without_secrets
from data.ground.whole_folder import check_place
from data.inputs import expanded
from data.model_folders import SETTINGS_FILE
from data.passages import is_built
from models.sizes import Size
from trainer.evaluation.encoding.encode import DEFAULT_BATCH_TOKENS, embedder_of
from trainer.evaluation.subject import check_sizes, choose_device, load_model, trained_settings
from trainer.mining.mine import (
    IDENTITY,
    PASSAGES_PER_BLOCK,
    QUERIES_PER_BLOCK,
    REPORT,
    TEXTS,
    WORK,
    Blocks,
    Miner,
    Report,
    claim,
    mine,
    report_text,
)
from trainer.mining.rules import Rules
from trainer.resilience.stopping import STOP_FILE_VARIABLE, StopRequests


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    if "seed" in stated_in(args) and args.sampling != "random":
        raise ConfigError("--seed is read with --sampling random alone; give --sampling random, or leave --seed out")
    rules = Rules(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Rules)})
    blocks = Blocks(args.queries_per_block, args.passages_per_block)
    corpora = [Path(path) for path in args.corpus]
    corpora += [path for name in args.inputs if (path := corpus_of(name, format=args.format)) and path not in corpora]
    output = Path(args.output)
    check_place(output)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file; give a folder")
    tuples, source = _options(args)
    check_tuples(args.inputs, tuples, source)
    miner, model_identity = load_miner(args)
    identity = {
        "inputs": _inputs_identity(args.inputs),
        "corpora": [_file_identity(path) for path in corpora],
        "reading": _reading_identity(args),
        "model": model_identity,
        "rules": dataclasses.asdict(rules),
        "keep_negatives": args.keep_negatives,
        "blocks": dataclasses.asdict(blocks),
    }
    with ExitStack() as stack:
        stops = stack.enter_context(
            StopRequests(after_minutes=args.stop_after_minutes, stop_file=os.environ.get(STOP_FILE_VARIABLE))
        )
        is_new = not output.exists()
        claim(output, identity, stack)
        try:
            mine(
                output,
                miner,
                rules,
                plan=lambda scratch: plan_tuples(args.inputs, tuples, source, scratch=scratch),
                corpora=corpora,
                blocks=blocks,
                keep_negatives=args.keep_negatives,
                stop_wanted=stops.wanted,
            )
        except UserError:
            # The inputs are wrong. The corrected command is a different one, and a claimed folder would refuse it.
            if not is_built(output / WORK / TEXTS):
                shutil.rmtree(output if is_new else output / WORK)
                (output / IDENTITY).unlink(missing_ok=True)
            raise
    sys.stdout.write(report_text(read_record(output / REPORT, Report, what="report", hint="remove it and mine again")))


def load_miner(args: argparse.Namespace) -> tuple[Miner, dict[str, Any]]:
    """The model of --model at --size and --rerank, and the identity that tells it from other models."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    folder = Path(args.model)
    if not folder.is_dir():
        raise ConfigError(f"--model {folder} is no folder; give a model's, which a name on the hub is not")
    settings = trained_settings(folder)
    encoder, tokenizer, _ = load_model(folder, pooling=settings.pooling)
    ladder = settings.sizes
    small = ladder.find(args.size) if args.size else ladder.full
    large = ladder.find(args.rerank) if args.rerank else small
    check_sizes((small, large), encoder)
    if args.rerank and small == large:
        raise ConfigError(f"--rerank {large} is the size that searches, too; give a larger one, or leave --rerank out")
    if args.rerank and not small.fits_in(large):
        raise ConfigError(f"--rerank {large} is no larger than --size {small}, which searches; exchange them")
    device = str(choose_device(args.device))
    sizes = list(dict.fromkeys([small, large]))
    run = embedder_of(encoder, tokenizer, sizes, device=device, batch_tokens=args.batch_tokens)

    def encode_side(texts: Sequence[str], queries: bool) -> Mapping[Size, np.ndarray]:
        return run(
            texts,
            similarity=settings.similarity,
            max_length=settings.query_max_length if queries else settings.passage_max_length,
            prompt=settings.query_prompt if queries else settings.passage_prompt,
        )

    identity = {
        "files": {path.relative_to(folder).as_posix(): sha256_of(path) for path in _files_that_decide(folder)},
        "size": str(small),
        "rerank": str(large),
        "batch_tokens": args.batch_tokens,
        "device": device,
    }
    return Miner(encode_side, small, large, device), identity


def _files_that_decide(folder: Path) -> list[Path]:
    """A model folder's weights, tokenizer, configuration and settings.

    Those of sentence-transformers have some in subfolders. The configuration decides, too: of a table which tokens
    count, of an encoder how many heads attend.
    """
    if (folder / SETTINGS_FILE).is_file():
        names = ("*.safetensors", SETTINGS_FILE, "tokenizer.json", "config.json")
        found = [path for name in names for path in folder.glob(name)]
    else:
        found = [each for pattern in ("*.safetensors", "*.bin", "*.json") for each in folder.rglob(pattern)]
    return sorted(found)


_READING = (
    *("format", "split", "columns", "query_column", "positive_column", "negative_column"),
    *("skip_empty", "limit"),
)


def _options(args: argparse.Namespace) -> tuple[TupleOptions, SourceOptions]:
    tuples = TupleOptions(
        args.format,
        TupleLayout(args.query_column or "", tuple(args.positive_column), tuple(args.negative_column)),
        tuple(args.columns),
        skip_rows=args.skip_rows,
    )
    return tuples, SourceOptions(args.limit, skip_empty=args.skip_empty, split=args.split, stated=stated_in(args))


def _files_of(name: str) -> list[Path]:
    """The files behind an input, in a fixed order; none for an address or a name on the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    found = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    return sorted(each for each in map(Path, found) if each.is_file())


def _inputs_identity(inputs: Sequence[str]) -> list[dict[str, Any]]:
    """The files behind inputs, with their content. Addresses and data sets of the hub are told apart by name alone."""
    return [
        each
        for pattern in inputs
        for name in expanded(pattern)
        for each in [_file_identity(path) for path in _files_of(name)] or [{"name": without_secrets(name)}]
    ]


def _reading_identity(args: argparse.Namespace) -> dict[str, Any]:
    skip_rows = _file_identity(Path(args.skip_rows)) if args.skip_rows else None
    return {key: getattr(args, key) for key in _READING} | {"skip_rows": skip_rows}


def _file_identity(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"file {path} does not exist; check --corpus, --skip-rows and the inputs")
    return {"path": str(path.resolve()), "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m trainer.mine_negatives", description="Find hard negatives for pairs with a trained model."
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="queries with positives: files or folders, as for data.prepare")
    add("--model", required=True, metavar="FOLDER", help="of a run, or of sentence-transformers")
    add("--output", required=True, metavar="FOLDER", help="new or empty, or an unfinished one: tuples.jsonl comes here")
    add("--size", metavar="SIZE", help="that searches: demi, 2x32 (the model's largest)")
    add("--rerank", metavar="SIZE", help="a larger size that orders and scores the best (none)")
    add("--corpus", nargs="+", default=[], metavar="FILE", help="corpus.jsonl or collection.tsv to search as well")
    add("--keep-negatives", action="store_true", help="put the input's own negatives before the mined ones")
    _rule_options(parser)
    _reading_options(parser)
    _running_options(parser)
    return parser


def _rule_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which matches become negatives").add_argument
    add(
        "--num-negatives",
        type=count(most=10_000),
        default=3,
        metavar="N",
        help="of each tuple, where there are so many (%(default)s)",
    )
    add(
        "--range-min",
        type=count(least=0),
        default=0,
        metavar="N",
        help="skip so many of the best that the rules leave (0)",
    )
    add(
        "--range-max",
        type=count(least=0),
        default=0,
        metavar="N",
        help="look no deeper (range-min + 10 × num-negatives)",
    )
    add("--absolute-margin", type=real(least=0), metavar="M", help="keep what scores at least M below the positive")
    add(
        "--relative-margin",
        type=real(least=0, below=1),
        metavar="M",
        help="or M × |positive| below it: 0.05 keeps up to 95 %%",
    )
    add("--max-score", type=real(), metavar="S")
    add("--min-score", type=real(), metavar="S")
    add("--sampling", choices=("top", "random"), default="top", help="of those that are left (%(default)s)")
    seeds = count(least=0, most=LARGEST_SEED)
    add("--seed", action=Stated, type=seeds, default=0, help="of random sampling (%(default)s)")


def _reading_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("reading, as for data.prepare tuples").add_argument
    add("--format", choices=TUPLE_FORMATS, default="auto")
    add("--split", action=Stated, default="train", help="of a hub data set or of qrels (%(default)s)")
    add(
        "--columns",
        action=Stated,
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help="of TSV without a header",
    )
    add("--query-column", action=Stated, metavar="NAME")
    add("--positive-column", action=StatedEach, default=[], metavar="NAME")
    add("--negative-column", action=StatedEach, default=[], metavar="NAME")
    add("--skip-rows", metavar="FILE")
    add("--skip-empty", action="store_true")
    add("--limit", type=count(), metavar="N", help="tuples to read")


def _running_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("running").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one (%(default)s)")
    add(
        "--batch-tokens",
        type=count(),
        default=DEFAULT_BATCH_TOKENS,
        help="tokens a batch, padding included (%(default)s)",
    )
    add("--queries-per-block", type=count(), default=QUERIES_PER_BLOCK, metavar="N", help="(%(default)s)")
    add("--passages-per-block", type=count(), default=PASSAGES_PER_BLOCK, metavar="N", help="(%(default)s)")
    add("--stop-after-minutes", type=real(least=0), default=0.0, metavar="M", help="then end with code 75 (0: do not)")


if __name__ == "__main__":
    run_command(main)
