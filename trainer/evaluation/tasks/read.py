"""Reads the evaluation tasks that a recipe or a command names: STS files, and folders of retrieval collections."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from data.ground.files import looks_of, sha256_of
from trainer.evaluation.tasks.inputs import check_task_names
from trainer.evaluation.tasks.retrieval import RetrievalData, load_beir
from trainer.evaluation.tasks.sts import STSTask, read_sts


def read_tasks(
    sts: Iterable[str | Path],
    beir: Iterable[str | Path],
    *,
    split: str = "test",
    subsets: str | Path | None = None,
    max_documents: int = 0,
    taken: Sequence[str] = (),
) -> tuple[list[STSTask], list[RetrievalData]]:
    """Read all tasks; two of the same name are refused, because results are told apart by it.

    sts, subsets: as in `read_sts`. beir, split, max_documents: as in `load_beir`. taken: names that no task may have.
    """
    pairs = [read_sts(path, subsets=subsets) for path in sts]
    collections = [load_beir(path, split=split, max_documents=max_documents) for path in beir]
    check_task_names([*taken, *(task.name for task in pairs), *(data.name for data in collections)])
    return pairs, collections


def digest_of_tasks(
    sts: Iterable[str | Path], beir: Iterable[str | Path], *, split: str = "test", subsets: str | Path | None = None
) -> str:
    """One sha256 of the contents of all files that `read_tasks` reads. Files that are absent, which it refuses, are not
    in it.
    """
    of_folder = ("corpus.jsonl", "queries.jsonl", f"qrels/{split}.tsv")
    paths = [*map(Path, sts), *([Path(subsets)] if subsets else [])]
    paths += [Path(folder) / name for folder in beir for name in of_folder]
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            digest.update(bytes.fromhex(_hashed(path, looks_of(path.stat()))))
    return digest.hexdigest()


@functools.cache
def _hashed(path: Path, looks: str) -> str:
    """A file's sha256. Each evaluation of a study asks for its tests, which are hashed again only once they change."""
    return sha256_of(path)
