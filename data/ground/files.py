"""Reading and writing files, and what is said when the system or a library refuses.

Written files are whole or absent, also after a power cut. What goes wrong while a file is read becomes one sentence
with the file's name: `reading` around code that opens and parses a file, `refused_by` around a call of a library that
was given a file or a folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from data.ground.errors import CommandEnd, DataError

# Their exceptions, raised while a file is read, are about that file.
_FILE_LIBRARIES = (
    "gzip",
    "json",
    "lzma",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "zipfile",
    "zlib",
    "zstandard",
)
_RESTORE = "restore it or fetch it again"
_HINTS = {
    errno.EACCES: "give this user leave to use it, or name another place",
    errno.EPERM: "give this user leave to use it, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENOSPC: "free some space there, or name another place",
    errno.EDQUOT: "free some space there, or name another place",
    errno.ENOENT: "check the path and the folder you run in",
    errno.ENOTDIR: "a part of the path is a file; name another place",
    errno.EISDIR: "name a file",
    errno.EEXIST: "something else stands there; name another place",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "fix the links",
    errno.ENOTEMPTY: "name another place",
    errno.EINVAL: "check the path",
    errno.EIO: "the disk or the network failed; try again",
    errno.ESTALE: "the disk or the network failed; try again",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "allow more open files",
}


def describe_os_error(error: OSError) -> str | None:
    """One sentence about what the system refused, or None where it names no file and the disk is not full."""
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
        return None
    hint = _HINTS.get(error.errno or 0)
    if hint is None:
        return None
    name = "a disk" if error.filename is None else os.fsdecode(error.filename)
    return f"{name}: {error.strerror}; {hint}"


@contextlib.contextmanager
def reading(path: Path | str, *, what: str = "file", hint: str = _RESTORE) -> Iterator[None]:
    """Turn what goes wrong while `path` is read into a DataError that names it.

    Args:
        what: what the file is, before its name: "manifest".
        hint: what to do about a damaged file; a file that may not be read has a hint of its own.

    """
    try:
        yield
    except CommandEnd:
        raise
    except UnicodeDecodeError as error:
        raise DataError(f"{what} {path} is not UTF-8 (byte {error.start}); convert the file") from error
    except (FileNotFoundError, PermissionError) as error:
        raise DataError(f"{what} {path} cannot be read ({error.strerror}); {_HINTS[error.errno or 0]}") from error
    except RecursionError as error:
        raise DataError(f"{what} {path} is damaged (nested too deep); {hint}") from error
    except MemoryError as error:
        raise DataError(f"{what} {path} does not fit into memory; {hint}") from error
    except OSError as error:
        # Libraries raise OSError for damaged content, too, without a number of the system's.
        raise DataError(f"{what} {path} cannot be read ({error.strerror or first_line(error)}); {hint}") from error
    except Exception as error:
        if not isinstance(error, EOFError) and type(error).__module__.split(".")[0] not in _FILE_LIBRARIES:
            raise
        raise DataError(f"{what} {path} is damaged ({first_line(error)}); {hint}") from error


@contextlib.contextmanager
def refused_by(library: str, thing: str, *, hint: str, kind: type[DataError] | type = DataError) -> Iterator[None]:
    """Turn whatever a library raises about what it was given into a sentence that names the thing.

    For calls such as `from_pretrained`, whose every exception is about the folder they were given.

    Args:
        library: who refuses: "transformers".
        thing: what was given, as the sentence begins: "model folder runs/a/model".
        hint: what to do.
        kind: the class of the error.

    """
    try:
        yield
    except CommandEnd:
        raise
    except Exception as error:
        raise kind(f"{thing} is refused by {library} ({type(error).__name__}: {first_line(error)}); {hint}") from error


def first_line(error: object, *, limit: int = 300) -> str:
    """The first line of a text that is not empty, cut to `limit` characters; of an exception without any, its class.

    Of pydantic's exceptions, whose first line says only how many problems there are, the first problem.
    """
    problems = getattr(error, "errors", None)
    if type(error).__module__.startswith("pydantic") and callable(problems):
        first = problems()[0]
        return f"{'.'.join(map(str, first['loc']))} = {str(first['input'])[:80]!r}: {first['msg']}"[:limit]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__ if isinstance(error, BaseException) else ""
    return lines[0] if len(lines[0]) <= limit else f"{lines[0][:limit]} …"


def open_regular(path: Path | str) -> BufferedReader:
    """A regular file, open for reading. A pipe or a device in its place would be read for ever.

    Raises:
        OSError: with the file's name, also where something else stands there.

    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def sha256_of(path: Path | str) -> str:
    """The sha256 of a whole file, in hexadecimal digits."""
    with reading(path), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def looks_of(status: os.stat_result) -> str:
    """A file's size, times and inode: as long as they are the same, so are its bytes, unless somebody set the times."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8; names that are not UTF-8, and halves of surrogate pairs, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_bytes(path: Path | str, *, what: str = "file", hint: str = _RESTORE) -> bytes:
    """A whole file."""
    with reading(path, what=what, hint=hint), open_regular(path) as file:
        return file.read()


def read_text(path: Path, *, what: str = "file", hint: str = _RESTORE) -> str:
    """A whole text file, which must be UTF-8."""
    with reading(path, what=what, hint=hint):
        return read_bytes(path, what=what, hint=hint).decode("utf-8")


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file holds either what it held or all of `content`, whenever the machine stops.

    Raises:
        OSError: with the file's name; nothing is left behind.

    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        # It is there no longer, unless something went wrong or the process is to end.
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's bytes, or the renames within a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
