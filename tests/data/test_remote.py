"""Shards from elsewhere: the same batches as from disk, a cache that is bounded and shared, every fault by name, and
skipped shards that leave all ranks in step."""

from __future__ import annotations

import base64
import errno
import fcntl
import gzip
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import fsspec
import numpy as np
import pytest

from data import remote
from data.ground.errors import DataError
from data.remote import BadShard, Cache
from data.shards import reader as reading
from data.shards.reader import ShardFolder
from data.shards.writer import SplitWriter, finish_folder
from data.stream import Sample, Stream
from tests.data.conftest import mapped

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

B = 12
SHARD_BYTES = 14_336
GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer, docstrings) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    with SplitWriter(
        folder, 0, kind="documents", vocabulary_size=len(tiny_tokenizer), chunk_samples=8, shard_bytes=SHARD_BYTES
    ) as writer:
        for ids in tiny_tokenizer(docstrings[:300], add_special_tokens=False).input_ids:
            writer.add_document(ids[:40])
    finish_folder(folder, 1, tokenizer=tiny_tokenizer)
    assert len(ShardFolder(folder).manifest.shards) >= 6
    return folder


class Server(ThreadingHTTPServer):
    """Serves a folder; `faults` maps a file's name to what becomes of its next answers, one after the other.

    A fault turns the right bytes into other bytes, or into a status.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.faults: dict[str, list[Callable[[bytes], bytes | int]]] = {}
        self.requests: Counter[str] = Counter()
        self.queries: set[str] = set()
        self.credentials: set[str] = set()
        self.packed = False  # answers are gzipped
        self.pauses: dict[str, float] = {}  # seconds before the head, before the body, between the body's bytes
        self.ended = threading.Event()
        self.authorisations: set[str | None] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/shards"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        place, _, query = self.path.partition("?")
        name = place.removeprefix("/shards/")
        self.server.queries.add(query)
        self.server.credentials.add(self.headers.get("Authorization", ""))
        self.server.requests[name] += 1
        self.server.authorisations.add(self.headers["Authorization"])
        path = self.server.folder / name
        answer: bytes | int = path.read_bytes() if path.is_file() else 404
        if (faults := self.server.faults.get(name)) and isinstance(answer, bytes):
            answer = faults.pop(0)(answer)
        content = answer if isinstance(answer, bytes) else b""
        self.pause("head")
        self.send_response(200 if isinstance(answer, bytes) else answer)
        if self.server.packed:
            content = gzip.compress(content)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.pause("body")
        # Whoever has had enough hangs up.
        with suppress(ConnectionError):
            for piece in (
                (content[at : at + 1] for at in range(len(content))) if "byte" in self.server.pauses else [content]
            ):
                self.wfile.write(piece)
                self.pause("byte")

    def pause(self, place: str) -> None:
        self.server.ended.wait(self.server.pauses.get(place, 0))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(copy) -> Iterator[Server]:
    with Server(copy) as one:
        thread = threading.Thread(target=one.serve_forever, args=[0.01])  # s between looks whether it is to end
        thread.start()
        yield one
        one.ended.set()
        one.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def pauses(monkeypatch) -> list[float]:
    """The pauses before further attempts, which are noted and not waited for."""
    noted: list[float] = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=time.monotonic, sleep=noted.append))
    return noted


@pytest.fixture
def cache(tmp_path) -> Cache:
    return Cache.at(tmp_path / "cache", 1)


def flipped(content: bytes) -> bytes:
    """One bit of the first member's payload."""
    place = 700
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


def unavailable(content: bytes) -> int:
    return 503


def as_list(samples: list[Sample]) -> list[tuple]:
    return [(s.index, s.epoch, s.position, s.payload.tolist()) for s in samples]


def global_batches(steps: int, source: ShardFolder, *, world_size: int = 1, first: int = 0, num_workers: int = 0):
    """The batches of all ranks, joined, from global batch `first` on."""
    ranks = [
        Stream(
            [source],
            collate=as_list,
            seed=5,
            global_batch_size=B,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
        )
        for rank in range(world_size)
    ]
    for one in ranks:
        one.load_state_dict({**one.state_dict(), "samples": first * B})
    batches = [list(itertools.chain.from_iterable(next(one) for one in ranks)) for _ in range(steps)]
    for one in ranks:
        one.close()
    return batches


