"""Inputs: each file once, nothing left out without a word, whatever stands in the folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data.ground.errors import DataError
from data.inputs import find_inputs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.jsonl, sub/b.jsonl.gz and sub/deep/c.txt, seen from the folder itself."""
    monkeypatch.chdir(tmp_path)
    for name in ("in/a.jsonl", "in/sub/b.jsonl.gz", "in/sub/deep/c.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


ALL = ["in/a.jsonl", "in/sub/b.jsonl.gz", "in/sub/deep/c.txt"]


def found(*names: str, output: str | None = None) -> list[str]:
    return [str(path) for path in find_inputs(names, output=Path(output) if output else None)]


def refused(sentence: str, *names: str) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        find_inputs(names)
    assert "\n" not in str(caught.value)


def test_files_folders_globs_and_hub_names(folder: Path) -> None:
    assert found("in") == ALL
    assert found("in/a.jsonl", "in/sub") == ALL
    assert found("in/*.jsonl", "in/*/*.gz") == ALL[:2]
    assert found("in/**/*.*") == ALL
    assert found("in/**") == ALL
    assert found("./in/[ab].jsonl") == ALL[:1]
    assert found(str(folder / "in/**/c.t?t")) == [str(folder / ALL[2])]
    assert found("in/../in/a.jsonl") == ["in/../in/a.jsonl"]
    assert found("org/name", "name") == ["org/name", "name"]
    (folder / "in/x[1].txt").touch()
    assert found("in/x[1].txt") == ["in/x[1].txt"]


def test_what_is_not_there_is_refused(folder: Path) -> None:
    refused(r"file in/b\.jsonl does not exist", "in/b.jsonl")
    refused(r"no file matches in/\*\.gz", "in/*.gz")
    refused(r"no file matches none/\*\*/\*\.txt", "none/**/*.txt")
    (folder / "empty").mkdir()
    refused("folder empty holds no .jsonl", "empty")
    refused("a.jsonl/b.txt does not exist", "in/a.jsonl/b.txt")
    refused("File name too long", "x" * 300 + "/y.jsonl")
    refused("holds a NUL", "a\0.jsonl")


@pytest.mark.parametrize(
    "names",
    [
        ("in/a.jsonl", "in/a.jsonl"),
        ("in", "in/a.jsonl"),
        ("in/*.jsonl", "in"),
        ("in", "again"),
        ("in/a.jsonl", "link.jsonl"),
        ("in/a.jsonl", "hard.jsonl"),
        ("in/a.jsonl", "in/sub/../a.jsonl"),
        ("org/name", "org/name"),
    ],
)
def test_no_file_is_read_twice(folder: Path, names: tuple[str, ...]) -> None:
    (folder / "again").symlink_to("in")
    (folder / "link.jsonl").symlink_to("in/a.jsonl")
    (folder / "hard.jsonl").hardlink_to(folder / "in/a.jsonl")
    refused("is given twice.*; name each file once", *names)


def test_a_link_within_a_folder_names_a_file_twice(folder: Path) -> None:
    (folder / "in/z.jsonl").symlink_to("a.jsonl")
    refused(r"in/z\.jsonl is given twice, also as in/a\.jsonl", "in")


def test_linked_folders_are_read_and_loops_end(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/d.tsv").touch()
    (folder / "in/linked").symlink_to("../elsewhere")
    (folder / "in/loop").symlink_to(".")
    (folder / "in/sub/up").symlink_to("..")
    assert found("in") == [ALL[0], "in/linked/d.tsv", *ALL[1:]]
    assert found("in/**/*.*") == [ALL[0], "in/linked/d.tsv", *ALL[1:]]


@pytest.mark.parametrize("target", ["nowhere", "x.jsonl"])
def test_broken_links_are_refused(folder: Path, target: str) -> None:
    (folder / "in/sub/x.jsonl").symlink_to(target)
    for name in ("in", "in/*/*.jsonl", "in/**", "in/sub/x.jsonl"):
        refused(r"in/sub/x\.jsonl is a link that leads to no file", name)


def test_pipes_and_devices_are_refused(folder: Path) -> None:
    os.mkfifo(folder / "in/p.jsonl")
    refused("no regular file", "in/p.jsonl")
    refused("no regular file", "in/*.jsonl")
    refused("no regular file", "/dev/zero")


def test_what_a_folder_leaves_out_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("x.csv", "y.csv", "z.bz2", "README", ".hidden.jsonl", ".cache"):
        (folder / "in" / name).touch()
    os.mkfifo(folder / "in/pipe.jsonl")
    (folder / "in/D.JSONL.GZ").touch()
    assert found("in") == ["in/D.JSONL.GZ", *ALL]
    (line,) = caplog.messages
    assert line.startswith("of in, these are left out: ")
    for part in ("2 .csv", "1 .bz2", "1 files without an ending", "1 hidden files", "1 files that are not regular"):
        assert part in line
    caplog.clear()
    assert found("in/sub") == ALL[1:] and not caplog.messages


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_folders_are_refused(folder: Path) -> None:
    (folder / "in/sub").chmod(0)
    try:
        for name in ("in", "in/*/*.gz", "in/**/*.gz"):
            refused("in/sub.* cannot be read", name)
    finally:
        (folder / "in/sub").chmod(0o755)


def test_a_folder_that_cannot_be_listed_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for those who run tests as root."""
    scandir = os.scandir

    def denied(path: Path) -> object:
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    for name in ("in", "in/*/*.gz", "in/**/*.gz"):
        refused("folder in/sub cannot be read", name)


def test_what_prepare_wrote_is_no_input(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("out/preparation.json", "out/units/0.json", "killed/.plan/tokenizer.json", "in/old/preparation.json"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (folder / "in/old/manifest.json").touch()
    (folder / "in/out/units").mkdir(parents=True)
    (folder / "in/out/units/00000.json").touch()
    assert found("in", output="in/out") == ALL
    assert "1 folders written by data.prepare" in caplog.text
    assert "in/out/units/00000.json" in found("in"), "only what is known to be ours is left out"
    assert found("in/**/*.json", "in/a.jsonl", output="in/out")[-1] == "in/a.jsonl"
    assert "in/out/units/00000.json" not in found("in/**/*.json", output="in/out")
    refused("folder out was written by data.prepare; name the files", "out")
    refused("folder killed was written by data.prepare", "killed")


def test_names_that_are_not_utf_8_are_refused(folder: Path) -> None:
    name = os.fsdecode(b"in/\xff.jsonl")
    (folder / name).touch()
    for given in (name, "in", "in/*.jsonl"):
        refused("is not UTF-8; rename it", given)
