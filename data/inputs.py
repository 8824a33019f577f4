"""The files that a command's inputs name: paths, globs, folders, and names of data sets of the Hugging Face hub.

What is decided here:
- Every file is read once. A file that is named twice, by whatever paths, is refused with both of its names.
- Nothing is left out silently. Dangling links and unreadable folders are refused; in a folder, files with other endings
  are counted in a warning.
- Links to folders are followed, each folder once, so that a loop of links ends.
- Folders that `data.prepare` wrote are left out of a folder that contains them, so its output may lie below its inputs.
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import logging
import os
import re
import stat
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from data.ground.errors import DataError
from data.ground.files import first_line, is_unicode
from data.ground.secrets import without_secrets
from data.lines import COMPRESSIONS
from data.remote import is_remote

logger = logging.getLogger(__name__)

FileKind = Literal["jsonl", "tsv", "txt", "parquet", "tar", "hub", "ids"]
SUFFIXES: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".tsv": "tsv",
    ".txt": "txt",
    ".parquet": "parquet",
    ".tar": "tar",
}
# The file and the folder that data.prepare creates first in its output folder.
PREPARATION, SCRATCH = "preparation.json", ".plan"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def find_inputs(names: Sequence[str], *, output: Path | None = None) -> list[Path | str]:
    """The files of paths, globs and folders, in a fixed order. Addresses and names of hub data sets stay strings.

    Files in `output` are left out of folders and globs.
    """
    found: list[Path | str] = []
    named: dict[object, Path | str] = {}
    for pattern in names:
        for one in (one for name in expanded(pattern) for one in _find(name, output)):
            key = one if isinstance(one, str) else _identity(one)
            if key in named:
                other = "" if str(named[key]) == str(one) else f", also as {named[key]}"
                raise DataError(f"{one} is given twice{other}; name each file once")
            named[key] = one
            found.append(one)
    return found


def kind_of(path: Path | str) -> FileKind:
    """The kind of a result of `find_inputs`: a path's ending decides; an address is a tar, another string the hub's."""
    if isinstance(path, str):
        return "tar" if is_remote(path) else "hub"
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path} is of an unknown format; give {_known_suffixes()}")
    if kind == "parquet" and path.suffix.lower() in COMPRESSIONS:
        raise DataError(f"{path} is a compressed parquet file; decompress it, because parquet needs random access")
    if kind == "tar" and path.suffix.lower() in COMPRESSIONS:
        raise DataError(f"{path} is a compressed tar; decompress it")
    return kind


def check_name(name: str, what: str) -> None:
    """Refuse a name that cannot be recorded in the output folder's JSON files."""
    if "\0" in name:
        raise DataError(f"the name of {what} {name!r} holds a NUL; choose another")
    if not is_unicode(name):
        raise DataError(f"the name of {what} {name!a} is not UTF-8; rename it")


def expanded(name: str) -> list[str]:
    """The names that a pattern with braces stands for, such as WebDataset's shard-{000..127}.tar."""
    check_name(name, "input")
    if "{" not in name or _status(Path(name).expanduser()) is not None:
        return [name]
    from braceexpand import braceexpand

    try:
        return list(braceexpand(name))
    except ValueError as error:
        raise DataError(f"the pattern {name} cannot be expanded ({first_line(error)}); fix its braces") from error


def _find(name: str, output: Path | None) -> list[Path | str]:
    if not name:
        raise DataError("an input is an empty text; name a file, a folder or a data set")
    if is_remote(name):
        if _kind(Path(name.partition("?")[0])) != "tar":
            raise DataError(f"{without_secrets(name)} is no .tar, the only remote format that is read; fetch it")
        return [name]
    path = Path(name).expanduser()
    status = _status(path)
    if status is None:
        if path.is_symlink():
            raise _broken(path)
        if glob.has_magic(name):
            return [*_of_glob(name, path, output)]
        if _HUB_NAME.fullmatch(name) and _kind(path) is None:
            return [name]
        raise DataError(f"file {name} does not exist; check the path and the folder you run in")
    if stat.S_ISDIR(status.st_mode):
        return [*_of_folder(name, path, output)]
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{name} is no regular file; write its content into a file, and name that file")
    return [path]


