"""A frozen model's vectors on disk, computed once and looked up by text, in whatever order training reads texts.

A store is a folder:
    store.json          format, the model's and the students' tokenizer's fingerprints, width, number of blocks
    000007.f16.npy      float16 [n, width]: a block's vectors
    000007.keys.npy     int64 [n, r]: each vector's keys
A block's keys are written last, by rename, so that a kill leaves no keys without vectors.

A key is the hash of a text's ids (data/collate.py). The ids are the STUDENT's, cut as the student reads them, so the
stored model may have any tokenizer; texts that a student cannot tell apart share a vector. A query's key is the hash
mixed once more, because models may read queries and passages in different ways, and the same text can be both. A
document's vector has one key for each length at which recipes cut it; a query or passage that is cut at several lengths
has a vector for each.

Vectors are float16, with eleven significant bits, which changes a cosine by less than 1e-3. They are memory-mapped, so
ranks of one machine share them. Every rank holds each key with the place of its vector, 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from torch import Tensor

from data.collate import PairBatch
from data.ground.errors import ConfigError, UserError
from data.ground.files import reading, refused_by, sha256_of, write_atomically
from data.ground.records import Record, read_record
from data.keyed_random import mix64
from data.shards.writer import npy_bytes
from models.choices import Similarity

STORE_FILE = "store.json"
_Count = Annotated[int, pydantic.Field(ge=1, lt=1 << 40)]
_MAKER = "`python -m trainer.teacher_vectors`"
MAKE_AGAIN = f"make it again with {_MAKER}"
_REPAIR = f"run {_MAKER} again, which makes the block anew"
_OF_QUERIES = np.uint64(0x71756572696573)  # "queries"


class StoreRecord(Record):
    """store.json. `blocks` is None until all blocks are written. Stores of format 1 may hold a text more than once."""

    format: Literal[1, 2] = 2
    teacher: str  # sha256 of the stored model's weights, tokenizer, lengths and prompts
    tokenizer: str  # fingerprint of the students' tokenizer
    texts: str  # sha256 of the inputs
    # Tokens that students read of a document or passage, and of a query, without its prompt and special ones.
    rooms: tuple[_Count, ...]
    query_rooms: tuple[_Count, ...] = ()  # none: a store of documents
    similarity: Similarity = "cosine"  # how the model compares its vectors; for cosine they have unit length
    temperature: float | None = None  # that the model was trained at, where its folder says it
    width: _Count
    blocks: _Count | None = None

    @property
    def keys_a_vector(self) -> int:
        return 1 if self.query_rooms else len(self.rooms)


def query_keys(hashes: Tensor) -> Tensor:
    """The keys of queries, from the hashes of their ids; int64 [n] both. The hash of a passage is its key."""
    return torch.from_numpy(mix64(hashes.cpu().numpy().view(np.uint64) ^ _OF_QUERIES).view(np.int64))


def _keys_path(folder: Path, block: int) -> Path:
    return folder / f"{block:06d}.keys.npy"


def _vectors_path(folder: Path, block: int) -> Path:
    return folder / f"{block:06d}.f16.npy"


def write_block(folder: Path, block: int, keys: np.ndarray, vectors: np.ndarray) -> None:
    """keys: int64 [n, r]; vectors: float16 [n, width]."""
    write_atomically(_vectors_path(folder, block), npy_bytes(vectors))
    write_atomically(_keys_path(folder, block), npy_bytes(keys))


def has_block(folder: Path, block: int, record: StoreRecord) -> bool:
    """Whether a block is there, both its files whole and of the record's shape."""
    try:
        _read_block(folder, block, record)
    except UserError:
        return False
    return True


def _read_block(folder: Path, block: int, record: StoreRecord) -> tuple[np.ndarray, np.ndarray]:
    """Keys int64 [n, r], and vectors float16 [n, width], memory-mapped. Raises ConfigError for a damaged block."""
    named = f"block of vectors {folder / f'{block:06d}.*'}"
    for path in (_keys_path(folder, block), _vectors_path(folder, block)):
        if not path.is_file():
            raise ConfigError(f"{named} lacks {path.name}; {_REPAIR}")
    refused = refused_by("numpy", named, hint=_REPAIR, kind=ConfigError)
    with refused, reading(folder, what="store", hint=_REPAIR):
        keys = np.load(_keys_path(folder, block), allow_pickle=False)
        vectors = _mapped(_vectors_path(folder, block))
    shapes = (*vectors.shape[:1], record.keys_a_vector), (*vectors.shape[:1], record.width)
    if (keys.shape, vectors.shape) != shapes or keys.dtype != np.int64:
        raise ConfigError(f"{named} does not fit {STORE_FILE}; {_REPAIR}")
    return keys, vectors


