"""Command: hard negatives for pairs, found by a trained model: tuples in, the same tuples with negatives out.

    python -m trainer.mine_negatives pairs.jsonl --model runs/x/model --output mined --relative-margin 0.05
    python -m data.prepare tuples mined/tuples.jsonl --tokenizer T --output shards/mined

Reads what `data.prepare tuples` reads. Searched are the inputs' own passages, of MS MARCO and BEIR folders the whole
corpus, and those of --corpus. `--size` searches; with `--rerank` a larger size of the same model, encoded in the same
pass, orders and scores the best. Which matches become negatives: trainer/negatives.py.

Memory is bounded by the blocks: texts and vectors lie on disk (data/passages.py; 4 bytes a dimension of each passage),
a block of queries searches them exactly, block by block. What is finished stays: vectors by blocks of passages, results
by blocks of queries. The same command goes on and gives the same bytes; another one is refused. SIGTERM, SIGUSR1, the
file that BARISTA_STOP_FILE names or --stop-after-minutes ends it between blocks with code 75.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch
from tqdm import tqdm
from transformers.utils import logging as hf_logging

from data.command import run_command
from data.corpora import TUPLE_FORMATS, Unit, corpus_of, plan_tuples
from data.errors import UserError
from data.files import read_text, refused_by, sha256_of, sync, write_atomically
from data.passages import Passages, build, is_built
from data.records import Record, read_json, read_record
from models.sizes import Size
from trainer.config import LOCK, ConfigError
from trainer.evaluation.encode import DEFAULT_BATCH_TOKENS, encoding_of
from trainer.evaluation.inputs import whole_number
from trainer.evaluation.retrieval import TopK
from trainer.evaluation.subject import check_sizes, choose_device, load_model, trained_settings
from trainer.negatives import DROPPED, Rules, choose
from trainer.options import LARGEST_SEED, count, real
from trainer.run_lock import Locked, lock
from trainer.stopping import STOP_FILE_VARIABLE, Stopped, StopRequests
from trainer.whole_folder import check_place

log = logging.getLogger(__name__)

IDENTITY, TUPLES, REPORT, WORK = "mining.json", "tuples.jsonl", "report.json", "work"
TEXTS = "texts"  # in WORK
QUERIES_PER_BLOCK = 4_096
PASSAGES_PER_BLOCK = 16_384
_GATHERED_BYTES = 64 << 20
_TABLES = ("counts", "positives", "negatives", "dropped")  # in a part's .npz
_DIGITS = 5  # of the scores that are written
_WAIT_SECONDS = 5.0

StopWanted = Callable[[], str | None]
# Texts and whether they are queries -> float32 [n, dim] a size.
EncodeSide = Callable[[Sequence[str], bool], Mapping[Size, np.ndarray]]


@dataclass(frozen=True)
class Miner:
    """A model at the size that searches and the one that decides, which may be the same."""

    encode: EncodeSide
    small: Size
    large: Size
    device: str

    @property
    def sizes(self) -> list[Size]:
        return list(dict.fromkeys([self.small, self.large]))


@dataclass(frozen=True)
class Blocks:
    queries: int = QUERIES_PER_BLOCK
    passages: int = PASSAGES_PER_BLOCK


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    rules = Rules(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Rules)})
    blocks = Blocks(args.queries_per_block, args.passages_per_block)
    corpora = [Path(path) for path in args.corpus]
    corpora += [path for name in args.inputs if (path := corpus_of(name, format=args.format)) and path not in corpora]
    output = Path(args.output)
    check_place(output)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is a file; give a folder")
    miner, model_identity = load_miner(args)
    identity = {
        "inputs": [_file_identity(path) for name in args.inputs for path in _files_of(name)],
        "corpora": [_file_identity(path) for path in corpora],
        "reading": {key: getattr(args, key) for key in _READING},
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
        _claim(output, identity, stack)
        try:
            mine(
                output,
                miner,
                rules,
                plan=lambda scratch: _units(args, scratch),
                corpora=corpora,
                blocks=blocks,
                keep_negatives=args.keep_negatives,
                stop_wanted=stops.wanted,
            )
        except UserError:
            # Those of the inputs: a mended command is another one, and starts afresh.
            if not is_built(output / WORK / TEXTS):
                shutil.rmtree(output if is_new else output / WORK)
                (output / IDENTITY).unlink(missing_ok=True)
            raise
    sys.stdout.write(report_text(read_record(output / REPORT, _Report, what="report", mend="remove it and mine again")))


def mine(
    output: Path,
    miner: Miner,
    rules: Rules,
    *,
    plan: Callable[[Path], Sequence[Unit]],
    corpora: Sequence[Path] = (),
    blocks: Blocks = Blocks(),
    keep_negatives: bool = False,
    stop_wanted: StopWanted = lambda: None,
) -> None:
    """Everything from the inputs to `output`/tuples.jsonl and report.json; what is there already is not made again.

    `plan` gives the units to read, with an empty folder to keep their index in.
    """
    work = output / WORK
    if (output / REPORT).is_file():
        log.info("%s is finished", output)
        shutil.rmtree(work, ignore_errors=True)
        return
    texts = work / TEXTS

    def check(place: str) -> None:
        if (reason := stop_wanted()) is not None:
            raise Stopped(f"stopped in {place} ({reason}); the same command goes on")

    if not is_built(texts):
        shutil.rmtree(texts, ignore_errors=True)
        (texts / "plan").mkdir(parents=True)
        units = plan(texts / "plan")
        total = sum(unit.size for unit in units) + sum(path.stat().st_size for path in corpora)
        with _bar("reading", total, unit="B", unit_scale=True) as bar:

            def report(num_bytes: int) -> None:
                bar.update(num_bytes)
                check("reading")

            build(texts, units, corpora, report=report)
    passages = Passages(texts)
    log.info("%d tuples, %d distinct passages", passages.num_rows, passages.num_passages)
    _encode_passages(passages, work, miner, blocks.passages, check)
    (work / "parts").mkdir(exist_ok=True)
    starts = range(0, passages.num_rows, blocks.queries)
    with _bar("mining", passages.num_rows, unit="query") as bar:
        for start in starts:
            rows = np.arange(start, min(start + blocks.queries, passages.num_rows))
            part = _part(work, start)
            if not part.is_file():
                check("mining")
                _mine_block(rows, passages, work, miner, rules, blocks, keep_negatives, part)
            bar.update(len(rows))
    _finish(output, [_part(work, start) for start in starts], rules, passages.num_passages)
    shutil.rmtree(work)
    log.info("mined tuples are in %s", output / TUPLES)


def _encode_passages(
    passages: Passages, work: Path, miner: Miner, per_block: int, check: Callable[[str], None]
) -> None:
    """Append blocks of vectors to a file a size; `encoded` counts the passages whose vectors are whole."""
    counter = work / "encoded"
    done = _encoded(counter, passages.num_passages)
    files = {size: _vectors_file(work, size) for size in miner.sizes}
    for size, path in files.items():
        there, expected = path.stat().st_size if path.is_file() else 0, done * size.dim * 4
        if there < expected:
            raise ConfigError(
                f"{path} has {there} bytes, and {counter} says that {expected} were written; {_remove(work)}"
            )
        path.touch()
        os.truncate(path, expected)  # what a kill left of a block
    with _bar("encoding", passages.num_passages, initial=done, unit="text") as bar:
        while done < passages.num_passages:
            check("encoding")
            ids = range(done, min(done + per_block, passages.num_passages))
            vectors = miner.encode(passages.passages(ids), False)
            for size, path in files.items():
                with path.open("ab") as file:
                    file.write(np.ascontiguousarray(vectors[size], np.float32).data)
                sync(path)
            done = ids.stop
            write_atomically(counter, f"{done}\n")
            bar.update(len(ids))


def _encoded(counter: Path, num_passages: int) -> int:
    """How many passages' vectors are whole."""
    if not counter.is_file():
        return 0
    done = whole_number(read_text(counter, what="counter").strip(), most=num_passages)
    if done is None or done < 0:
        raise ConfigError(f"{counter} is no number between 0 and {num_passages} passages; {_remove(counter.parent)}")
    return done


