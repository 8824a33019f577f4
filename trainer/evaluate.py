"""Commands: score a trained model at every size, compare, time and rerank, or score any run file as trec_eval does.

    python -m trainer.evaluate sizes --model runs/x/model --beir data/scifact --bm25 --output results
    python -m trainer.evaluate sizes --model runs/x/model --beir data/scifact --across-depths
    python -m trainer.evaluate compare results other_results
    python -m trainer.evaluate latency --model runs/x/model --beir data/scifact
    python -m trainer.evaluate rerank --model runs/x/model --beir data/scifact --output reranked
    python -m trainer.evaluate quantised --model runs/x/model --beir data/scifact
    python -m trainer.evaluate fused --model runs/x/model --beir data/scifact
    python -m trainer.evaluate score --qrels Q --run R

`sizes` writes `results.json`: {"format": 1, "model", "sizes", "settings", "records"}, where each record is flat:
{"method": "trained" | "untrained" | "BM25", "task", "kind": "sts" | "retrieval", "size": the size's name in its ladder,
"layers", "dim", "metric": trec_eval's name or spearman, pearson, spearman/<subset>, "value"}; BM25 has layers 0, dim 0.
With --across-depths, results.json also has "across_depths": {"records", "significance"}, for queries against documents
of other depths; its records have "document_size" and "document_layers" too. "significance" has one entry for each
tested size (Verdict in trainer/evaluation/results/report.py). raw.jsonl.gz, beside results.json, holds every query's
and every pair's scores (trainer/evaluation/results/raw.py). With --vectors the documents' vectors are kept
(trainer/evaluation/search/vectors.py). Under a launcher, ranks share the work. `score` prints and writes trec_eval's
names; its JSON is one flat object.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from data.ground.command import exit_code_of, log_to_stderr
from data.ground.errors import ConfigError
from data.ground.options import listed
from data.ground.whole_folder import check_file
from models.choices import Similarity
from models.encoder import Encoder
from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.evaluation import arguments
from trainer.evaluation.arguments import Command
from trainer.evaluation.encoding.encode import EncodeTexts, embedder_of
from trainer.evaluation.fused import (
    corrected,
    costs_json,
    fused_markdown,
    fused_retrieval,
    fused_sts,
    measure_pairs,
    plot_fused,
)
from trainer.evaluation.latency import measure_costs
from trainer.evaluation.quantised import (
    RAW_FOLDERS,
    Raws,
    Row,
    plot_precisions,
    precision_markdown,
    ranges_json,
    retrieval_rows,
    sts_rows,
    with_fronts,
    with_int8_table,
)
from trainer.evaluation.rerank import compare_ways, plot_ways, ways_markdown
from trainer.evaluation.results.comparison import compare_results
from trainer.evaluation.results.output import output_folder, write_json, write_text
from trainer.evaluation.results.raw import RAW_FILE, read_raw, write_raw
from trainer.evaluation.results.report import Record, markdown_table, plot_records, results_markdown
from trainer.evaluation.results.significance import TestResult, p_text, paired_t_test
from trainer.evaluation.senteval import TASKS as SENTEVAL_TASKS
from trainer.evaluation.senteval import evaluate_transfer, read_task
from trainer.evaluation.sizes_command import evaluate_sizes
from trainer.evaluation.subject import choose_device, load_subject, untrained_encoder
from trainer.evaluation.tasks.read import read_tasks
from trainer.evaluation.tasks.retrieval import (
    METRICS,
    RetrievalData,
    RunScores,
    load_beir,
    read_qrels,
    read_run,
    score_run,
)
from trainer.evaluation.tasks.sts import STSTask, read_sts

_RERANK_FILES = ("rerank.json", "rerank.md", "rerank.png")
_FUSED_FILES = ("fused.json", "fused.md", "figures/")
_QUANTISED_FILES = ("quantised.json", "quantised.md", "figures/", *(f"{name}/" for name in RAW_FOLDERS.values()))


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments.build_parser(_COMMANDS).parse_args(argv)
    log_to_stderr()
    return exit_code_of(lambda: _carry_out(args))


def _carry_out(args: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and args.command is not evaluate_sizes:
        raise ConfigError("only `sizes` shares its work among ranks; start this command without a launcher")
    check_file(getattr(args, "json", None), "--json")
    return args.command(args)


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
        write_json(args.json, content)
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
    return {name: paired_t_test(scores.of_queries(name), other.of_queries(name)) for name in METRICS}


def _latency(args: argparse.Namespace) -> int:
    if not args.sts and not args.beir:
        raise ConfigError("there are no queries to time; give --sts FILE or --beir FOLDER")
    if args.sts and args.beir:
        raise ConfigError("--sts and --beir are both given, and the queries of one are timed; leave one out")
    arguments.refuse_unread(args)
    if args.sts:
        texts = [text for pair in read_sts(args.sts).pairs for text in pair]
    else:
        texts = list(load_beir(args.beir, split=args.split).queries)
    encoder, tokenizer, settings, sizes = load_subject(args)
    device = choose_device(args.device)
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
        write_json(
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
    device = choose_device(args.device)
    output = output_folder(args.output, _RERANK_FILES)
    data = load_beir(args.beir, split=args.split)
    encoder, tokenizer, settings, sizes = load_subject(args)
    ladder = settings.sizes
    small = ladder.find(args.shortlist) if args.shortlist else ladder.sizes[0]
    large = ladder.find(args.rerank) if args.rerank else ladder.full
    for size in (small, large):
        if size not in sizes:
            sizes = [*sizes, size]
    if small == large:
        raise ConfigError(f"shortlist and rerank are both {small}; give two sizes")
    if not small.fits_in(large):
        raise ConfigError(f"the shortlist's size {small} is not part of {large}; swap them or choose others")
    if args.top_k < max(args.depth):
        raise ConfigError(
            f"--depth {max(args.depth)} is more than the --top-k {args.top_k} that are searched; raise it"
        )
    encode_queries, encode_documents = _both_sides(args, encoder, tokenizer, settings, sizes)
    queries, documents = encode_queries(data.queries), encode_documents(data.documents)
    costs = measure_costs(encoder, tokenizer, sizes, settings, data.queries[: args.queries], device=device)
    ways = compare_ways(
        data, queries, documents, costs, small=small, large=large, depths=args.depth, top_k=args.top_k, device=device
    )
    table = ways_markdown(ways)
    sys.stdout.write(table)
    if output:
        write_text(output / "rerank.md", table)
        plot_ways(ways, output / "rerank.png", title=f"{data.name}: search with {small}, rerank with {large}")
        write_json(
            output / "rerank.json",
            {"format": 1, "model": str(args.model), "task": data.name, "ways": [way.as_json() for way in ways]},
        )
    return 0


class _Setting(NamedTuple):
    """Where a command computes and writes, and its tasks."""

    device: torch.device
    output: Path | None
    sts: list[STSTask]
    beir: list[RetrievalData]


def _setting_of(args: argparse.Namespace, files: Sequence[str]) -> _Setting:
    """files: what the command writes into its output.

    Everything is checked and read before the model is loaded, so that a wrong path fails at once.
    """
    arguments.require_tasks(args)
    device, output = choose_device(args.device), output_folder(args.output, files)
    return _Setting(device, output, *read_tasks(args.sts, args.beir, split=args.split))


def _quantised(args: argparse.Namespace) -> int:
    device, output, sts, beir = _setting_of(args, _QUANTISED_FILES)
    encoder, tokenizer, settings, sizes = load_subject(args)

    models = [encoder, *([with_int8_table(encoder)] if encoder.is_static else [])]
    rows: list[Row] = []
    ranges = {}
    raws: Raws = {}
    for task in sts:
        # STS compares vectors by their cosine, whatever similarity the model has. The vectors are scaled to unit length
        # here, so that the ranges of int8 fit them.
        first, *variant = (_one_side(args, model, tokenizer, settings, sizes, similarity="cosine") for model in models)
        rows += sts_rows(first, task, table_variant=variant[0] if variant else None, raws=raws)
    for data in beir:
        (queries, documents), *variants = (_both_sides(args, model, tokenizer, settings, sizes) for model in models)
        found, of_task = retrieval_rows(
            queries,
            documents,
            data,
            top_k=args.top_k,
            rescored=args.rescored,
            device=device,
            table_variant=variants[0] if variants else None,
            raws=raws,
        )
        rows += found
        ranges[data.name] = ranges_json(of_task)
    rows = with_fronts(rows)
    table = precision_markdown(rows, settings.sizes.name)
    sys.stdout.write(table)
    if output:
        write_text(output / "quantised.md", table)
        plot_precisions(rows, output / "figures")
        for precision, raw in raws.items():
            (output / RAW_FOLDERS[precision]).mkdir(parents=True, exist_ok=True)
            write_raw(raw, output / RAW_FOLDERS[precision] / RAW_FILE)
        content = {"format": 1, "model": str(args.model), "rows": [row.as_json() for row in rows]}
        write_json(output / "quantised.json", content | {"int8_ranges": ranges})
    return 0


def _fused(args: argparse.Namespace) -> int:
    device, output, sts, beir = _setting_of(args, _FUSED_FILES)
    encoder, tokenizer, settings, sizes = load_subject(args)
    if len(sizes) < 2:
        raise ConfigError(f"two sizes' scores are added, and --sizes {args.sizes} names one; name two or more")

    encode_sts = _one_side(args, encoder, tokenizer, settings, sizes, similarity="dot")
    rows = [row for task in sts for row in fused_sts(encode_sts([t for pair in task.pairs for t in pair]), task)]
    encode_queries, encode_documents = _both_sides(args, encoder, tokenizer, settings, sizes)
    for data in beir:
        vectors = encode_queries(data.queries), encode_documents(data.documents)
        rows += fused_retrieval(*vectors, data, top_k=args.top_k, device=device)
    rows = corrected(rows) if args.holm else rows
    timed = beir[0].queries if beir else [text for pair in sts[0].pairs for text in pair]
    costs = measure_pairs(encoder, tokenizer, sizes, settings, timed[: args.queries], device=device)
    table = fused_markdown(rows, costs, settings.sizes.name)
    sys.stdout.write(table)
    if output:
        write_text(output / "fused.md", table)
        plot_fused(rows, output / "figures")
        content = {"format": 1, "model": str(args.model), "rows": [row.as_json() for row in rows]}
        write_json(output / "fused.json", content | {"holm": args.holm, "costs": costs_json(costs)})
    return 0


def _encoding(
    args: argparse.Namespace, encoder: Encoder, tokenizer: PreTrainedTokenizerBase, sizes: Sequence[Size]
) -> Callable[..., Mapping[Size, np.ndarray]]:
    return embedder_of(
        encoder,
        tokenizer,
        sizes,
        device=choose_device(args.device),
        batch_tokens=args.batch_tokens,
        progress=sys.stderr.isatty(),
        dtype=getattr(torch, getattr(args, "dtype", "float32")),  # only some commands let the user choose
    )


def _both_sides(
    args: argparse.Namespace,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    settings: EmbeddingSettings,
    sizes: Sequence[Size],
) -> tuple[EncodeTexts, EncodeTexts]:
    """The functions that encode queries and documents."""
    alike = partial(_encoding(args, encoder, tokenizer, sizes), similarity=settings.similarity)
    return (
        partial(alike, max_length=settings.query_max_length, prompt=settings.query_prompt),
        partial(alike, max_length=settings.passage_max_length, prompt=settings.passage_prompt),
    )


def _one_side(
    args: argparse.Namespace,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    settings: EmbeddingSettings,
    sizes: Sequence[Size],
    *,
    similarity: Similarity,
) -> EncodeTexts:
    """The function that encodes texts that are neither queries nor passages."""
    encode_texts = _encoding(args, encoder, tokenizer, sizes)
    return partial(encode_texts, similarity=similarity, max_length=settings.max_length, prompt=settings.query_prompt)


def _compare(args: argparse.Namespace) -> int:
    folders = [args.baseline, *args.others]
    for folder in args.others:
        if folders.count(folder) > 1:
            raise ConfigError(f"{folder} is given twice; name each evaluation once")
    results = {str(folder): read_raw(folder / RAW_FILE) for folder in folders}
    sys.stdout.write(compare_results(results, baseline=str(args.baseline), corrected=args.holm))
    return 0


def _transfer(args: argparse.Namespace) -> int:
    if unknown := [name for name in args.tasks if name not in SENTEVAL_TASKS]:
        raise ConfigError(f"SentEval task {unknown[0]!r} is unknown; choose from {', '.join(SENTEVAL_TASKS)}")
    output = output_folder(args.output)
    tasks = [read_task(args.data, name) for name in args.tasks]
    encoder, tokenizer, settings, sizes = load_subject(args)
    methods = {"trained": encoder}
    if args.random_init:
        methods["untrained"] = untrained_encoder(encoder, seed=args.seed)
    records: list[Record] = []
    for method, model in methods.items():
        # By the dot product, with which the classifier sees the embeddings as they are.
        encode_texts = _one_side(args, model, tokenizer, settings, sizes, similarity="dot")
        records += evaluate_transfer(encode_texts, tasks, name_of=settings.sizes.name, method=method, seed=args.seed)
    table = results_markdown(records)
    sys.stdout.write(table)
    if output:
        write_text(output / "table.md", table)
        plot_records(records, output / "figures")
        content = {
            "format": 1,
            "model": str(args.model),
            "sizes": [size.numbers for size in sizes],
            "settings": dataclasses.asdict(settings),
            "records": [record.as_json() for record in records],
        }
        write_json(output / "results.json", content)
    return 0


def _mteb(args: argparse.Namespace) -> int:
    try:
        import mteb

        from trainer.evaluation.mteb_model import load_mteb_models
    except ImportError:
        raise ConfigError("this needs the package mteb; install it with: pip install -e '.[mteb]'") from None
    try:
        tasks = list(mteb.get_tasks(tasks=args.tasks))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"mteb does not know all of {', '.join(args.tasks)} ({error}); see mteb.get_tasks()"
        ) from None
    device = choose_device(args.device)
    names = listed(args.sizes)
    if not names:
        raise ConfigError(f"--sizes {args.sizes!r} names no size; give a list such as demi,3x48")
    scores: dict[str, dict[str, float]] = {}
    for name, model in zip(names, load_mteb_models(args.model, names, device=device)):
        for result in mteb.evaluate(model, tasks, cache=None, show_progress_bar=sys.stderr.isatty()).task_results:
            scores.setdefault(result.task_name, {})[name] = float(result.get_score())
    rows = [[task, *(f"{by_size[name]:.4f}" for name in names)] for task, by_size in scores.items()]
    sys.stdout.write(markdown_table(["task", *names], rows))
    if args.json:
        write_json(args.json, {"format": 1, "model": str(args.model), "main_scores": scores})
    return 0


_COMMANDS = {
    "sizes": Command(evaluate_sizes, arguments.add_sizes),
    "score": Command(_score, arguments.add_score),
    "compare": Command(_compare, arguments.add_compare),
    "latency": Command(_latency, arguments.add_latency),
    "rerank": Command(_rerank, arguments.add_rerank),
    "quantised": Command(_quantised, arguments.add_quantised),
    "fused": Command(_fused, arguments.add_fused),
    "transfer": Command(_transfer, arguments.add_transfer),
    "mteb": Command(_mteb, arguments.add_mteb),
}


if __name__ == "__main__":
    sys.exit(main())
