"""The output folder of data.prepare: one command at a time writes to it, with one set of inputs and options."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data.corpora.by_id import TextIndex
from data.corpora.splits import IdLayout, InputSplit
from data.ground.errors import DataError
from data.ground.files import looks_of, read_text, reading, sha256_of, write_atomically
from data.inputs import PREPARATION, SCRATCH, check_name
from data.shards.format import MANIFEST

logger = logging.getLogger(__name__)

# The file that records size, times and inode of each input when it was hashed.
SEEN = ".inputs"
# Format of preparation.json: version 2 has the sha256 of whole inputs.
FORMAT = 2


@contextlib.contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Lock a folder for this command alone; the folder must be new, empty, or written by data.prepare."""
    check_name(str(output), "output folder")
    try:
        is_new = not output.exists()
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"folder {output} cannot be made ({error.strerror}); choose a writable folder") from error
    descriptor = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another command is writing to {output}; wait for it or choose another folder") from error
        except OSError:
            logger.warning("the file system of %s has no locks: let only one command write there", output)
        names = sorted(path.name for path in output.iterdir())
        if PREPARATION not in names and (strangers := sorted({*names} - {SCRATCH})):
            raise DataError(f"folder {output} holds other files ({strangers[0]}); choose an empty or new folder")
        try:
            yield
        finally:
            shutil.rmtree(output / SCRATCH, ignore_errors=True)
            # A command that finished nothing removes everything that it wrote. Completion markers of input splits
            # without samples do not count as finished work: writing them again is quick.
            if PREPARATION not in names and not any(
                path.exists() and path.parent.name != "units" for path in (*_finished(output), *output.glob("*.tar"))
            ):
                _clear(output)
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                output.rmdir()
        os.close(descriptor)


def _finished(output: Path) -> list[Path]:
    """The files whose presence shows that a command has finished a part of its work."""
    return [output / MANIFEST, output / "tokenizer.json", output / "pairs.jsonl", *output.glob("units/*.json")]


def _clear(output: Path) -> None:
    """Remove the unfinished work of a command in a folder that was empty before."""
    with contextlib.suppress(OSError):
        leftovers = (*output.glob("shard-*.tar*"), *output.glob("units/*.json*"), output / SEEN, output / PREPARATION)
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
        if (output / "units").is_dir():
            (output / "units").rmdir()


def settle(output: Path, preparation: dict[str, Any]) -> str:
    """Record the inputs and options of the folder, or check that they equal the recorded ones; returns their sha256."""
    path = output / PREPARATION
    content = json.dumps({"format": FORMAT, **preparation}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    before = read_text(path) if path.exists() else ""
    if before and before != content:
        if any(file.exists() for file in _finished(output)):
            raise DataError(
                f"folder {output} holds something made with other {_differing(before, content)}; "
                "choose an empty folder, or delete this one first"
            )
        # Nothing was finished, as after an error in the user's data: a corrected command may start afresh.
        for leftover in output.glob("shard-*.tar*"):
            leftover.unlink()
    if before != content:
        temporary = output / SCRATCH / PREPARATION
        temporary.parent.mkdir(exist_ok=True)
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    return hashlib.sha256(content.encode()).hexdigest()


def _differing(before_text: str, now_text: str) -> str:
    now = json.loads(now_text)
    try:
        before = json.loads(before_text)
    except ValueError:
        before = None
    if not isinstance(before, dict):
        return "settings"
    if before.get("format") != now["format"]:
        return f"versions of this command (format {before.get('format')} instead of {now['format']})"
    names = []
    for key in sorted({*before, *now}):
        if before.get(key) == now.get(key):
            continue
        if key == "options" and isinstance(before.get(key), dict):
            options = sorted({*before[key], *now[key]})
            names += [name for name in options if before[key].get(name) != now[key].get(name)]
        elif key != "units" or before.get("inputs") == now.get("inputs"):
            names.append(key)
    return ", ".join(name.replace("_", " ") for name in names)


class Inputs:
    """The files that a command reads: their sha256, and whether they have changed since."""

    def __init__(self, output: Path, input_splits: Sequence[InputSplit], *, processes: int) -> None:
        self._path = output / SEEN
        paths: dict[str, None] = {}
        # Files that this command makes from the inputs. They are made anew each time, so their hashes are not kept.
        self._joined: dict[str, str] = {}
        self._others: list[str] = []
        for input_split in input_splits:
            if isinstance(input_split.layout, IdLayout):
                self._joined[f"{input_split.source.rpartition('[')[0]} joined"] = input_split.path
                paths[str(TextIndex.path_in(Path(input_split.layout.index)))] = None
            elif not input_split.is_file:
                self._others.append(
                    input_split.source.rpartition("[")[0] if input_split.kind == "hub" else input_split.source
                )
            else:
                paths[input_split.path] = None
        before = self._read()
        self._seen: dict[str, list[str]] = {}
        # Hashing releases the GIL, so threads run in parallel.
        with ThreadPoolExecutor(max_workers=max(1, min(processes, 8))) as pool:
            for path, seen in zip(paths, pool.map(lambda path: _seen(path, before.get(path)), paths)):
                self._seen[path] = seen

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of all inputs, as JSON values: it decides the output."""
        found: dict[str, Any] = {path: {"sha256": digest} for path, (_, digest) in self._seen.items()}
        found |= {name: {"sha256": sha256_of(path)} for name, path in self._joined.items()}
        return found | dict.fromkeys(self._others)

    def remember(self) -> None:
        write_atomically(self._path, json.dumps(self._seen, indent=1, ensure_ascii=False) + "\n")

    def check(self) -> None:
        """Refuse an input that changed while it was read: nobody knows which of its bytes were written to shards."""
        for path, seen in self._seen.items():
            if _seen(path, seen)[1] != seen[1]:
                raise DataError(
                    f"{path} was changed while it was read; delete {self._path.parent} and run the command again"
                )

    def _read(self) -> dict[str, list[str]]:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        # The file only saves hashing: an entry that cannot be read means that the input is hashed again.
        entries = found.items() if isinstance(found, dict) else ()
        return {path: seen for path, seen in entries if isinstance(seen, list) and len(seen) == 2}


def _seen(path: str, before: list[str] | None) -> list[str]:
    """[size, times and inode of a file, its sha256]; the sha256 is copied from `before` if the former are the same."""
    with reading(path):
        looks = looks_of(Path(path).stat())
        return before if before is not None and before[0] == looks else [looks, sha256_of(path)]
