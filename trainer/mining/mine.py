"""Mining of hard negatives, one block of queries at a time so that it can be stopped and resumed; and its files."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch
from tqdm import tqdm

from data.corpora.splits import InputSplit
from data.ground.errors import ConfigError
from data.ground.files import read_text, refused_by, sync, write_atomically
from data.ground.records import Record, read_json
from data.passages import Passages, build, is_built
from models.sizes import Size
from trainer.evaluation.tasks.inputs import whole_number
from trainer.evaluation.tasks.retrieval import TopK
from trainer.mining.rules import DROPPED, Rules, choose
from trainer.resilience.run_lock import LOCK, Locked, lock
from trainer.resilience.stopping import Stopped

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
# Takes texts and whether they are queries; returns float32 vectors [n, dim] for each size.
EncodeSide = Callable[[Sequence[str], bool], Mapping[Size, np.ndarray]]


@dataclass(frozen=True)
class Miner:
    """A model with two sizes: the small one searches, the large one decides. They may be the same."""

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


def mine(
    output: Path,
    miner: Miner,
    rules: Rules,
    *,
    plan: Callable[[Path], Sequence[InputSplit]],
    corpora: Sequence[Path] = (),
    blocks: Blocks = Blocks(),
    keep_negatives: bool = False,
    stop_wanted: StopWanted = lambda: None,
) -> None:
    """Mine from the inputs to `output`/tuples.jsonl and report.json; partial results in `output` are used.

    `plan` gives the units to read; its argument is an empty folder to keep their index in.
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
    """Append blocks of vectors to one file per size; the file `encoded` counts the passages that are complete."""
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
        os.truncate(path, expected)  # drop a block that a kill left incomplete
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
    """The number of passages whose vectors are complete."""
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
    """Search, score and choose for a block of rows; write the numbers for the report, and then the block's tuples."""
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
            negatives = passages.negative_texts(row) + negatives
        own = passages.positives(row)
        own_scores = known_scores[first[number] + np.searchsorted(known[number], own)]
        line: dict[str, Any] = {
            "query": queries[number],
            "positives": passages.positive_texts(row),
            "negatives": negatives,
            "positive_scores": _rounded(own_scores),
            "mined_scores": _rounded(chosen.scores[number][found]),
        }
        if (weight := passages.weight(row)) is not None:
            line["weight"] = weight
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
    """The best `depth` of all passages by exact search: scores float32 and ids int64, [n, min(depth, passages)]."""
    found = TopK(len(queries), depth, device=miner.device)
    on_device = torch.from_numpy(queries).to(miner.device)
    dim = miner.small.dim
    with _vectors_file(work, miner.small).open("rb") as file:
        for start in range(0, num_passages, per_block):
            count = min(per_block, num_passages - start)
            # The file is read and not memory-mapped, because mapped pages would count as this process' memory.
            block = np.fromfile(file, np.float32, count * dim).reshape(count, dim)
            found.add_block(on_device, torch.from_numpy(block), start=start)
    return found.result()


def _reranked(queries: np.ndarray, ids: np.ndarray, large: _Vectors) -> tuple[np.ndarray, np.ndarray]:
    """The same matches, ranked by the large size's scores; ties go to the lower id."""
    owners = np.repeat(np.arange(len(ids)), ids.shape[1])
    scores = large.scores(queries, owners, ids.reshape(-1)).reshape(ids.shape)
    order = np.lexsort((ids, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


class _Vectors:
    """The passages' vectors by id, memory-mapped from their file."""

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
        with refused_by("numpy", f"{path}", hint=_remove(output / WORK)), np.load(path) as tables:
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
    """The distribution of scores; every value is None if there are no scores."""

    mean: float | None
    std: float | None
    min: float | None
    quarter: float | None = pydantic.Field(alias="25%")
    half: float | None = pydantic.Field(alias="50%")
    three_quarters: float | None = pydantic.Field(alias="75%")
    max: float | None


class Report(Record):
    """report.json: tuples by their number of negatives, matches dropped by each rule, and distributions of scores."""

    tuples: int
    passages: int
    negatives: int
    tuples_by_negatives: dict[str, int]
    dropped: dict[str, int]
    scores: dict[str, _Distribution] = pydantic.Field(min_length=1)


def report_text(report: Report) -> str:
    """The report as text for people."""
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


def claim(output: Path, identity: Mapping[str, Any], stack: ExitStack) -> None:
    """Lock the output folder until `stack` closes; refuse a folder that belongs to another command."""
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
    hint = "restore it, or remove the folder"
    old, new = read_json(path, what="record", hint=hint), json.loads(content)
    if not isinstance(old, dict):
        raise ConfigError(f"record {path} holds no object; {hint}")
    if old != new:
        other = ", ".join(key.replace("_", " ") for key in sorted({*old, *new}) if old.get(key) != new.get(key))
        raise ConfigError(f"--output {output} was begun with other {other}; choose a new folder, or remove this one")


def _vectors_file(work: Path, size: Size) -> Path:
    return work / f"passages_{size}.f32"


def _part(work: Path, start: int) -> Path:
    return work / "parts" / f"{start:012d}.jsonl"


def _rounded(scores: np.ndarray) -> list[float]:
    return [round(float(score), _DIGITS) for score in scores]


def _bar(what: str, total: int, *, initial: int = 0, unit: str, unit_scale: bool = False) -> tqdm:
    return tqdm(desc=what, total=total, initial=initial, unit=unit, unit_scale=unit_scale, mininterval=1.0)
