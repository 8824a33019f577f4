"""Reads the evaluation tasks that a recipe or a command names: STS files, and folders of retrieval collections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

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
