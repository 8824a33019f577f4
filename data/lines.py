"""Lines of text files, plain and compressed; decoding of UTF-8 and JSON with errors that name the place.

What is decided here:
- A compressed file is read to its end, which must be the end of a frame: zstandard's own reader does not notice that
  a file was cut off.
- Several frames may follow each other, and frames of `zstd --long` (windows of up to 2 GiB) are read.
- A line, or a document of several lines, has at most LONGEST_LINE bytes unless the caller allows more: three megabytes
  of gzip may be one line of three gigabytes, which no process should try to hold.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data.ground.errors import DataError
from data.ground.files import first_line, open_regular, reading

COMPRESSIONS = (".gz", ".zst")
LONGEST_LINE = 2**30
LARGEST_WINDOW = 2**31
# Four compressed bytes expand to at most 128 KiB, so this many never expand to more than 128 MiB at once.
_BYTES_AT_A_TIME = 4096


@dataclass
class ByteCounter:
    """How many of the bytes of an input split (its `size`) a reader has read."""

    bytes_read: int = 0


def is_compressed(path: Path | str) -> bool:
    return Path(path).suffix.lower() in COMPRESSIONS


def lines(
    path: Path,
    start: int = 0,
    stop: int | None = None,
    *,
    counter: ByteCounter | None = None,
    longest: int = LONGEST_LINE,
) -> Iterator[tuple[int, bytes]]:
    """(position, line) of the lines that begin at byte offsets in [start, stop).

    The positions of a compressed file are line numbers from 1; `start` is then the number of lines to skip.
    """
    counter = counter or ByteCounter()
    with reading(path, hint="fetch it again"), open_regular(path) as file:
        if is_compressed(path):
            stream = _decompressed(path, file)
            number = 0
            while line := stream.readline(longest + 1):
                number += 1
                _check_length(len(line), longest, f"{path}:{number}")
                counter.bytes_read = file.tell()
                if number > start:
                    yield number, line
            return
        position = start
        if start:
            # A line that begins before `start` belongs to the previous input split.
            file.seek(start - 1)
            position -= 1
            while skipped := file.readline(2**20):
                position += len(skipped)
                if skipped.endswith(b"\n"):
                    break
        while stop is None or position < stop:
            line = file.readline(longest + 1)
            if not line:
                break
            _check_length(len(line), longest, f"{path}, byte {position}")
            counter.bytes_read = position + len(line) - start
            yield position, line
            position += len(line)


def _check_length(length: int, longest: int, where: str) -> None:
    if length > longest:
        raise DataError(too_long(where, longest))


def too_long(where: str, longest: int) -> str:
    """The error message for a line or a document of more than `longest` bytes."""
    return (
        f"{where}: a line or a document is longer than {longest / 2**20:g} MiB; cut it, or allow more with "
        "--longest-line"
    )


def decoded(content: bytes, where: str | Callable[[], str]) -> str:
    """Decode a user's bytes, which must be UTF-8. `where` names their place in errors, or is a function that does."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{_told(where)} is not UTF-8; convert the file") from error


def json_value(text: str, where: str | Callable[[], str], *, hint: str) -> Any:
    """Parse a user's JSON text. `where` as in `decoded`; `hint` says what the text should be."""
    try:
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            # An unpaired surrogate is not a character: web crawls contain such escapes, and tokenizers refuse them.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        what = first_line(error) if isinstance(error, ValueError) else "nested too deep"
        raise DataError(f"{_told(where)} is no JSON ({what}); {hint}") from error
    return value


def _told(where: str | Callable[[], str]) -> str:
    return where() if callable(where) else where


def _decompressed(path: Path, file: BinaryIO) -> io.BufferedIOBase:
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=file)
    return io.BufferedReader(_Frames(file), 2**20)


class _Frames(io.RawIOBase):
    """The decompressed bytes of a file's zstandard frames; the last frame must be complete."""

    def __init__(self, file: BinaryIO) -> None:
        import zstandard

        self._file = file
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            if not self._compressed and not (compressed := self._file.read(_BYTES_AT_A_TIME)):
                if self._frame is not None:
                    raise EOFError("it ends within a frame: a part of it is missing")
                return 0
            self._compressed = self._compressed or compressed
            frame = self._frame or self._decompressor.decompressobj()
            self._ready = memoryview(frame.decompress(self._compressed))
            self._compressed = frame.unused_data if frame.eof else b""
            self._frame = None if frame.eof else frame
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
