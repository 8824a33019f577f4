"""Commands: score a trained model at every size, compare, time and rerank, or score anybody's run as trec_eval does.

    python -m trainer.evaluate sizes --model runs/x/model --beir data/scifact --bm25 --output results
    python -m trainer.evaluate compare results other_results
    python -m trainer.evaluate latency --model runs/x/model --beir data/scifact
    python -m trainer.evaluate rerank --model runs/x/model --beir data/scifact --output reranked
    python -m trainer.evaluate score --qrels Q --run R

`sizes` writes `results.json`: {"format": 1, "model", "sizes", "settings", "records"}, where each record is flat:
{"method": "trained" | "untrained" | "BM25", "task", "kind": "sts" | "retrieval", "size": the size's name in its ladder,
"layers", "dim", "metric": trec_eval's name or spearman, pearson, spearman/<subset>, "value"}; BM25 has layers 0, dim 0.
Beside it, raw.jsonl.gz holds every query's and every pair's scores (trainer/evaluation/raw.py).
`score` prints and writes trec_eval's names; the JSON is one flat object.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedTokenizerBase
from transformers.utils import logging as hf_logging

from data.tokens import load_tokenizer
from models.encoder import EmbeddingSettings, Encoder, load_encoder, longest_input
from models.sizes import STARBUCKS_LADDER, Ladder, Size
from trainer.command import USER_MISTAKES
from trainer.config import ConfigError
from trainer.evaluation import evaluate_tasks, known_metrics
from trainer.evaluation.comparison import compare_results
from trainer.evaluation.encode import DEFAULT_BATCH_TOKENS, encode, encoder_forward
from trainer.evaluation.latency import measure_costs
from trainer.evaluation.raw import RAW_FILE, RawResults, read_raw, write_raw
from trainer.evaluation.report import Record, markdown_table, plot_records, results_markdown
from trainer.evaluation.rerank import compare_ways, plot_ways, ways_markdown
from trainer.evaluation.retrieval import (
    DEFAULT_PASSAGES_PER_BLOCK,
    DEFAULT_TOP_K,
    METRICS,
    RetrievalData,
    Run,
    RunScores,
    bm25_run,
    load_beir,
    read_qrels,
    read_run,
    score_run,
    write_run,
)
from trainer.evaluation.senteval import TASKS as SENTEVAL_TASKS
from trainer.evaluation.senteval import evaluate_transfer, read_task
from trainer.evaluation.significance import TestResult, p_text, paired_t_test
from trainer.evaluation.sts import read_sts

log = logging.getLogger(__name__)

BM25 = "BM25"
_RESULT_FILES = ("results.json", "table.md", "figures", "runs", RAW_FILE, f"{RAW_FILE}.partial")
_RERANK_FILES = ("rerank.json", "rerank.md", "rerank.png")


def untrained_encoder(encoder: Encoder, *, seed: int = 0) -> Encoder:
    """The same architecture and pooling with fresh weights: the control that says what training gave."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = AutoModel.from_config(copy.deepcopy(encoder.config)).float()
    return Encoder(fresh, encoder.pooling)


def choose_sizes(text: str, ladder: Ladder, encoder: Encoder) -> list[Size]:
    """The sizes that `--sizes` names: "ladder", "grid" (its layers × its dims) or a comma-separated list."""
    if text == "ladder":
        sizes = list(ladder)
    elif text == "grid":
        sizes = [Size(a.layers, b.dim) for a in ladder for b in ladder]
    else:
        sizes = [ladder.find(name.strip()) for name in text.split(",") if name.strip()]
    if not sizes:
        raise ConfigError(f"--sizes {text!r} names no size; use ladder, grid, or a list such as 2x32,4x64")
    for size in sizes:
        if size.layers > encoder.num_layers or size.dim > encoder.hidden_size:
            raise ConfigError(
                f"size {size} outgrows the encoder of {encoder.num_layers} layers and {encoder.hidden_size} "
                "dimensions; choose a smaller one with --sizes"
            )
    return list(dict.fromkeys(sizes))


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return args.command(args)
    except USER_MISTAKES as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _score(args: argparse.Namespace) -> int:
    scores = score_run(
        read_run(args.run),
        read_qrels(args.qrels),
        relevance_level=args.relevance_level,
        complete=args.complete,
        max_documents=args.max_documents,
    )
    lines = []
    if args.per_query:
        for query, values in scores.per_query.items():
            lines += [f"{name:<22}\t{query}\t{values[name]:6.4f}" for name in METRICS]
    lines.append(f"{'num_q':<22}\tall\t{scores.num_queries}")
    lines += [f"{name:<22}\tall\t{scores.means[name]:6.4f}" for name in METRICS]
    content: dict[str, Any] = {"num_q": scores.num_queries, **scores.means}
    if args.baseline:
        tests = _against_baseline(args, scores)
        lines += [f"{name:<22}\tp\t{p_text(test.p)}\t{test.difference:+6.4f}" for name, test in tests.items()]
        content["against_baseline"] = {name: dataclasses.asdict(test) for name, test in tests.items()}
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        _write_json(args.json, content)
    return 0


