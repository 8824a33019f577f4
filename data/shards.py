"""Tokenized shards on disk: the format, a writer that survives being killed, a reader that seeks and verifies.

    <folder>/shard-00042-003.tar      unit 42 (one source file or row range), its 4th shard
                 00042-000917.tok.npy     uint16|uint32 [tokens]   ids of about 1,024 samples, no special tokens, uncut
                 00042-000917.off.npy     uint32 [samples + 1]     where each sample starts
    <folder>/units/00042.json         receipt of a finished unit
    <folder>/tokenizer/               the tokenizer that made the ids, so that the folder is self-contained
    <folder>/manifest.json            written last: shards, their sha256, byte offsets of every member, totals

A folder is read from a disk, or from elsewhere through a cache (data/remote.py).

Kind "documents" has the columns tok and off. Kind "tuples" has q.tok, q.off (queries), d.tok, d.off (all passages of
all queries, concatenated), grp (uint32 [samples + 1]: each query's range of passages), pos (uint16 [samples]: how many
of a query's passages are positives; they come first) and, for graded pairs only, score (float32 [samples]).

Why so: every shard is a valid WebDataset tar of .npy members (no pickle, dtype and shape inside), but many samples
share a member, because a tar header and an npy header on one document's few hundred bytes more than double it. Payloads
are 512-aligned, so the reader hands out views of an mmap, and with the manifest's offsets it never reads forward.
A unit is written by one process under temporary names, then fsync, rename, and a receipt, also by rename: a killed unit
is written again from its start, byte for byte the same (fixed mtime, owner and order), and a finished one is skipped.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import logging
import mmap
import os
import shutil
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from pathlib import Path
from tarfile import BLOCKSIZE, LENGTH_NAME, NUL, RECORDSIZE, USTAR_FORMAT, TarInfo
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pydantic

from data.errors import DataError, OtherFormat
from data.files import open_regular, read_bytes, reading, sync, write_atomically
from data.records import Record, parse_record, read_record
from data.remote import MANIFEST_BYTES, BadShard, Cache, is_remote, joined, what_is_wrong, what_it_is
from data.remote import read_bytes as read_remote_bytes
from data.secrets import without_secrets
from data.tokens import LARGEST_ID, Vocabulary, load_tokenizer, save_tokenizer, tokenizer_fingerprint, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
COLUMNS = {"documents": ("tok", "off"), "tuples": ("q.tok", "q.off", "d.tok", "d.off", "grp", "pos")}
GRADED_COLUMNS = (*COLUMNS["tuples"], "score")
SHARD_BYTES = 128 * 2**20
CHUNK_SAMPLES = 1024
# A chunk also ends here, so that a unit of whole books neither fills memory nor overflows uint32 offsets.
CHUNK_TOKENS = 2**23
MAX_POSITIVES = 2**16 - 1
# Each open mmap holds a file descriptor; a shuffle group of 16 shards fits several times over.
MAX_OPEN_SHARDS = 128
LOOKED_AT_SHARDS = 16
_RESTORE = "restore the file, or delete it and run the same prepare command again"

Kind = Literal["documents", "tuples"]
Verify = Literal["first_read", "size"]
# Sums of them stay below what 64 bits hold.
Offset = Annotated[int, pydantic.Field(ge=0, lt=2**60)]
Count = Annotated[int, pydantic.Field(ge=1, lt=2**60)]
# A manifest from elsewhere must not make us read outside its folder.
ShardName = Annotated[str, pydantic.Field(pattern=r"^[\w.-]+\.tar$", max_length=255)]
Sha256 = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
BadShards = Literal["refuse", "skip"]


# A chunk's columns and a row within them.
Row = tuple[dict[str, np.ndarray], int]


class Tuple(NamedTuple):
    """One sample of kind "tuples": the first `num_positives` passages are the positives."""

    query: np.ndarray  # ids
    passages: list[np.ndarray]
    num_positives: int
    score: float | None


@dataclass(frozen=True)
class Chunk:
    """Samples that share members; `members` maps a column to (offset, length) of its .npy file within the shard."""

    key: str
    samples: Count
    members: dict[str, tuple[Offset, Count]]


@dataclass(frozen=True)
class Shard:
    name: ShardName
    sha256: Sha256
    bytes: Count
    samples: Count
    tokens: Count
    chunks: tuple[Chunk, ...]
    source: str


@dataclass(frozen=True)
class UnitReceipt:
    """What a finished unit tells the manifest; `settings` is whatever decided its content."""

    unit: int
    kind: str
    columns: tuple[str, ...]
    vocabulary_size: int
    settings: dict[str, Any]
    shards: tuple[Shard, ...]

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    kind: str
    columns: tuple[str, ...]
    tokenizer: dict[str, Any]  # {"fingerprint", "vocab_size", "name"}
    shards: tuple[Shard, ...]
    fingerprint: str  # sha256 of manifest.json itself: the identity of the data, kept in every checkpoint

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


class _TokenizerEntry(Record):
    fingerprint: Sha256
    vocab_size: Annotated[int, pydantic.Field(ge=1, le=LARGEST_ID + 1)]
    name: str


class _ManifestFile(Record):
    """manifest.json."""

    format: Literal[1]
    kind: Literal["documents", "tuples"]
    columns: tuple[str, ...]
    tokenizer: _TokenizerEntry
    shards: tuple[Shard, ...]


class _ReceiptFile(Record):
    """units/NNNNN.json."""

    format: Literal[1]
    unit: Offset
    kind: Literal["documents", "tuples"]
    columns: tuple[str, ...]
    vocabulary_size: Annotated[int, pydantic.Field(ge=1, le=LARGEST_ID + 1)]
    settings: dict[str, Any]
    shards: tuple[Shard, ...]


# ---------------------------------------------------------------------------------------------------------- writing


class UnitWriter:
    """Writes the shards of one unit; use as a context manager, or call `close()` (keep) or `abort()` (drop).

    `settings` (JSON values) says what decides the unit's content: source, row range, tokenizer fingerprint, seed.
    A later run with other settings is refused instead of mixing two data sets in one folder.
    """

    def __init__(
        self,
        folder: str | Path,
        unit: int,
        *,
        kind: Kind,
        vocabulary_size: int,
        graded: bool = False,
        source: str = "",
        settings: Mapping[str, Any] | None = None,
        shard_bytes: int = SHARD_BYTES,
        chunk_samples: int = CHUNK_SAMPLES,
    ) -> None:
        if kind not in COLUMNS:
            raise DataError(f"kind {kind!r} of shards is unknown; use one of {', '.join(COLUMNS)}")
        if graded and kind != "tuples":
            raise DataError("only shards of kind tuples can be graded; drop the scores or write tuples")
        if shard_bytes < RECORDSIZE or chunk_samples < 1:
            raise DataError(
                f"shards of {shard_bytes} bytes with chunks of {chunk_samples} samples are too small; "
                f"use at least {RECORDSIZE} bytes and one sample"
            )
        self.folder = Path(folder)
        self.unit = unit
        self.kind = kind
        self.columns = GRADED_COLUMNS if graded else COLUMNS[kind]
        self.vocabulary_size = vocabulary_size
        self.source = source
        self.settings = _plain(settings)
        self.shard_bytes = shard_bytes
        self.chunk_samples = chunk_samples
        self._token_dtype = token_dtype(vocabulary_size)
        self._shards: list[Shard] = []
        self._tar: _TarFile | None = None
        self._chunks: list[Chunk] = []
        self._num_chunks = 0
        self._num_samples = 0
        self._shard_tokens = 0
        self._texts: list[np.ndarray] = []  # documents, or queries
        self._passages: list[np.ndarray] = []
        self._group_sizes: list[int] = []
        self._positives: list[int] = []
        self._scores: list[float] = []
        self._pending_tokens = 0
        try:
            (self.folder / "units").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"folder {folder} cannot be made ({error.strerror}); choose a writable folder") from error
        path = _receipt_path(self.folder, unit)
        # The same unit of a finished folder may be written again: that mends a lost shard, byte for byte.
        if (self.folder / MANIFEST).exists() and not (path.exists() and _read_receipt(path).settings == self.settings):
            raise DataError(f"folder {folder} already holds finished shards; choose an empty folder or delete it first")
        self._remove_leftovers()

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document's ids, without special tokens, uncut."""
        if self.kind != "documents":
            raise DataError(f"shards of kind {self.kind} in {self.folder} take tuples, not documents")
        self._texts.append(self._ids(ids, "document"))
        self._end_sample(len(self._texts[-1]))

    def add_tuple(
        self,
        query: Sequence[int] | np.ndarray,
        passages: Sequence[Sequence[int] | np.ndarray],
        *,
        num_positives: int = 1,
        score: float | None = None,
    ) -> None:
        """Append a query and its passages, positives first; all ids without special tokens, uncut."""
        if self.kind != "tuples":
            raise DataError(f"shards of kind {self.kind} in {self.folder} take documents, not tuples")
        if not 1 <= num_positives <= min(len(passages), MAX_POSITIVES):
            raise DataError(
                f"{self._here()} has {num_positives} positives of {len(passages)} passages; "
                f"give each query between one positive and {MAX_POSITIVES}, or drop it"
            )
        if (score is not None) != ("score" in self.columns):
            raise DataError(f"{self._here()} {'lacks a' if score is None else 'has a'} score unlike the other samples")
        if score is not None and not isfinite(score):
            raise DataError(f"{self._here()} has the score {score}; give a finite number or drop it")
        ids = self._ids(query, "query")
        passage_ids = [self._ids(passage, "passage") for passage in passages]
        self._texts.append(ids)
        self._passages.extend(passage_ids)
        self._group_sizes.append(len(passages))
        self._positives.append(num_positives)
        if score is not None:
            self._scores.append(score)
        self._end_sample(len(ids) + sum(map(len, passage_ids)))

    def close(self) -> UnitReceipt:
        """Make the last shard durable and write the receipt; from then on the unit counts as finished."""
        try:
            self._flush_chunk()
            self._finish_shard()
        except BaseException:
            self.abort()
            raise
        receipt = UnitReceipt(
            self.unit, self.kind, self.columns, self.vocabulary_size, self.settings, tuple(self._shards)
        )
        _write_atomically(_receipt_path(self.folder, self.unit), _json_bytes({"format": FORMAT, **asdict(receipt)}))
        return receipt

    def abort(self) -> None:
        """Drop the unit and whatever is written of it."""
        if self._tar is not None:
            # On a full disk, what is still buffered cannot be written here either, and is not wanted.
            with suppress(OSError):
                self._tar.file.close()
            self._tar = None
        self._remove_leftovers()

    def __enter__(self) -> UnitWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _here(self) -> str:
        return f"sample {self._num_samples} of unit {self.unit}" + (f" ({self.source})" if self.source else "")

    def _ids(self, ids: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
        try:
            array = np.asarray(ids, dtype=np.uint32)
        except OverflowError as error:
            raise DataError(f"the {what} in {self._here()} holds a negative id; check the tokenizer") from error
        if array.ndim != 1 or not len(array):
            raise DataError(f"the {what} in {self._here()} has no tokens; drop empty texts before writing")
        return array

    def _end_sample(self, num_tokens: int) -> None:
        self._num_samples += 1
        self._pending_tokens += num_tokens
        if len(self._texts) >= self.chunk_samples or self._pending_tokens >= CHUNK_TOKENS:
            self._flush_chunk()

    def _flush_chunk(self) -> None:
        if not self._texts:
            return
        prefix = "q." if self.kind == "tuples" else ""
        columns = {
            f"{prefix}tok": self._concatenated(self._texts),
            f"{prefix}off": _offsets([len(text) for text in self._texts]),
        }
        if self.kind == "tuples":
            columns["d.tok"] = self._concatenated(self._passages)
            columns["d.off"] = _offsets([len(passage) for passage in self._passages])
            columns["grp"] = _offsets(self._group_sizes)
            columns["pos"] = np.asarray(self._positives, dtype="<u2")
            if "score" in self.columns:
                columns["score"] = np.asarray(self._scores, dtype="<f4")
        payloads = {column: npy_bytes(columns[column]) for column in self.columns}

        size = sum(_TarFile.size_of(payload) for payload in payloads.values())
        if self._tar is not None and self._tar.bytes + size + RECORDSIZE > self.shard_bytes:
            self._finish_shard()
        if self._tar is None:
            name = f"shard-{self.unit:05d}-{len(self._shards):03d}.tar"
            self._tar = _TarFile(self.folder / f"{name}.tmp")
        key = f"{self.unit:05d}-{self._num_chunks:06d}"
        members = {column: self._tar.add(f"{key}.{column}.npy", payload) for column, payload in payloads.items()}
        self._chunks.append(Chunk(key, len(self._texts), members))
        self._num_chunks += 1
        self._shard_tokens += self._pending_tokens
        self._pending_tokens = 0
        for pending in (self._texts, self._passages, self._group_sizes, self._positives, self._scores):
            pending.clear()

    def _concatenated(self, texts: list[np.ndarray]) -> np.ndarray:
        ids = np.concatenate(texts)
        if int(ids.max()) >= self.vocabulary_size:
            raise DataError(
                f"unit {self.unit}{f' ({self.source})' if self.source else ''} holds id {int(ids.max())}, but the "
                f"vocabulary has {self.vocabulary_size} tokens; tokenize with the tokenizer that the folder names"
            )
        return ids.astype(self._token_dtype)

    def _finish_shard(self) -> None:
        if self._tar is None:
            return
        temporary = self._tar.path
        size, digest = self._tar.close()
        final = temporary.with_suffix("")
        temporary.replace(final)
        sync(self.folder)
        samples = sum(chunk.samples for chunk in self._chunks)
        chunks = tuple(self._chunks)
        self._shards.append(Shard(final.name, digest, size, samples, self._shard_tokens, chunks, self.source))
        self._tar = None
        self._chunks = []
        self._shard_tokens = 0

    def _remove_leftovers(self) -> None:
        _receipt_path(self.folder, self.unit).unlink(missing_ok=True)
        for path in self.folder.glob(f"shard-{self.unit:05d}-*.tar*"):
            path.unlink()


def finished_unit(folder: str | Path, unit: int, *, settings: Mapping[str, Any] | None = None) -> UnitReceipt | None:
    """The receipt of a unit that is already whole, or None if it must be written, as where its receipt is damaged.

    A receipt made with other settings is refused: the folder belongs to another data set.
    """
    path = _receipt_path(Path(folder), unit)
    if not path.exists():
        return None
    try:
        receipt = _read_receipt(path)
    except OtherFormat:
        raise
    except DataError as error:
        logger.warning("unit %d is written again: %s", unit, error)
        return None
    if receipt.settings != _plain(settings):
        differing = sorted(
            key
            for key in {*receipt.settings, *_plain(settings)}
            if receipt.settings.get(key) != _plain(settings).get(key)
        )
        raise DataError(
            f"folder {folder} holds unit {unit} made with another {', '.join(differing)}; "
            "choose an empty folder or delete this one"
        )
    whole = all(_size_of(Path(folder) / shard.name) == shard.bytes for shard in receipt.shards)
    return receipt if whole else None


def finish_folder(
    folder: str | Path, units: int | Iterable[int], *, tokenizer: PreTrainedTokenizerFast, name: str = ""
) -> Manifest:
    """Assemble manifest.json from the receipts of `units` (a count, or their numbers), in unit order.

    `name` is how the user called the tokenizer. Doing it twice gives the same bytes.
    """
    folder = Path(folder)
    numbers = sorted(range(units) if isinstance(units, int) else set(units))
    missing = [number for number in numbers if not _receipt_path(folder, number).exists()]
    if missing:
        raise DataError(
            f"folder {folder} lacks {len(missing)} of {len(numbers)} units, unit {missing[0]} first; "
            "run the same prepare command again to finish it"
        )
    receipts = [_read_receipt(_receipt_path(folder, number)) for number in numbers]
    shards = [shard for receipt in receipts for shard in receipt.shards]
    if not shards:
        raise DataError(f"folder {folder} would hold no samples; check that the sources have texts that are not empty")
    if len({(receipt.kind, receipt.columns, receipt.vocabulary_size) for receipt in receipts}) > 1:
        raise DataError(f"folder {folder} mixes units of different kinds; choose an empty folder")
    if receipts[0].vocabulary_size != (size := vocabulary_of(tokenizer).size):
        raise DataError(
            f"the units in {folder} were written for a vocabulary of {receipts[0].vocabulary_size} tokens, but the "
            f"tokenizer has {size}; finish the folder with the tokenizer that made it"
        )
    for shard in shards:
        _check_size(folder / shard.name, shard)
    strangers = {path.name for path in folder.glob("shard-*.tar")} - {shard.name for shard in shards}
    if strangers:
        raise DataError(
            f"folder {folder} holds {min(strangers)}, which is none of the {len(numbers)} units of this command; "
            "choose an empty folder or delete this one"
        )

    _save_tokenizer(folder / "tokenizer", tokenizer)
    content = {
        "format": FORMAT,
        "kind": receipts[0].kind,
        "columns": receipts[0].columns,
        "tokenizer": {"fingerprint": tokenizer_fingerprint(tokenizer), "vocab_size": size, "name": name},
        "totals": {
            "shards": len(shards),
            "bytes": sum(shard.bytes for shard in shards),
            "samples": sum(shard.samples for shard in shards),
            "tokens": sum(shard.tokens for shard in shards),
        },
        "shards": [asdict(shard) for shard in shards],
    }
    _write_atomically(folder / MANIFEST, _json_bytes(content))
    for stale in (*folder.glob("*.tmp"), *(folder / "units").glob("*.tmp")):
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    return read_manifest(folder)


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The narrowest type that holds every id; ids run from 0 to vocabulary_size - 1."""
    return np.dtype("<u2") if vocabulary_size <= 2**16 else np.dtype("<u4")


def npy_bytes(array: np.ndarray) -> bytes:
    """The .npy file of an array; its data starts at a multiple of 64 bytes."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


class _TarFile:
    """A USTAR file whose bytes depend on its members only, and whose member offsets are known as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO = path.open("wb")
        self.bytes = 0
        self._sha256 = hashlib.sha256()

    def add(self, name: str, payload: bytes) -> tuple[int, int]:
        """Append a member; returns (offset, length) of its payload."""
        info = TarInfo(name)
        info.size = len(payload)
        info.mode = 0o444
        self._write(info.tobuf(USTAR_FORMAT))
        offset = self.bytes
        self._write(payload)
        self._write(NUL * (-len(payload) % BLOCKSIZE))
        return offset, len(payload)

    def close(self) -> tuple[int, str]:
        """End the archive and make it durable; returns (bytes, sha256)."""
        self._write(NUL * (2 * BLOCKSIZE))
        self._write(NUL * (-self.bytes % RECORDSIZE))
        with _naming_the_file(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
        return self.bytes, self._sha256.hexdigest()

    @staticmethod
    def size_of(payload: bytes) -> int:
        return BLOCKSIZE + len(payload) + -len(payload) % BLOCKSIZE

    def _write(self, content: bytes) -> None:
        with _naming_the_file(self.path):
            self.file.write(content)
        self._sha256.update(content)
        self.bytes += len(content)


@contextmanager
def _naming_the_file(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"file {path} cannot be written ({error.strerror}); free space or choose another folder"
        ) from error


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, dtype="<u4")
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _receipt_path(folder: Path, unit: int) -> Path:
    return folder / "units" / f"{unit:05d}.json"


def _read_receipt(path: Path) -> UnitReceipt:
    found = read_record(path, _ReceiptFile, what="receipt", mend="delete it and run the prepare command again")
    return UnitReceipt(found.unit, found.kind, found.columns, found.vocabulary_size, found.settings, found.shards)


def _plain(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings as they come back from JSON, so that tuples equal lists."""
    return json.loads(json.dumps(dict(settings or {})))


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def _write_atomically(path: Path, content: bytes) -> None:
    with _naming_the_file(path):
        write_atomically(path, content)


def _save_tokenizer(target: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    save_tokenizer(tokenizer, temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.replace(target)
    sync(target.parent)


# ---------------------------------------------------------------------------------------------------------- reading


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check manifest.json, without touching the shards."""
    path = f"manifest {without_secrets(folder)}/{MANIFEST}"
    content = _remote_manifest(str(folder)) if is_remote(folder) else _local_manifest(Path(folder))
    found = parse_record(content, _ManifestFile, where=path, mend="make the folder again with python -m data.prepare")
    manifest = Manifest(
        kind=found.kind,
        columns=found.columns,
        tokenizer=found.tokenizer.model_dump(),
        shards=found.shards,
        fingerprint=hashlib.sha256(content).hexdigest(),
    )
    columns = (COLUMNS[manifest.kind], *([GRADED_COLUMNS] if manifest.kind == "tuples" else []))
    if manifest.columns not in columns:
        raise DataError(f"{path} has kind {manifest.kind!r} with unknown columns; make the shards again")
    if not manifest.shards:
        raise DataError(
            f"shard folder {without_secrets(folder)} holds no samples; make it from sources that have texts"
        )
    names: set[str] = set()
    for shard in manifest.shards:
        inside = all(
            set(chunk.members) == set(manifest.columns)
            and all(offset >= BLOCKSIZE and offset + length <= shard.bytes for offset, length in chunk.members.values())
            for chunk in shard.chunks
        )
        if not inside or shard.samples != sum(chunk.samples for chunk in shard.chunks):
            raise DataError(f"{path} contradicts itself about {shard.name}; make the shards again")
        if shard.name in names:
            raise DataError(f"{path} lists {shard.name} twice; make the shards again")
        names.add(shard.name)
    return manifest


def _local_manifest(folder: Path) -> bytes:
    path = folder / MANIFEST
    with reading(folder, what="shard folder"):
        if not folder.is_dir():
            raise DataError(f"shard folder {folder} does not exist; make it with python -m data.prepare")
        if not path.exists():
            if any(folder.glob("shard-*.tar*")) or (folder / "units").is_dir():
                raise DataError(f"shard folder {folder} is unfinished; run the same prepare command again to finish it")
            raise DataError(f"shard folder {folder} holds no {MANIFEST}; make shards with python -m data.prepare")
    return read_bytes(path, what="manifest", mend="make the folder again with python -m data.prepare")


def _remote_manifest(folder: str) -> bytes:
    try:
        return read_remote_bytes(joined(folder, MANIFEST), limit=MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise DataError(
            f"shard folder {without_secrets(folder)} holds no {MANIFEST}; copy a finished folder there"
        ) from error


class ShardFolder:
    """Random access to the samples of one folder, numbered in manifest order.

    Opening reads the manifest and checks that every shard of a local folder has its full size. `verify` "first_read"
    also hashes a shard when it is first opened: by this process, or, with a `cache`, on this machine. Remote shards are
    hashed when they enter the cache. A chunk's headers, offsets and ids are checked when it is first touched. Arrays
    are read-only views of an mmap. Pickles and forks: files are opened lazily, by each process for itself.

    A shard that is missing or damaged is refused by name. With `bad_shards` "skip" it is passed over: its samples'
    places are taken by samples of the next sound shard of the manifest (`standing_in`), so that the order remains a
    function of position, and all who see the same bad files see the same stream.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        verify: Verify = "first_read",
        bad_shards: BadShards = "refuse",
        cache: Cache | None = None,
    ) -> None:
        self._place = str(path) if is_remote(path) else Path(path)
        # How it is called: an address without its secrets.
        self.path = Path(path) if isinstance(self._place, Path) else without_secrets(path).rstrip("/")
        self.verify = verify
        self.bad_shards = bad_shards
        self.cache = cache or (Cache.at() if is_remote(path) else None)
        self.manifest = read_manifest(self._place)
        self._bad: set[int] = set()
        self._verified: set[int] = set()
        counts = [chunk.samples for shard in self.manifest.shards for chunk in shard.chunks]
        self._chunk_starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # [chunks + 1]
        chunks_per_shard = [len(shard.chunks) for shard in self.manifest.shards]
        self._shard_of_chunk = np.repeat(np.arange(len(chunks_per_shard)), chunks_per_shard)
        self._first_chunk = np.concatenate([[0], np.cumsum(chunks_per_shard, dtype=np.int64)])
        self._shard_starts = self._chunk_starts[self._first_chunk]  # [shards + 1]
        self._open_shards: OrderedDict[int, _OpenShard] = OrderedDict()
        if isinstance(self._place, Path):
            for number, shard in enumerate(self.manifest.shards):
                self._unless_bad(number, functools.partial(_check_size, self._place / shard.name, shard))

    def __len__(self) -> int:
        return self.num_samples

    def __repr__(self) -> str:
        return f"ShardFolder({str(self.path)!r}, {self.kind}, {self.num_samples} samples)"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open_shards": OrderedDict()}

    @property
    def kind(self) -> str:
        return self.manifest.kind

    @property
    def graded(self) -> bool:
        return "score" in self.manifest.columns

    @property
    def num_samples(self) -> int:
        return int(self._chunk_starts[-1])

    @property
    def num_tokens(self) -> int:
        return self.manifest.tokens

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def chunk_samples(self) -> list[list[int]]:
        """Samples of each chunk of each shard: what the order of an epoch is computed from."""
        return [[chunk.samples for chunk in shard.chunks] for shard in self.manifest.shards]

    @cached_property
    def tokenizer_path(self) -> Path:
        """The local folder of the tokenizer that made the ids."""
        if isinstance(self._place, Path):
            return self._place / "tokenizer"
        assert self.cache is not None
        return self.cache.tokenizer(self._place, self.manifest.tokenizer["fingerprint"])

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the folder's own tokenizer, which must be the one that made the ids."""
        tokenizer = load_tokenizer(self.tokenizer_path)
        self.check_tokenizer(tokenizer)
        vocabulary = vocabulary_of(tokenizer)
        if vocabulary.size != (recorded := self.manifest.tokenizer["vocab_size"]):
            raise DataError(
                f"the manifest of {self.path} records a vocabulary of {recorded} tokens, and its tokenizer has "
                f"{vocabulary.size}; make the shards again"
            )
        return vocabulary

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Refuse a tokenizer that is not the one the shards were made with."""
        if tokenizer_fingerprint(tokenizer) != self.manifest.tokenizer["fingerprint"]:
            raise DataError(
                f"tokenizer {tokenizer.name_or_path!r} is not the one the shards in {self.path} were made with; "
                f"use {self.tokenizer_path} or make the shards again"
            )

    def check(self) -> None:
        """Read everything once: hashes, headers, offsets and ids of every shard."""
        for shard in self.manifest.shards:
            with self._file(shard) as file:
                self._check_sha256(shard, file)
        for chunk in range(len(self._shard_of_chunk)):
            self._columns(chunk)

    def spread(self, count: int) -> np.ndarray:
        """Up to `count` sample numbers at even steps, of a few shards only: what a look at the data should touch."""
        chosen = np.unique(np.linspace(0, len(self.manifest.shards) - 1, LOOKED_AT_SHARDS).astype(np.int64))
        starts, sizes = self._shard_starts[chosen], np.diff(self._shard_starts)[chosen]
        ends = np.cumsum(sizes)
        places = np.unique(np.linspace(0, ends[-1] - 1, count).astype(np.int64))
        within = np.searchsorted(ends, places, side="right")
        return starts[within] + places - (ends - sizes)[within]

    def standing_in(self, indices: np.ndarray) -> np.ndarray:
        """The samples, int64 [n], that are read for `indices` [n]: these themselves, unless their shard is skipped.

        Row r of a skipped shard is replaced by row r modulo its samples of the next sound shard, counted in a circle.
        """
        if self.bad_shards == "refuse":
            return indices
        shards = np.searchsorted(self._shard_starts, indices, side="right") - 1
        read = indices.copy()
        for number in np.unique(shards).tolist():
            substitute = self._sound_shard(number)
            if substitute != number:
                chosen = shards == number
                rows = indices[chosen] - self._shard_starts[number]
                start, end = self._shard_starts[substitute : substitute + 2]
                read[chosen] = start + rows % (end - start)
        return read

    def document(self, index: int) -> np.ndarray:
        """The ids of one document, a read-only view."""
        return self.documents([index])[0]

    def documents(self, indices: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """The ids of several documents, in the order asked for."""
        if self.kind != "documents":
            raise DataError(f"shards in {self.path} hold {self.kind}, not documents; use data of the right kind")
        texts = []
        for columns, row in self._rows(indices):
            offsets = columns["off"]
            texts.append(columns["tok"][offsets[row] : offsets[row + 1]])
        return texts

    def tuple(self, index: int) -> Tuple:
        """One query with its passages, read-only views."""
        return self.tuples([index])[0]

    def tuples(self, indices: Sequence[int] | np.ndarray) -> list[Tuple]:
        """Several queries with their passages, in the order asked for."""
        if self.kind != "tuples":
            raise DataError(f"shards in {self.path} hold {self.kind}, not tuples; use data of the right kind")
        samples = []
        for columns, row in self._rows(indices):
            query_offsets, tokens = columns["q.off"], columns["d.tok"]
            query = columns["q.tok"][query_offsets[row] : query_offsets[row + 1]]
            first, last = columns["grp"][row : row + 2].tolist()
            ends = columns["d.off"][first : last + 1].tolist()
            passages = [tokens[start:end] for start, end in pairwise(ends)]
            score = float(columns["score"][row]) if "score" in columns else None
            samples.append(Tuple(query, passages, int(columns["pos"][row]), score))
        return samples

    def samples(self, indices: Sequence[int] | np.ndarray) -> list[Any]:
        """Documents or tuples, whichever the folder holds."""
        return self.documents(indices) if self.kind == "documents" else self.tuples(indices)

    def _rows(self, indices: Sequence[int] | np.ndarray) -> Iterator[Row]:
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self.num_samples):
            raise IndexError(f"sample {wanted.min()}..{wanted.max()} of {self.num_samples} in {self.path}")
        wanted = self.standing_in(wanted)
        chunks = np.searchsorted(self._chunk_starts, wanted, side="right") - 1
        rows = wanted - self._chunk_starts[chunks]
        for chunk, row in zip(chunks.tolist(), rows.tolist()):
            yield self._columns(chunk), row

    def _columns(self, chunk: int) -> dict[str, np.ndarray]:
        number = int(self._shard_of_chunk[chunk])
        return self._shard(number).columns(chunk - int(self._first_chunk[number]))

    def _shard(self, number: int) -> _OpenShard:
        shard = self._open_shards.get(number)
        if shard is None:
            shard = self._open(number)
            # Views that are still held keep their mmap alive; only our references go.
            if isinstance(self._place, str):
                self._let_go_of_evicted()
            self._open_shards[number] = shard
            if len(self._open_shards) > MAX_OPEN_SHARDS:
                self._open_shards.popitem(last=False)
        return shard

    def _open(self, number: int) -> _OpenShard:
        entry = self.manifest.shards[number]
        with reading(self._address(entry), what="shard"), self._file(entry) as file:
            if isinstance(self._place, Path):
                _check_size(self._place / entry.name, entry)
                if self.verify == "first_read" and number not in self._verified:
                    self._check_first_read(entry, file)
                    self._verified.add(number)
            vocabulary_size = self.manifest.tokenizer["vocab_size"]
            return _OpenShard(self._address(entry), entry, file, vocabulary_size=vocabulary_size)

    def _check_first_read(self, shard: Shard, file: io.BufferedReader) -> None:
        if self.cache is None:
            self._check_sha256(shard, file)
            return
        assert isinstance(self._place, Path)
        mark = f"{shard.name} {what_it_is(file)}"
        marks = self.cache.marks(self._place, self.fingerprint)
        if not self.cache.is_marked(marks, mark):
            self._check_sha256(shard, file)
            self.cache.add_mark(marks, mark)

    def _check_sha256(self, shard: Shard, file: io.BufferedReader) -> None:
        wrong = what_is_wrong(file, sha256=shard.sha256, size=shard.bytes)
        if wrong:
            raise BadShard(f"shard {self._address(shard)} is {wrong}; {_RESTORE}")

    def _address(self, shard: Shard) -> str:
        """What a shard is called in messages."""
        return f"{self.path}/{shard.name}"

    @contextmanager
    def _file(self, shard: Shard) -> Iterator[io.BufferedReader]:
        if isinstance(self._place, str):
            assert self.cache is not None
            address = joined(self._place, shard.name)
            with self.cache.shard(address, sha256=shard.sha256, size=shard.bytes) as cached:
                yield cached
            return
        path = self._place / shard.name
        try:
            file = open_regular(path)
        except FileNotFoundError as error:
            raise _missing(str(path)) from error
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENXIO):
                raise _irregular(path) from error
            raise
        with file:
            yield file

    def _let_go_of_evicted(self) -> None:
        """A cached shard that was unlinked takes up the disk for as long as somebody maps it."""
        assert self.cache is not None
        for number in list(self._open_shards):
            if not self.cache.holds(self.manifest.shards[number].sha256):
                del self._open_shards[number]

    def _sound_shard(self, number: int) -> int:
        """The shard itself, or the next one that is sound."""
        count = len(self.manifest.shards)
        for candidate in (number, *range(number + 1, count), *range(number)):
            if candidate not in self._bad:
                self._unless_bad(candidate, functools.partial(self._shard, candidate))
            if candidate not in self._bad:
                return candidate
        raise DataError(f"all {count} shards of {self.path} are bad; restore them or make the shards again")

    def _unless_bad(self, number: int, act: Callable[[], object]) -> None:
        """Do something that touches a shard; where it is bad, remember and say so, or refuse it."""
        try:
            act()
        except BadShard as error:
            if self.bad_shards == "refuse":
                raise
            self._bad.add(number)
            logger.warning(
                "skipped: %s; its %d samples of %d are replaced by others",
                error,
                self.manifest.shards[number].samples,
                self.num_samples,
            )


class _OpenShard:
    """One mapped shard and the checked column views of the chunks touched so far."""

    def __init__(self, path: str, shard: Shard, file: io.BufferedReader, *, vocabulary_size: int) -> None:
        self.path = path
        self.shard = shard
        self.vocabulary_size = vocabulary_size
        self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._views: dict[int, dict[str, np.ndarray]] = {}

    def columns(self, number: int) -> dict[str, np.ndarray]:
        views = self._views.get(number)
        if views is None:
            chunk = self.shard.chunks[number]
            views = {column: self._array(chunk, column) for column in chunk.members}
            self._check(chunk, views)
            self._views[number] = views
        return views

    def _array(self, chunk: Chunk, column: str) -> np.ndarray:
        offset, length = chunk.members[column]
        header = io.BytesIO(self.map[offset : offset + min(length, 256)])
        name = self.map[offset - BLOCKSIZE : offset - BLOCKSIZE + LENGTH_NAME].rstrip(NUL)
        try:
            if name != f"{chunk.key}.{column}.npy".encode():
                raise ValueError("tar name")
            if np.lib.format.read_magic(header) != (1, 0):
                raise ValueError("npy version")
            shape, _, dtype = np.lib.format.read_array_header_1_0(header)
            if (
                len(shape) != 1
                or dtype not in self._dtypes(column)
                or header.tell() + shape[0] * dtype.itemsize != length
            ):
                raise ValueError("npy shape")
        except Exception as error:  # numpy reads a header as Python's literals, which fail in many ways
            raise self._damaged(f"member {chunk.key}.{column}.npy is no array of the recorded size") from error
        return np.frombuffer(self.map, dtype=dtype, count=shape[0], offset=offset + header.tell())

    def _dtypes(self, column: str) -> tuple[np.dtype, ...]:
        if column.endswith("tok"):
            return (token_dtype(self.vocabulary_size),)
        return (np.dtype({"pos": "<u2", "score": "<f4"}.get(column, "<u4")),)

    def _check(self, chunk: Chunk, views: dict[str, np.ndarray]) -> None:
        sound = True
        for column, array in views.items():
            if column.endswith("tok"):
                if len(array) and int(array.max()) >= self.vocabulary_size:
                    raise self._damaged(
                        f"chunk {chunk.key} holds id {int(array.max())}, "
                        f"but the vocabulary has {self.vocabulary_size} tokens"
                    )
            elif column.endswith("off"):
                sound = sound and _rises(array, end=len(views[column.removesuffix("off") + "tok"]))
            elif column == "grp":
                sound = sound and len(array) == chunk.samples + 1 and _rises(array, end=len(views["d.off"]) - 1)
            else:
                sound = sound and len(array) == chunk.samples
        sound = sound and len(views["q.off" if "q.off" in views else "off"]) == chunk.samples + 1
        if "pos" in views:
            sound = sound and bool((views["pos"] >= 1).all() and (views["pos"] <= np.diff(views["grp"])).all())
        if "score" in views:
            sound = sound and bool(np.isfinite(views["score"]).all())
        if not sound:
            raise self._damaged(f"chunk {chunk.key} has offsets that do not fit its tokens")

    def _damaged(self, what: str) -> DataError:
        return DataError(f"shard {self.path} is damaged: {what}; {_RESTORE}")


def _rises(offsets: np.ndarray, *, end: int) -> bool:
    """Offsets of texts that are not empty, from 0 to `end`."""
    return len(offsets) > 1 and offsets[0] == 0 and int(offsets[-1]) == end and bool((offsets[1:] > offsets[:-1]).all())


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _check_size(path: Path, shard: Shard) -> None:
    with reading(path, what="shard"):
        try:
            status = path.stat()
        except FileNotFoundError as error:
            raise _missing(str(path)) from error
    if not stat.S_ISREG(status.st_mode):
        raise _irregular(path)
    size = status.st_size
    if size != shard.bytes:
        what = "empty" if size == 0 else "truncated" if size < shard.bytes else "too long"
        raise BadShard(f"shard {path} is {what}: {size} bytes instead of {shard.bytes}; {_RESTORE}")


def _irregular(path: Path) -> BadShard:
    return BadShard(f"shard {path} is no regular file; {_RESTORE}")


def _missing(path: str) -> BadShard:
    return BadShard(f"shard {path} is missing; {_RESTORE}")
