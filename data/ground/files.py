"""Reading and writing files, and the messages for errors of the operating system and of libraries.

Written files are complete or absent, also after a power cut. An error while a file is read becomes one sentence with
the file's name: use `reading` around code that opens and parses a file, and `refused_by` around a call of a library
that takes a file or a folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from data.ground.errors import CommandEnd, DataError

# Exceptions of these libraries, raised while a file is read, are about that file.
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
    """One sentence about an OSError; None if it names no file and is not about a full disk or too many open files."""
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
        return None
    hint = _HINTS.get(error.errno or 0)
    if hint is None:
        return None
    name = "a disk" if error.filename is None else os.fsdecode(error.filename)
    return f"{name}: {error.strerror}; {hint}"


@contextlib.contextmanager
def reading(path: Path | str, *, what: str = "file", hint: str = _RESTORE) -> Iterator[None]:
    """Turn errors while `path` is read into a DataError that names it.

    Args:
        what: the kind of file, printed before its name: "manifest".
        hint: what to do about a damaged file; missing files and missing permissions have hints of their own.

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
        # Libraries raise OSError for damaged content, too, then without an errno.
        raise DataError(f"{what} {path} cannot be read ({error.strerror or first_line(error)}); {hint}") from error
    except Exception as error:
        if not isinstance(error, EOFError) and type(error).__module__.split(".")[0] not in _FILE_LIBRARIES:
            raise
        raise DataError(f"{what} {path} is damaged ({first_line(error)}); {hint}") from error


@contextlib.contextmanager
def refused_by(library: str, thing: str, *, hint: str, kind: type[DataError] | type = DataError) -> Iterator[None]:
    """Turn every exception of a library call into one sentence that names the file or folder given to it.

    For calls such as `from_pretrained`, all of whose exceptions are about the folder that they were given.

    Args:
        library: the library's name: "transformers".
        thing: the file or folder, as the beginning of the sentence: "model folder runs/a/model".
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
    """The first non-empty line of a message, cut to `limit` characters; for an exception without one, its class name.

    The first line of pydantic's exceptions only counts the problems, so the first problem is returned instead.
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
    """Open a regular file for reading. Anything else is refused: reading a pipe or a device could take forever.

    Raises:
        OSError: with the file's name, also if it is no regular file.

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
    """The sha256 of a file, in hexadecimal digits."""
    with reading(path), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def looks_of(status: os.stat_result) -> str:
    """A file's size, times and inode. If these are unchanged, so are its bytes, unless somebody set the times."""
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8. File names that are not UTF-8 and unpaired surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def file_name(text: str) -> str:
    """A file name made from the text: letters, digits and -_.+ stay, and all other characters become underscores."""
    return "".join(c if c.isalnum() or c in "-_.+" else "_" for c in text)


def one_file_name(names: Iterable[str]) -> tuple[str, str] | None:
    """The first two different names from which `file_name` makes the same file name; None if there are no such two."""
    by_file: dict[str, str] = {}
    for name in names:
        if (other := by_file.setdefault(file_name(name), name)) != name:
            return other, name
    return None


def read_bytes(path: Path | str, *, what: str = "file", hint: str = _RESTORE) -> bytes:
    """The content of a file."""
    with reading(path, what=what, hint=hint), open_regular(path) as file:
        return file.read()


def read_text(path: Path, *, what: str = "file", hint: str = _RESTORE) -> str:
    """Read a text file. Its content must be UTF-8."""
    with reading(path, what=what, hint=hint):
        return read_bytes(path, what=what, hint=hint).decode("utf-8")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file's content: whenever the machine stops, the file holds either the old content or the new.

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
        # The temporary file still exists only after an error or an interrupt.
        with contextlib.suppress(OSError):
            temporary.unlink()
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file's bytes, or the renames within a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
