"""Shard folders that lie elsewhere (http, https, s3, gs, file, memory: through fsspec), and a bounded cache of shards.

    <cache>/shards/<sha256>.tar            a shard that was fetched whole and had the sha256 of its manifest
    <cache>/shards/<sha256>-<bytes>.tmp    one on its way; its bytes count from the start
    <cache>/tokenizers/<fingerprint>/      the tokenizer of a folder
    <cache>/locks/                         `room`, held while room is made; `00`..`ff`, held while a shard is fetched
    <cache>/verified/<folder and manifest> what was hashed of a local folder: name, size, mtime and inode a line

A cached shard is named by its content and appears by rename after it was hashed, so whatever is there is whole and
needs no second hash, for whichever folder, process or rank. The ranks and loader processes of a machine share one
cache: a lock (flock, which ends with its process) a shard lets one of them fetch while the others wait, and the shards
opened longest ago are unlinked to make room. A shard that is in use stays readable: its mmap outlives the name.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from data.errors import DataError
from data.secrets import with_variables

if TYPE_CHECKING:
    import fsspec

logger = logging.getLogger(__name__)

CACHE_GIB = 32.0
ATTEMPTS = 2
# What save_pretrained writes of a fast tokenizer; a plain web server cannot be asked for a list.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PROTOCOLS = ("http", "https", "s3", "gs", "file", "memory")
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}


class BadShard(DataError):
    """What is wrong with a shard's bytes, wherever they are read: missing, of another size, or of another sha256."""


def is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def read_bytes(address: str) -> bytes:
    """All of a small file. FileNotFoundError where there is none."""
    system, path = _open_system(address)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return system.cat_file(path)
        except FileNotFoundError:
            raise
        except Exception as error:
            _try_again(address, error, attempt)
    raise AssertionError


def default_cache() -> Path:
    """A folder of this user's in the machine's temporary folder."""
    return Path(tempfile.gettempdir()) / f"barista-{os.getuid()}"


