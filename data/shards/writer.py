"""Writing shards: one process writes each input split, either completely or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tarfile import BLOCKSIZE, RECORDSIZE
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import numpy as np
import pydantic

from data.ground.errors import DataError, OtherFormat
from data.ground.files import sync, write_atomically
from data.ground.records import Record, read_record
from data.shards.format import (
    CHUNK_SAMPLES,
    COLUMNS,
    FORMAT,
    GRADED_COLUMNS,
    MANIFEST,
    NO_PROMPTS,
    WEIGHTED_COLUMNS,
    Chunk,
    CompletionMarker,
    Kind,
    Manifest,
    Offset,
    Prompts,
    Shard,
    check_size,
    read_manifest,
    size_of,
    token_dtype,
)
from data.tokens import LARGEST_ID, save_tokenizer, tokenizer_fingerprint, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
logger = logging.getLogger(__name__)

SHARD_BYTES = 128 * 2**20
# A chunk also ends at this size, so that an input split of whole books neither fills memory nor overflows uint32
# offsets.
CHUNK_TOKENS = 2**23
MAX_POSITIVES = 2**16 - 1
# Scores and weights are stored as float32; beyond this they would become infinite.
LARGEST_NUMBER = float(np.finfo(np.float32).max)


class _MarkerFile(Record):
    """The fields of units/NNNNN.json, the completion marker of an input split."""

    format: Literal[1]
    unit: Offset
    kind: Kind
    columns: tuple[str, ...]
    vocabulary_size: Annotated[int, pydantic.Field(ge=1, le=LARGEST_ID + 1)]
    settings: dict[str, Any]
    shards: tuple[Shard, ...]


class SplitWriter:
    """Writes the shards of one input split; use as a context manager, or call `close()` (keep) or `abort()` (drop).

    `settings` (JSON values) is everything that decides the content: source, row range, tokenizer fingerprint, seed.
    A later run with other settings is refused instead of mixing two data sets in one folder.
    """

    def __init__(
        self,
        folder: str | Path,
        split: int,
        *,
        kind: Kind,
        vocabulary_size: int,
        graded: bool = False,
        weighted: bool = False,
        source: str = "",
        settings: Mapping[str, Any] | None = None,
        shard_bytes: int = SHARD_BYTES,
        chunk_samples: int = CHUNK_SAMPLES,
    ) -> None:
        if kind not in COLUMNS:
            raise DataError(f"kind {kind!r} of shards is unknown; use one of {', '.join(COLUMNS)}")
        if graded and kind != "tuples":
            raise DataError("only shards of kind tuples can be graded; drop the scores or write tuples")
        if weighted and (graded or kind != "tuples"):
            raise DataError("only shards of kind tuples without scores can have weights; drop the weights")
        if shard_bytes < RECORDSIZE or chunk_samples < 1:
            raise DataError(
                f"shards of {shard_bytes} bytes with chunks of {chunk_samples} samples are too small; "
                f"use at least {RECORDSIZE} bytes and one sample"
            )
        self.folder = Path(folder)
        self.number = split
        self.kind = kind
        self.columns = GRADED_COLUMNS if graded else WEIGHTED_COLUMNS if weighted else COLUMNS[kind]
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
        self._weights: list[float] = []
        self._pending_tokens = 0
        try:
            (self.folder / "units").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"folder {folder} cannot be made ({error.strerror}); choose a writable folder") from error
        path = _marker_path(self.folder, split)
        # An input split of a finished folder may be written again: this restores a lost shard, byte for byte.
        if (self.folder / MANIFEST).exists() and not (path.exists() and _read_marker(path).settings == self.settings):
            raise DataError(f"folder {folder} already holds finished shards; choose an empty folder or delete it first")
        self._remove_leftovers()

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document: all its ids, without special tokens."""
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
        weight: float = 1.0,
    ) -> None:
        """Append a training example: a query and its passages, positives first; all ids, without special tokens.

        score: of a graded pair. weight: what its loss is multiplied by in training.
        """
        if self.kind != "tuples":
            raise DataError(f"shards of kind {self.kind} in {self.folder} take documents, not tuples")
        if not 1 <= num_positives <= min(len(passages), MAX_POSITIVES):
            raise DataError(
                f"{self._here()} has {num_positives} positives of {len(passages)} passages; "
                f"give each query between one positive and {MAX_POSITIVES}, or drop it"
            )
        if (score is not None) != ("score" in self.columns):
            raise DataError(f"{self._here()} {'lacks a' if score is None else 'has a'} score unlike the other samples")
        if score is not None and not abs(score) <= LARGEST_NUMBER:
            raise DataError(f"{self._here()} has the score {score}; give a finite number (float32) or drop it")
        if not 0 <= weight <= LARGEST_NUMBER:
            raise DataError(f"{self._here()} has the weight {weight}; give a finite number of at least 0 (float32)")
        if weight != 1 and "weight" not in self.columns:
            raise DataError(f"{self._here()} has a weight, and these shards have none; write them as weighted")
        ids = self._ids(query, "query")
        passage_ids = [self._ids(passage, "passage") for passage in passages]
        self._texts.append(ids)
        self._passages.extend(passage_ids)
        self._group_sizes.append(len(passages))
        self._positives.append(num_positives)
        if score is not None:
            self._scores.append(score)
        self._weights.append(weight)
        self._end_sample(len(ids) + sum(map(len, passage_ids)))

    def close(self) -> CompletionMarker:
        """Make the last shard durable and write the completion marker; from then on the input split is finished."""
        try:
            self._flush_chunk()
            self._finish_shard()
        except BaseException:
            self.abort()
            raise
        marker = CompletionMarker(
            self.number, self.kind, self.columns, self.vocabulary_size, self.settings, tuple(self._shards)
        )
        _write_atomically(_marker_path(self.folder, self.number), _json_bytes({"format": FORMAT, **asdict(marker)}))
        return marker

    def abort(self) -> None:
        """Drop the input split and remove the files already written for it."""
        if self._tar is not None:
            self._tar.sink.abandon()
            self._tar = None
        self._remove_leftovers()

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _here(self) -> str:
        return f"sample {self._num_samples} of input split {self.number}" + (f" ({self.source})" if self.source else "")

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
            if "weight" in self.columns:
                columns["weight"] = np.asarray(self._weights, dtype="<f4")
        payloads = {column: npy_bytes(columns[column]) for column in self.columns}

        size = sum(_TarFile.size_of(payload) for payload in payloads.values())
        if self._tar is not None and self._tar.length + size + RECORDSIZE > self.shard_bytes:
            self._finish_shard()
        if self._tar is None:
            name = f"shard-{self.number:05d}-{len(self._shards):03d}.tar"
            self._tar = _TarFile(self.folder / f"{name}.tmp")
        key = f"{self.number:05d}-{self._num_chunks:06d}"
        members = {column: self._tar.add(key, f"{column}.npy", payload) for column, payload in payloads.items()}
        self._chunks.append(Chunk(key, len(self._texts), members))
        self._num_chunks += 1
        self._shard_tokens += self._pending_tokens
        self._pending_tokens = 0
        numbers = (self._group_sizes, self._positives, self._scores, self._weights)
        for pending in (self._texts, self._passages, *numbers):
            pending.clear()

    def _concatenated(self, texts: list[np.ndarray]) -> np.ndarray:
        ids = np.concatenate(texts)
        if int(ids.max()) >= self.vocabulary_size:
            raise DataError(
                f"input split {self.number}{f' ({self.source})' if self.source else ''} holds id {int(ids.max())}, but "
                f"the vocabulary has {self.vocabulary_size} tokens; tokenize with the tokenizer that the folder names"
            )
        return ids.astype(self._token_dtype)

    def _finish_shard(self) -> None:
        if self._tar is None:
            return
        temporary = self._tar.sink.path
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
        _marker_path(self.folder, self.number).unlink(missing_ok=True)
        for path in self.folder.glob(f"shard-{self.number:05d}-*.tar*"):
            path.unlink()