def cached_bytes(cache: Cache) -> int:
    return sum(path.stat().st_size for path in (cache.folder / "shards").iterdir())


# ------------------------------------------------------------------------------------------------------ whole transfers


TOPOLOGIES = [
    (1, 0, 0),
    (2, 0, 7),
    *(pytest.param(*case, marks=pytest.mark.processes) for case in ((1, 2, 3), (2, 1, 60))),
]


@pytest.mark.parametrize(("world_size", "num_workers", "first"), TOPOLOGIES)
def test_the_same_batches_over_http_as_from_disk(folder, server, cache, world_size, num_workers, first):
    expected = global_batches(27, ShardFolder(folder), first=first)
    source = ShardFolder(server.address, cache=cache)
    assert source.fingerprint == ShardFolder(folder).fingerprint
    options = {"world_size": world_size, "num_workers": num_workers, "first": first}
    assert global_batches(27, source, **options) == expected
    assert global_batches(27, source, **{**options, "first": first + 1}) != expected
    assert server.requests["manifest.json"] == 1
    assert {server.requests[shard.name] for shard in source.manifest.shards} == {1}, "one transfer a machine"


@pytest.mark.processes
@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_other_protocols(folder, cache, protocol):
    address = f"file://{folder}"
    if protocol == "memory":
        address = "memory://bucket/shards/"
        fsspec.filesystem("memory").put(str(folder), "/bucket/shards", recursive=True)
    source = ShardFolder(address, cache=cache)
    assert global_batches(9, source, num_workers=1) == global_batches(9, ShardFolder(folder))
    assert source.vocabulary.size == ShardFolder(folder).vocabulary.size
    assert source.tokenizer_path.is_relative_to(cache.folder)


def test_the_tokenizer_comes_once(server, cache):
    for _ in range(2):
        source = ShardFolder(server.address, cache=cache)
        assert source.vocabulary.mask_id is not None
    assert server.requests["tokenizer/tokenizer.json"] == 1
    assert [path.name for path in (cache.folder / "tokenizers").iterdir()] == [source.manifest.tokenizer["fingerprint"]]


def test_a_pickled_remote_folder_reads_on(server, cache):
    source = ShardFolder(server.address, cache=cache)
    document = source.document(0).tolist()
    assert pickle.loads(pickle.dumps(source)).document(0).tolist() == document


