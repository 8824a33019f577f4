"""WebDataset tars as inputs: what webdataset writes is read, here and elsewhere, and every defect is told by name."""

from __future__ import annotations

import errno
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import webdataset

from data import prepare, remote
from data.corpora import tars
from data.corpora.options import SourceOptions, TupleOptions
from data.corpora.plan import plan_documents, plan_tuples
from data.corpora.splits import DocumentLayout
from data.ground.errors import DataError
from data.shards.reader import ShardFolder
from tests.data.reading import read_documents, read_tuples

SAMPLES: list[dict[str, Any]] = [
    {"__key__": f"a/{number:04d}", "txt": f"text number {number}", "jpg": b"\xff\xd8 no picture"}
    for number in range(30)
]


def write_tar(path: Path, samples: list[dict[str, Any]]) -> Path:
    with webdataset.TarWriter(str(path), encoder=lambda sample: sample) as writer:
        for sample in samples:
            encoded = {
                name: value
                if name == "__key__" or isinstance(value, bytes)
                else value.encode()
                if isinstance(value, str)
                else json.dumps(value).encode()
                for name, value in sample.items()
            }
            writer.write(encoded)
    return path


def members(path: Path, contents: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def test_texts_are_those_that_webdataset_reads(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", SAMPLES)
    theirs = [sample["txt"].decode() for sample in webdataset.WebDataset(str(path), shardshuffle=False)]
    assert [each["text"] for each in read_documents([str(path)])] == theirs == [each["txt"] for each in SAMPLES]


def test_fields_of_json_members_are_columns(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [{"__key__": "1", "json": {"body": "a text", "id": 3}}])
    assert list(read_documents([str(path)], layout=DocumentLayout("body"))) == [{"text": "a text"}]
    with pytest.raises(DataError, match=r"x.tar sample 0 .*'text'.*'body', 'id'"):
        list(read_documents([str(path)]))


def test_named_members_are_columns_of_tuples(tmp_path: Path) -> None:
    rows = [
        {"__key__": f"{n}", "query.txt": f"q{n}", "pos.json": [f"p{n}", f"r{n}"], "neg.txt": f"n{n}"} for n in range(3)
    ]
    rows[2].pop("neg.txt")
    found = list(read_tuples([str(write_tar(tmp_path / "x.tar", rows))]))
    assert found[0] == {"query": "q0", "positives": ["p0", "r0"], "negatives": ["n0"], "score": None}
    assert [each["negatives"] for each in found] == [["n0"], ["n1"], []]


def test_braces_name_several_tars(tmp_path: Path) -> None:
    for number in range(3):
        write_tar(tmp_path / f"s-{number:03d}.tar", SAMPLES[10 * number : 10 * number + 10])
    pattern = str(tmp_path / "s-{000..002}.tar")
    assert [each["text"] for each in read_documents([pattern])] == [each["txt"] for each in SAMPLES]
    assert len(plan_documents([pattern])) == 3
    with pytest.raises(DataError, match=r"s-003\.tar"):
        plan_documents([str(tmp_path / "s-{002..003}.tar")])
    with pytest.raises(DataError, match="cannot be expanded"):
        plan_documents([str(tmp_path / "s-{002.tar")])
    # A file of that very name is the file.
    odd = write_tar(tmp_path / "{a,b}.tar", SAMPLES[:2])
    assert len(list(read_documents([str(odd)]))) == 2


def test_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "x.tar", SAMPLES)
    address = f"file://{path}"
    assert [each["text"] for each in read_documents([address])] == [each["txt"] for each in SAMPLES]
    (unit,) = plan_documents([address])
    assert not unit.is_file and unit.source == address
    with pytest.raises(DataError, match=r"y\.tar does not exist"):
        list(read_documents([f"file://{tmp_path}/y.tar"]))
    with pytest.raises(DataError, match=r"x.jsonl is no .tar"):
        plan_documents([f"file://{tmp_path}/x.jsonl"])

    def full(self: object, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(DataError, match=r"temporary folder .*No space left .*TMPDIR"):
        patch.setattr(remote.Transfer, "write", full)
        list(read_documents([address]))
    monkeypatch.setattr(tars, "LARGEST_REMOTE_BYTES", 100)
    with pytest.raises(DataError, match="more than the 100 bytes"):
        list(read_documents([address]))


def test_one_look_suffices_for_all_remote_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"__key__": "1", "query.txt": "q", "positive.txt": "p"}]
    addresses = [f"file://{write_tar(tmp_path / f'{n}.tar', rows)}" for n in range(3)]
    fetched: list[str] = []
    original = tars.fetch_into
    monkeypatch.setattr(
        tars, "fetch_into", lambda file, address, **more: (fetched.append(address), original(file, address, **more))
    )
    assert len(plan_tuples(addresses)) == 3
    assert fetched == addresses[:1]


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ({"1.txt": b"\xff\xfe"}, "x.tar sample 0, 1.txt, "),
        ({"1.json": b"{"}, "x.tar sample 0, 1.json, "),
        ({"1.json": b"[1]"}, "x.tar sample 0, 1.json, "),
        ({"1.json": b"[" * 100_000}, "x.tar sample 0, 1.json, "),
        ({"1.jpg": b"picture"}, r"x.tar holds no .txt or .json member"),
        ({}, r"x.tar holds no .txt or .json member"),
        ({"1.txt": b"a", "1.TXT": b"b"}, r"x.tar holds 1.TXT twice"),
        ({"1.txt": b"", "2.txt": b"a"}, "x.tar sample 0: text "),
    ],
)
def test_defects_are_told(contents: dict[str, bytes], said: str, tmp_path: Path) -> None:
    path = members(tmp_path / "x.tar", contents)
    with pytest.raises(DataError, match=said):
        list(read_documents([str(path)]))


