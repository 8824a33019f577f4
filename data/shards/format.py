"""The format of tokenized shards on disk; writer.py writes it and survives being killed, reader.py seeks and verifies.

    <folder>/shard-00042-003.tar      input split 42 (one source file or row range), its 4th shard
                 00042-000917.tok.npy     uint16|uint32 [tokens]   ids of about 1,024 samples, no special tokens, uncut
                 00042-000917.off.npy     uint32 [samples + 1]     where each sample starts
    <folder>/units/00042.json         completion marker of input split 42
    <folder>/tokenizer/               the tokenizer that made the ids, so that the folder is self-contained
    <folder>/manifest.json            written last: shards, their sha256, byte offsets of every member, totals, and
                                      how texts are framed and prompted, if not in the usual way

A folder is read from a local disk, or from a remote store through a cache (data/remote.py).

Kind "documents" has the columns tok and off. Kind "tuples" holds training examples, each a query with its positives and
negatives, in these columns:

    q.tok, q.off   the queries
    d.tok, d.off   all passages of all queries, concatenated
    grp            uint32 [samples + 1]   each query's range of passages
    pos            uint16 [samples]       each query's number of positives, which come before its negatives
    score          float32 [samples]      of graded pairs only
    weight         float32 [samples]      only where the input gave training examples weights of their own

Why this format: every shard is a valid WebDataset tar of .npy members (no pickle; dtype and shape are in the member).
Many samples share a member, because the tar and npy headers would more than double a document of a few hundred bytes.
Payloads are aligned to 512 bytes, so the reader returns views of an mmap. The manifest has every member's offset, so
the reader never scans.

One process writes an input split: it writes under temporary names, calls fsync, renames, and then writes the completion
marker, also by rename. An input split whose process was killed is written again from its start, byte for byte the same
(fixed mtime, owner and order); a finished one is skipped.
"""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pydantic

from data.ground.errors import DataError
from data.ground.files import read_bytes, reading
from data.ground.records import Record, parse_record
from data.ground.secrets import without_secrets
from data.remote import MANIFEST_BYTES, BadShard, is_remote, joined, what_is_wrong_with_size
from data.remote import read_bytes as read_remote_bytes
from data.tokens import LARGEST_ID

FORMAT = 1
MANIFEST = "manifest.json"
COLUMNS = {"documents": ("tok", "off"), "tuples": ("q.tok", "q.off", "d.tok", "d.off", "grp", "pos")}
GRADED_COLUMNS = (*COLUMNS["tuples"], "score")
WEIGHTED_COLUMNS = (*COLUMNS["tuples"], "weight")
CHUNK_SAMPLES = 1024
RESTORE = "restore the file, or delete it and run the same prepare command again"
Kind = Literal["documents", "tuples"]
# The bound keeps sums of several within 64 bits.
Offset = Annotated[int, pydantic.Field(ge=0, lt=2**60)]
Count = Annotated[int, pydantic.Field(ge=1, lt=2**60)]
Sha256 = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
# A manifest downloaded from a remote store must not make us read outside its folder.
ShardName = Annotated[str, pydantic.Field(pattern=r"^[\w.-]+\.tar$", max_length=255)]


class Tuple(NamedTuple):
    """One sample of kind "tuples", a training example: the first `num_positives` passages are the positives."""

    query: np.ndarray  # ids
    passages: list[np.ndarray]
    num_positives: int
    score: float | None
    weight: float = 1.0  # of its loss


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
class CompletionMarker:
    """What a finished input split adds to the manifest; `settings` is everything that decided its content."""

    unit: int  # the input split's number, under its name in the file
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


class FrameEntry(Record):
    """The tokens before and after every text; `appended` is the last of them where the preparation added it."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    appended: str = ""


class Prompts(Record):
    """What the preparation put before every query and every passage; the shards hold its ids as a part of the text."""

    query: str = ""
    passage: str = ""


NO_PROMPTS = Prompts()


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    `frame` is None where the tokenizer puts one token before and one after a text by itself, and `prompts` are empty
    where there are none. The file has no such entry then, like the files that were written before there were any.
    """

    kind: str
    columns: tuple[str, ...]
    tokenizer: dict[str, Any]  # {"fingerprint", "vocab_size", "name"}
    shards: tuple[Shard, ...]
    fingerprint: str  # the sha256 of manifest.json; it identifies the data, and every checkpoint records it
    frame: FrameEntry | None = None
    prompts: Prompts = NO_PROMPTS

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
    """The fields of manifest.json."""

    format: Literal[1]
    kind: Kind
    columns: tuple[str, ...]
    tokenizer: _TokenizerEntry
    shards: tuple[Shard, ...]
    frame: FrameEntry | None = None
    prompts: Prompts = NO_PROMPTS


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The narrowest type that holds every id; ids run from 0 to vocabulary_size - 1."""
    return np.dtype("<u2") if vocabulary_size <= 2**16 else np.dtype("<u4")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check manifest.json, without touching the shards."""
    path = f"manifest {without_secrets(folder)}/{MANIFEST}"
    content = _remote_manifest(str(folder)) if is_remote(folder) else _local_manifest(Path(folder))
    found = parse_record(content, _ManifestFile, where=path, hint="make the folder again with python -m data.prepare")
    manifest = Manifest(
        kind=found.kind,
        columns=found.columns,
        tokenizer=found.tokenizer.model_dump(),
        shards=found.shards,
        fingerprint=hashlib.sha256(content).hexdigest(),
        frame=found.frame,
        prompts=found.prompts,
    )
    columns = (COLUMNS[manifest.kind], *([GRADED_COLUMNS, WEIGHTED_COLUMNS] if manifest.kind == "tuples" else []))
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
    return read_bytes(path, what="manifest", hint="make the folder again with python -m data.prepare")


def _remote_manifest(folder: str) -> bytes:
    try:
        return read_remote_bytes(joined(folder, MANIFEST), limit=MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise DataError(
            f"shard folder {without_secrets(folder)} holds no {MANIFEST}; copy a finished folder there"
        ) from error


def size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def check_size(path: Path, shard: Shard) -> None:
    with reading(path, what="shard"):
        try:
            status = path.stat()
        except FileNotFoundError as error:
            raise missing(str(path)) from error
    if not stat.S_ISREG(status.st_mode):
        raise irregular(path)
    if wrong := what_is_wrong_with_size(status.st_size, shard.bytes):
        raise BadShard(f"shard {path} is {wrong}; {RESTORE}")


def irregular(path: Path) -> BadShard:
    return BadShard(f"shard {path} is no regular file; {RESTORE}")


def missing(path: str) -> BadShard:
    return BadShard(f"shard {path} is missing; {RESTORE}")
