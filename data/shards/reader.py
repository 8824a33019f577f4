"""Reading shards: random access to samples as views of an mmap; each shard is verified once, bad ones may be skipped.

An mmap maps a file into memory, so that a sample is read only when its pages are touched.
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tarfile import BLOCKSIZE, LENGTH_NAME, NUL
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from data.ground.errors import DataError
from data.ground.files import open_regular, reading
from data.ground.secrets import without_secrets
from data.remote import BadShard, Cache, is_remote, joined, what_is_wrong, what_it_is
from data.shards.format import RESTORE, Chunk, Shard, Tuple, check_size, irregular, missing, read_manifest, token_dtype
from data.tokens import (
    Vocabulary,
    frame_of,
    ids_fingerprint,
    load_tokenizer,
    tokenizer_fingerprint,
    vocabulary_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)
# Each open mmap holds a file descriptor. Eight shuffle groups of 16 shards fit.
MAX_OPEN_SHARDS = 128
LOOKED_AT_SHARDS = 16
Verify = Literal["first_read", "size"]
BadShards = Literal["refuse", "skip"]
# A chunk's columns and a row within them.
Row = tuple[dict[str, np.ndarray], int]


def _framed(before: Sequence[str], after: Sequence[str]) -> str:
    """A frame for a message, such as '<s> TEXT </s>'."""
    return repr(" ".join([*before, "TEXT", *after]))


class ShardFolder:
    """Random access to the samples of one folder, numbered in manifest order.

    Opening reads the manifest and checks that every shard of a local folder has its full size. `verify` "first_read"
    also hashes a shard when it is first opened: by this process, or, with a `cache`, on this machine. Remote shards are
    hashed when they enter the cache. A chunk's headers, offsets and ids are checked when it is first touched. Arrays
    are read-only views of an mmap. Pickles and forks: files are opened lazily, by each process for itself.

    A missing or damaged shard is an error that names it. With `bad_shards` "skip" it is skipped: replacement samples
    from the next sound shard of the manifest take the positions of its samples (`with_replacements`). The order remains
    a function of position, and all processes that see the same bad files see the same stream.
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
        # The name in messages: a path, or an address without its secrets.
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
                self._unless_bad(number, functools.partial(check_size, self._place / shard.name, shard))

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
    def weighted(self) -> bool:
        """Whether its training examples have weights of their own; else all have the weight 1."""
        return "weight" in self.manifest.columns

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
        """The number of samples of each chunk of each shard, from which the order of an epoch is computed."""
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
        if (frame := self.manifest.frame) is not None:
            ids = tuple(tuple(map(tokenizer.convert_tokens_to_ids, each)) for each in (frame.before, frame.after))
            if ids != (vocabulary.before, vocabulary.after):
                raise DataError(
                    f"the manifest of {self.path} records that texts become {_framed(frame.before, frame.after)}, and "
                    "its tokenizer does otherwise; make the shards again"
                )
        return vocabulary

    def reads_alike(self, tokenizer: PreTrainedTokenizerFast) -> bool:
        """Whether a tokenizer gives every text the ids of the shards' own, within the same frame."""
        if tokenizer_fingerprint(tokenizer) == self.manifest.tokenizer["fingerprint"]:
            return True
        own = load_tokenizer(self.tokenizer_path)
        return ids_fingerprint(tokenizer) == ids_fingerprint(own) and frame_of(tokenizer) == frame_of(own)

    def check_model_tokenizer(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Refuse the tokenizer of a model that cannot be trained on these shards.

        The tokenizer must give every text the ids that the shards hold, and put it into the same frame. If the
        preparation appended a token, the tokenizer's frame may also be the one without that token. The model then
        learns the frame with it, and is saved with the shards' tokenizer.
        """
        if tokenizer_fingerprint(tokenizer) == self.manifest.tokenizer["fingerprint"]:
            return
        own = load_tokenizer(self.tokenizer_path)
        if ids_fingerprint(tokenizer) != ids_fingerprint(own):
            self.check_tokenizer(tokenizer)
        frame, own_frame = frame_of(tokenizer), frame_of(own)
        appended = self.manifest.frame.appended if self.manifest.frame is not None else ""
        if frame == own_frame or (
            appended and (frame.before, (*frame.after, own.convert_tokens_to_ids(appended))) == own_frame
        ):
            return
        texts = [_framed(*map(own.convert_ids_to_tokens, map(list, each))) for each in (frame, own_frame)]
        raise DataError(
            f"tokenizer {tokenizer.name_or_path!r} makes {texts[0]} of a text, and the shards in {self.path} are for "
            f"{texts[1]}; make the shards again with the model's own tokenizer (--append-token adds a closing token)"
        )

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
        """Up to `count` evenly spaced sample numbers from a few shards only, for a quick look at the data."""
        chosen = np.unique(np.linspace(0, len(self.manifest.shards) - 1, LOOKED_AT_SHARDS).astype(np.int64))
        starts, sizes = self._shard_starts[chosen], np.diff(self._shard_starts)[chosen]
        ends = np.cumsum(sizes)
        places = np.unique(np.linspace(0, ends[-1] - 1, count).astype(np.int64))
        within = np.searchsorted(ends, places, side="right")
        return starts[within] + places - (ends - sizes)[within]

    def with_replacements(self, indices: np.ndarray) -> np.ndarray:
        """`indices` [n] with samples of skipped shards replaced by those that are read instead: int64 [n].

        Row r of a skipped shard is replaced by row r mod n of the next sound shard, which has n samples; the last
        shard is followed by the first.
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
            weight = float(columns["weight"][row]) if "weight" in columns else 1.0
            samples.append(Tuple(query, passages, int(columns["pos"][row]), score, weight))
        return samples

    def samples(self, indices: Sequence[int] | np.ndarray) -> list[Any]:
        """Documents or training examples, whichever the folder holds."""
        return self.documents(indices) if self.kind == "documents" else self.tuples(indices)

    def _rows(self, indices: Sequence[int] | np.ndarray) -> Iterator[Row]:
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self.num_samples):
            raise IndexError(f"sample {wanted.min()}..{wanted.max()} of {self.num_samples} in {self.path}")
        wanted = self.with_replacements(wanted)
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
            # This drops only our reference: views that are still in use keep their mmap alive.
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
                check_size(self._place / entry.name, entry)
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
        if self.cache.is_marked(marks, mark):
            return
        with self.cache.hashing(shard.sha256):
            # All ranks and loader processes come to a shard at about the same time; the first of them hashes it.
            if not self.cache.is_marked(marks, mark):
                self._check_sha256(shard, file)
                self.cache.add_mark(marks, mark)

    def _check_sha256(self, shard: Shard, file: io.BufferedReader) -> None:
        wrong = what_is_wrong(file, sha256=shard.sha256, size=shard.bytes)
        if wrong:
            raise BadShard(f"shard {self._address(shard)} is {wrong}; {RESTORE}")

    def _address(self, shard: Shard) -> str:
        """The name of a shard in messages."""
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
            raise missing(str(path)) from error
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENXIO):
                raise irregular(path) from error
            raise
        with file:
            yield file

    def _let_go_of_evicted(self) -> None:
        """Close shards that were removed from the cache: their disk space is freed only when nobody maps them."""
        assert self.cache is not None
        for number in list(self._open_shards):
            if not self.cache.holds(self.manifest.shards[number].sha256):
                del self._open_shards[number]

    def _sound_shard(self, number: int) -> int:
        """The number of the shard itself if it is sound, or else of the next sound shard."""
        count = len(self.manifest.shards)
        for candidate in (number, *range(number + 1, count), *range(number)):
            if candidate not in self._bad:
                self._unless_bad(candidate, functools.partial(self._shard, candidate))
            if candidate not in self._bad:
                return candidate
        raise DataError(f"all {count} shards of {self.path} are bad; restore them or make the shards again")

    def _unless_bad(self, number: int, act: Callable[[], object]) -> None:
        """Call `act`, which touches a shard; if the shard is bad, log and remember it, or raise."""
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
        except Exception as error:  # numpy parses the header as a Python literal, which can raise many exceptions
            raise self._damaged(f"member {chunk.key}.{column}.npy is no array of the recorded size") from error
        return np.frombuffer(self.map, dtype=dtype, count=shape[0], offset=offset + header.tell())

    def _dtypes(self, column: str) -> tuple[np.dtype, ...]:
        if column.endswith("tok"):
            return (token_dtype(self.vocabulary_size),)
        return (np.dtype({"pos": "<u2", "score": "<f4", "weight": "<f4"}.get(column, "<u4")),)

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
        if "weight" in views:
            sound = sound and bool((np.isfinite(views["weight"]) & (views["weight"] >= 0)).all())
        if not sound:
            raise self._damaged(f"chunk {chunk.key} has offsets that do not fit its tokens")

    def _damaged(self, what: str) -> DataError:
        return DataError(f"shard {self.path} is damaged: {what}; {RESTORE}")


def _rises(offsets: np.ndarray, *, end: int) -> bool:
    """Whether these are the offsets of non-empty texts: strictly rising from 0 to `end`."""
    return len(offsets) > 1 and offsets[0] == 0 and int(offsets[-1]) == end and bool((offsets[1:] > offsets[:-1]).all())