@pytest.mark.parametrize(("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_one_sentence(cache, protocol, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    fsspec.filesystem("memory")  # so that only the protocol's own import can fail
    with pytest.raises(DataError, match=f"pip install {package}"):
        ShardFolder(f"{protocol}://bucket/shards", cache=cache)


def test_other_addresses_are_refused(server, cache):
    with pytest.raises(DataError, match=r"begins with zz://; shards are read from http"):
        ShardFolder("zz://bucket/shards", cache=cache)
    with pytest.raises(DataError, match=r"nowhere holds no manifest\.json"):
        ShardFolder(server.address + "/nowhere", cache=cache)


# --------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("fault", "words"), [(flipped, "damaged: its sha256"), (halved, "truncated"), (lambda content: b"", "empty")]
)
def test_a_bad_transfer_is_fetched_again_once_and_then_refused(server, cache, folder, caplog, fault, words):
    name = ShardFolder(folder).manifest.shards[0].name
    server.faults[name] = [fault]
    assert ShardFolder(server.address, cache=cache).document(0).tolist() == ShardFolder(folder).document(0).tolist()
    assert server.requests[name] == 2
    assert words in caplog.text and "fetching it again" in caplog.text

    shutil.rmtree(cache.folder / "shards")
    again = Cache.at(cache.folder, 1)
    server.faults[name] = [fault, fault]
    with pytest.raises(BadShard, match=words) as caught:
        ShardFolder(server.address, cache=again).document(0)
    assert f"{server.address}/{name}" in str(caught.value) and "fetched 2 times" in str(caught.value)
    assert server.requests[name] == 4
    assert not list((cache.folder / "shards").iterdir()), "nothing bad is kept"


def test_a_missing_shard_is_refused_at_once(server, cache):
    name = min(path.name for path in server.folder.glob("*.tar"))
    (server.folder / name).unlink()
    with pytest.raises(BadShard, match=f"{name} is missing"):
        ShardFolder(server.address, cache=cache).document(0)
    assert server.requests[name] == 1


def test_a_server_in_trouble_is_no_bad_shard(server, cache, pauses):
    """What may pass is not skipped: on another rank it may have passed."""
    source = ShardFolder(server.address, bad_shards="skip", cache=cache)
    name = source.manifest.shards[0].name
    server.faults[name] = [unavailable] * len(remote.PAUSES)
    assert len(source.document(0))
    assert pauses == list(remote.PAUSES) == sorted(remote.PAUSES), "each pause is longer than the one before"
    shutil.rmtree(cache.folder / "shards")
    source = ShardFolder(server.address, bad_shards="skip", cache=Cache.at(cache.folder, 1))
    server.faults[name] = [unavailable] * (len(remote.PAUSES) + 1)
    with pytest.raises(DataError, match="cannot be fetched") as caught:
        source.document(0)
    assert not isinstance(caught.value, BadShard) and name in str(caught.value)
    assert server.requests[name] == 2 * (len(remote.PAUSES) + 1)


def test_one_bad_arrival_and_a_server_in_trouble_are_no_bad_shard(server, cache, folder):
    """A shard is bad only if it arrives twice with wrong bytes, however many transfers fail in between."""
    source = ShardFolder(server.address, bad_shards="skip", cache=cache)
    first, second = source.manifest.shards[:2]
    server.faults[first.name] = [unavailable, flipped]
    assert source.document(0).tolist() == ShardFolder(folder).document(0).tolist()
    server.faults[second.name] = [flipped, unavailable, halved]
    assert source.with_replacements(np.array([first.samples]))[0] != first.samples, "this one is"
    assert server.requests[first.name] == server.requests[second.name] == 3


def test_redirects_in_a_circle_last(server, cache, pauses, monkeypatch):
    """Each attempt follows them as far as the client does, and a further attempt would do the same."""
    monkeypatch.setattr(Handler, "end_headers", redirecting_to_itself)
    server.faults["manifest.json"] = [lambda content: 302] * 99
    with pytest.raises(
        DataError, match=r"cannot be fetched \(it redirects further after 10 redirects\); check the address"
    ):
        ShardFolder(server.address, cache=cache)
    assert pauses == [] and server.requests["manifest.json"] < 20


def redirecting_to_itself(handler: Handler) -> None:
    handler.send_header("Location", handler.path)
    BaseHTTPRequestHandler.end_headers(handler)


@pytest.mark.parametrize(("status", "attempts"), [(401, 1), (403, 1), (429, 4), (500, 4)])
def test_a_refusal_that_will_last_ends_at_once(server, cache, status, attempts):
    server.faults["manifest.json"] = [lambda content: status] * 9
    with pytest.raises(DataError, match=f"cannot be fetched .*{status}"):
        ShardFolder(server.address, cache=cache)
    assert server.requests["manifest.json"] == attempts


def test_a_full_disk_names_the_cache(folder, cache, monkeypatch):
    def full(self: object, *args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = ShardFolder(f"file://{folder}", cache=cache)
    monkeypatch.setattr(remote.Transfer, "write", full)
    with pytest.raises(DataError, match=r"No space left on device.*data\.cache_dir"):
        source.document(0)
    assert not list((cache.folder / "shards").iterdir())


def test_a_cache_of_another_user(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "default_cache", lambda: tmp_path / "theirs")
    Cache.at()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(DataError, match="belongs to another user"):
        Cache.at()


def test_the_default_cache_is_a_private_folder(tmp_path, monkeypatch):
    place = tmp_path / "barista"
    monkeypatch.setattr(remote, "default_cache", lambda: place)
    Cache.at()
    assert place.stat().st_mode & 0o777 == 0o700
    for mode in (0o777, 0o750, 0o701):
        place.chmod(mode)
        with pytest.raises(DataError, match=rf"open to other users \(mode {mode:o}\)"):
            Cache.at()
    place.chmod(0o700)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to("elsewhere")
    with pytest.raises(DataError, match="is a link or a file, not a folder"):
        Cache.at()
    place.unlink()
    place.write_text("")
    with pytest.raises(DataError, match=r"cannot be used|no folder"):
        Cache.at()
    place.unlink()
    tmp_path.chmod(0o777)
    with pytest.raises(DataError, match="can be replaced by every user"):
        Cache.at()
    tmp_path.chmod(0o1777)
    Cache.at()
    tmp_path.chmod(0o700)


# ------------------------------------------------------------------------------------------------ what a server decides


@pytest.mark.parametrize("packed", [False, True])
def test_no_more_is_read_than_there_may_be(server, cache, monkeypatch, packed):
    """A manifest has a bound, a shard its size, and what unpacks itself on the way has both."""
    server.packed = packed
    source = ShardFolder(server.address, cache=cache)
    name = source.manifest.shards[0].name
    server.faults[name] = [lambda content: content + bytes(2**24)] * 2
    largest = []
    original = remote.Transfer.write

    def write(self: remote.Transfer, content: bytes) -> None:
        original(self, content)
        largest.append(sum(path.stat().st_size for path in (cache.folder / "shards").iterdir()))

    monkeypatch.setattr(remote.Transfer, "write", write)
    with pytest.raises(BadShard, match=f"too long: more than {source.manifest.shards[0].bytes} bytes, fetched 2 times"):
        source.document(0)
    assert max(largest, default=0) <= source.manifest.shards[0].bytes
    assert not list((cache.folder / "shards").iterdir())
    monkeypatch.setattr("data.shards.format.MANIFEST_BYTES", 1000)
    with pytest.raises(DataError, match=r"manifest\.json has more than the 1000 bytes that such a file may have"):
        ShardFolder(server.address, cache=cache)
    with pytest.raises(DataError, match="more than the 1000 bytes"):
        ShardFolder(f"file://{server.folder}", cache=cache)


@pytest.mark.parametrize(
    ("slowly", "words"),
    [
        ({"head": 60.0}, "nothing came for 0.3 s"),
        ({"body": 60.0}, "nothing came for 0.3 s"),
        ({"byte": 0.02}, ".* bytes in . s are too few to wait for"),
    ],
)
def test_a_server_that_keeps_one_waiting_is_given_up(server, cache, monkeypatch, pauses, slowly, words):
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.3)
    server.pauses = slowly
    with pytest.raises(DataError, match=rf"manifest.json cannot be fetched \({words}\)") as caught:
        ShardFolder(server.address, cache=cache)
    assert server.requests["manifest.json"] == 2 and pauses == [1.0]
    assert "\n" not in str(caught.value)


def test_secrets_of_addresses_are_in_no_message(server, cache, caplog):
    """And they reach the server: in the header of a password, behind the file's name as parameters."""
    address = server.address.replace("//", "//user:s3cr3t@") + "/?token=s3cr3t"
    source = ShardFolder(address, cache=cache)
    assert len(source.document(0)) and source.vocabulary.size
    assert server.queries == {"token=s3cr3t"} and all(given.startswith("Basic ") for given in server.credentials)
    shown = [repr(source), str(source.path), caplog.text]
    assert str(source.path) == server.address.replace("//", "//***@") + "/?token=***"
    name = source.manifest.shards[-1].name
    server.faults[name] = [flipped, unavailable, flipped]
    last = source.num_samples - 1
    with pytest.raises(DataError) as caught:
        source.document(last)
    shown += [str(caught.value), caplog.text]
    (server.folder / name).unlink()
    with pytest.raises(BadShard) as caught:
        source.document(last)
    shown.append(str(caught.value))
    with pytest.raises(DataError) as caught:
        ShardFolder(address.replace("/shards/", "/nowhere/"), cache=cache)
    shown.append(str(caught.value))
    for bad in (
        "zz://user:s3cr3t@host/x",
        "http::s3cr3t",
        "http://u:s3cr3t@h/a::file://x",
        "http://u:s3cr3t@127.0.0.1:9",
    ):
        with pytest.raises(DataError) as caught:
            ShardFolder(bad, cache=cache)
        shown.append(str(caught.value) if "@" in bad else "")
    assert "s3cr3t" not in "".join(shown) and "***" in "".join(shown)


# --------------------------------------------------------------------------------------------- what the cache believes


def with_ids_exchanged(path: Path) -> bytes:
    """A tokenizer.json in which two words have each other's ids."""
    content = json.loads(path.read_text())
    ids = content["model"]["vocab"]
    ids["the"], ids["of"] = ids["of"], ids["the"]
    return json.dumps(content).encode()


def test_a_bad_tokenizer_does_not_enter_the_cache(server, cache):
    poisoned = json.dumps({"auto_map": {"AutoTokenizer": ["x.X", "x.X"]}, "tokenizer_class": "X"}).encode()
    other = with_ids_exchanged(server.folder / "tokenizer" / "tokenizer.json")
    for name, content, words in (
        ("tokenizer_config.json", poisoned, "code of its own"),
        ("tokenizer.json", other, "its fingerprint is"),
        ("tokenizer.json", b"<html>", "it cannot be read"),
    ):
        server.faults[f"tokenizer/{name}"] = [lambda _, content=content: content]
        with pytest.raises(DataError, match=f"is not the one that its manifest names .*{words}") as caught:
            ShardFolder(server.address, cache=cache).vocabulary  # noqa: B018
        assert "\n" not in str(caught.value)
        assert not list((cache.folder / "tokenizers").iterdir())
    # The server fixed, all is well.
    assert ShardFolder(server.address, cache=cache).vocabulary.size


def test_a_cached_tokenizer_that_has_changed_is_fetched_again(server, cache):
    size = ShardFolder(server.address, cache=cache).vocabulary.size
    (path,) = cache.folder.glob("tokenizers/*/tokenizer.json")
    path.write_bytes(with_ids_exchanged(path))
    assert ShardFolder(server.address, cache=cache).vocabulary.size == size
    assert server.requests["tokenizer/tokenizer.json"] == 2


@pytest.mark.parametrize("kept", ["nothing", "mtime"])
def test_a_cached_shard_that_has_changed_is_fetched_again(folder, server, cache, caplog, kept):
    first = ShardFolder(server.address, cache=cache)
    expected = ShardFolder(folder).document(0).tolist()
    assert first.document(0).tolist() == expected
    (path,) = (cache.folder / "shards").iterdir()
    before = path.stat()
    path.write_bytes(flipped(path.read_bytes()))
    if kept == "mtime":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ShardFolder(server.address, cache=cache).document(0).tolist() == expected
    assert server.requests[first.manifest.shards[0].name] == 2 and "damaged: its sha256" in caplog.text


def test_a_cached_shard_without_a_mark_is_hashed_and_kept(server, cache):
    source = ShardFolder(server.address, cache=cache)
    source.document(0)
    for mark in (cache.folder / "verified").iterdir():
        mark.write_bytes(b"\xff\n")
    ShardFolder(server.address, cache=cache).document(0)
    assert server.requests[source.manifest.shards[0].name] == 1


# ---------------------------------------------------------------------------------------------------------- the bound


def largest(folder: Path) -> int:
    return max(shard.bytes for shard in ShardFolder(folder).manifest.shards)


def starts_of(source: ShardFolder) -> np.ndarray:
    """The first sample of each shard."""
    return np.cumsum([0, *(shard.samples for shard in source.manifest.shards[:-1])])


def test_the_cache_keeps_its_bound_and_what_was_used_last(folder, server, tmp_path):
    limit = 3 * largest(folder)
    cache = Cache.at(tmp_path / "cache", limit / GIB)
    source = ShardFolder(server.address, cache=cache)
    starts = starts_of(source).tolist()
    first = source.document(0)
    held = first.tolist()
    for number, start in enumerate(starts[1:], start=1):
        source.document(start)
        # Opened anew at each step, the first shard is never the one that was used longest ago.
        ShardFolder(server.address, cache=cache).document(0)
        assert cached_bytes(cache) <= limit
        assert cache.holds(source.manifest.shards[number].sha256)
    assert server.requests[source.manifest.shards[0].name] == 1
    assert not cache.holds(source.manifest.shards[1].sha256)
    still = mapped(cache.folder)
    assert 0 < len(still) <= 3 and not any("(deleted)" in path for path in still), "evicted shards are let go of"

    other = Cache.at(tmp_path / "cache", largest(folder) / GIB)
    ShardFolder(server.address, cache=other).document(starts[1])
    assert not cache.holds(source.manifest.shards[0].sha256)
    assert first.tolist() == held, "a shard in use stays readable after its eviction"


@pytest.mark.processes
def test_batches_through_a_cache_of_one_shard(folder, server, tmp_path):
    cache = Cache.at(tmp_path / "cache", largest(folder) / GIB)
    source = ShardFolder(server.address, cache=cache)
    expected = global_batches(6, ShardFolder(folder))
    assert global_batches(6, source, world_size=2, num_workers=1) == expected
    assert cached_bytes(cache) <= largest(folder)
    assert sum(server.requests.values()) > len(source.manifest.shards), "shards were evicted and fetched again"


def test_a_shard_larger_than_the_cache(folder, server, tmp_path):
    cache = Cache.at(tmp_path / "cache", 2000 / GIB)
    with pytest.raises(DataError, match=r"does not fit .* raise data\.cache_gib"):
        ShardFolder(server.address, cache=cache).document(0)


def read_all(address: str, cache: Cache, seed: int, results: multiprocessing.Queue) -> None:
    source = ShardFolder(address, cache=cache)
    order = np.random.default_rng(seed).permutation(source.num_samples)
    results.put(sum(int(ids.sum()) for ids in source.documents(order)))


@pytest.mark.processes
@pytest.mark.parametrize(("num_shards", "once"), [(2, False), (100, True)])
def test_processes_share_a_cache(folder, server, tmp_path, num_shards, once):
    """In a cache of two shards four processes evict each other all the time; in a large one all fetch each once."""
    cache = Cache.at(tmp_path / "cache", num_shards * largest(folder) / GIB)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    readers = [context.Process(target=read_all, args=(server.address, cache, seed, results)) for seed in range(4)]
    for reader in readers:
        reader.start()
    local = ShardFolder(folder)
    expected = sum(int(ids.sum()) for ids in local.documents(range(local.num_samples)))
    assert [results.get(timeout=60) for _ in readers] == [expected] * 4
    for reader in readers:
        reader.join()
        assert reader.exitcode == 0
    assert cached_bytes(cache) <= num_shards * largest(folder)
    assert not list((cache.folder / "shards").glob("*.tmp"))
    assert ({server.requests[shard.name] for shard in local.manifest.shards} == {1}) == once


def test_what_a_killed_process_left_makes_room(folder, server, tmp_path, monkeypatch):
    cache = Cache.at(tmp_path / "cache", largest(folder) / GIB)
    source = ShardFolder(server.address, cache=cache)
    first, second = source.manifest.shards[:2]
    left = cache.folder / "shards" / f"{second.sha256}-{second.bytes}.tmp"
    left.write_bytes(b"half of it")
    assert len(source.document(0))
    assert not left.exists()
    # One that is alive is waited for: until its lock is let go, its bytes are not to be had.
    (cache.folder / "shards" / f"{first.sha256}.tar").unlink()
    left.write_bytes(b"half of it")
    waited_for: list[str] = []
    flock = fcntl.flock
    with (cache.folder / "locks" / second.sha256[:2]).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def locked(file: IO[str], operation: int) -> None:
            if file.name == lock.name and operation == fcntl.LOCK_EX:
                assert left.exists() and not cache.holds(first.sha256)
                waited_for.append(Path(file.name).name)
                flock(lock, fcntl.LOCK_UN)
            flock(file, operation)

        monkeypatch.setattr(fcntl, "flock", locked)
        assert len(ShardFolder(server.address, cache=cache).document(0))
    assert waited_for == [second.sha256[:2]] != [first.sha256[:2]]
    assert cache.holds(first.sha256) and not left.exists()


# --------------------------------------------------------------------------------------------------- local verification


def test_a_local_shard_is_hashed_once_a_machine(copy, cache, monkeypatch):
    hashed: list[str] = []
    what_is_wrong = reading.what_is_wrong

    def noted(file: IO[bytes], *, sha256: str, size: int) -> str:
        hashed.append(sha256)
        return what_is_wrong(file, sha256=sha256, size=size)

    monkeypatch.setattr(reading, "what_is_wrong", noted)
    shards = ShardFolder(copy).manifest.shards
    for _ in range(2):
        source = ShardFolder(copy, cache=cache)
        source.documents(range(source.num_samples))
    assert hashed == [shard.sha256 for shard in shards]
    ShardFolder(copy).document(0)  # without a cache, once a process
    ShardFolder(copy, verify="size").document(0)
    assert hashed == [shard.sha256 for shard in (*shards, shards[0])]
    # Other bytes of the same size and another time: the mark no longer holds.
    path = copy / shards[0].name
    path.write_bytes(flipped(path.read_bytes()))
    os.utime(path, ns=(0, 12345))
    with pytest.raises(BadShard, match="sha256"):
        ShardFolder(copy, cache=cache).document(0)


def test_processes_that_come_at_the_same_time_hash_a_shard_once(copy, cache, monkeypatch):
    """All ranks and loader processes open the same shards at about the same time."""
    hashed: list[str] = []
    what_is_wrong, is_marked = reading.what_is_wrong, Cache.is_marked
    come, looked = threading.Barrier(3), threading.local()

    def noted(file: IO[bytes], *, sha256: str, size: int) -> str:
        hashed.append(sha256)
        return what_is_wrong(file, sha256=sha256, size=size)

    def all_at_once(self: Cache, marks: Path, mark: str) -> bool:
        found = is_marked(self, marks, mark)
        if not hasattr(looked, "first"):
            looked.first = found
            come.wait(60)
        return found

    monkeypatch.setattr(reading, "what_is_wrong", noted)
    monkeypatch.setattr(Cache, "is_marked", all_at_once)
    texts: list[list[int]] = []
    readers = [
        threading.Thread(target=lambda: texts.append(ShardFolder(copy, cache=cache).document(0).tolist()))
        for _ in range(3)
    ]
    for one in readers:
        one.start()
    for one in readers:
        one.join()
    assert texts == [ShardFolder(copy).document(0).tolist()] * 3
    first = ShardFolder(copy).manifest.shards[0].sha256
    assert hashed == [first] * 2, "once with the cache, and once by the folder without one"


def test_a_cache_without_locks_still_serves_local_folders(copy, cache, monkeypatch):
    def unsupported(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert len(ShardFolder(copy, cache=cache).document(0))


def test_marks_that_cannot_be_read_name_the_cache(copy, cache):
    """The shard is sound, so a message about it would mislead."""
    source = ShardFolder(copy, cache=cache)
    cache.marks(copy, source.fingerprint).mkdir()
    with pytest.raises(DataError, match=r"the cache .* cannot be used .*data\.cache_dir"):
        source.document(0)


def test_a_torn_mark_counts_for_nothing(copy, cache):
    source = ShardFolder(copy, cache=cache)
    source.document(0)
    marks = cache.marks(copy, source.fingerprint)
    (mark,) = filter(None, marks.read_text().split("\n"))
    marks.write_text(f"\n{mark[:-2]}")
    ShardFolder(copy, cache=cache).document(0)
    assert marks.read_text().split("\n")[-2:] == [mark, ""]


# ---------------------------------------------------------------------------------------------------------- skipped


def bad_copy(copy: Path) -> list[int]:
    """Four ways to be bad, two of them in neighbours; returns the shards' numbers."""
    shards = ShardFolder(copy).manifest.shards
    numbers = [1, 3, 4, len(shards) - 1]
    paths = [copy / shards[number].name for number in numbers]
    paths[0].write_bytes(flipped(paths[0].read_bytes()))
    paths[1].unlink()
    paths[2].write_bytes(halved(paths[2].read_bytes()))
    paths[3].write_bytes(b"")
    return numbers


def naive_replacement(source: ShardFolder, bad: list[int], index: int) -> int:
    """Walk the manifest sample by sample."""
    sizes = [shard.samples for shard in source.manifest.shards]
    shard, row = 0, index
    while row >= sizes[shard]:
        row -= sizes[shard]
        shard += 1
    while shard in bad:
        shard = (shard + 1) % len(sizes)
    return sum(sizes[:shard]) + (row % sizes[shard])


@pytest.mark.processes
@pytest.mark.parametrize("over", ["disk", "http"])
def test_skipped_shards_leave_every_rank_in_step(folder, copy, server, cache, caplog, over):
    sound = ShardFolder(folder)
    undisturbed = [sample for batch in global_batches(26, sound) for sample in batch]
    bad = bad_copy(copy)
    place = copy if over == "disk" else server.address
    with pytest.raises(BadShard):
        global_batches(26, ShardFolder(place, cache=cache))

    def open_folder() -> ShardFolder:
        return ShardFolder(place, bad_shards="skip", cache=cache)

    batches = global_batches(26, open_folder())
    read = [sample for batch in batches for sample in batch]
    replacements = [naive_replacement(sound, bad, index) for index, *_ in undisturbed]
    assert [sample[0] for sample in read] == replacements != [sample[0] for sample in undisturbed]
    assert [sample[3] for sample in read] == [sound.document(index).tolist() for index in replacements]
    assert [sample[1:3] for sample in read] == [sample[1:3] for sample in undisturbed]
    for world_size, num_workers, first in ((2, 0, 0), (3, 1, 0), (1, 2, 9), (4, 0, 11)):
        resumed = global_batches(26 - first, open_folder(), world_size=world_size, num_workers=num_workers, first=first)
        assert resumed == batches[first:]
    for number in bad:
        entry = sound.manifest.shards[number]
        assert f"{place}/{entry.name}" in caplog.text and f"its {entry.samples} samples of 300" in caplog.text


@pytest.mark.processes
def test_replacements_are_counted_where_they_are_delivered(copy):
    bad_copy(copy)
    source = ShardFolder(copy, bad_shards="skip")
    places = np.arange(source.num_samples)
    expected = int((source.with_replacements(places) != places).sum())
    assert 0 < expected < source.num_samples
    ranks = [
        Stream([source], collate=as_list, seed=5, global_batch_size=60, rank=r, world_size=2, num_workers=r)
        for r in range(2)
    ]
    for one in ranks:
        for _ in range(5):
            next(one)
        one.close()
    assert sum(one.replacements for one in ranks) == expected


def test_when_all_shards_are_bad(copy):
    for path in copy.glob("*.tar"):
        path.unlink()
    with pytest.raises(DataError, match=r"all .* shards of .* are bad"):
        ShardFolder(copy, bad_shards="skip").document(0)


def test_a_look_at_the_data_touches_few_shards(folder, monkeypatch):
    source = ShardFolder(folder)
    monkeypatch.setattr("data.shards.reader.LOOKED_AT_SHARDS", 1000)
    even = np.unique(np.linspace(0, source.num_samples - 1, 50).astype(np.int64))
    assert source.spread(50).tolist() == even.tolist(), "where all shards are looked at, even steps over all samples"
    monkeypatch.setattr("data.shards.reader.LOOKED_AT_SHARDS", 3)
    looked_at = source.spread(40)
    shards = np.searchsorted(starts_of(source), looked_at, side="right") - 1
    last = len(source.manifest.shards) - 1
    assert set(shards.tolist()) == {0, last // 2, last}
    held = sum(source.manifest.shards[shard].samples for shard in (0, last // 2, last))
    assert len(looked_at) == len(set(looked_at.tolist())) == min(40, held)


def test_a_password_that_a_variable_holds(server, tmp_path, monkeypatch):
    """It is sent to the server, and is in nothing that the folder says of itself."""
    address = server.address.replace("://", "://user:${BARISTA_PASSWORD}@")
    cache = Cache.at(tmp_path / "cache", GIB)
    with pytest.raises(DataError, match="BARISTA_PASSWORD, which is not set here"):
        ShardFolder(address, cache=cache)
    monkeypatch.setenv("BARISTA_PASSWORD", "s3cr3t/@")
    source = ShardFolder(address, cache=cache)
    assert server.authorisations == {"Basic " + base64.b64encode(b"user:s3cr3t/@").decode()}
    assert "s3cr3t" not in str(source.path)
