"""Command: texts and training examples to tokenized shards; also trains tokenizers and collects documentation.

    python -m data.prepare {documents,tuples,tokenizer,installed-docs} --help

What is decided here:
- The inputs are cut into input splits (`data.corpora`); a process tokenizes one with the Rust tokenizer and writes it
  (`data.shards`). Only counts travel between processes.
- The output depends on the inputs, the tokenizer, the options and the seed, never on the number of processes or on how
  often the command was killed. preparation.json records these in the output folder before the first shard is written:
  the same command continues where it stopped, and any other command is refused.
- Inputs are identified by the sha256 of all their bytes. `.inputs` keeps size, times and inode of each file when it was
  hashed: the file is hashed again only if these change, and a change while it is read is noticed.
- Samples are shuffled once, within blocks of an input split; epochs shuffle again while reading (`data.order`).
- Workers do not outlive the command: they are killed when it ends, and the kernel kills them if it is killed.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

from data.corpora.options import MOST_NEGATIVES, TEXT_SPLITS, TUPLE_FORMATS
from data.documentation import (
    DOCUMENTED_PACKAGES,
)
from data.ground.command import INTERRUPTED_CODE, exit_code_of, log_to_stderr
from data.ground.errors import DataError
from data.ground.options import Parser, Stated, StatedEach, SubParsers, flag_of
from data.inputs import check_name
from data.keyed_random import check_seed
from data.lines import LONGEST_LINE
from data.preparation.commands import SPECIAL_TOKENS, collect_documentation, prepare_shards, train_tokenizer
from data.preparation.workers import default_processes
from data.shards.format import CHUNK_SAMPLES
from data.shards.writer import SHARD_BYTES
from data.tokens import LARGEST_ID


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m data.prepare", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add_command in (_add_documents, _add_tuples, _add_tokenizer, _add_installed_docs):
        command = add_command(commands)
        command.add_argument("--verbose", action="store_true", help="log every finished input split")
    return parser


def _add_documents(commands: SubParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "documents",
        help="texts to shards of documents, for pre-training",
        description="Tokenize documents from .parquet, .jsonl, .tsv and .txt files (.gz and .zst of the text formats), "
        "WebDataset .tar files or a Hugging Face data set, without truncation, into shards. Run the same "
        "command again after a kill.",
    )
    _inputs(parser)
    _shard_options(parser)
    _source_options(parser)
    _text_options(parser)
    parser.add_argument(
        "--skip-first",
        metavar="N",
        type=int,
        default=0,
        help="leave out the first N records, to evaluate on them (default 0)",
    )
    parser.set_defaults(
        run=prepare_shards,
        identity=[
            *("text_column", "text_split", "subset", "split", "skip_first", "limit", "seed"),
            *("shard_megabytes", "chunk_samples"),
        ],
    )
    return parser


def _add_tuples(commands: SubParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "tuples",
        help="training examples (query, positives, negatives) and graded pairs to shards, for fine-tuning",
        description="Tokenize queries with their positive and negative passages from .parquet, .jsonl and .tsv files, "
        "a Hugging Face data set, MS MARCO's own files or a BEIR folder, without truncation, into shards. "
        "Run the same command again after a kill.",
    )
    _inputs(parser)
    _shard_options(parser)
    _source_options(parser)
    _column_options(parser)
    _hard_negatives_options(parser)
    parser.add_argument(
        "--skip-rows", metavar="FILE", help="0-based data rows to drop, one number a line; one input only"
    )
    parser.add_argument("--query-prompt", metavar="TEXT", default="", help="put before every query")
    parser.add_argument("--passage-prompt", metavar="TEXT", default="", help="put before every passage")
    parser.set_defaults(
        run=prepare_shards,
        identity=[
            *("subset", "split", "limit", "seed", "shard_megabytes", "chunk_samples", "format", "query_column"),
            *("positive_column", "negative_column", "score_column", "columns", "negatives", "max_negatives"),
            *("skip_rows", "query_prompt", "passage_prompt"),
        ],
    )
    return parser


def _add_tokenizer(commands: SubParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "tokenizer",
        help="train a WordPiece tokenizer on documents",
        description="Train a WordPiece tokenizer with BERT's special tokens and normaliser; AutoTokenizer loads it.",
    )
    _inputs(parser)
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--vocab-size", metavar="N", type=int, default=30522, help="tokens (default 30522)")
    parser.add_argument("--min-frequency", metavar="N", type=int, default=2, help="of a token (default 2)")
    parser.add_argument("--keep-case", action="store_true", help="do not lower-case")
    parser.add_argument("--max-length", metavar="N", type=int, default=512, help="model_max_length (default 512)")
    _source_options(parser)
    _text_options(parser)
    parser.set_defaults(
        run=train_tokenizer,
        identity=[
            *("text_column", "text_split", "subset", "split", "limit"),
            *("vocab_size", "min_frequency", "keep_case", "max_length"),
        ],
    )
    return parser


def _add_installed_docs(commands: SubParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "installed-docs",
        help="a corpus from the documentation of the installed packages",
        description="Collect the docstrings of installed packages by parsing their files: documents.jsonl, pairs.jsonl "
        "(query: summary, positive: body) and held-out/, a BEIR folder of summaries and bodies that occur in neither.",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument(
        "--package",
        metavar="NAME",
        action="append",
        default=[],
        help=f"may be repeated (default: those installed of {', '.join(DOCUMENTED_PACKAGES)})",
    )
    parser.add_argument("--held-out", metavar="N", type=int, default=500, help="evaluation queries (default 500)")
    parser.add_argument("--bodies", metavar="N", type=int, default=5000, help="evaluation passages (default 5000)")
    _processes_option(parser)
    parser.set_defaults(run=collect_documentation, identity=["package", "held_out", "bodies"])
    return parser


def _inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="files, folders, quoted globs, addresses of tars, or the name of a Hugging Face data set",
    )


def _processes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        metavar="N",
        type=int,
        default=default_processes(),
        help="default: the CPUs this command may use",
    )


def _shard_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder, or an unfinished one")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="folder or hub name of a fast tokenizer")
    parser.add_argument(
        "--append-token",
        metavar="TOKEN",
        default="",
        help="a special token of the tokenizer that is to end every text, after cutting (default: none but its own)",
    )
    _processes_option(parser)
    parser.add_argument(
        "--shard-megabytes", metavar="N", type=int, default=SHARD_BYTES // 2**20, help="largest shard (default 128)"
    )
    parser.add_argument(
        "--chunk-samples", metavar="N", type=int, default=CHUNK_SAMPLES, help="samples per tar member (default 1024)"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the shuffle on disk (default 0)")


def _source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", metavar="N", type=int, help="take only the first N records")
    parser.add_argument(
        "--longest-line",
        action=Stated,
        metavar="MIB",
        type=int,
        default=LONGEST_LINE // 2**20,
        help="refuse longer lines and documents (default 1024)",
    )
    parser.add_argument("--skip-empty", action="store_true", help="drop empty texts instead of stopping at the first")
    parser.add_argument(
        "--subset", action=Stated, metavar="NAME", help="configuration of a hub data set, such as sample-10BT"
    )
    parser.add_argument(
        "--split", action=Stated, metavar="NAME", default="train", help="of a hub data set or of qrels (default train)"
    )


def _text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text-column", action=Stated, metavar="NAME", default="text", help="default: text")
    parser.add_argument(
        "--text-split",
        action=Stated,
        choices=TEXT_SPLITS,
        default="blank-lines",
        help="what divides the documents of a .txt file (default blank-lines)",
    )


def _column_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=TUPLE_FORMATS,
        default="auto",
        help="columns: by column name; nli: TSV with a header, columns anchor, entailed, contradicted; sts: TSV "
        "without a header, columns score, sentence1, sentence2; msmarco: folder of collection.tsv, queries.SPLIT.tsv "
        "and qrels.SPLIT.tsv; beir: folder of corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv; "
        "auto: msmarco or beir if the folder's files are theirs, else columns (default)",
    )
    parser.add_argument(
        "--query-column", action=Stated, metavar="NAME", help="default: query, anchor, question or sentence1"
    )
    parser.add_argument(
        "--positive-column",
        action=StatedEach,
        metavar="NAME",
        default=[],
        help="may be repeated; holds a text, a list of texts or of {title, text} passages "
        "(default: positive, positives, pos, positive_passages, answer or sentence2)",
    )
    parser.add_argument(
        "--negative-column",
        action=StatedEach,
        metavar="NAME",
        default=[],
        help="may be repeated (default, if no column is named: negative, negatives, negative_1, hard_negative, neg, "
        "negative_passages and the like)",
    )
    parser.add_argument(
        "--score-column",
        action=Stated,
        metavar="NAME",
        help="makes graded pairs (default, if no column is named: score, if present)",
    )
    parser.add_argument(
        "--weight-column",
        action=Stated,
        metavar="NAME",
        help="multiplies a query's loss; an empty one means 1 (default, if no column is named: weight, if present)",
    )
    parser.add_argument(
        "--columns",
        action=Stated,
        metavar="NAME,NAME,...",
        type=lambda text: text.split(","),
        default=[],
        help="the columns of TSV files that have no header",
    )


def _hard_negatives_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--negatives",
        metavar="FILE",
        help='hard negatives by id for msmarco and beir, jsonl (.gz, .zst): {"qid", "neg": [ids]} or '
        '{"qid", "neg": {system: [ids]}}, as in sentence-transformers\' msmarco-hard-negatives',
    )
    parser.add_argument(
        "--max-negatives",
        action=Stated,
        metavar="N",
        type=int,
        default=50,
        help="at most N negatives for each query of msmarco and beir; passages judged irrelevant come before those of "
        "--negatives (default 50)",
    )


# The bounds of numeric options, inclusive.
BOUNDS = {
    "skip_first": (0, 2**40),
    "limit": (1, 2**60),
    "processes": (1, 4096),
    "shard_megabytes": (1, 2**16),
    "chunk_samples": (1, 2**24),
    "longest_line": (1, 2**16),
    "max_negatives": (0, MOST_NEGATIVES),
    "vocab_size": (len(SPECIAL_TOKENS) + 1, LARGEST_ID),
    "min_frequency": (1, 2**40),
    "max_length": (3, 2**30),  # [CLS], a token and [SEP]
    "held_out": (1, 10**9),
    "bodies": (1, 10**9),
}


def run(argv: Sequence[str]) -> None:
    """Run one command from another program. Raises UserError if the user must change something."""
    _run(_parser().parse_args(argv))


def _run(arguments: argparse.Namespace) -> None:
    for name, (low, high) in BOUNDS.items():
        value = getattr(arguments, name, None)
        if value is not None and not low <= value <= high:
            raise DataError(f"{flag_of(name)} {value} is not possible; give between {low} and {high}")
    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                check_name(text, f"argument {name.replace('_', '-')}")
    if hasattr(arguments, "seed"):
        check_seed(arguments.seed)
    arguments.run(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    log_to_stderr(level=logging.INFO if arguments.verbose else logging.WARNING)
    code = exit_code_of(lambda: _run(arguments))
    if code == INTERRUPTED_CODE:
        sys.stderr.write("interrupted; run the same command again to continue\n")
    return code


def _exit_on_terminate() -> None:
    """Let SIGTERM unwind the stack, so that the workers are killed and the folder is unlocked."""

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    _exit_on_terminate()
    sys.exit(main())
