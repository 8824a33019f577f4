"""The command `sizes`: every task at every size, as records, raw results, tables and figures."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from models.sizes import Size
from trainer.config import ConfigError
from trainer.evaluation import evaluate_tasks, known_metrics
from trainer.evaluation.encode import encoder_forward
from trainer.evaluation.output import output_folder, write_json
from trainer.evaluation.raw import RAW_FILE, RawResults, write_raw
from trainer.evaluation.report import Record, plot_records, results_markdown
from trainer.evaluation.retrieval import (
    DEFAULT_TOP_K,
    RetrievalData,
    Run,
    bm25_run,
    load_beir,
    score_run,
    write_run,
)
from trainer.evaluation.sts import read_sts
from trainer.evaluation.subject import choose_device, load_subject, untrained_encoder

log = logging.getLogger(__name__)

BM25 = "BM25"


def evaluate_sizes(args: argparse.Namespace) -> int:
    for chatty in ("bm25s", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    if not args.sts and not args.beir:
        raise ConfigError("there is nothing to evaluate on; give --sts FILE or --beir FOLDER")
    device = choose_device(args.device)
    output = output_folder(args.output)
    # Files are read before the model, so that a wrong path is told at once.
    sts = [read_sts(path, subsets=args.sts_subsets) for path in args.sts]
    beir = [load_beir(path, split=args.split, max_documents=args.max_documents) for path in args.beir]
    _check_names([*(task.name for task in sts), *(data.name for data in beir)])

    encoder, tokenizer, settings, sizes = load_subject(args)
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
        write_json(args.json, content)
    if output:
        (output / "table.md").write_text(table, encoding="utf-8")
        plot_records(records, output / "figures")
        write_raw(raw, output / RAW_FILE)
        write_json(output / "results.json", content)
    return 0


def bm25_records(data: RetrievalData, *, top_k: int = DEFAULT_TOP_K, raw: RawResults | None = None) -> list[Record]:
    """The BM25 baseline's scores on one collection."""
    scores = score_run(bm25_run(data, top_k=top_k), data.qrels)
    means = known_metrics(scores, data, top_k)
    if raw is not None:
        raw.add_retrieval(BM25, data.name, (0, 0), scores, list(means))
    return [Record(BM25, data.name, "retrieval", "", 0, 0, metric, value) for metric, value in means.items()]


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
