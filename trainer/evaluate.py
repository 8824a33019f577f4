"""Commands: score a trained model at every size, or score anybody's run file as trec_eval does.

    python -m trainer.evaluate sizes --model runs/x/model --beir data/scifact --bm25 --output results
    python -m trainer.evaluate score --qrels Q --run R

`sizes` writes `results.json`: {"format": 1, "model", "sizes", "settings", "records"}, where each record is flat:
{"method": "trained" | "untrained" | "BM25", "task", "kind": "sts" | "retrieval", "size": the size's name in its ladder,
"layers", "dim", "metric": trec_eval's name or spearman, pearson, spearman/<subset>, "value"}; BM25 has layers 0, dim 0.
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
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel
from transformers.utils import logging as hf_logging

from data.tokens import load_tokenizer
from models.encoder import EmbeddingSettings, Encoder, load_encoder, longest_input
from models.sizes import STARBUCKS_LADDER, Ladder, Size
from trainer.command import USER_MISTAKES
from trainer.config import ConfigError
from trainer.evaluation import evaluate_tasks, known_metrics
from trainer.evaluation.encode import DEFAULT_BATCH_TOKENS, encoder_forward
from trainer.evaluation.report import Record, plot_records, results_markdown
from trainer.evaluation.retrieval import (
    DEFAULT_PASSAGES_PER_BLOCK,
    DEFAULT_TOP_K,
    METRICS,
    RetrievalData,
    Run,
    bm25_run,
    load_beir,
    read_qrels,
    read_run,
    score_run,
    write_run,
)
from trainer.evaluation.sts import read_sts

log = logging.getLogger(__name__)

BM25 = "BM25"
_RESULT_FILES = ("results.json", "table.md", "figures", "runs")


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
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json:
        _write_json(args.json, {"num_q": scores.num_queries, **scores.means})
    return 0


def _sizes(args: argparse.Namespace) -> int:
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
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

    encoder = load_encoder(args.model, pooling=args.pooling)
    tokenizer = load_tokenizer(args.model)
    settings = _settings(args, encoder)
    sizes = choose_sizes(args.sizes, settings.sizes, encoder)
    rows = encoder.word_embeddings.num_embeddings
    if len(tokenizer) > rows:
        raise ConfigError(
            f"the tokenizer of {args.model} has {len(tokenizer)} tokens and the model's table {rows}; "
            "give a folder whose tokenizer is the model's own"
        )

    methods = {"trained": encoder}
    if args.random_init:
        methods["untrained"] = untrained_encoder(encoder, seed=args.seed)
    records: list[Record] = []
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
        )
    if args.bm25:
        for data in beir:
            log.info("%s: %s", BM25, data.name)
            records += bm25_records(data, top_k=args.top_k)

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
        _write_json(output / "results.json", content)
    return 0


def bm25_records(data: RetrievalData, *, top_k: int = DEFAULT_TOP_K) -> list[Record]:
    """The BM25 baseline's scores on one collection."""
    scores = score_run(bm25_run(data, top_k=top_k), data.qrels)
    means = known_metrics(scores, data, top_k)
    return [Record(BM25, data.name, "retrieval", "", 0, 0, metric, value) for metric, value in means.items()]


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


def _output_folder(path: Path | None) -> Path | None:
    if path is None:
        return None
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--output {path} is a file; give a folder")
    if path.is_dir() and (strangers := sorted({entry.name for entry in path.iterdir()} - set(_RESULT_FILES))):
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
    commands = parser.add_subparsers(required=True, metavar="{sizes,score}")

    sizes = commands.add_parser(
        "sizes",
        help="score a model at many sizes, all from one pass over the texts",
        description="Score a model at many sizes, all from one pass over the texts, and print a table per task.",
    )
    sizes.set_defaults(command=_sizes)
    add = sizes.add_argument
    add("--model", required=True, help="a trained folder (Hugging Face files and barista.json), or a hub name")
    add("--sts", nargs="+", default=[], type=Path, metavar="FILE", help="TSV (score, sentence, sentence) or jsonl")
    add("--sts-subsets", type=Path, metavar="FILE", help="TSV of dataset, subset, first row, rows (with a header)")
    add("--beir", nargs="+", default=[], type=Path, metavar="FOLDER", help="BEIR folders")
    add("--split", default="test", help="which qrels of the BEIR folders (%(default)s)")
    add(
        "--sizes",
        default="ladder",
        help="ladder, grid (the ladder's layers × its dims), or a list: demi,3x48 (%(default)s)",
    )
    add("--random-init", action="store_true", help="score the same architecture with fresh weights too, as the control")
    add("--seed", type=int, default=0, help="of the fresh weights (%(default)s)")
    add("--bm25", action="store_true", help="score BM25 too (needs the package bm25s)")
    add("--output", type=Path, metavar="FOLDER", help="write results.json, table.md and figures/ here")
    add("--json", type=Path, metavar="FILE", help="write the content of results.json to this file")
    add("--save-runs", action="store_true", help="write every ranking as a TREC run file to OUTPUT/runs")
    add("--pooling", choices=("cls", "mean"), help="in place of the model's own")
    add("--similarity", choices=("dot", "cosine"), help="of retrieval, in place of the model's own (STS takes cosine)")
    add("--max-length", type=_positive, metavar="TOKENS", help="of queries and documents, in place of the model's own")
    add("--top-k", type=_positive, default=DEFAULT_TOP_K, help="documents kept a query (%(default)s)")
    add("--max-documents", type=int, default=0, help="of each corpus, judged ones first; scores then rise (0: all)")
    add("--ignore-identical-ids", action="store_true", help="drop the document with the query's id (ArguAna, Quora)")
    add(
        "--batch-tokens",
        type=_positive,
        default=DEFAULT_BATCH_TOKENS,
        help="tokens a batch, padding included (%(default)s)",
    )
    add(
        "--passages-per-block",
        type=_positive,
        default=DEFAULT_PASSAGES_PER_BLOCK,
        help="documents held as vectors at a time (%(default)s)",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is one (%(default)s)")
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
    add("-q", "--per-query", action="store_true", help="print every query's values too")
    add("--json", type=Path, metavar="FILE", help="write the means, not rounded, as one flat JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
