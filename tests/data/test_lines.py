"""Lines of compressed files: whole, or refused; and never longer than was allowed."""

from __future__ import annotations

import gzip
import random
import struct
from pathlib import Path

import pytest
import zstandard

from data.ground.errors import DataError
from data.lines import ByteCounter, lines

CONTENT = "".join(f"line {number} {random.Random(number).random()}\n" for number in range(3000)).encode()
SKIPPABLE = struct.pack("<II", 0x184D2A50, 5) + b"hello"


def read(path: Path, **options: int) -> bytes:
    return b"".join(line for _, line in lines(path, **options))


def frames(*parts: bytes, **options: bool) -> bytes:
    return b"".join(zstandard.ZstdCompressor(**options).compress(part) for part in parts)


@pytest.mark.parametrize(
    "content",
    [
        frames(CONTENT),
        frames(CONTENT[:1234], b"", CONTENT[1234:], write_checksum=True),
        SKIPPABLE + frames(CONTENT[:99]) + SKIPPABLE + frames(CONTENT[99:]) + SKIPPABLE,
        zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
        ).compress(CONTENT),
        gzip.compress(CONTENT),
        gzip.compress(CONTENT[:99]) + gzip.compress(CONTENT[99:]),
    ],
    ids=["one", "several", "skippable", "long window", "gz", "two gz"],
)
def test_whole_files_are_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ("a.txt.gz" if content.startswith(b"\x1f") else "A.TXT.ZST")
    path.write_bytes(content)
    counter = ByteCounter()
    found = list(lines(path, counter=counter))
    assert b"".join(line for _, line in found) == CONTENT and found[-1][0] == 3000
    assert counter.bytes_read == len(content)
    assert read(path, start=2) == b"".join(CONTENT.splitlines(keepends=True)[2:])


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("kept", [0.01, 0.5, 0.99, -1, -3])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, flushed: bool, kept: float) -> None:
    """Where it was flushed on the way, whole lines come before the cut, and nothing in them is wrong."""
    compressor = zstandard.ZstdCompressor(write_checksum=False).compressobj()
    blocks = []
    for line in CONTENT.splitlines(keepends=True):
        blocks.append(compressor.compress(line))
        if flushed:
            blocks.append(compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    whole = b"".join([*blocks, compressor.flush()])
    path = tmp_path / "a.txt.zst"
    path.write_bytes(whole)
    assert read(path) == CONTENT
    path.write_bytes(whole[: int(len(whole) * kept) if kept > 0 else int(kept)])
    with pytest.raises(DataError, match=r"a\.txt\.zst is damaged \(it ends within a frame.*fetch it again"):
        read(path)


def test_every_cut_of_a_small_file_is_refused(tmp_path: Path) -> None:
    """But that to nothing: an empty file has no frame, and is refused as empty where it is planned."""
    path = tmp_path / "a.txt.zst"
    whole = frames(b"one\n", b"two\n", write_checksum=True)
    first = len(frames(b"one\n", write_checksum=True))
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        if length == first:
            assert read(path) == b"one\n", "a file of fewer frames is a whole file"
            continue
        with pytest.raises(DataError, match="is damaged"):
            read(path)


@pytest.mark.parametrize("content", [b"no frame\n", frames(CONTENT) + b"behind\n"])
def test_what_is_no_frame_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        read(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst"])
def test_a_line_may_be_too_long(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = b"short\n" + b"x" * 1000 + b"\n"
    pack = {"t": bytes, "z": gzip.compress, "s": frames}[name[-1] if name[-2:] != "st" else "s"]
    path.write_bytes(pack(content))
    assert read(path, longest=1001) == content
    found = lines(path, longest=1000)
    assert next(found)[1] == b"short\n"
    with pytest.raises(DataError, match=rf"{name}.* is longer than .* MiB; cut it, or allow more with --longest-line"):
        next(found)


def test_a_bomb_is_never_held(tmp_path: Path) -> None:
    """A line of 1 GiB in some hundred kilobytes: refused after the first bytes beyond what is allowed."""
    compressor = zstandard.ZstdCompressor().compressobj()
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"".join(compressor.compress(bytes(2**24)) for _ in range(64)) + compressor.flush())
    counter = ByteCounter()
    with pytest.raises(DataError, match="longer than 1 MiB"):
        next(lines(path, counter=counter, longest=2**20))


def test_lines_of_byte_ranges_are_each_in_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * (2**20 + 7) + b"\nbb\n\nccc")
    size = path.stat().st_size
    for cut in [1, 5, 2**20, 2**20 + 6, 2**20 + 7, 2**20 + 8, 2**20 + 9, size - 1]:
        pieces = [line for low, high in ((0, cut), (cut, size)) for _, line in lines(path, low, high)]
        assert b"".join(pieces) == path.read_bytes()
