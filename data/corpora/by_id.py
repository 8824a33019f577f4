"""Texts and relevance judgements by id: BEIR folders, qrels, hard negatives."""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.corpora.rows import json_row, rows_of
from data.corpora.splits import DocumentLayout, IdLayout, InputSplit, join_title, place
from data.ground.errors import DataError
from data.ground.files import open_regular, read_text, reading
from data.lines import ByteCounter, decoded, lines


def number_of(value: Any) -> float:
    """A number, or a text that is one ("0.5"), as float; NaN for everything else."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


class TextIndex:
    """Texts of a file by id: sorted 64-bit hashes of the ids and the byte offsets of their lines.

    For collection.tsv (id, tab, text) and corpus.jsonl ({"_id", "title", "text"}). The index takes 16 bytes a text and
    is mapped from disk.
    """

    def __init__(self, path: Path, hashes: np.ndarray, offsets: np.ndarray) -> None:
        self.path = path
        self._hashes = hashes  # uint64 [texts], rising
        self._offsets = offsets  # int64 [texts]
        with reading(path), open_regular(path) as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @classmethod
    def build(cls, path: Path) -> TextIndex:
        """Build the index of a file, which is read once."""
        hashes, offsets = [], []
        for position, line in lines(path):
            if line.strip():
                hashes.append(_id_hash(cls._parse(path, position, line)[0]))
                offsets.append(position)
        if not hashes:
            raise DataError(f"{path} is empty; fetch it again")
        order = np.argsort(np.asarray(hashes, dtype=np.uint64), kind="stable")
        index = cls(path, np.asarray(hashes, dtype=np.uint64)[order], np.asarray(offsets, dtype=np.int64)[order])
        twins = np.flatnonzero(index._hashes[1:] == index._hashes[:-1])
        if len(twins):
            offset = int(index._offsets[twins[0]])
            raise DataError(f"{path} holds the id {index._at(offset)[0]!r} twice; drop one of the two lines")
        return index

    def save(self, folder: Path) -> None:
        np.save(folder / "hashes.npy", self._hashes)
        np.save(folder / "offsets.npy", self._offsets)
        (folder / "path").write_text(str(self.path), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> TextIndex:
        hashes, offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("hashes", "offsets"))
        return cls(cls.path_in(folder), hashes, offsets)

    @staticmethod
    def path_in(folder: Path) -> Path:
        """The file that a saved index belongs to."""
        return Path((folder / "path").read_text(encoding="utf-8"))

    def __len__(self) -> int:
        return len(self._hashes)

    def get(self, name: str) -> str | None:
        """The text of an id, with its title before it, or None."""
        wanted = _id_hash(name)
        row = int(np.searchsorted(self._hashes, np.uint64(wanted)))
        if row == len(self._hashes) or int(self._hashes[row]) != wanted:
            return None
        found, text = self._at(int(self._offsets[row]))
        return text if found == name else None

    def _at(self, offset: int) -> tuple[str, str]:
        end = self._map.find(b"\n", offset)
        return self._parse(self.path, offset, self._map[offset : end if end >= 0 else len(self._map)])

    @staticmethod
    def _parse(path: Path, position: int, line: bytes) -> tuple[str, str]:
        input_split = InputSplit(str(path), str(path), "jsonl", IdLayout("", ""), size=0)
        text = decoded(line, lambda: place(input_split, position)).rstrip("\r\n")
        if path.suffix == ".tsv":
            name, tab, content = text.partition("\t")
            if not tab:
                raise DataError(f"{place(input_split, position)} is not of the form ID, tab, text")
            return name, content
        row = json_row(input_split, position, text)
        key, body, title = row.get("_id"), row.get("text"), row.get("title")
        if not isinstance(key, str | int) or isinstance(key, bool) or not isinstance(body, str):
            raise DataError(
                f"{place(input_split, position)} has no '_id' or no 'text', which a BEIR corpus or query needs"
            )
        if title is not None and not isinstance(title, str):
            raise DataError(f"{place(input_split, position)}: the title is a {type(title).__name__}, not a text")
        return str(key), join_title(title, body)


def _id_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def read_qrels(path: Path) -> dict[str, dict[str, float]]:
    """{query id: {passage id: grade}} of BEIR's three columns with a header, or TREC's four columns without one."""
    if not path.is_file():
        raise DataError(f"file {path} of relevance judgements does not exist; check the folder and --split")
    judged: dict[str, dict[str, float]] = {}
    for number, line in enumerate(read_text(path, hint="fetch it again").split("\n"), start=1):
        cells = [cell.strip() for cell in line.split("\t")] if "\t" in line else line.split()
        if not any(cells) or (number == 1 and cells[-1] in ("score", "relevance", "rel")):
            continue
        query, passage, grade = (
            (cells[0], cells[-2], number_of(cells[-1])) if len(cells) in (3, 4) else ("", "", math.nan)
        )
        if not (query and passage and math.isfinite(grade)):
            raise DataError(f"{path}:{number} is not of the form QUERY PASSAGE GRADE or QUERY 0 PASSAGE GRADE")
        if judged.setdefault(query, {}).setdefault(passage, grade) != grade:
            raise DataError(
                f"{path}:{number} judges query {query!r} and passage {passage!r} again, with another grade; drop one"
            )
    if not judged:
        raise DataError(f"{path} holds no judgements; fetch it again")
    return judged


def read_beir_texts(path: Path) -> dict[str, str]:
    """{id: text} of a corpus.jsonl, queries.jsonl or an id-tab-text .tsv; a title is put before its text."""
    if not path.is_file():
        raise DataError(f"file {path} does not exist; check the folder and --split")
    texts: dict[str, str] = {}
    for position, line in lines(path):
        if line.strip():
            name, text = TextIndex._parse(path, position, line)
            if name in texts:
                raise DataError(f"{path} holds the id {name!r} twice; drop one of the two lines")
            texts[name] = text
    return texts


def corpus_texts(path: Path, counter: ByteCounter | None = None) -> Iterator[str]:
    """All non-empty texts of a corpus.jsonl or an id-tab-text .tsv; a title is put before its text."""
    if not path.is_file():
        raise DataError(f"file {path} does not exist; give a corpus.jsonl or a collection.tsv")
    for position, line in lines(path, counter=counter):
        if line.strip():
            _, text = TextIndex._parse(path, position, line)
            if text.strip():
                yield text


def read_hard_negatives(path: Path, judged: Mapping[str, Mapping[str, float]], *, most: int) -> dict[str, list[str]]:
    """{query id: passage ids} of {"qid", "neg": [...]} or {"qid", "neg": {system: [...], ...}} lines.

    The systems take turns, so that each contributes its best. Judged passages are left out: they may be relevant.
    """
    if not path.is_file():
        raise DataError(f"hard negatives file {path} does not exist; check the path")
    input_split = InputSplit(str(path), str(path), "jsonl", DocumentLayout(), size=0)
    found: dict[str, list[str]] = {}
    for position, row in rows_of(input_split, ByteCounter()):
        query, negatives = str(row.get("qid", "")), row.get("neg")
        if not query or not isinstance(negatives, list | dict):
            raise DataError(f'{place(input_split, position)} is not of the form {{"qid": ..., "neg": [...]}}')
        if query not in judged:
            continue
        if query in found:
            raise DataError(
                f"{place(input_split, position)} gives negatives of query {query!r} again; drop one of the lines"
            )
        systems = list(negatives.values()) if isinstance(negatives, dict) else [negatives]
        entries = [[_passage_id(entry) for entry in system] if isinstance(system, list) else [""] for system in systems]
        if not all(name for system in entries for name in system):
            raise DataError(
                f'{place(input_split, position)}: "neg" must hold passage ids or {{"pid": id}} objects only'
            )
        names = (name for turn in itertools.zip_longest(*entries) for name in turn if name is not None)
        distinct = dict.fromkeys(name for name in names if name not in judged[query])
        found[query] = list(itertools.islice(distinct, most))
    return found


def _passage_id(entry: Any) -> str:
    name = entry.get("pid") if isinstance(entry, Mapping) else entry
    return str(name) if isinstance(name, str | int) and not isinstance(name, bool) else ""