def _against_baseline(args: argparse.Namespace, scores: RunScores) -> dict[str, TestResult]:
    """Metric -> paired t-test over the queries of the two runs."""
    other = score_run(
        read_run(args.baseline),
        read_qrels(args.qrels),
        relevance_level=args.relevance_level,
        complete=args.complete,
        max_documents=args.max_documents,
    )
    if other.per_query.keys() != scores.per_query.keys():
        raise ConfigError(
            f"{args.run} and {args.baseline} answer different queries; count missing ones 0 by --complete"
        )
    return {
        name: paired_t_test(
            [values[name] for values in scores.per_query.values()],
            [values[name] for values in other.per_query.values()],
        )
        for name in METRICS
    }


def _sizes(args: argparse.Namespace) -> int:
    for chatty in ("bm25s", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    if not args.sts and not args.beir:
        raise ConfigError("there is nothing to evaluate on; give --sts FILE or --beir FOLDER")
    device = _device(args.device)
    output = _output_folder(args.output)
    # Files are read before the model, so that a wrong path is told at once.
    sts = [read_sts(path, subsets=args.sts_subsets) for path in args.sts]
    beir = [load_beir(path, split=args.split, max_documents=args.max_documents) for path in args.beir]
    _check_names([*(task.name for task in sts), *(data.name for data in beir)])

    encoder, tokenizer, settings, sizes = _model(args)
    methods = {"trained": encoder}
    if args.random_init:
        methods["untrained"] = untrained_encoder(encoder, seed=args.seed)
    records: list[Record] = []
    raw = RawResults()
    for method, model in methods.items():
        log.info("%s: %d sizes on %d tasks", method, len(sizes), len(sts) + len(beir))
        model.to(device).eval()
        records += evaluate_tasks(
            encoder_forward(model, sizes, dtype=getattr(torch, args.dtype)),
            tokenizer,
            sizes,
            settings,
            sts=sts,
            retrieval=beir,
            device=device,
            flat=model.is_static,
            method=method,
            top_k=args.top_k,
            batch_tokens=args.batch_tokens,
            passages_per_block=args.passages_per_block,
            ignore_identical_ids=args.ignore_identical_ids,
            progress=sys.stderr.isatty(),
            on_run=_run_writer(output, method) if args.save_runs and output else None,
            raw=raw,
        )
    if args.bm25:
        for data in beir:
            log.info("%s: %s", BM25, data.name)
            records += bm25_records(data, top_k=args.top_k, raw=raw)

    table = results_markdown(records)
    sys.stdout.write(table)
    content = {
        "format": 1,
        "model": str(args.model),
        "sizes": [[size.layers, size.dim] for size in sizes],
        "settings": dataclasses.asdict(settings),
        "records": [record.as_json() for record in records],
    }
    if args.json:
        _write_json(args.json, content)
    if output:
        (output / "table.md").write_text(table, encoding="utf-8")
        plot_records(records, output / "figures")
        write_raw(raw, output / RAW_FILE)
        _write_json(output / "results.json", content)
    return 0


def bm25_records(data: RetrievalData, *, top_k: int = DEFAULT_TOP_K, raw: RawResults | None = None) -> list[Record]:
    """The BM25 baseline's scores on one collection."""
    scores = score_run(bm25_run(data, top_k=top_k), data.qrels)
    means = known_metrics(scores, data, top_k)
    if raw is not None:
        raw.add_retrieval(BM25, data.name, (0, 0), scores, list(means))
    return [Record(BM25, data.name, "retrieval", "", 0, 0, metric, value) for metric, value in means.items()]


def _latency(args: argparse.Namespace) -> int:
    if not args.sts and not args.beir:
        raise ConfigError("there are no queries to time; give --sts FILE or --beir FOLDER")
    if args.sts:
        texts = [text for pair in read_sts(args.sts).pairs for text in pair]
    else:
        texts = list(load_beir(args.beir, split=args.split).queries)
    encoder, tokenizer, settings, sizes = _model(args)
    device = _device(args.device)
    costs = measure_costs(encoder, tokenizer, sizes, settings, texts[: args.queries], device=device)
    names = settings.sizes
    rows = [
        [
            names.name(size),
            str(size),
            f"{cost.milliseconds:.3f}",
            f"{cost.parameters:,}",
            str(cost.index_bytes_per_document),
        ]
        for size, cost in costs.items()
    ]
    header = ["size", "layers × dim", "ms a query", "parameters", "index bytes a document"]
    sys.stdout.write(markdown_table(header, rows, text_columns=2))
    if args.json:
        _write_json(
            args.json,
            {
                "format": 1,
                "model": str(args.model),
                "queries": min(args.queries, len(texts)),
                "threads": torch.get_num_threads(),
                "device": str(device),
                "sizes": {str(size): cost.as_json() for size, cost in costs.items()},
            },
        )
    return 0


def _rerank(args: argparse.Namespace) -> int:
    device = _device(args.device)
    output = _output_folder(args.output, _RERANK_FILES)
    data = load_beir(args.beir, split=args.split)
    encoder, tokenizer, settings, sizes = _model(args)
    ladder = settings.sizes
    small = ladder.find(args.shortlist) if args.shortlist else ladder.sizes[0]
    large = ladder.find(args.rerank) if args.rerank else ladder.full
    for size in (small, large):
        if size not in sizes:
            sizes = [*sizes, size]
    if small == large:
        raise ConfigError(f"shortlist and rerank are both {small}; give two sizes")
    if not (small.layers <= large.layers and small.dim <= large.dim):
        raise ConfigError(f"the shortlist's size {small} is not part of {large}; swap them or choose others")
    if args.top_k < max(args.depth):
        raise ConfigError(
            f"--depth {max(args.depth)} is more than the --top-k {args.top_k} that are searched; raise it"
        )
    encode_texts = partial(
        encode,
        encoder_forward(encoder.to(device).eval(), sizes),
        tokenizer,
        sizes=sizes,
        similarity=settings.similarity,
        device=device,
        batch_tokens=args.batch_tokens,
        progress=sys.stderr.isatty(),
    )
    queries = encode_texts(data.queries, max_length=settings.query_max_length, prompt=settings.query_prompt)
    documents = encode_texts(data.documents, max_length=settings.passage_max_length, prompt=settings.passage_prompt)
    costs = measure_costs(encoder, tokenizer, sizes, settings, data.queries[: args.queries], device=device)
    ways = compare_ways(
        data, queries, documents, costs, small=small, large=large, depths=args.depth, top_k=args.top_k, device=device
    )
    table = ways_markdown(ways)
    sys.stdout.write(table)
    if output:
        (output / "rerank.md").write_text(table, encoding="utf-8")
        plot_ways(ways, output / "rerank.png", title=f"{data.name}: search with {small}, rerank with {large}")
        _write_json(
            output / "rerank.json",
            {"format": 1, "model": str(args.model), "task": data.name, "ways": [way.as_json() for way in ways]},
        )
    return 0


def _compare(args: argparse.Namespace) -> int:
    folders = [args.baseline, *args.others]
    results = {str(folder): read_raw(folder / RAW_FILE) for folder in folders}
    sys.stdout.write(compare_results(results, baseline=str(args.baseline), corrected=args.holm))
    return 0


def _transfer(args: argparse.Namespace) -> int:
    if unknown := [name for name in args.tasks if name not in SENTEVAL_TASKS]:
        raise ConfigError(f"SentEval task {unknown[0]!r} is unknown; choose from {', '.join(SENTEVAL_TASKS)}")
    device = _device(args.device)
    output = _output_folder(args.output)
    tasks = [read_task(args.data, name) for name in args.tasks]
    encoder, tokenizer, settings, sizes = _model(args)
    methods = {"trained": encoder}
    if args.random_init:
        methods["untrained"] = untrained_encoder(encoder, seed=args.seed)
    records: list[Record] = []
    for method, model in methods.items():
        encode_texts = partial(
            encode,
            encoder_forward(model.to(device).eval(), sizes),
            tokenizer,
            sizes=sizes,
            similarity="dot",  # the classifier sees the embeddings as they are
            max_length=max(settings.query_max_length, settings.passage_max_length),
            prompt=settings.query_prompt,
            device=device,
            batch_tokens=args.batch_tokens,
            progress=sys.stderr.isatty(),
        )
        records += evaluate_transfer(encode_texts, tasks, name_of=settings.sizes.name, method=method, seed=args.seed)
    table = results_markdown(records)
    sys.stdout.write(table)
    if output:
        (output / "table.md").write_text(table, encoding="utf-8")
        plot_records(records, output / "figures")
        content = {
            "format": 1,
            "model": str(args.model),
            "sizes": [[size.layers, size.dim] for size in sizes],
            "settings": dataclasses.asdict(settings),
            "records": [record.as_json() for record in records],
        }
        _write_json(output / "results.json", content)
    return 0


def _mteb(args: argparse.Namespace) -> int:
    try:
        import mteb

        from trainer.evaluation.mteb_model import load_mteb_model
    except ImportError:
        raise ConfigError("this needs the package mteb; install it with: pip install -e '.[mteb]'") from None
    try:
        tasks = list(mteb.get_tasks(tasks=args.tasks))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"mteb does not know all of {', '.join(args.tasks)} ({error}); see mteb.get_tasks()"
        ) from None
    device = _device(args.device)
    scores: dict[str, dict[str, float]] = {}
    for name in args.sizes.split(","):
        model = load_mteb_model(args.model, name.strip(), device=device)
        for result in mteb.evaluate(model, tasks, cache=None, show_progress_bar=sys.stderr.isatty()).task_results:
            scores.setdefault(result.task_name, {})[name.strip()] = float(result.get_score())
    names = [name.strip() for name in args.sizes.split(",")]
    rows = [[task, *(f"{by_size[name]:.4f}" for name in names)] for task, by_size in scores.items()]
    sys.stdout.write(markdown_table(["task", *names], rows))
    if args.json:
        _write_json(args.json, {"format": 1, "model": str(args.model), "main_scores": scores})
    return 0


