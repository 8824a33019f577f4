"""A teacher's vectors on disk, computed once and looked up by text, in whatever order training reads texts.

A store is a folder:
    store.json          format, the teacher's and the students' tokenizer's fingerprints, width, number of blocks
    000007.f16.npy      float16 [n, width]: a block's vectors
    000007.keys.npy     int64 [n, r]: each text's hashes (data/collate.py), one for each length at which it is cut
A block's keys are written last, by rename, and are the block's completion marker. A text's key is made of the STUDENT's
token ids, so the teacher may have any tokenizer; texts that a student cannot tell apart share the vector of the first.
Vectors are float16, with eleven significant bits, which changes a cosine by less than 1e-3. They are memory-mapped, so
ranks of one machine share them. Every rank holds each key with the place of its vector, 16 bytes; a text has a key for
each length at which it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from torch import Tensor

from data.ground.errors import ConfigError
from data.ground.files import reading, refused_by, sha256_of, write_atomically
from data.ground.records import Record, read_record
from data.shards.writer import npy_bytes

STORE_FILE = "store.json"
_Count = Annotated[int, pydantic.Field(ge=1, lt=1 << 40)]
_HINT = "make it again with `python -m trainer.teacher_vectors`"


class StoreRecord(Record):
    """store.json. `blocks` is None until all blocks are written."""

    format: Literal[1] = 1
    teacher: str  # sha256 of the teacher's weights, tokenizer, lengths and prompts
    tokenizer: str  # fingerprint of the students' tokenizer
    texts: str  # sha256 of the inputs
    rooms: tuple[_Count, ...]  # tokens of a text that students read, without its prompt and special ones
    width: _Count
    blocks: _Count | None = None


def keys_path(folder: Path, block: int) -> Path:
    return folder / f"{block:06d}.keys.npy"


def _vectors_path(folder: Path, block: int) -> Path:
    return folder / f"{block:06d}.f16.npy"


def write_block(folder: Path, block: int, keys: np.ndarray, vectors: np.ndarray) -> None:
    """keys: int64 [n, r]; vectors: float16 [n, width]. Keys are written last: a block with keys is complete."""
    write_atomically(_vectors_path(folder, block), npy_bytes(vectors))
    write_atomically(keys_path(folder, block), npy_bytes(keys))


@dataclass(frozen=True)
class VectorStore:
    """A store, open for reading. keys: int64 [n], sorted; rows: int64 [n], each key's row among all blocks' vectors."""

    folder: Path
    fingerprint: str
    width: int
    keys: np.ndarray
    rows: np.ndarray
    starts: np.ndarray  # int64 [blocks + 1], the first row of each block
    blocks: tuple[np.ndarray, ...]  # float16 [n_b, width], memory-mapped

    @classmethod
    def open(cls, folder: str | Path, *, tokenizer: str) -> VectorStore:
        """Raises ConfigError for a store that is unfinished, damaged, or of another tokenizer's texts."""
        folder = Path(folder)
        record = read_store_record(folder)
        if record is None:
            raise ConfigError(f"teacher.store {folder} holds no vectors; {_HINT}")
        if record.blocks is None:
            raise ConfigError(f"teacher.store {folder} is unfinished; run the same command again to finish it")
        if record.tokenizer != tokenizer:
            raise ConfigError(
                f"teacher.store {folder} is of texts by another tokenizer than the shards'; {_HINT}, from this recipe"
            )
        keys, blocks = [], []
        for number in range(record.blocks):
            named = f"block of vectors {folder / f'{number:06d}.*'}"
            with refused_by("numpy", named, hint=_HINT, kind=ConfigError), reading(folder, what="store", hint=_HINT):
                found = np.load(keys_path(folder, number), allow_pickle=False)
                block = np.load(_vectors_path(folder, number), mmap_mode="r", allow_pickle=False)
                if found.shape != (len(block), len(record.rooms)) or block.shape[1:] != (record.width,):
                    raise ConfigError(f"teacher.store {folder}: block {number} does not fit its record; {_HINT}")
            keys.append(found)
            blocks.append(block)
        starts = np.concatenate(([0], np.cumsum([len(block) for block in blocks])))
        flat = np.concatenate(keys).reshape(-1)  # [texts · r]
        unique, first = np.unique(flat, return_index=True)
        return cls(
            folder,
            sha256_of(folder / STORE_FILE),
            record.width,
            unique,
            first // len(record.rooms),
            starts,
            tuple(blocks),
        )

    def find(self, keys: Tensor) -> Tensor:
        """Vectors float32 [n, width] of texts with these hashes, int64 [n]. Raises ConfigError for a missing text."""
        wanted = keys.cpu().numpy()
        places = np.searchsorted(self.keys, wanted)
        places = np.minimum(places, len(self.keys) - 1)
        if missing := int((self.keys[places] != wanted).sum()):
            raise ConfigError(
                f"teacher.store {self.folder} has no vector of {missing} of a batch's {len(wanted)} texts; {_HINT}, of "
                "the texts from which the shards were made and from this recipe"
            )
        rows = self.rows[places]
        vectors = np.empty((len(wanted), self.width), np.float32)
        block_of = np.searchsorted(self.starts, rows, side="right") - 1
        for block in np.unique(block_of).tolist():
            here = block_of == block
            vectors[here] = self.blocks[block][rows[here] - self.starts[block]]
        return torch.from_numpy(vectors)


def read_store_record(folder: Path) -> StoreRecord | None:
    """None where there is no store. Raises DataError for a record that is damaged."""
    path = folder / STORE_FILE
    return read_record(path, StoreRecord, what="record of stored vectors", hint=_HINT) if path.is_file() else None


def write_store_record(folder: Path, record: StoreRecord) -> None:
    write_atomically(folder / STORE_FILE, record.model_dump_json(indent=2) + "\n")