def _of_folder(name: str, top: Path, output: Path | None) -> list[Path]:
    if any((top / made).exists() for made in (PREPARATION, SCRATCH)):
        raise DataError(f"folder {name} was written by data.prepare; name the files in it that are to be read")
    files: list[Path] = []
    left_out: Counter[str] = Counter()
    for folder, entries in _folders(top, output):
        if _was_prepared(entries):
            left_out["folders written by data.prepare"] += 1
            continue
        for entry in entries:
            path = folder / entry.name
            if _is_folder(entry):
                continue
            if entry.name.startswith("."):
                left_out["hidden files"] += _kind(path) is not None
            elif entry.is_symlink() and not path.exists():
                raise _broken(path)
            elif not entry.is_file():
                left_out["files that are not regular"] += 1
            elif _kind(path) is None:
                left_out[path.suffix or "files without an ending"] += 1
            else:
                files.append(path)
    if not files:
        raise DataError(f"folder {name} holds no {_known_suffixes()} files")
    _say_left_out(name, left_out)
    return _checked(sorted(files))


def _of_glob(name: str, path: Path, output: Path | None) -> list[Path]:
    parts = path.parts[1:] if path.is_absolute() else path.parts
    matches = dict.fromkeys(_matches(Path(path.anchor) if path.is_absolute() else Path(), parts, output))
    files: list[Path] = []
    left_out: Counter[str] = Counter()
    for match in sorted(matches, key=str):
        status = _status(match)
        if status is None:
            raise _broken(match)
        if stat.S_ISDIR(status.st_mode):
            left_out["folders"] += 1
        elif not stat.S_ISREG(status.st_mode):
            raise DataError(f"{match} is no regular file; write its content into a file, and name that file")
        elif not _is_within(match, output):
            files.append(match)
    if not files:
        raise DataError(f"no file matches {name}; check the pattern and the folder you run in")
    if "**" not in parts:
        _say_left_out(name, left_out)
    return _checked(files)


def _matches(folder: Path, parts: Sequence[str], output: Path | None) -> Iterator[Path]:
    """The paths that a glob's parts match below a folder, as `glob.glob` does, but `**` survives loops of links."""
    if not parts:
        yield folder
        return
    first, *rest = parts
    if first == "**":
        for below, entries in _folders(folder, output, as_glob=True):
            if rest:
                yield from _matches(below, rest, output)
            else:
                yield from (below / entry.name for entry in entries if not entry.name.startswith("."))
    elif not glob.has_magic(first):
        if os.path.lexists(folder / first):
            yield from _matches(folder / first, rest, output)
    elif (status := _status(folder)) and stat.S_ISDIR(status.st_mode):
        for entry in _entries(folder):
            if fnmatch.fnmatchcase(entry.name, first) and (first.startswith(".") or not entry.name.startswith(".")):
                yield from _matches(folder / entry.name, rest, output)


def _folders(top: Path, output: Path | None, *, as_glob: bool = False) -> Iterator[tuple[Path, list[os.DirEntry[str]]]]:
    """`top` and all folders below it with their entries, each folder once; folders behind links come last.

    Folders below one that `data.prepare` wrote are not visited. A glob skips hidden folders, but not those that
    `data.prepare` wrote.
    """
    seen: set[tuple[int, int]] = set()
    folders, links = deque([top]), deque[Path]()
    while folders or links:
        folder = (folders or links).popleft()
        status = _status(folder)
        if status is None or not stat.S_ISDIR(status.st_mode) or (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        if _is_within(folder, output):
            continue
        entries = _entries(folder)
        yield folder, entries
        if not as_glob and _was_prepared(entries):
            continue
        for entry in entries:
            if _is_folder(entry) and not (as_glob and entry.name.startswith(".")):
                (links if entry.is_symlink() else folders).append(folder / entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link in a loop, or one whose target this user may not read


def _was_prepared(entries: Iterable[os.DirEntry[str]]) -> bool:
    return any(entry.name in (PREPARATION, SCRATCH) for entry in entries)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"folder {folder} cannot be read ({error.strerror}); permit it to this user, or name other inputs"
        ) from error


def _status(path: Path) -> os.stat_result | None:
    """The status of the file or folder at a path, with links followed; None if there is nothing."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise DataError(f"{path} cannot be read ({error.strerror}); check the name and the permissions") from error


def _checked(files: Iterable[Path]) -> list[Path]:
    files = list(files)
    for file in files:
        check_name(str(file), "input")
    return files


def _broken(path: Path) -> DataError:
    return DataError(f"{path} is a link that leads to no file; fix or remove it")


def _is_within(path: Path, folder: Path | None) -> bool:
    return folder is not None and path.resolve().is_relative_to(folder.resolve())


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _kind(path: Path) -> FileKind | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return SUFFIXES.get(suffixes[-1]) if suffixes else None


def _known_suffixes() -> str:
    return "/".join(SUFFIXES) + " (or .gz/.zst of them)"


def _say_left_out(name: str, left_out: Counter[str]) -> None:
    counts = [f"{count} {what}" for what, count in sorted(left_out.items()) if count]
    if counts:
        logger.warning("of %s, these are left out: %s", name, ", ".join(counts))