def _model(
    args: argparse.Namespace,
) -> tuple[Encoder, PreTrainedTokenizerBase, EmbeddingSettings, list[Size]]:
    """The model of --model, with the sizes of --sizes."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    encoder = load_encoder(args.model, pooling=args.pooling)
    tokenizer = load_tokenizer(args.model)
    settings = _settings(args, encoder)
    rows = encoder.word_embeddings.num_embeddings
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer of {args.model} has {len(tokenizer)} tokens and the model's table {rows}; "
            "give a folder whose tokenizer is the model's own"
        )
    return encoder, tokenizer, settings, choose_sizes(args.sizes, settings.sizes, encoder)


def _settings(args: argparse.Namespace, encoder: Encoder) -> EmbeddingSettings:
    """The model's own settings, the command line's in their place; default lengths shrink to what the model takes."""
    own = EmbeddingSettings.load(args.model) if Path(args.model).is_dir() else None
    found = own
    full = Size(encoder.num_layers, encoder.hidden_size)
    if found is None and STARBUCKS_LADDER.full == full:
        found = EmbeddingSettings(ladder=tuple((size.layers, size.dim) for size in STARBUCKS_LADDER))
    if (found is None or not found.ladder) and args.sizes in ("ladder", "grid"):
        raise ConfigError(
            f"{args.model} has no barista.json that gives its ladder; name the sizes, for example --sizes {full}"
        )
    settings = found or EmbeddingSettings()
    limit = longest_input(encoder.backbone)
    lengths = {}
    for key in ("query_max_length", "passage_max_length"):
        length = args.max_length or getattr(settings, key)
        if limit is not None and length > limit:
            if args.max_length or own:
                raise ConfigError(
                    f"{key} {length} is more than the {limit} tokens the model can take; give --max-length"
                )
            length = limit
        lengths[key] = length
    return dataclasses.replace(
        settings,
        pooling=encoder.pooling,
        similarity=args.similarity or settings.similarity,
        ladder=settings.ladder or ((full.layers, full.dim),),
        **lengths,
    )


def _run_writer(output: Path, method: str) -> Callable[[str, Size, Run], None]:
    def write(task: str, size: Size, run: Run) -> None:
        folder = output / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        write_run(run, folder / f"{task}_{method}_{size}.trec", name=f"{method}_{size}")

    return write


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two of the tasks are named {name!r}; rename one of the files or folders")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but PyTorch sees no GPU; use --device cpu or auto")
    return torch.device(name)


def _output_folder(path: Path | None, ours: Sequence[str] = _RESULT_FILES) -> Path | None:
    if path is None:
        return None
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--output {path} is a file; give a folder")
    if path.is_dir() and (strangers := sorted({entry.name for entry in path.iterdir()} - set(ours))):
        raise ConfigError(f"--output {path} holds something else ({strangers[0]}); give a new or an empty folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.evaluate", description="Evaluate embeddings and rankings.")
    commands = parser.add_subparsers(required=True, metavar="{sizes,score,compare,latency,rerank,transfer,mteb}")

    sizes = commands.add_parser(
        "sizes",
        help="score a model at many sizes, all from one pass over the texts",
        description="Score a model at many sizes, all from one pass over the texts, and print a table per task.",
    )
    sizes.set_defaults(command=_sizes)
    add = sizes.add_argument
    _model_options(sizes)
    add("--sts", nargs="+", default=[], type=Path, metavar="FILE", help="TSV (score, sentence, sentence) or jsonl")
    add("--sts-subsets", type=Path, metavar="FILE", help="TSV of dataset, subset, first row, rows (with a header)")
    add("--beir", nargs="+", default=[], type=Path, metavar="FOLDER", help="BEIR folders")
    add("--split", default="test", help="which qrels of the BEIR folders (%(default)s)")
    add("--random-init", action="store_true", help="score the same architecture with fresh weights too, as the control")
    add("--seed", type=int, default=0, help="of the fresh weights (%(default)s)")
    add("--bm25", action="store_true", help="score BM25 too (needs the package bm25s)")
    add("--output", type=Path, metavar="FOLDER", help="write results.json, raw.jsonl.gz, table.md and figures/ here")
    add("--json", type=Path, metavar="FILE", help="write the content of results.json to this file")
    add("--save-runs", action="store_true", help="write every ranking as a TREC run file to OUTPUT/runs")
    add("--top-k", type=_positive, default=DEFAULT_TOP_K, help="documents kept a query (%(default)s)")
    add("--max-documents", type=int, default=0, help="of each corpus, judged ones first; scores then rise (0: all)")
    add("--ignore-identical-ids", action="store_true", help="drop the document with the query's id (ArguAna, Quora)")
    add(
        "--passages-per-block",
        type=_positive,
        default=DEFAULT_PASSAGES_PER_BLOCK,
        help="documents held as vectors at a time (%(default)s)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the encoder's matrix products (%(default)s)",
    )

    score = commands.add_parser(
        "score",
        help="score a run file under trec_eval's names",
        description="Score a TREC run file; the numbers are trec_eval's.",
    )
    score.set_defaults(command=_score)
    add = score.add_argument
    add("--qrels", required=True, type=Path, help="judgements: TREC's four columns, or BEIR's three with a header")
    add("--run", required=True, type=Path, help="a run in TREC's six columns")
    add(
        "-l",
        "--relevance-level",
        type=_positive,
        default=1,
        help="lowest grade that is relevant; nDCG takes the grades themselves (%(default)s)",
    )
    add("-c", "--complete", action="store_true", help="judged queries that the run lacks count 0 instead of nothing")
    add("-M", "--max-documents", type=_positive, metavar="N", help="cut rankings at N documents")
    add("--baseline", type=Path, metavar="RUN", help="another run: p of the paired t-test and the difference, a metric")
    add("-q", "--per-query", action="store_true", help="print every query's values too")
    add("--json", type=Path, metavar="FILE", help="write the means, not rounded, as one flat JSON object")

    compare = commands.add_parser(
        "compare",
        help="test evaluations against another, size by size",
        description="Test the trained models of some `sizes` outputs against another's, size by size: paired t-test "
        "over queries, Fisher's z for STS. Marks: † significantly better, ‡ significantly worse (p < 0.05).",
    )
    compare.set_defaults(command=_compare)
    add = compare.add_argument
    add("baseline", type=Path, metavar="BASELINE", help="the --output folder of `sizes`")
    add("others", type=Path, nargs="+", metavar="OTHER", help="more such folders, of the same tasks")
    add("--holm", action="store_true", help="correct for the number of comparisons in a task's table")

    latency = commands.add_parser(
        "latency",
        help="milliseconds a query, parameters and index bytes of each size",
        description="Time the encoding of one query at a time, with the encoder cut to each size's layers.",
    )
    latency.set_defaults(command=_latency)
    _model_options(latency)
    add = latency.add_argument
    add("--sts", type=Path, metavar="FILE", help="whose sentences are the queries")
    add("--beir", type=Path, metavar="FOLDER", help="or whose queries")
    add("--split", default="test", help="which qrels of the BEIR folder (%(default)s)")
    add("--queries", type=_positive, default=100, metavar="N", help="how many are timed (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")

    rerank = commands.add_parser(
        "rerank",
        help="search with a small size, rerank with a large: quality, latency, memory",
        description="Search with a small size and rerank the best documents with a large one, against each size "
        "searching alone: quality with significance against the large one alone, milliseconds a query, memory.",
    )
    rerank.set_defaults(command=_rerank)
    _model_options(rerank)
    add = rerank.add_argument
    add("--beir", required=True, type=Path, metavar="FOLDER", help="a BEIR folder")
    add("--split", default="test", help="which of its qrels (%(default)s)")
    add("--shortlist", metavar="SIZE", help="the size that searches (the ladder's first)")
    add("--rerank", metavar="SIZE", help="the size that reranks (the ladder's last)")
    add("--depth", type=_positive, nargs="+", default=[10, 50, 100], help="documents reranked (10 50 100)")
    add("--top-k", type=_positive, default=DEFAULT_TOP_K, help="documents searched for (%(default)s)")
    add("--queries", type=_positive, default=100, metavar="N", help="how many are timed (%(default)s)")
    add("--output", type=Path, metavar="FOLDER", help="write rerank.json, rerank.md and rerank.png here")

    transfer = commands.add_parser(
        "transfer",
        help="SentEval's classification tasks on frozen embeddings, at every size",
        description="Logistic regression on frozen embeddings: SentEval's transfer tasks, from its own files.",
    )
    transfer.set_defaults(command=_transfer)
    _model_options(transfer)
    add = transfer.add_argument
    add("--data", required=True, type=Path, metavar="FOLDER", help="SentEval's data/downstream")
    add("--tasks", nargs="+", default=list(SENTEVAL_TASKS), metavar="TASK", help=f"some of {' '.join(SENTEVAL_TASKS)}")
    add("--random-init", action="store_true", help="score the same architecture with fresh weights too, as the control")
    add("--seed", type=int, default=0, help="of the folds and of the fresh weights (%(default)s)")
    add("--output", type=Path, metavar="FOLDER", help="write results.json, table.md and figures/ here")

    foreign = commands.add_parser(
        "mteb",
        help="any task of the package mteb, NanoBEIR's among them (needs it, and its data sets)",
        description="Run tasks of the package mteb with the model at some sizes and print each task's main score.",
    )
    foreign.set_defaults(command=_mteb)
    add = foreign.add_argument
    add("--model", required=True, help="a trained folder (Hugging Face files and barista.json)")
    add("--tasks", nargs="+", required=True, metavar="NAME", help="mteb's names: STS12 NanoSciFactRetrieval")
    add("--sizes", required=True, help="a list of sizes: demi,3x48")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the scores to this file")
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    """What every command that runs a model takes."""
    add = parser.add_argument
    add("--model", required=True, help="a trained folder (Hugging Face files and barista.json), or a hub name")
    add(
        "--sizes",
        default="ladder",
        help="ladder, grid (the ladder's layers × its dims), or a list: demi,3x48 (%(default)s)",
    )
    add("--pooling", choices=("cls", "mean"), help="in place of the model's own")
    add("--similarity", choices=("dot", "cosine"), help="of retrieval, in place of the model's own (STS takes cosine)")
    add("--max-length", type=_positive, metavar="TOKENS", help="of queries and documents, in place of the model's own")
    add(
        "--batch-tokens",
        type=_positive,
        default=DEFAULT_BATCH_TOKENS,
        help="tokens a batch, padding included (%(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one (%(default)s)")


if __name__ == "__main__":
    sys.exit(main())