def test_a_tar_that_is_cut_or_none(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "whole.tar", SAMPLES).read_bytes()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole[:5000])
    with pytest.raises(DataError, match=r"cut.tar is damaged"):
        list(read_documents([str(cut)]))
    cut.write_bytes(b"no tar at all" * 100)
    with pytest.raises(DataError, match=r"cut.tar is damaged"):
        list(read_documents([str(cut)]))
    with pytest.raises(DataError, match="is a compressed tar"):
        (tmp_path / "x.tar.gz").write_bytes(b"")
        plan_documents([str(tmp_path / "x.tar.gz")])


def test_a_member_longer_than_a_line_may_be_is_not_read(tmp_path: Path) -> None:
    path = members(tmp_path / "x.tar", {"1.txt": b"a" * 2000})
    with pytest.raises(DataError, match=r"1.txt: a line or a document is longer"):
        list(read_documents([str(path)], source=SourceOptions(longest_line=1000)))


def test_half_a_surrogate_pair_is_replaced_as_in_lines(tmp_path: Path) -> None:
    half = b'{"text": "a \\ud83d z"}'
    (tmp_path / "x.jsonl").write_bytes(half + b"\n")
    of_lines = list(read_documents([str(tmp_path / "x.jsonl")]))
    assert list(read_documents([str(members(tmp_path / "x.tar", {"1.json": half}))])) == of_lines
    of_lines[0]["text"].encode()


def test_a_format_of_tsv_files_is_refused(tmp_path: Path) -> None:
    rows = [{"__key__": "1", "query.txt": "q", "positive.txt": "p"}]
    with pytest.raises(DataError, match=r"x.tar is not a .tsv file, which format nli needs"):
        plan_tuples([str(write_tar(tmp_path / "x.tar", rows))], TupleOptions("nli"))


def test_an_address_s_password_is_in_no_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(file: BinaryIO, address: str, *, limit: int) -> None:
        file.write(b"no tar at all" * 100)

    monkeypatch.setattr(tars, "fetch_into", cut)
    with pytest.raises(DataError, match="damaged") as caught:
        list(read_documents(["https://user:s3cret@host/x.tar"]))
    assert "s3cret" not in str(caught.value)


@pytest.mark.processes
def test_shards_of_tars_are_those_of_lines(tmp_path: Path, tiny_tokenizer_path: Path) -> None:
    """Through the command and its processes; a tar is an input split, as a file of lines of this length is."""
    write_tar(tmp_path / "x.tar", SAMPLES)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": each["txt"]}) + "\n" for each in SAMPLES))
    found = []
    for name in ("x.tar", "x.jsonl"):
        output = tmp_path / name.partition(".")[2]
        command = ["documents", str(tmp_path / name), "--output", str(output), "--tokenizer", str(tiny_tokenizer_path)]
        assert prepare.main([*command, "--processes", "2"]) == 0
        folder = ShardFolder(output)
        found.append([folder.document(number).tolist() for number in range(folder.num_samples)])
    assert found[0] == found[1] and len(found[0]) == 30
