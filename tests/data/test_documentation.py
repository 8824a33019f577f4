"""The installed packages' documentation: what is found, how it is cut, and that nothing held out leaks."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data.corpora.by_id import read_beir_texts, read_qrels
from data.documentation import (
    Documentation,
    clean_docstring,
    installed_docstrings,
    installed_documentation,
    split_summary,
    without_interrupts,
    write_documentation,
)
from data.ground.errors import DataError
from tests import ROOT

BODY = "It has many words in it, so that there are certainly more than fifteen of them in this body."

MODULE = f'''"""Module of samples.

{BODY} Module."""
import nothing_that_exists
raise SystemExit("never imported")

class Shape:
    """A shape with :class:`~other.Corner` corners and ``literal`` text.

    {BODY} Shape."""

    def area(self):
        """Small one."""

    @property
    def name(self):
        """Small two."""

if True:
    def free(x):
        """Compute the free function of x.

        Parameters
        ----------
        x : int
            {BODY} Free."""

add_docstr(compiled.fast, r"""
fast(input) -> Tensor

Runs a compiled function quickly.

{BODY} {{extra}}
""".format(extra=1))
add_newdoc("sample", ("Kind", "slow"), """Runs a compiled method slowly.

{BODY} Slow.""")
'''


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "samplepackage"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text(MODULE)
    (folder / "tests" / "test_it.py").write_text('"""Tests are left out of it."""')
    (folder / "broken.py").write_text('"""Broken."""\ndef (:')
    monkeypatch.syspath_prepend(tmp_path)


def test_docstrings_are_found_without_importing(sample: None) -> None:
    found = {docstring.name: docstring for docstring in installed_docstrings(["samplepackage"])}
    assert "samplepackage" not in sys.modules
    assert set(found) == {
        "samplepackage",
        "samplepackage.Shape",
        "samplepackage.Shape.area",
        "samplepackage.Shape.name",
        "samplepackage.free",
        "compiled.fast",
        "sample.slow",
    }
    assert found["samplepackage.Shape.area"].group == "samplepackage.Shape"
    assert found["samplepackage.free"].group == "samplepackage"
    assert found["samplepackage.Shape"].text.startswith("A shape with other.Corner corners and literal text.\n\n")
    assert "----" not in found["samplepackage.free"].text
    assert split_summary(found["compiled.fast"].text) == ("Runs a compiled function quickly.", BODY + " {extra}")


def test_pairs_and_documents_without_what_is_held_out(sample: None) -> None:
    whole = installed_documentation(["samplepackage"], num_held_out=1, num_bodies=2)
    assert len(whole.held_out) == len(whole.distractors) == 1
    assert len(whole.pairs) == 4
    secret = whole.held_out[0]
    for text in (*whole.documents, *(pair.body for pair in whole.pairs), *(pair.summary for pair in whole.pairs)):
        assert secret.body not in text and secret.summary not in text
    assert any(pair.body == whole.distractors[0].body for pair in whole.pairs)
    for pair in whole.pairs:
        assert any(pair.summary in document for document in whole.documents)
    assert installed_documentation(["samplepackage"], num_held_out=1, num_bodies=2) == whole


def test_cleaning_is_light() -> None:
    text = "See :py:func:`os.path` and ``x = 1``.\n=====\n\n\n\n>>> keep(this)\n```python\ncode\n```"
    assert clean_docstring(text) == "See os.path and x = 1.\n\n>>> keep(this)\n```python\ncode\n```"


@pytest.mark.parametrize(
    "text",
    [
        "Args: none here:\n\n" + BODY,
        "Short.\n\n" + BODY,
        "A summary without enough body.\n\nOnly few words.",
        "Only a summary of one paragraph " * 3,
        "A summary of doctests only.\n\n" + ">>> call(one, two, three, four, five)\n" * 9,
        "",
    ],
)
def test_docstrings_without_summary_or_body_make_no_pair(text: str) -> None:
    assert split_summary(text) is None


@pytest.fixture(scope="module")
def real(processes: None) -> Documentation:
    return installed_documentation(["stdlib", "numpy"], num_held_out=50, num_bodies=200, processes=2)


def test_real_documentation(real: Documentation, tmp_path: Path) -> None:
    assert len(real.pairs) > 1500 and len(real.documents) > 2000
    assert (len(real.held_out), len(real.distractors)) == (50, 150)
    names = {pair.name for pair in real.pairs} | {pair.name for pair in real.held_out}
    assert len(names) == len(real.pairs) + 50
    assert {"numpy.linalg._linalg.solve", "asyncio.locks.Barrier.wait"} <= names
    assert any(name.startswith("topics.") for name in names)
    secret = {pair.body for pair in real.held_out} | {pair.summary for pair in real.held_out}
    assert not secret & ({pair.body for pair in real.pairs} | {pair.summary for pair in real.pairs})
    assert not any(pair.body in document for pair in real.held_out for document in real.documents)
    assert len({pair.summary for pair in real.pairs}) == len({pair.body for pair in real.pairs}) == len(real.pairs)

    write_documentation(real, tmp_path)
    corpus = read_beir_texts(tmp_path / "held-out" / "corpus.jsonl")
    queries = read_beir_texts(tmp_path / "held-out" / "queries.jsonl")
    qrels = read_qrels(tmp_path / "held-out" / "qrels" / "test.tsv")
    assert (len(corpus), len(queries), len(qrels)) == (200, 50, 50)
    for pair in real.held_out:
        assert queries[pair.name] == pair.summary
        assert [corpus[passage] for passage in qrels[pair.name]] == [pair.body]
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text("utf-8").splitlines()]
    assert sorted(row["query"] for row in rows) == sorted(pair.summary for pair in real.pairs)
    # The first of them are a sample of all, not of the first package.
    of_numpy = [row["name"].startswith("numpy.") for row in rows]
    assert abs(sum(of_numpy[:500]) / 500 - sum(of_numpy) / len(rows)) < 0.1
    assert len((tmp_path / "documents.jsonl").read_text("utf-8").splitlines()) == len(real.documents)


def test_user_errors_are_refused(sample: None) -> None:
    with pytest.raises(DataError, match="'no_such_package' is not installed"):
        installed_docstrings(["no_such_package"])
    with pytest.raises(DataError, match="top-level import name"):
        installed_docstrings(["numpy.linalg"])
    with pytest.raises(DataError, match="too few to hold out"):
        installed_documentation(["samplepackage"], num_held_out=500)
    with pytest.raises(DataError, match="make no evaluation"):
        installed_documentation(["samplepackage"], num_held_out=5, num_bodies=2)


def report_mask(connection) -> None:
    connection.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))


def masks_of_two(*, guarded: bool) -> None:
    """Print whether SIGINT is blocked in each of two processes that are started one after the other."""
    context = multiprocessing.get_context("spawn")
    found = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        with without_interrupts() if guarded else contextlib.nullcontext():
            process = context.Process(target=report_mask, args=(theirs,))
            process.start()
        found.append(ours.recv())
        process.join()
    print(found, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.processes
@pytest.mark.parametrize(("guarded", "said"), [(True, "[True, True] False"), (False, "[False, False] False")])
def test_not_even_the_first_process_sees_an_interrupt(guarded: bool, said: str) -> None:
    """The first that is spawned starts multiprocessing's resource tracker, which unblocks SIGINT."""
    script = f"from tests.data.test_documentation import masks_of_two; masks_of_two(guarded={guarded})"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said, done.stderr