@dataclass(frozen=True)
class Cache:
    """One folder, shared by the processes of a machine; at most `limit_bytes` of shards."""

    folder: Path
    limit_bytes: int

    @classmethod
    def at(cls, folder: str | Path = "", gib: float = CACHE_GIB) -> Cache:
        """Make or join the cache; an empty name: the default one."""
        chosen = Path(folder).expanduser() if folder else default_cache()
        try:
            chosen.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The temporary folder is everybody's: whoever else owns this could put any bytes into it.
            if not folder and chosen.stat().st_uid != os.getuid():
                raise DataError(f"the cache {chosen} belongs to another user; set data.cache_dir to a folder of yours")
            for part in ("shards", "tokenizers", "locks", "verified"):
                (chosen / part).mkdir(exist_ok=True)
        except OSError as error:
            raise _cannot(chosen, error) from error
        return cls(chosen, int(gib * 2**30))

    # ------------------------------------------------------------------------------------------------------- shards

    @contextmanager
    def shard(self, address: str, *, sha256: str, size: int) -> Iterator[BufferedReader]:
        """The shard, open for reading: from the cache, or fetched into it and checked."""
        final = self.folder / "shards" / f"{sha256}.tar"
        try:
            file = self._opened(final)
            if file is None:
                with self._locked(sha256[:2]):
                    # Another process may have fetched it while this one waited, and unlinked it as soon again.
                    file = self._opened(final) or self._fetched(address, final, size)
        except OSError as error:
            raise _cannot(self.folder, error) from error
        with file:
            yield file

    def holds(self, sha256: str) -> bool:
        return (self.folder / "shards" / f"{sha256}.tar").exists()

    def _opened(self, final: Path) -> BufferedReader | None:
        try:
            file = final.open("rb")
        except FileNotFoundError:
            return None
        # The least recently used goes first. Gone in between, it is read all the same.
        with suppress(FileNotFoundError):
            os.utime(final)
        return file

    def _fetched(self, address: str, final: Path, size: int) -> BufferedReader:
        """Fetch a shard whose lock is held. The file is opened before it has a name that others could unlink."""
        temporary = final.with_name(f"{final.stem}-{size}.tmp")
        system, path = _open_system(address)
        self._make_room(size, temporary)
        try:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    system.get_file(path, str(temporary))
                except FileNotFoundError as error:
                    raise BadShard(f"shard {address} is missing; restore the file or make the shards again") from error
                except Exception as error:
                    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    _try_again(address, error, attempt)
                    continue
                file = temporary.open("rb")
                wrong = what_is_wrong(file, sha256=final.stem, size=size)
                if not wrong:
                    temporary.rename(final)
                    return file
                file.close()
                if attempt == ATTEMPTS:
                    raise BadShard(
                        f"shard {address} is {wrong}, fetched {ATTEMPTS} times; restore the file or make the shards "
                        "again"
                    )
                logger.warning("shard %s arrived %s; fetching it again", address, wrong)
            raise AssertionError
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, size: int, temporary: Path) -> None:
        """Unlink the shards used longest ago until `size` more bytes fit, and claim them by an empty `temporary`."""
        if size > self.limit_bytes:
            raise DataError(
                f"a shard of {size} bytes does not fit into the cache {self.folder} of {self.limit_bytes} bytes; raise "
                "data.cache_gib"
            )
        while True:
            with self._locked("room"):
                on_the_way = self._on_the_way(but=temporary)
                used = size + sum(map(_bytes_claimed, on_the_way))
                shards = [(path, stat) for path in temporary.parent.glob("*.tar") if (stat := _stat_of(path))]
                used += sum(stat.st_size for _, stat in shards)
                for path, stat in sorted(shards, key=lambda entry: entry[1].st_mtime_ns):
                    if used <= self.limit_bytes:
                        break
                    path.unlink(missing_ok=True)
                    used -= stat.st_size
                if used <= self.limit_bytes:
                    temporary.touch()
                    return
            # Only shards on their way are left, and those who fetch them wait for nobody.
            with self._locked(on_the_way[0].name[:2]):
                pass

    def _on_the_way(self, *, but: Path) -> list[Path]:
        """Shards that others are fetching; what a killed process left is removed."""
        alive = []
        for path in but.parent.glob("*.tmp"):
            if path == but:
                continue
            with (self.folder / "locks" / path.name[:2]).open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    # One of the same lock as ours is nobody's, for we hold that.
                    if path.name[:2] != but.name[:2]:
                        alive.append(path)
                        continue
                path.unlink(missing_ok=True)
        return alive

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        with (self.folder / "locks" / name).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # --------------------------------------------------------------------------------------------- tokenizers, marks

    def tokenizer(self, address: str, fingerprint: str) -> Path:
        """The local copy of a remote folder's tokenizer. Whoever loads it compares its fingerprint."""
        if not re.fullmatch(r"[0-9a-f]{64}", fingerprint):
            raise DataError(f"the manifest of {address} names no tokenizer fingerprint; make the shards again")
        final = self.folder / "tokenizers" / fingerprint
        if final.is_dir():
            return final
        try:
            temporary = Path(tempfile.mkdtemp(dir=final.parent))
            try:
                for name in TOKENIZER_FILES:
                    (temporary / name).write_bytes(read_bytes(f"{address}/tokenizer/{name}"))
                # Where another process was first, its copy is as good.
                with suppress(OSError):
                    temporary.rename(final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except FileNotFoundError as error:
            raise DataError(
                f"shard folder {address} lacks tokenizer/{' or tokenizer/'.join(TOKENIZER_FILES)}; copy the whole "
                "folder"
            ) from error
        except OSError as error:
            raise _cannot(self.folder, error) from error
        return final

    def marks(self, folder: Path, fingerprint: str) -> Path:
        """Where it is written which shards of a local folder were verified on this machine."""
        key = hashlib.sha256(f"{folder.resolve()}\n{fingerprint}".encode()).hexdigest()
        return self.folder / "verified" / key

    def is_marked(self, marks: Path, mark: str) -> bool:
        try:
            return mark in marks.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            return False

    def add_mark(self, marks: Path, mark: str) -> None:
        # Appended in one write, so that processes need no lock; after a torn line comes a new one.
        try:
            with marks.open("ab", buffering=0) as file:
                file.write(f"\n{mark}\n".encode())
        except OSError as error:
            raise _cannot(self.folder, error) from error


def what_is_wrong(file: BufferedReader, *, sha256: str, size: int) -> str:
    """Why an open file is not the shard of that hash and size; empty if it is."""
    found = os.fstat(file.fileno()).st_size
    if found != size:
        what = "empty" if found == 0 else "truncated" if found < size else "too long"
        return f"{what}: {found} bytes instead of {size}"
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
        return "damaged: its sha256 is not the manifest's"
    return ""


def _open_system(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    protocol = address.partition("://")[0]
    if protocol not in PROTOCOLS:
        raise DataError(f"{address} begins with {protocol}://; shards are read from {', '.join(PROTOCOLS)}, or a path")
    import fsspec

    try:
        # fsspec keeps one system a process and thread, so that none is carried over a fork.
        return fsspec.core.url_to_fs(with_variables(address))
    except ImportError as error:
        raise DataError(
            f"{address} needs the package {_PACKAGES[protocol]}; install it: pip install {_PACKAGES[protocol]}"
        ) from error


def _try_again(address: str, error: Exception, attempt: int) -> None:
    """Transports raise errors of their own kinds, of which a second attempt is all that can be made."""
    words = " ".join(f"{type(error).__name__}: {error}".split())
    if attempt == ATTEMPTS:
        raise DataError(f"{address} cannot be fetched ({words}); check the address, the network and the access")
    logger.warning("%s could not be fetched (%s); fetching it again", address, words)


def _bytes_claimed(temporary: Path) -> int:
    return int(temporary.stem.rpartition("-")[2])


def _stat_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _cannot(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"the cache {folder} cannot be used ({error.strerror or error}); set data.cache_dir to a local disk with room"
    )