def finished_split(
    folder: str | Path, split: int, *, settings: Mapping[str, Any] | None = None
) -> CompletionMarker | None:
    """The completion marker of an input split, or None if the input split must be written (again).

    A missing or damaged marker, and a shard of the wrong size, mean that it must be written. A marker made with other
    settings is refused: the folder belongs to another data set.
    """
    path = _marker_path(Path(folder), split)
    if not path.exists():
        return None
    try:
        marker = _read_marker(path)
    except OtherFormat:
        raise
    except DataError as error:
        logger.warning("input split %d is written again: %s", split, error)
        return None
    if marker.settings != _plain(settings):
        differing = sorted(
            key
            for key in {*marker.settings, *_plain(settings)}
            if marker.settings.get(key) != _plain(settings).get(key)
        )
        raise DataError(
            f"folder {folder} holds input split {split} made with another {', '.join(differing)}; "
            "choose an empty folder or delete this one"
        )
    whole = all(size_of(Path(folder) / shard.name) == shard.bytes for shard in marker.shards)
    return marker if whole else None


def finish_folder(
    folder: str | Path,
    splits: int | Iterable[int],
    *,
    tokenizer: PreTrainedTokenizerFast,
    name: str = "",
    appended: str = "",
    prompts: Prompts = NO_PROMPTS,
) -> Manifest:
    """Assemble manifest.json from the completion markers of `splits` (a count, or their numbers), in ascending order.

    `name` is what the user called the tokenizer, `appended` the token that `append_token` gave it, and `prompts` what
    stands before the texts in the shards. A second call writes the same bytes.
    """
    folder = Path(folder)
    numbers = sorted(range(splits) if isinstance(splits, int) else set(splits))
    missing = [number for number in numbers if not _marker_path(folder, number).exists()]
    if missing:
        raise DataError(
            f"folder {folder} lacks {len(missing)} of {len(numbers)} input splits, the first of them {missing[0]}; "
            "run the same prepare command again to finish it"
        )
    markers = [_read_marker(_marker_path(folder, number)) for number in numbers]
    shards = [shard for marker in markers for shard in marker.shards]
    if not shards:
        raise DataError(f"folder {folder} would hold no samples; check that the sources have texts that are not empty")
    if len({(marker.kind, marker.columns, marker.vocabulary_size) for marker in markers}) > 1:
        raise DataError(f"folder {folder} mixes input splits of different kinds; choose an empty folder")
    vocabulary = vocabulary_of(tokenizer)
    if markers[0].vocabulary_size != (size := vocabulary.size):
        raise DataError(
            f"the shards in {folder} were written for a vocabulary of {markers[0].vocabulary_size} tokens, but the "
            f"tokenizer has {size}; finish the folder with the tokenizer that made it"
        )
    for shard in shards:
        check_size(folder / shard.name, shard)
    strangers = {path.name for path in folder.glob("shard-*.tar")} - {shard.name for shard in shards}
    if strangers:
        raise DataError(
            f"folder {folder} holds {min(strangers)}, which belongs to none of this command's {len(numbers)} input "
            "splits; choose an empty folder or delete this one"
        )

    _save_tokenizer(folder / "tokenizer", tokenizer)
    content = {
        "format": FORMAT,
        "kind": markers[0].kind,
        "columns": markers[0].columns,
        "tokenizer": {"fingerprint": tokenizer_fingerprint(tokenizer), "vocab_size": size, "name": name},
        "totals": {
            "shards": len(shards),
            "bytes": sum(shard.bytes for shard in shards),
            "samples": sum(shard.samples for shard in shards),
            "tokens": sum(shard.tokens for shard in shards),
        },
        "shards": [asdict(shard) for shard in shards],
    }
    if appended or (len(vocabulary.before), len(vocabulary.after)) != (1, 1):
        before, after = (tokenizer.convert_ids_to_tokens(list(ids)) for ids in (vocabulary.before, vocabulary.after))
        content["frame"] = {"before": before, "after": after, "appended": appended}
    if prompts != NO_PROMPTS:
        content["prompts"] = prompts.model_dump()
    _write_atomically(folder / MANIFEST, _json_bytes(content))
    for stale in (*folder.glob("*.tmp"), *(folder / "units").glob("*.tmp")):
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    return read_manifest(folder)