@dataclass(frozen=True)
class VectorStore:
    """A store, open for reading. keys: int64 [n], sorted; rows: int64 [n], each key's row among all blocks' vectors.

    named: how errors call it, such as "guide.store vectors/nli".
    """

    folder: Path
    named: str
    record: StoreRecord
    fingerprint: str
    keys: np.ndarray
    rows: np.ndarray
    starts: np.ndarray  # int64 [blocks + 1], the first row of each block
    blocks: tuple[np.ndarray, ...]  # float16 [n_b, width], memory-mapped

    @property
    def width(self) -> int:
        return self.record.width

    @classmethod
    def open(cls, folder: str | Path, *, tokenizer: str, section: str = "teacher") -> VectorStore:
        """Raises ConfigError for a store that is unfinished, damaged, or of another tokenizer's texts.

        section: the recipe's section that names the store.
        """
        folder = Path(folder)
        named = f"{section}.store {folder}"
        record = read_store_record(folder)
        if record is None:
            raise ConfigError(f"{named} holds no vectors; {MAKE_AGAIN}")
        if record.blocks is None:
            raise ConfigError(f"{named} is unfinished; run the same command again to finish it")
        if record.tokenizer != tokenizer:
            raise ConfigError(
                f"{named} is of texts by another tokenizer than the shards'; {MAKE_AGAIN}, from this recipe"
            )
        keys, blocks = [], []
        for number in range(record.blocks):
            found, block = _read_block(folder, number, record)
            keys.append(found)
            blocks.append(block)
        starts = np.concatenate(([0], np.cumsum([len(block) for block in blocks])))
        flat = np.concatenate(keys).reshape(-1)  # [vectors · r]
        unique, first = np.unique(flat, return_index=True)
        fingerprint = sha256_of(folder / STORE_FILE)
        rows = first // record.keys_a_vector
        return cls(folder, named, record, fingerprint, unique, rows, starts, tuple(blocks))

    def find(self, keys: Tensor) -> Tensor:
        """Vectors float32 [n, width] of these keys, int64 [n]. Raises ConfigError for a missing text."""
        wanted = keys.cpu().numpy()
        places = np.searchsorted(self.keys, wanted)
        places = np.minimum(places, len(self.keys) - 1)
        if missing := int((self.keys[places] != wanted).sum()):
            raise ConfigError(
                f"{self.named} has no vector of {missing} of a batch's {len(wanted)} texts; {MAKE_AGAIN}, of "
                "the texts from which the shards were made and from this recipe"
            )
        rows = self.rows[places]
        vectors = np.empty((len(wanted), self.width), np.float32)
        block_of = np.searchsorted(self.starts, rows, side="right") - 1
        for block in np.unique(block_of).tolist():
            here = block_of == block
            vectors[here] = self.blocks[block][rows[here] - self.starts[block]]
        return torch.from_numpy(vectors)

    def find_pairs(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """Vectors of a batch's queries, float32 [n, width], and of its passages, [m, width]."""
        found = self.find(torch.cat([query_keys(batch.query_hashes), batch.passage_hashes.cpu()]))
        queries, passages = found.split([len(batch.queries), len(batch.passages)])
        return queries, passages


def _mapped(path: Path) -> np.ndarray:
    """The float16 array of an .npy file, memory-mapped. Raises ValueError for any other file.

    np.load would keep a file open for each block, and a process may open 1,024.
    """
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"it is an array file of version {version}")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
        begin = file.tell()
        end = file.seek(0, 2)
    count = int(np.prod(shape))
    if by_columns or dtype != np.float16 or not count or end - begin != 2 * count:
        raise ValueError(f"it holds {end - begin} bytes of {dtype} in the shape {shape}")
    whole = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
    return whole[begin:].view(torch.float16).numpy().reshape(shape)


def read_store_record(folder: Path) -> StoreRecord | None:
    """None where there is no store. Raises DataError for a record that is damaged."""
    path = folder / STORE_FILE
    return read_record(path, StoreRecord, what="record of stored vectors", hint=MAKE_AGAIN) if path.is_file() else None


def write_store_record(folder: Path, record: StoreRecord) -> None:
    write_atomically(folder / STORE_FILE, record.model_dump_json(indent=2) + "\n")
