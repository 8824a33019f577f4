"""Remote shard folders (http, https, s3, gs, file, memory: through fsspec), and a bounded cache of shards.

    <cache>/shards/<sha256>.tar            a complete shard with the sha256 of its manifest
    <cache>/shards/<sha256>-<bytes>.tmp    a shard being fetched; its full size counts towards the limit at once
    <cache>/tokenizers/<fingerprint>/      the tokenizer of a folder
    <cache>/locks/                         `room`, held while shards are removed; `00`..`ff`, held while a shard is
                                           fetched or hashed
    <cache>/verified/<sha256>.tar          size, times and inode of the cached shard when it was hashed
    <cache>/verified/<folder and manifest> a line for each hashed shard of a local folder: name, size, times and inode

A cached shard is named by its content and is renamed into place after it was hashed. It is hashed again only if its
size, times or inode change, whichever folder, process or rank reads it. The ranks and loader processes of a machine
share one cache. A lock for each shard (flock, which ends with its process) lets one of them fetch the shard, or hash it
if its folder is local, while the others wait. The least recently opened shards are unlinked to make room. A shard that
is in use stays readable: its mmap outlives the file name.

A server cannot decide how much is read, or for how long: a shard ends at the manifest's size, other files at a limit
for their kind, and a server that sends less than SLOWEST bytes a second for STALL_SECONDS is given up. A tokenizer
enters the cache only if it is the one that the manifest names. Secrets in an address appear in no message.

A transfer that fails is tried again after growing pauses, because object stores ask for patience and servers restart.
Only a refusal that is meant to last, such as a wrong password, ends the command at once.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import io
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from data.ground.errors import DataError
from data.ground.files import looks_of, open_regular
from data.ground.secrets import with_variables, without_secrets
from data.tokens import load_tokenizer, tokenizer_fingerprint

if TYPE_CHECKING:
    import fsspec

logger = logging.getLogger(__name__)

CACHE_GIB = 32.0
# Seconds before each further attempt after a transfer that failed.
PAUSES = (1.0, 4.0, 15.0)
STALLS = 2  # after so many transfers that were too slow, a server is given up
BAD_ARRIVALS = 2  # after so many transfers with wrong bytes, a shard is bad
STALL_SECONDS = 60.0
SLOWEST = 1024  # bytes a second
MANIFEST_BYTES = 2**28  # a manifest takes some 10 MB (tuples: 20) for a hundred million samples
TOKENIZER_BYTES = 2**27
# The files that save_pretrained writes for a fast tokenizer; a plain web server cannot list them.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PROTOCOLS = ("http", "https", "s3", "gs", "file", "memory")
_TEMPORARY_STATUSES = (408, 425, 429)  # other answers of 400 to 499 will not change
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}


class BadShard(DataError):
    """A shard, local or remote, is missing, or has another size or sha256 than the manifest says."""


def is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def joined(address: str, name: str) -> str:
    """The address of a file in a folder; URL parameters of the folder, such as a key, stay at the end."""
    folder, mark, parameters = (
        address.partition("?") if address.startswith(("http://", "https://")) else (address, "", "")
    )
    return f"{folder.rstrip('/')}/{name}{mark}{parameters}"


def read_bytes(address: str, *, limit: int) -> bytes:
    """The content of a remote file of at most `limit` bytes. Raises FileNotFoundError if there is none."""
    content = io.BytesIO()
    fetch_into(content, address, limit=limit)
    return content.getvalue()


def fetch_into(file: BinaryIO, address: str, *, limit: int) -> None:
    """Write a remote file of at most `limit` bytes into `file`.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the disk that `file` is on is full.

    """
    failures = _Failures(address)
    while True:
        file.seek(0)
        file.truncate()
        try:
            _download(address, Transfer(file, limit))
        except FileNotFoundError:
            raise
        except _TooLong as error:
            raise DataError(
                f"{without_secrets(address)} has more than the {limit} bytes that such a file may have; check that the "
                "address is right"
            ) from error
        except Exception as error:
            failures.add(error)
            continue
        return


def default_cache() -> Path:
    """The user's cache folder in the machine's temporary folder."""
    return Path(tempfile.gettempdir()) / f"barista-{os.getuid()}"


@dataclass(frozen=True)
class Cache:
    """The cache folder that the processes of a machine share; it holds at most `limit_bytes` of shards."""

    folder: Path
    limit_bytes: int

    @classmethod
    def at(cls, folder: str | Path = "", gib: float = CACHE_GIB) -> Cache:
        """Open the cache, and create it if need be; an empty name means the default folder."""
        chosen = Path(folder).expanduser() if folder else default_cache()
        try:
            chosen.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not folder:
                _check_private(chosen)
            for part in ("shards", "tokenizers", "locks", "verified"):
                (chosen / part).mkdir(exist_ok=True)
        except OSError as error:
            raise _cannot(chosen, error) from error
        return cls(chosen, int(gib * 2**30))

    # ------------------------------------------------------------------------------------------------------- shards

    @contextmanager
    def shard(self, address: str, *, sha256: str, size: int) -> Iterator[BufferedReader]:
        """The shard, open for reading; it is fetched into the cache and checked if it is not there."""
        final = self.folder / "shards" / f"{sha256}.tar"
        try:
            file = self._opened(final)
            if file is None:
                with self._locked(sha256[:2]):
                    # Another process may have fetched the shard while this one waited; it may also be gone again.
                    file = self._opened(final) or self._hashed_again(final, size)
                    file = file or self._fetched(address, final, size)
        except OSError as error:
            raise _cannot(self.folder, error) from error
        with file:
            yield file

    def holds(self, sha256: str) -> bool:
        return (self.folder / "shards" / f"{sha256}.tar").exists()

    def _opened(self, final: Path) -> BufferedReader | None:
        """The cached shard, open for reading, if it has not changed since it was hashed; else None."""
        try:
            file = open_regular(final)
        except FileNotFoundError:
            return None
        mark = self._mark_of(final)
        try:
            holds = mark.read_bytes() == what_it_is(file).encode()
        except FileNotFoundError:
            holds = False
        if not holds:
            file.close()
            return None
        # The time of the mark records the last use. If the mark was removed meanwhile, the open file is still readable.
        with suppress(FileNotFoundError):
            os.utime(mark)
        return file

    def _hashed_again(self, final: Path, size: int) -> BufferedReader | None:
        """Hash a cached shard that has changed since: returns it if its content is right, else removes it.

        The caller holds the shard's lock.
        """
        try:
            file = open_regular(final)
        except FileNotFoundError:
            return None
        wrong = what_is_wrong(file, sha256=final.stem, size=size)
        if not wrong:
            self._mark(final, file)
            return file
        file.close()
        logger.warning("cached shard %s is %s; fetching it again", final, wrong)
        final.unlink(missing_ok=True)
        return None

    def _mark(self, final: Path, file: BufferedReader) -> None:
        self._mark_of(final).write_bytes(what_it_is(file).encode())

    def _mark_of(self, final: Path) -> Path:
        return self.folder / "verified" / final.name

    def _fetched(self, address: str, final: Path, size: int) -> BufferedReader:
        """Fetch a shard whose lock the caller holds.

        The file is opened before it gets its final name, because other processes may unlink that name at once.
        """
        temporary = final.with_name(f"{final.stem}-{size}.tmp")
        shown = without_secrets(address)
        failures = _Failures(address)
        bad_arrivals = 0
        self._make_room(size, temporary)
        try:
            while True:
                wrong = ""
                try:
                    with temporary.open("wb") as arriving:
                        _download(address, Transfer(arriving, size))
                except FileNotFoundError as error:
                    raise BadShard(f"shard {shown} is missing; restore the file or make the shards again") from error
                except _TooLong:
                    wrong = f"too long: more than {size} bytes"
                except Exception as error:
                    failures.add(error)
                    continue
                file = temporary.open("rb")
                wrong = wrong or what_is_wrong(file, sha256=final.stem, size=size)
                if not wrong:
                    temporary.rename(final)
                    self._mark(final, file)
                    return file
                file.close()
                bad_arrivals += 1
                if bad_arrivals == BAD_ARRIVALS:
                    raise BadShard(
                        f"shard {shown} is {wrong}, fetched {bad_arrivals} times; restore the file or make the shards "
                        "again"
                    )
                logger.warning("shard %s arrived %s; fetching it again", shown, wrong)
        finally:
            temporary.unlink(missing_ok=True)

    def _make_room(self, size: int, temporary: Path) -> None:
        """Unlink the least recently used shards until `size` more bytes fit; claim these by creating `temporary`."""
        if size > self.limit_bytes:
            raise DataError(
                f"a shard of {size} bytes does not fit into the cache {self.folder} of {self.limit_bytes} bytes; raise "
                "data.cache_gib"
            )
        while True:
            with self._locked("room"):
                on_the_way = self._on_the_way(but=temporary)
                used = size + sum(map(_bytes_claimed, on_the_way))
                shards = [(path, status) for path in temporary.parent.glob("*.tar") if (status := _stat_of(path))]
                used += sum(status.st_size for _, status in shards)
                for path, status in sorted(shards, key=self._last_used):
                    if used <= self.limit_bytes:
                        break
                    path.unlink(missing_ok=True)
                    self._mark_of(path).unlink(missing_ok=True)
                    used -= status.st_size
                if used <= self.limit_bytes:
                    temporary.touch()
                    return
            # The cache is full of shards that are being fetched. Wait for one of them: they wait for no lock.
            with self._locked(on_the_way[0].name[:2]):
                pass

    def _last_used(self, entry: tuple[Path, os.stat_result]) -> int:
        path, status = entry
        return (_stat_of(self._mark_of(path)) or status).st_mtime_ns

    def _on_the_way(self, *, but: Path) -> list[Path]:
        """The temporary files of shards that others are fetching; files left by killed processes are removed."""
        alive = []
        for path in but.parent.glob("*.tmp"):
            if path == but:
                continue
            with (self.folder / "locks" / path.name[:2]).open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    # If the file shares the lock that this process holds, nobody else is fetching it.
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

    @contextmanager
    def hashing(self, sha256: str) -> Iterator[None]:
        """Held while a shard of a local folder is hashed, so that other processes wait for the result."""
        try:
            lock = (self.folder / "locks" / sha256[:2]).open("a")
        except OSError as error:
            raise _cannot(self.folder, error) from error
        with lock:
            # On a file system without locks, every process hashes the shard for itself.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # --------------------------------------------------------------------------------------------- tokenizers, marks

    def tokenizer(self, address: str, fingerprint: str) -> Path:
        """The local copy of a remote folder's tokenizer, which must have that fingerprint."""
        final = self.folder / "tokenizers" / fingerprint
        try:
            if final.is_dir() and not _what_is_wrong_with_tokenizer(final, fingerprint):
                return final
            with self._locked("tokenizers"):
                if final.is_dir() and (wrong := _what_is_wrong_with_tokenizer(final, fingerprint)):
                    logger.warning("the cached tokenizer %s has changed (%s); fetching it again", final, wrong)
                    shutil.rmtree(final)
                if not final.is_dir():
                    self._fetch_tokenizer(address, final)
        except FileNotFoundError as error:
            raise DataError(
                f"shard folder {without_secrets(address)} lacks tokenizer/{' or tokenizer/'.join(TOKENIZER_FILES)}; "
                "copy the whole folder"
            ) from error
        except OSError as error:
            raise _cannot(self.folder, error) from error
        return final

    def _fetch_tokenizer(self, address: str, final: Path) -> None:
        temporary = Path(tempfile.mkdtemp(dir=final.parent))
        try:
            for name in TOKENIZER_FILES:
                content = read_bytes(joined(address, f"tokenizer/{name}"), limit=TOKENIZER_BYTES)
                (temporary / name).write_bytes(content)
            wrong = _what_is_wrong_with_tokenizer(temporary, final.name)
            if wrong:
                raise DataError(
                    f"the tokenizer of shard folder {without_secrets(address)} is not the one that its manifest names "
                    f"({wrong}); copy the whole folder there again"
                )
            temporary.rename(final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def marks(self, folder: Path, fingerprint: str) -> Path:
        """The file that lists the shards of a local folder that were verified on this machine."""
        key = hashlib.sha256(f"{folder.resolve()}\n{fingerprint}".encode()).hexdigest()
        return self.folder / "verified" / key

    def is_marked(self, marks: Path, mark: str) -> bool:
        try:
            return mark.encode() in marks.read_bytes().split(b"\n")
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _cannot(self.folder, error) from error

    def add_mark(self, marks: Path, mark: str) -> None:
        # One write appends the whole line, so processes need no lock. It begins with a line break to end a torn line.
        try:
            with marks.open("ab", buffering=0) as file:
                file.write(f"\n{mark}\n".encode())
        except OSError as error:
            raise _cannot(self.folder, error) from error


def what_it_is(file: BufferedReader) -> str:
    """Size, times and inode of an open file, as `looks_of` writes them."""
    return looks_of(os.fstat(file.fileno()))


def what_is_wrong(file: BufferedReader, *, sha256: str, size: int) -> str:
    """Why an open file is not the shard of that hash and size; empty if it is."""
    if wrong := what_is_wrong_with_size(os.fstat(file.fileno()).st_size, size):
        return wrong
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
        return "damaged: its sha256 is not the manifest's"
    return ""


def what_is_wrong_with_size(found: int, size: int) -> str:
    """Why a file of `found` bytes is not a shard of `size` bytes; empty if it may be."""
    if found == size:
        return ""
    what = "empty" if found == 0 else "truncated" if found < size else "too long"
    return f"{what}: {found} bytes instead of {size}"


def _what_is_wrong_with_tokenizer(folder: Path, fingerprint: str) -> str:
    try:
        found = tokenizer_fingerprint(load_tokenizer(folder))
    except DataError as error:
        # The hint after the last semicolon is for the owner of a local folder, so it is cut off.
        return re.sub(rf"tokenizer (folder )?{re.escape(str(folder))}:? ", "it ", str(error)).rpartition("; ")[0]
    return "" if found == fingerprint else f"its fingerprint is {found[:12]}… instead of {fingerprint[:12]}…"


def _check_private(folder: Path) -> None:
    """Refuse a default cache that other users can write to: they could put any bytes there."""
    hint = "remove it, or set data.cache_dir to a folder of yours"
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise DataError(f"the cache {folder} is a link or a file, not a folder; {hint}") from error
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if status.st_uid != os.getuid():
        raise DataError(f"the cache {folder} belongs to another user; set data.cache_dir to a folder of yours")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise DataError(f"the cache {folder} is open to other users (mode {stat.S_IMODE(status.st_mode):o}); {hint}")
    # A user who may rename the cache could put another folder in its place. The sticky bit of /tmp prevents that.
    parent = folder.parent.stat().st_mode
    if parent & stat.S_IWOTH and not parent & stat.S_ISVTX:
        raise DataError(f"the cache {folder} can be replaced by every user; {hint}")


# ----------------------------------------------------------------------------------------------------------- transfers


class _TooLong(Exception):
    """The server sent more bytes than the limit."""


class _Stalled(Exception):
    """The server sent too few bytes for too long."""


class _Circle(Exception):
    """The server redirects without end."""


class Transfer:
    """Writes arriving bytes to a file; raises if they are more than `limit` or arrive too slowly."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self._left = limit
        self._since = time.monotonic()
        self._lately = 0

    def write(self, content: bytes) -> None:
        self._left -= len(content)
        if self._left < 0:
            raise _TooLong
        self._file.write(content)
        self._lately += len(content)
        seconds = time.monotonic() - self._since
        if seconds >= STALL_SECONDS:
            if self._lately < SLOWEST * seconds:
                raise _Stalled(f"{self._lately} bytes in {seconds:.0f} s are too few to wait for")
            self._since, self._lately = time.monotonic(), 0


def _download(address: str, transfer: Transfer) -> None:
    """Pass a file's bytes to `transfer` as they arrive. Raises FileNotFoundError if there is no such file."""
    system, path = _open_system(address)
    protocol = address.partition("://")[0]
    if protocol in ("http", "https"):
        import fsspec.asyn

        fsspec.asyn.sync(system.loop, _over_http, system, path, transfer)
        return
    with open_regular(path) if protocol == "file" else system.open(path, "rb") as file:
        while content := file.read(2**20):
            transfer.write(content)


async def _over_http(system: Any, address: str, transfer: Transfer) -> None:
    """Download with aiohttp directly, because fsspec bounds neither the bytes nor the time."""
    import aiohttp

    session = await system.set_session()
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                response = await stack.enter_async_context(
                    session.get(system.encode_url(address), timeout=aiohttp.ClientTimeout(total=None), **system.kwargs)
                )
            if response.status in (404, 410):
                raise FileNotFoundError(address)
            response.raise_for_status()
            content = b"\n"
            while content:
                async with asyncio.timeout(STALL_SECONDS):
                    content = await response.content.readany()
                transfer.write(content)
        except TimeoutError as error:
            raise _Stalled(f"nothing came for {STALL_SECONDS:g} s") from error
        except aiohttp.TooManyRedirects as error:
            raise _Circle(f"it redirects further after {len(error.history)} redirects") from error


def _open_system(address: str) -> tuple[fsspec.AbstractFileSystem, str]:
    protocol = address.partition("://")[0]
    shown = without_secrets(address)
    if protocol not in PROTOCOLS:
        raise DataError(f"{shown} begins with {protocol}://; shards are read from {', '.join(PROTOCOLS)}, or a path")
    if re.search(r"::\w+://", address):
        raise DataError(f"{shown} chains addresses; give one address of {', '.join(PROTOCOLS)}, or a path")
    import fsspec

    try:
        # fsspec keeps one file system object per process and thread, so none is shared across a fork.
        return fsspec.core.url_to_fs(with_variables(address))
    except ImportError as error:
        raise DataError(
            f"{shown} needs the package {_PACKAGES[protocol]}; install it: pip install {_PACKAGES[protocol]}"
        ) from error


class _Failures:
    """The failed transfers of one file; it decides whether there is another attempt, and waits before it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._pauses = iter(PAUSES)
        self._stalls = 0

    def add(self, error: Exception) -> None:
        """Log a failed transfer and wait, or raise if it is not to be tried again.

        Every transport raises its own kinds of exceptions.

        Raises:
            DataError: the file cannot be fetched.
            OSError: the disk that it is written to is full.

        """
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.errno in _FULL_DISK):
            raise error
        self._stalls += isinstance(error, _Stalled)
        name = "" if isinstance(error, _Stalled | _Circle) else f"{type(error).__name__}: "
        shown, words = without_secrets(self._address), without_secrets(" ".join(f"{name}{error}".split()))
        pause = None if _will_last(error) or self._stalls == STALLS else next(self._pauses, None)
        if pause is None:
            raise DataError(f"{shown} cannot be fetched ({words}); check the address, the network and the access")
        logger.warning("%s could not be fetched (%s); fetching it again in %g s", shown, words, pause)
        time.sleep(pause)


def _will_last(error: Exception) -> bool:
    """Whether a failure is a refusal that another attempt would meet again: a wrong password or address."""
    status = getattr(error, "status", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in _TEMPORARY_STATUSES
    return refused or isinstance(error, PermissionError | ValueError | _Circle)


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
