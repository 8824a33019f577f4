"""Output folders that appear complete or not at all; their path is checked before anything is computed.

A folder is written beside its final place, as .NAME.XXXXXXXX.partial, and then renamed. A killed command leaves such a
folder unlocked, and the next command with the same output removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from data.ground.errors import CommandEnd, ConfigError
from data.ground.files import first_line

_PARTIAL, _OLD = ".partial", ".old"
_ROOM = 20  # characters that the names of unfinished folders add to the output's name


def check_file(path: Path | None, option: str) -> None:
    """Refuse a path at which this user cannot write a file; None means that no file is to be written."""
    if path is None:
        return
    with _looking_at(path, option):
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; name a file")
        dangling = path.is_symlink() and not path.exists()
        # Writing to a dangling link creates the file that it names.
        target = path.parent / path.readlink() if dangling else path
    check_place(target, option, link=True)


def check_place(path: Path, option: str = "--output", *, link: bool = False) -> None:
    """Refuse a path at which this user cannot create anything, and links unless `link`; creates nothing itself."""
    with _looking_at(path, option):
        if path.is_symlink() and not (link and path.exists()):
            raise ConfigError(f"{option} {path} is a link; name the place itself")
        above = next(each for each in (path, *path.absolute().parents) if each.exists() or each.is_symlink())
        if above != path and not above.is_dir():
            raise ConfigError(f"{option} {path} is below {above}, which is no folder; name another place")
        if not os.access(above, os.W_OK | os.X_OK if above.is_dir() else os.W_OK):
            raise ConfigError(
                f"{option} {path} cannot be written: this user may not write in {above}; name another place"
            )
        if len(os.fsencode(path.name)) > os.pathconf(above, "PC_NAME_MAX") - _ROOM:
            raise ConfigError(f"{option} {path.name[:20]}… is too long for a name; choose a shorter one")


@contextlib.contextmanager
def _looking_at(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}…"
        raise ConfigError(f"{option} {shown} cannot be used ({error.strerror}); name another place") from error


@contextlib.contextmanager
def written_whole(output: Path) -> Iterator[Path]:
    """An empty folder to write into; at the end it replaces `output`, or it is removed if an error occurs.

    An existing `output` is removed: the caller has checked that this is allowed.

    Raises:
        ConfigError: another command is writing this output, or the disk refuses.

    """
    output.parent.mkdir(parents=True, exist_ok=True)
    _remove_left(output)
    partial = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=_PARTIAL, dir=output.parent))
    try:
        with _held(partial), writing(output):
            yield partial
            partial.chmod(0o755)  # mkdtemp's folders are private
            _put_in_place(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def writing(output: Path) -> Iterator[None]:
    """Turn errors of the operating system, also those reported by safetensors, into one sentence about `output`."""
    try:
        yield
    except CommandEnd:
        raise
    except Exception as error:
        if (reason := _refusal(error)) is None:
            raise
        raise ConfigError(
            f"{output} cannot be written ({reason}); free some space there, or name another place"
        ) from error


def _refusal(error: Exception) -> str | None:
    """The message of an operating system's error, also of one that safetensors wrapped; None for other errors."""
    if isinstance(error, OSError):
        return error.strerror if error.errno is not None else None
    if type(error).__name__ == "SafetensorError" and "os error" in str(error):
        return first_line(error)
    return None


def _put_in_place(partial: Path, output: Path) -> None:
    if output.exists() and any(output.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=_OLD, dir=output.parent))
        output.replace(old)
        partial.replace(output)
        shutil.rmtree(old)
    else:
        partial.replace(output)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock the folder if its file system can; the kernel releases the lock when the process ends."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove_left(output: Path) -> None:
    """Remove the folders of commands that were killed while they wrote this output."""
    name = re.compile(rf"\.{re.escape(output.name)}\.[a-z0-9_]{{8}}({_PARTIAL}|{_OLD})")
    left = [path for path in output.parent.iterdir() if name.fullmatch(path.name) and not path.is_symlink()]
    for path in left:
        if path.suffix == _PARTIAL and _is_held(path):
            raise ConfigError(f"{output} is being written by another command; wait for it to end")
    for path in left:
        shutil.rmtree(path, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(handle)
    return False
