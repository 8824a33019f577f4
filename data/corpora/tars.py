"""Rows of WebDataset tars, local or remote: the members with one key make a sample.

    000017.txt           its column "text"
    000017.json          an object: its fields are columns
    000017.query.txt     its column "query"; other names work alike
    000017.pos.json      its column "pos", of any JSON value

Members with other endings, such as pictures, are skipped. The tar is streamed from start to end, never held in memory.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from data.corpora.splits import InputSplit, place
from data.ground.errors import DataError
from data.ground.files import first_line, open_regular, reading
from data.lines import ByteCounter, decoded, json_value, too_long
from data.remote import fetch_into, is_remote

# The limit for a remote tar, which is downloaded to this machine's disk before it is read.
LARGEST_REMOTE_BYTES = 2**38
_ENDINGS = (".txt", ".json")


def tar_rows(input_split: InputSplit, counter: ByteCounter) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, columns) of each sample of a tar."""
    # webdataset imports torch, which takes seconds and which other inputs do not need.
    from webdataset.tariterators import base_plus_ext, group_by_keys

    with _opened(input_split) as file, reading(input_split.source, what="tar", hint="fetch it again"):
        try:
            samples = group_by_keys(_members(input_split, file, counter), keys=base_plus_ext)
            number = -1
            for number, sample in enumerate(samples):
                yield number, _row(input_split, number, sample)
            if number < 0:
                raise DataError(f"tar {input_split.source} holds no .txt or .json member; leave it out")
        except tarfile.TarError as error:
            raise DataError(f"tar {input_split.source} is damaged ({first_line(error)}); fetch it again") from error
        except ValueError as error:
            if isinstance(error, DataError) or "duplicate file name" not in str(error):
                raise
            name = str(error.args[0]).partition(":")[0]
            raise DataError(
                f"tar {input_split.source} holds {name} twice in one sample; drop one of the two"
            ) from error


def _members(input_split: InputSplit, file: BinaryIO, counter: ByteCounter) -> Iterator[dict[str, Any]]:
    """The text members, in the form that WebDataset's group_by_keys takes."""
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            counter.bytes_read = member.offset_data + member.size
            if member.isfile() and member.name.lower().endswith(_ENDINGS):
                if member.size > input_split.longest_line:
                    raise DataError(too_long(f"{input_split.source}, {member.name}", input_split.longest_line))
                content = tar.extractfile(member)
                assert content is not None
                yield {"fname": member.name, "data": content.read(), "__url__": input_split.path}


def _row(input_split: InputSplit, number: int, sample: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for ending, content in sample.items():
        if ending.startswith("__"):
            continue
        column, _, kind = ending.rpartition(".")
        where = f"{place(input_split, number)}, {sample['__key__']}.{ending},"
        text = decoded(content, where)
        if kind == "txt":
            row[column or "text"] = text
            continue
        value = json_value(text, where, hint="write one value into it")
        if column:
            row[column] = value
        elif isinstance(value, dict):
            row |= value
        else:
            raise DataError(f"{where} holds a {type(value).__name__}, not an object with named fields")
    return row


@contextmanager
def _opened(input_split: InputSplit) -> Iterator[BinaryIO]:
    if not is_remote(input_split.path):
        with reading(input_split.path), open_regular(Path(input_split.path)) as file:
            yield file
        return
    with tempfile.TemporaryFile(prefix="barista-") as file:
        try:
            fetch_into(file, input_split.path, limit=LARGEST_REMOTE_BYTES)
        except FileNotFoundError:
            raise DataError(f"{input_split.source} does not exist; check the address") from None
        except OSError as error:
            raise DataError(
                f"{input_split.source} cannot be kept in the temporary folder {tempfile.gettempdir()} "
                f"({error.strerror}); free space there, or set TMPDIR to a folder with more"
            ) from error
        file.seek(0)
        yield file  # type: ignore[misc]
