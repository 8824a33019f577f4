"""Command: an existing embedding model made to work at every size, from texts without labels.

    python -m trainer.resize MODEL --texts FILE... --output RUN [--sizes 1x32,2x64,...] [--section.key=value ...]

MODEL is a folder of sentence-transformers, or one that this trainer wrote. It teaches itself: every depth learns the
whole model's vectors of your texts, at every width. The whole model learns its own vectors, and hardly changes. Then
every size is evaluated beside the model cut as it is and beside the closed form (a linear map a depth, without
training), and exported as a folder for sentence-transformers.
With --train heads the model itself does not change by a bit, so that vectors that are indexed stay valid: only the
linear maps of its depths are trained.

RUN holds start/ (the model as it is), shards/, closed_form/, training/ (a run like any other), evaluation/, export/,
figures/, resize.json and table.md. After a kill the same command goes on. If the files of --sts or
--beir have changed since, it evaluates again. Under the deepspeed launcher all ranks train.
With --prepare-only the command ends before training, and without it goes on from there.
--section.key=value sets a recipe key of the training on the texts. The training on --pairs keeps its own settings.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from data.ground.command import log_to_stderr, run_command
from data.ground.errors import ConfigError
from data.ground.options import Parser, Stated, count, settings_among, stated_in
from trainer.resizing.resize import Resize, resize

# Recipe keys that the command sets itself, and those that would end a training before it leaves a model.
_OWN = (
    "run.output",
    "run.resume",
    "model.source",
    "model.ladder",
    "train.stop_at_step",
    "debug.replay",
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m trainer.resize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub name of the model")
    add("--texts", required=True, nargs="+", metavar="FILE", help="texts, as for data.prepare documents")
    add("--output", required=True, type=Path, metavar="RUN", help="a new folder, or that of this command before")
    add(
        "--sizes",
        default="",
        metavar="1x32,2x64,...",
        help="the ladder, also with fractions of feed-forwards: 6x64x0.25; default: six sizes by the model's shape",
    )
    add("--train", choices=("all", "heads"), default="all", help="heads: the model itself stays as it is")
    add("--no-heads", action="store_true", help="no linear maps: sizes that are cuts of the weights alone")
    add("--prepare-only", action="store_true", help="end before training, with start/, shards/ and closed_form/")
    add("--teacher", default="", metavar="MODEL", help="another model to learn from, of any tokenizer and width")
    add("--pairs", nargs="+", default=[], metavar="FILE", help="queries with passages, for SRL after it")
    add("--sts", nargs="+", default=[], metavar="FILE", help="STS files to evaluate on")
    add("--beir", nargs="+", default=[], metavar="FOLDER", help="BEIR folders to evaluate on")
    add("--text-column", action=Stated, default="text", metavar="NAME", help="of the texts' files (%(default)s)")
    kinds = "what divides a .txt file (%(default)s)"
    add("--text-split", action=Stated, default="blank-lines", metavar="KIND", help=kinds)
    add("--limit", type=count(), metavar="N", help="take only the first N texts")
    add("--max-length", type=count(), metavar="TOKENS", help="what is read of a text (default: what the model reads)")
    add("--processes", type=count(most=4096), metavar="N", help="that tokenize")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # what the deepspeed launcher passes
    args, rest = parser.parse_known_args(argv)
    overrides = settings_among(rest, decided=_OWN)
    if args.train == "heads" and args.no_heads:
        raise ConfigError("--train heads trains nothing else than heads; leave --no-heads out")
    log_to_stderr()
    logging.getLogger("bm25s").setLevel(logging.ERROR)
    table = resize(
        Resize(
            model=args.model,
            texts=tuple(args.texts),
            output=args.output,
            sizes=args.sizes,
            trains=args.train,
            heads=not args.no_heads,
            teacher=args.teacher,
            pairs=tuple(args.pairs),
            sts=tuple(args.sts),
            beir=tuple(args.beir),
            text_column=args.text_column,
            text_split=args.text_split,
            limit=args.limit,
            max_length=args.max_length,
            processes=args.processes,
            overrides=tuple(overrides),
            stated=stated_in(args),
        ),
        prepare_only=args.prepare_only,
    )
    sys.stdout.write(table)


if __name__ == "__main__":
    run_command(main)