def _remove(work: Path) -> str:
    return f"remove {work}, and the same command begins again"


def _mine_block(
    rows: np.ndarray,
    passages: Passages,
    work: Path,
    miner: Miner,
    rules: Rules,
    blocks: Blocks,
    keep_negatives: bool,
    part: Path,
) -> None:
    """Search, score and choose for a block of rows; write its tuples, and before them what the report needs."""
    queries = passages.queries(rows)
    vectors = miner.encode(queries, True)
    barred = [passages.excluded(row) for row in rows]
    if keep_negatives:
        barred = [np.union1d(ids, passages.negatives(row)) for ids, row in zip(barred, rows)]
    depth = rules.last_rank + max(map(len, barred))
    scores, ids = _search(vectors[miner.small], passages.num_passages, work, miner, depth, blocks.passages)
    decided = vectors[miner.large]
    large = _Vectors(work, miner.large, passages.num_passages)
    if miner.large != miner.small:
        scores, ids = _reranked(decided, ids, large)
    known = [passages.known(row) for row in rows]
    owners = np.repeat(np.arange(len(rows)), list(map(len, known)))
    known_scores = large.scores(decided, owners, np.concatenate(known))
    lowest = np.full(len(rows), np.inf, np.float32)
    np.minimum.at(lowest, owners, known_scores)
    stride = passages.num_passages
    barred_pairs = np.concatenate([number * stride + each for number, each in enumerate(barred)])
    excluded = np.isin(np.arange(len(rows))[:, None] * stride + ids, barred_pairs)
    chosen = choose(scores, ids, excluded=excluded, positives=lowest, rows=rows, rules=rules)

    first = np.cumsum([0, *map(len, known)])
    lines = []
    for number, row in enumerate(rows):
        found = chosen.ids[number] >= 0
        negatives = passages.passages(chosen.ids[number][found])
        if keep_negatives:
            negatives = passages.passages(dict.fromkeys(passages.negatives(row).tolist())) + negatives
        own = passages.positives(row)
        own_scores = known_scores[first[number] + np.searchsorted(known[number], own)]
        line = {
            "query": queries[number],
            "positives": passages.passages(own),
            "negatives": negatives,
            "positive_scores": _rounded(own_scores),
            "mined_scores": _rounded(chosen.scores[number][found]),
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    found = chosen.ids >= 0
    with part.with_suffix(".npz").open("wb") as file:
        np.savez(
            file,
            counts=found.sum(1),
            positives=lowest,
            negatives=chosen.scores[found],
            dropped=[chosen.dropped[name] for name in DROPPED],
        )
    write_atomically(part, "".join(lines))


def _search(
    queries: np.ndarray, num_passages: int, work: Path, miner: Miner, depth: int, per_block: int
) -> tuple[np.ndarray, np.ndarray]:
    """The exact best `depth` of all passages: scores float32 and ids int64, both [n, min(depth, passages)]."""
    found = TopK(len(queries), depth, device=miner.device)
    on_device = torch.from_numpy(queries).to(miner.device)
    dim = miner.small.dim
    with _vectors_file(work, miner.small).open("rb") as file:
        for start in range(0, num_passages, per_block):
            count = min(per_block, num_passages - start)
            # Read, not mapped: mapped pages would count as this process' memory.
            block = np.fromfile(file, np.float32, count * dim).reshape(count, dim)
            found.add_block(on_device, torch.from_numpy(block), start=start)
    return found.result()


def _reranked(queries: np.ndarray, ids: np.ndarray, large: _Vectors) -> tuple[np.ndarray, np.ndarray]:
    """The same matches in the order of the larger size; ties go to the lower id."""
    owners = np.repeat(np.arange(len(ids)), ids.shape[1])
    scores = large.scores(queries, owners, ids.reshape(-1)).reshape(ids.shape)
    order = np.lexsort((ids, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


class _Vectors:
    """Passages' vectors by id, from the file."""

    def __init__(self, work: Path, size: Size, num_passages: int) -> None:
        self._table = np.memmap(_vectors_file(work, size), np.float32, "r", shape=(num_passages, size.dim))

    def scores(self, queries: np.ndarray, owners: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Dot products of queries[owners] with the passages `ids`: float32 [n]."""
        at_once = max(1, _GATHERED_BYTES // (8 * self._table.shape[1]))
        parts = [
            np.einsum("nd,nd->n", queries[owners[start : start + at_once]], self._table[ids[start : start + at_once]])
            for start in range(0, len(ids), at_once)
        ]
        return np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)


def _finish(output: Path, parts: Sequence[Path], rules: Rules, num_passages: int) -> None:
    target = output / TUPLES
    temporary = target.with_suffix(".tmp")
    with temporary.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole)
    sync(temporary)
    temporary.replace(target)
    columns: dict[str, list[np.ndarray]] = {}
    for part in parts:
        path = part.with_suffix(".npz")
        with refused_by("numpy", f"{path}", mend=_remove(output / WORK)), np.load(path) as tables:
            for name in _TABLES:
                columns.setdefault(name, []).append(tables[name])
    counts, positives, negatives = (np.concatenate(columns[name]) for name in ("counts", "positives", "negatives"))
    report = {
        "tuples": len(counts),
        "passages": num_passages,
        "negatives": len(negatives),
        "tuples_by_negatives": {str(n): int((counts == n).sum()) for n in range(rules.num_negatives + 1)},
        "dropped": dict(zip(DROPPED, np.sum(columns["dropped"], axis=0).tolist())),
        "scores": {
            "positive": _distribution(positives),
            "negative": _distribution(negatives),
            "difference": _distribution(np.repeat(positives, counts) - negatives),
        },
    }
    write_atomically(output / REPORT, json.dumps(report, indent=1) + "\n")


def _distribution(scores: np.ndarray) -> dict[str, float | None]:
    names = ("mean", "std", "min", "25%", "50%", "75%", "max")
    if not len(scores):
        return dict.fromkeys(names)
    wide = scores.astype(np.float64)
    values = [wide.mean(), wide.std(), *np.quantile(wide, [0, 0.25, 0.5, 0.75, 1])]
    return {name: round(float(value), _DIGITS) for name, value in zip(names, values)}


class _Distribution(Record):
    """Of scores; None where there are none."""

    mean: float | None
    std: float | None
    min: float | None
    quarter: float | None = pydantic.Field(alias="25%")
    half: float | None = pydantic.Field(alias="50%")
    three_quarters: float | None = pydantic.Field(alias="75%")
    max: float | None


class _Report(Record):
    """report.json: how many tuples have how many negatives, what rules dropped, and how scores are distributed."""

    tuples: int
    passages: int
    negatives: int
    tuples_by_negatives: dict[str, int]
    dropped: dict[str, int]
    scores: dict[str, _Distribution] = pydantic.Field(min_length=1)


def report_text(report: _Report) -> str:
    """The report as people read it."""
    columns = [each.model_dump(by_alias=True) for each in report.scores.values()]
    lines = [f"{report.negatives:,} negatives for {report.tuples:,} tuples among {report.passages:,} passages", ""]
    lines += ["negatives of a tuple   tuples"]
    lines += [f"{count:>20}   {number:,}" for count, number in report.tuples_by_negatives.items() if number]
    lines += ["", f"{'score':<10}" + "".join(f"{name:>12}" for name in report.scores)]
    for value in columns[0]:
        cells = [column[value] for column in columns]
        lines.append(f"{value:<10}" + "".join(f"{'–' if cell is None else f'{cell:.4f}':>12}" for cell in cells))
    dropped = [f"{name} {number:,}" for name, number in report.dropped.items() if number]
    return "\n".join([*lines, "", f"matches dropped by a rule: {', '.join(dropped) or 'none'}"]) + "\n"


# Inputs, the model, and what a folder was made of


def load_miner(args: argparse.Namespace) -> tuple[Miner, dict[str, Any]]:
    """The model of --model at --size and --rerank, and what tells it from another."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    folder = Path(args.model)
    settings = trained_settings(folder)
    encoder, tokenizer, _ = load_model(folder, pooling=settings.pooling)
    ladder = settings.sizes
    small = ladder.find(args.size) if args.size else ladder.full
    large = ladder.find(args.rerank) if args.rerank else small
    check_sizes((small, large), encoder)
    if args.rerank and (large.layers < small.layers or large.dim < small.dim):
        raise ConfigError(f"--rerank {large} is no larger than --size {small}, which searches; exchange them")
    device = str(choose_device(args.device))
    sizes = list(dict.fromkeys([small, large]))
    run = encoding_of(encoder, tokenizer, sizes, device=device, batch_tokens=args.batch_tokens)

    def encode_side(texts: Sequence[str], queries: bool) -> Mapping[Size, np.ndarray]:
        return run(
            texts,
            similarity=settings.similarity,
            max_length=settings.query_max_length if queries else settings.passage_max_length,
            prompt=settings.query_prompt if queries else settings.passage_prompt,
        )

    files = [*sorted(folder.glob("*.safetensors")), folder / "barista.json", *sorted(folder.glob("tokenizer.json"))]
    identity = {
        "files": {path.name: sha256_of(path) for path in files},
        "size": str(small),
        "rerank": str(large),
        "batch_tokens": args.batch_tokens,
        "device": device,
    }
    return Miner(encode_side, small, large, device), identity


def _claim(output: Path, identity: Mapping[str, Any], stack: ExitStack) -> None:
    """Hold the folder until `stack` closes; refuse what is not of this command."""
    content = json.dumps(identity, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    path = output / IDENTITY
    if output.is_dir() and not path.is_file() and {each.name for each in output.iterdir()} - {LOCK, f"{IDENTITY}.tmp"}:
        raise ConfigError(f"--output {output} holds other files; choose a new or empty folder")
    output.mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(lock(output, wait_seconds=_WAIT_SECONDS))
    except Locked as error:
        raise ConfigError(str(error)) from None
    if not path.is_file():
        write_atomically(path, content)
        return
    mend = "restore it, or remove the folder"
    old, new = read_json(path, what="record", mend=mend), json.loads(content)
    if not isinstance(old, dict):
        raise ConfigError(f"record {path} holds no object; {mend}")
    if old != new:
        other = ", ".join(key.replace("_", " ") for key in sorted({*old, *new}) if old.get(key) != new.get(key))
        raise ConfigError(f"--output {output} was begun with other {other}; choose a new folder, or remove this one")


_READING = (
    *("format", "split", "columns", "query_column", "positive_column", "negative_column"),
    *("skip_rows", "skip_empty", "limit"),
)


def _units(args: argparse.Namespace, scratch: Path) -> list[Unit]:
    return plan_tuples(
        args.inputs,
        scratch=scratch,
        format=args.format,
        split=args.split,
        columns=args.columns,
        query_column=args.query_column,
        positive_columns=args.positive_column,
        negative_columns=args.negative_column,
        skip_rows=args.skip_rows,
        skip_empty=args.skip_empty,
        limit=args.limit,
    )


def _files_of(name: str) -> list[Path]:
    """The files behind an input, in a fixed order; none for a name on the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    found = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    return sorted(each for each in map(Path, found) if each.is_file())


def _file_identity(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"file {path} does not exist; check --corpus and the inputs")
    return {"path": str(path.resolve()), "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _vectors_file(work: Path, size: Size) -> Path:
    return work / f"passages_{size}.f32"


def _part(work: Path, start: int) -> Path:
    return work / "parts" / f"{start:012d}.jsonl"


def _rounded(scores: np.ndarray) -> list[float]:
    return [round(float(score), _DIGITS) for score in scores]


def _bar(what: str, total: int, *, initial: int = 0, unit: str, unit_scale: bool = False) -> tqdm:
    return tqdm(desc=what, total=total, initial=initial, unit=unit, unit_scale=unit_scale, mininterval=1.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.mine_negatives", description="Find hard negatives for pairs with a trained model."
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="queries with positives: files or folders, as for data.prepare")
    add("--model", required=True, metavar="FOLDER", help="of a run: Hugging Face files and barista.json")
    add("--output", required=True, metavar="FOLDER", help="new or empty, or an unfinished one: tuples.jsonl comes here")
    add("--size", metavar="SIZE", help="that searches: demi, 2x32 (the model's largest)")
    add("--rerank", metavar="SIZE", help="a larger size that orders and scores the best (none)")
    add("--corpus", nargs="+", default=[], metavar="FILE", help="corpus.jsonl or collection.tsv to search as well")
    add("--keep-negatives", action="store_true", help="put the input's own negatives before the mined ones")

    group = parser.add_argument_group("which matches become negatives")
    add = group.add_argument
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
    add("--seed", type=count(least=0, most=LARGEST_SEED), default=0, help="of random sampling (%(default)s)")

    group = parser.add_argument_group("reading, as for data.prepare tuples")
    add = group.add_argument
    add("--format", choices=TUPLE_FORMATS, default="auto")
    add("--split", default="train", help="of MS MARCO and BEIR folders (%(default)s)")
    add("--columns", type=lambda text: text.split(","), default=[], metavar="NAME,...", help="of TSV without a header")
    add("--query-column", metavar="NAME")
    add("--positive-column", action="append", default=[], metavar="NAME")
    add("--negative-column", action="append", default=[], metavar="NAME")
    add("--skip-rows", metavar="FILE")
    add("--skip-empty", action="store_true")
    add("--limit", type=count(), metavar="N", help="tuples to read")

    group = parser.add_argument_group("running")
    add = group.add_argument
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
    return parser


if __name__ == "__main__":
    run_command(main)
