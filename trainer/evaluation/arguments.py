"""The command line of `trainer.evaluate`: the options of each command, and their help texts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from data.ground.errors import ConfigError
from data.ground.options import LARGEST_SEED, Parser, Stated, SubParsers, count, flag_of, stated_in
from models.choices import Pooling
from trainer.evaluation.encoding.encode import DEFAULT_BATCH_TOKENS
from trainer.evaluation.senteval import TASKS as SENTEVAL_TASKS
from trainer.evaluation.tasks.retrieval import DEFAULT_PASSAGES_PER_BLOCK, DEFAULT_TOP_K


class Command(NamedTuple):
    """A command: what runs it, and what adds its parser under its name."""

    run: Callable[[argparse.Namespace], int]
    add_parser: Callable[[SubParsers, str], argparse.ArgumentParser]


def build_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser of all commands. `commands`: by their names, in the order in which --help shows them."""
    parser = Parser(prog="python -m trainer.evaluate", description="Evaluate embeddings and rankings.")
    added = parser.add_subparsers(required=True, metavar=f"{{{','.join(commands)}}}")

    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it

    for name, command in commands.items():
        command.add_parser(added, name).set_defaults(command=command.run)
    return parser


def add_sizes(added: SubParsers, name: str) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help="score a model at many sizes, all from one pass over the texts",
        description="Score a model at many sizes, all from one pass over the texts, and print a table per task.",
    )
    add = parser.add_argument
    _model_options(parser)
    _task_options(parser)
    add("--sts-subsets", type=Path, metavar="FILE", help="TSV of dataset, subset, first row, rows (with a header)")
    add(
        "--across-depths",
        action="store_true",
        help="queries of each size against documents of every other depth among --sizes too, at the query's width",
    )
    add("--random-init", action="store_true", help="score the same architecture with fresh weights too, as the control")
    seeds = count(least=0, most=LARGEST_SEED)
    add("--seed", action=Stated, type=seeds, default=0, help="of the fresh weights (%(default)s)")
    add("--bm25", action="store_true", help="score BM25 too (needs the package bm25s)")
    add("--output", type=Path, metavar="FOLDER", help="write results.json, raw.jsonl.gz, table.md and figures/ here")
    add("--json", type=Path, metavar="FILE", help="write the content of results.json to this file")
    add("--save-runs", action="store_true", help="write every ranking as a TREC run file to OUTPUT/runs")
    _top_k_option(parser, "kept a query")
    add(
        "--max-documents",
        action=Stated,
        type=count(least=0),
        default=0,
        help="of each corpus, judged ones first; scores then rise (0: all)",
    )
    add("--ignore-identical-ids", action="store_true", help="drop the document with the query's id (ArguAna, Quora)")
    add(
        "--passages-per-block",
        action=Stated,
        type=count(),
        default=DEFAULT_PASSAGES_PER_BLOCK,
        help="documents held as vectors at a time (%(default)s)",
    )
    add(
        "--vectors",
        type=Path,
        metavar="FOLDER",
        help="keep the documents' vectors here, in float16, and take them from here: for corpora of hours",
    )
    add(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="the --output of another evaluation: test every size against its (without: against BM25, then untrained)",
    )
    add("--holm", action="store_true", help="correct p for the number of tests in a task's table")
    _dtype_option(parser)
    return parser


def add_score(added: SubParsers, name: str) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help="score a run file under trec_eval's names",
        description="Score a TREC run file; the numbers are trec_eval's.",
    )
    add = parser.add_argument
    add("--qrels", required=True, type=Path, help="judgements: TREC's four columns, or BEIR's three with a header")
    add("--run", required=True, type=Path, help="a run in TREC's six columns")
    add(
        "-l",
        "--relevance-level",
        type=count(),
        default=1,
        help="lowest grade that is relevant; nDCG takes the grades themselves (%(default)s)",
    )
    add("-c", "--complete", action="store_true", help="judged queries that the run lacks count 0 instead of nothing")
    add("-M", "--max-documents", type=count(), metavar="N", help="cut rankings at N documents")
    add("--baseline", type=Path, metavar="RUN", help="another run: p of the paired t-test and the difference, a metric")
    add("-q", "--per-query", action="store_true", help="print every query's values too")
    add("--json", type=Path, metavar="FILE", help="write the means, not rounded, as one flat JSON object")
    return parser