def npy_bytes(array: np.ndarray) -> bytes:
    """The bytes of an array's .npy file; the array's data starts at a multiple of 64 bytes."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


class HashedFile:
    """A file being written, with its sha256; an error of the operating system is reported with the file's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO = path.open("wb")
        self.sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, content: bytes) -> int:
        if self.file.closed:
            return len(content)  # abandoned: tarfile still flushes its buffer when it is collected
        with _naming_the_file(self.path):
            self.file.write(content)
        self.sha256.update(content)
        self.bytes += len(content)
        return len(content)

    def abandon(self) -> None:
        """Close the file and ignore errors; later writes are dropped."""
        # On a full disk, closing fails because the buffered bytes cannot be written. They are not needed.
        with suppress(OSError):
            self.file.close()

    def close(self) -> None:
        """Flush the file to disk and close it."""
        with _naming_the_file(self.path):
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()


class _TarFile:
    """A WebDataset tar whose bytes depend on its members only; each member's offset is known when it is added."""

    def __init__(self, path: Path) -> None:
        # webdataset imports torch, which takes seconds and which other users of this module do not need.
        from webdataset import TarWriter

        self.sink = HashedFile(path)
        self._writer = TarWriter(self.sink, user="", group="", mode=0o444, mtime=0, encoder=False)

    @property
    def length(self) -> int:
        return int(self._writer.tarstream.offset)

    def add(self, key: str, column: str, payload: bytes) -> tuple[int, int]:
        """Append a member; returns (offset, length) of its payload.

        Members are added one at a time because TarWriter sorts the members of one call by name.
        """
        offset = self.length + BLOCKSIZE
        self._writer.write({"__key__": key, column: payload})
        return offset, len(payload)

    def close(self) -> tuple[int, str]:
        """End the archive and make it durable; returns (bytes, sha256)."""
        self._writer.close()
        self.sink.close()
        return self.sink.bytes, self.sink.sha256.hexdigest()

    @staticmethod
    def size_of(payload: bytes) -> int:
        return BLOCKSIZE + len(payload) + -len(payload) % BLOCKSIZE


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


def _marker_path(folder: Path, split: int) -> Path:
    return folder / "units" / f"{split:05d}.json"


def _read_marker(path: Path) -> CompletionMarker:
    found = read_record(path, _MarkerFile, what="completion marker", hint="delete it and run the prepare command again")
    return CompletionMarker(found.unit, found.kind, found.columns, found.vocabulary_size, found.settings, found.shards)


def _plain(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings after a round trip through JSON, which turns tuples into lists, so that they compare equal."""
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
