"""Reading files and records: whatever the system or a library raises becomes one sentence with the file's name."""

from __future__ import annotations

import errno
import gzip
import os
import zlib
from typing import Literal

import pyarrow.parquet as parquet
import pydantic
import pytest
from pydantic_core import PydanticCustomError
from safetensors import safe_open

from data.ground.errors import DataError, OtherFormat
from data.ground.files import first_line, open_regular, read_bytes, read_text, reading, refused_by, write_atomically
from data.ground.records import Record, parse_record, read_json, read_record


class Shape(Record):
    format: Literal[1, 2]
    rows: int
    names: tuple[str, ...] = ()


def test_a_sound_record_is_read():
    found = parse_record(b'{"format": 2, "rows": 3, "names": ["a"], "later": 1}', Shape, where="record")
    assert found == Shape(format=2, rows=3, names=("a",))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"format": 1, "rows": "3"}', "rows = '3': input should be a valid integer"),
        (b'{"format": 1, "rows": 3.0}', "rows = 3.0"),
        (b'{"format": 1, "rows": true}', "rows = True"),
        (b'{"format": 1, "rows": 1e999}', "rows = inf"),
        (b'{"format": 1}', "it has no rows"),
        (b'{"rows": 1}', "it has no format"),
        (b'{"format": 1, "rows": 1, "names": ["a", 2]}', "names[1] = 2"),
        (b"[1]", "it holds no JSON object"),
        (b"{", "is no JSON"),
        (b'{"a": "\xff"}', "is not UTF-8"),
        (b'{"a":' * 100_000, "is nested too deep"),
        (b'{"format": 1, "rows": ' + b"1" * 5000 + b"}", "is no JSON"),
    ],
)
def test_what_does_not_fit_is_named(content, said):
    with pytest.raises(DataError) as error:
        parse_record(content, Shape, where="record a.json", hint="make it again")
    sentence = str(error.value)
    assert sentence.startswith("record a.json") and said in sentence and sentence.endswith("; make it again")
    assert not isinstance(error.value, OtherFormat)


def test_another_format_is_told_apart_from_damage():
    with pytest.raises(OtherFormat, match="is of format 3, and this version reads format 1 and 2; use the version"):
        parse_record(b'{"format": 3, "rows": "anything"}', Shape, where="record a.json")


@pytest.mark.parametrize("content", [None, b"\xff", b"{"])
def test_files_that_cannot_be_read(tmp_path, content):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    for read in (read_json, lambda path: read_record(path, Shape)):
        with pytest.raises(DataError, match=r"a\.json"):
            read(path)
    with pytest.raises(DataError, match=r"a\.json"):
        read_text(path / "below")


def _raise_decoding() -> None:
    b"\xff".decode()


def _raise_deep() -> None:
    raise RecursionError


def _raise_gzip() -> None:
    gzip.decompress(gzip.compress(b"text" * 100)[:-9])


def _raise_zlib() -> None:
    zlib.decompress(b"no stream")


def _raise_io() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("fault", [_raise_decoding, _raise_deep, _raise_gzip, _raise_zlib, _raise_io])
def test_what_libraries_raise_names_the_file(fault):
    with pytest.raises(DataError, match=r"^table a\.gz .*; "), reading("a.gz", what="table"):
        fault()


def test_damaged_parquet_and_safetensors_name_the_file(tmp_path):
    path = tmp_path / "damaged"
    path.write_bytes(b"PAR1" + b"\0" * 40 + b"PAR1")
    with pytest.raises(DataError, match="damaged"), reading(path):
        parquet.ParquetFile(path)
    with pytest.raises(DataError, match="damaged"), reading(path):
        safe_open(path, "np")


@pytest.mark.parametrize("thing", ["pipe", "folder", "device"])
def test_only_regular_files_are_read(tmp_path, thing):
    """A pipe without a writer would be waited for until the end of days."""
    path = tmp_path / "a.json"
    if thing == "pipe":
        os.mkfifo(path)
    elif thing == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    for read in (read_bytes, read_text, read_json):
        with pytest.raises(DataError, match=r"a\.json cannot be read \(it is no regular file\)"):
            read(path)
    with pytest.raises(OSError, match=r"a\.json"):
        open_regular(path)


def test_a_fault_of_ours_is_no_damage():
    """Negative control."""
    with pytest.raises(KeyError), reading("a"):
        {}["absent"]
    refused = pytest.raises(DataError, match="folder m is refused by transformers")
    with refused, refused_by("transformers", "folder m", hint="use another"):
        {}["absent"]


def test_a_failed_write_names_the_file_and_leaves_nothing(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "a").mkdir()  # a file cannot take a folder's place
    with pytest.raises(OSError) as error:
        write_atomically(folder / "a", "text")
    assert error.value.filename == str(folder / "a")
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_a_problem_of_the_whole_record_is_told_without_its_content() -> None:
    class Pair(Record):
        low: int
        high: int

        @pydantic.model_validator(mode="after")
        def _check(self) -> Pair:
            if self.low > self.high:
                raise PydanticCustomError("order", "low is above high")
            return self

    with pytest.raises(DataError, match=r"^record is damaged \(low is above high\); restore it"):
        parse_record(b'{"low": 2, "high": 1}', Pair, where="record")


def test_what_pydantic_says_is_its_first_problem() -> None:
    """Its own first line is a count."""

    class Inner(Record):
        size: int

    with pytest.raises(pydantic.ValidationError) as raised:
        Inner.model_validate({"size": "three"})
    assert first_line(raised.value) == "size = 'three': Input should be a valid integer"