def add_compare(added: SubParsers, name: str) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help="test evaluations against another, size by size",
        description="Test the trained models of some `sizes` outputs against another's, size by size: paired t-test "
        "over queries, Fisher's z for STS. Marks: † significantly better, ‡ significantly worse (p < 0.05).",
    )
    add = parser.add_argument
    add(
        "baseline",
        type=Path,
        metavar="BASELINE",
        help="the --output folder of `sizes`, or one precision in that of `quantised`",
    )
    add("others", type=Path, nargs="+", metavar="OTHER", help="more such folders, of the same tasks")
    add("--holm", action="store_true", help="correct for the number of comparisons in a task's table")
    return parser


def add_latency(added: SubParsers, name: str) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help="milliseconds a query, parameters and index bytes of each size",
        description="Time the encoding of one query at a time, with the encoder cut to each size's layers.",
    )
    # Single queries are timed, and their vectors are compared with nothing.
    _model_options(parser, without=("--similarity", "--batch-tokens"))
    add = parser.add_argument
    add("--sts", type=Path, metavar="FILE", help="whose sentences are the queries")
    add("--beir", type=Path, metavar="FOLDER", help="or whose queries")
    add("--split", action=Stated, default="test", help="which qrels of the BEIR folder (%(default)s)")
    add("--queries", type=count(), default=100, metavar="N", help="how many are timed (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    return parser


def add_rerank(added: SubParsers, name: str) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help="search with a small size, rerank with a large: quality, latency, memory",
        description="Search with a small size and rerank the best documents with a large one, against each size "
        "searching alone: quality with significance against the large one alone, milliseconds a query, memory.",
    )
    _model_options(parser)
    add = parser.add_argument
    add("--beir", required=True, type=Path, metavar="FOLDER", help="a BEIR folder")
    add("--split", default="test", help="which of its qrels (%(default)s)")
    add("--shortlist", metavar="SIZE", help="the size that searches (the ladder's first)")
    add("--rerank", metavar="SIZE", help="the size that reranks (the ladder's last)")
    add("--depth", type=count(), nargs="+", default=[10, 50, 100], help="documents reranked (10 50 100)")
    _top_k_option(parser, "searched for")
    add("--queries", type=count(), default=100, metavar="N", help="how many are timed (%(default)s)")
    add("--output", type=Path, metavar="FOLDER", help="write rerank.json, rerank.md and rerank.png here")
    return parser


def add_quantised(added: SubParsers, name: str) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help="what int8 and binary embeddings lose, size by size",
        description="Score every size in float32, int8 and one bit a dimension, with significance against float32; a "
        "static model with an int8 token table too.",
    )
    _model_options(parser)
    add = parser.add_argument
    _task_options(parser)
    _top_k_option(parser, "searched for")
    help_text = "found by bits, scored in int8 (%(default)s)"
    add("--rescored", action=Stated, type=count(), default=100, metavar="N", help=help_text)
    _dtype_option(parser)
    add(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write quantised.json, quantised.md, figures/ and each precision's raw.jsonl.gz here",
    )
    return parser


def add_fused(added: SubParsers, name: str) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help="two sizes' scores added, for every pair of sizes: quality and milliseconds",
        description="Rank by the sum of two sizes' similarities, for every pair of --sizes, with significance against "
        "the better of the two alone, and the milliseconds that a query takes.",
    )
    _model_options(parser)
    add = parser.add_argument
    _task_options(parser)
    _top_k_option(parser, "searched for", default=100)
    add("--queries", type=count(), default=100, metavar="N", help="how many are timed (%(default)s)")
    add("--holm", action="store_true", help="correct p for the number of pairs in a task's table")
    add("--output", type=Path, metavar="FOLDER", help="write fused.json, fused.md and figures/ here")
    return parser


def add_transfer(added: SubParsers, name: str) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help="SentEval's classification tasks on frozen embeddings, at every size",
        description="Logistic regression on frozen embeddings: SentEval's transfer tasks, from its own files.",
    )
    # The classifier sees the vectors as they are.
    _model_options(parser, without=("--similarity",))
    add = parser.add_argument
    add("--data", required=True, type=Path, metavar="FOLDER", help="SentEval's data/downstream")
    add("--tasks", nargs="+", default=list(SENTEVAL_TASKS), metavar="TASK", help=f"some of {' '.join(SENTEVAL_TASKS)}")
    add("--random-init", action="store_true", help="score the same architecture with fresh weights too, as the control")
    add(
        "--seed",
        type=count(least=0, most=LARGEST_SEED),
        default=0,
        help="of the folds and of the fresh weights (%(default)s)",
    )
    add("--output", type=Path, metavar="FOLDER", help="write results.json, table.md and figures/ here")
    return parser


def add_mteb(added: SubParsers, name: str) -> argparse.ArgumentParser:
    parser = added.add_parser(
        name,
        help="any task of the package mteb, NanoBEIR's among them (needs it, and its data sets)",
        description="Run tasks of the package mteb with the model at some sizes and print each task's main score.",
    )
    add = parser.add_argument
    add("--model", required=True, help="a trained folder (Hugging Face files and barista.json)")
    add("--tasks", nargs="+", required=True, metavar="NAME", help="mteb's names: STS12 NanoSciFactRetrieval")
    add("--sizes", required=True, help="a list of sizes: demi,3x48")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the scores to this file")
    return parser


# Option -> the options one of which must be given for anything to read it, of those that the command has. Options of
# the first table have an empty default, so they are stated where they have a value; those of the second are `Stated`.
_EMPTY_READ_WITH = {
    "bm25": ("beir",),
    "save_runs": ("beir",),
    "vectors": ("beir",),
    "ignore_identical_ids": ("beir",),
    "similarity": ("beir",),
    "sts_subsets": ("sts",),
    "holm": ("against", "bm25", "random_init", "across_depths"),  # of `fused`, which has none of these, always
}
_STATED_READ_WITH = {
    "split": ("beir",),
    "max_documents": ("beir",),
    "top_k": ("beir",),
    "passages_per_block": ("beir",),
    "rescored": ("beir",),
    "seed": ("random_init",),
}


def refuse_unread(args: argparse.Namespace) -> None:
    """Refuse an option that the command line states, and that nothing reads without an option that is not given."""
    given = [name for name in _EMPTY_READ_WITH if getattr(args, name, None)]
    given += [name for name in _STATED_READ_WITH if name in stated_in(args)]
    for name in given:
        readers = [each for each in (_EMPTY_READ_WITH | _STATED_READ_WITH)[name] if hasattr(args, each)]
        if readers and not any(getattr(args, each) for each in readers):
            option, *needed = map(flag_of, (name, *readers))
            one = " or ".join(filter(None, (", ".join(needed[:-1]), needed[-1])))
            raise ConfigError(f"{option} is read with {one} alone; give {one}, or leave {option} out")


def require_tasks(args: argparse.Namespace) -> None:
    """Refuse a command of `_task_options` that names no task, or has an option that none of its tasks reads."""
    if not args.sts and not args.beir:
        raise ConfigError("there is nothing to evaluate on; give --sts FILE or --beir FOLDER")
    refuse_unread(args)
    if getattr(args, "save_runs", False) and not args.output:
        raise ConfigError("--save-runs writes to OUTPUT/runs; give --output FOLDER")


def _task_options(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that score a model on any number of tasks."""
    add = parser.add_argument
    add("--sts", nargs="+", default=[], type=Path, metavar="FILE", help="TSV (score, sentence, sentence) or jsonl")
    add("--beir", nargs="+", default=[], type=Path, metavar="FOLDER", help="BEIR folders")
    add("--split", action=Stated, default="test", help="which qrels of the BEIR folders (%(default)s)")


def _top_k_option(parser: argparse.ArgumentParser, what: str, *, default: int = DEFAULT_TOP_K) -> None:
    """At least ten documents, because nDCG@10 and MRR@10 of fewer would be too low."""
    help_text = f"documents {what} (%(default)s)"
    parser.add_argument("--top-k", action=Stated, type=count(least=10), default=default, help=help_text)


def _dtype_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the encoder's matrix products (%(default)s)",
    )


def _model_options(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """Options of the commands that run a model. without: those that this command would not read."""

    def add(name: str, **options: Any) -> None:
        if name not in without:
            parser.add_argument(name, **options)

    parser.set_defaults(similarity=None)
    add("--model", required=True, help="a trained folder, one of sentence-transformers, or a hub name")
    add(
        "--sizes",
        default="ladder",
        help="ladder, grid (the ladder's layers × its dims), or a list: demi,3x48 (%(default)s)",
    )
    add("--pooling", choices=get_args(Pooling), help="in place of the model's own")
    add("--similarity", choices=("dot", "cosine"), help="of retrieval, in place of the model's own (STS takes cosine)")
    add("--max-length", type=count(), metavar="TOKENS", help="of queries and documents, in place of the model's own")
    add(
        "--batch-tokens",
        type=count(),
        default=DEFAULT_BATCH_TOKENS,
        help="tokens a batch, padding included (%(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one (%(default)s)")
