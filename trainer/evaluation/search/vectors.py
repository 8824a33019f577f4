"""A corpus' vectors on disk, encoded once for all sizes: what lets an evaluation of hours go on where it was killed.

A size is a prefix of its layer's vector, so one vector a layer count is kept, as wide as the widest size there: 3,520
bytes a document for the six sizes of the paper, whichever and however many sizes are wanted of those layers. It is kept
as the encoder gives it, since a cosine is that of CUT vectors: cutting comes first, normalising after, when it is read.
Numbers are float16, eleven significant bits: a score moves by about 1e-4 of itself.

A store is a folder: store.json (format, documents, widths, and fingerprints of all that decides the vectors), and a
file a block, 000007.f16, layer after layer, each [rows, width]. A block's file appears whole or not at all, and its
name is the mark that it is done. No byte is shared by two writers, so ranks on several machines may write into one
folder of a network file system. Blocks are memory-mapped when read: a size reads its own layer's part.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from torch import Tensor

from data.ground.errors import ConfigError
from data.ground.files import write_atomically
from data.ground.records import Record, read_record
from models.encoder import Encoder
from models.loading import NOT_COMPUTED_WITH
from models.sizes import Size

STORE_FILE = "store.json"
# From format 2 on, blocks end in their checksum; those of format 1 are read without.
_FORMAT = 2
_CHECKSUM_BYTES = 32
_LARGEST = float(np.finfo(np.float16).max)
_Count = Annotated[int, pydantic.Field(ge=1, lt=1 << 40)]
_HINTS = "remove it, or give another --vectors folder"


def widest(sizes: Sequence[Size]) -> list[Size]:
    """One size a layer count, as wide as its widest: what has to be encoded and kept for all of them."""
    widths = {size.layers: max(each.dim for each in sizes if each.layers == size.layers) for size in sizes}
    return [Size(layers, widths[layers]) for layers in sorted(widths)]


def cut(whole: np.ndarray, size: Size, *, similarity: str) -> Tensor:
    """float32 [n, size.dim] from a layer's vectors [n, ≥ size.dim]: cut, then of unit length for the cosine."""
    vectors = torch.from_numpy(np.ascontiguousarray(whole[:, : size.dim], dtype=np.float32))
    return torch.nn.functional.normalize(vectors, dim=-1) if similarity == "cosine" else vectors


def texts_digest(texts: Sequence[str]) -> str:
    """sha256 of the texts in their order."""
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d\n" % len(encoded))
        digest.update(encoded)
    return digest.hexdigest()


def weights_digest(encoder: Encoder) -> str:
    """sha256 of all that the encoder computes with; a pooler takes no part, and may be fresh at every load."""
    config = {key: value for key, value in encoder.config.to_dict().items() if key not in NOT_COMPUTED_WITH}
    content = json.dumps([config, encoder.pooling], sort_keys=True, default=str)
    digest = hashlib.sha256(content.encode())
    tensors = encoder.backbone.state_dict() | encoder.heads.state_dict(prefix="heads.")
    for name, tensor in sorted(tensors.items()):
        if not name.startswith("pooler."):
            values = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
            digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class VectorStore:
    """`rows` documents in blocks of `rows_per_block`; `widths`: layers -> dims kept."""

    folder: Path
    rows: int
    rows_per_block: int
    widths: Mapping[int, int]
    has_checksums: bool = True
    _verified: set[int] = field(default_factory=set, repr=False, compare=False)

    @property
    def num_blocks(self) -> int:
        return -(-self.rows // self.rows_per_block)

    @property
    def sizes(self) -> list[Size]:
        """What to encode for it."""
        return [Size(layers, width) for layers, width in self.widths.items()]

    def rows_of(self, block: int) -> range:
        """The documents of a block."""
        start = block * self.rows_per_block
        return range(start, min(start + self.rows_per_block, self.rows))

    def missing(self) -> list[int]:
        """Blocks that are still to be encoded."""
        return [block for block in range(self.num_blocks) if not self._path(block).is_file()]

    def write(self, block: int, vectors: Mapping[Size, np.ndarray]) -> None:
        """`vectors`: of `sizes`, float32 [rows of the block, width], not normalised."""
        parts = []
        for size in self.sizes:
            whole = vectors[size]
            largest = float(np.abs(whole).max(initial=0.0))
            if largest > _LARGEST:
                raise ConfigError(
                    f"layer {size.layers} gives vectors with a number of {largest:.3g}, and float16 ends at "
                    f"{_LARGEST:.0f}; evaluate without --vectors"
                )
            parts.append(whole.astype(np.float16).tobytes())
        if self.has_checksums:
            parts.append(_checksum(parts))
        write_atomically(self._path(block), b"".join(parts))

    def read(self, block: int, layers: int) -> np.ndarray:
        """float16 [rows of the block, the layer's width], mapped, not read yet."""
        path, rows = self._path(block), len(self.rows_of(block))
        before = sum(width for other, width in self.widths.items() if other < layers)
        vectors = 2 * rows * sum(self.widths.values())
        expected = vectors + _CHECKSUM_BYTES * self.has_checksums
        if not path.is_file():
            raise ConfigError(f"{path} is gone; --vectors must be a folder that stays, and that all ranks see")
        if path.stat().st_size != expected:
            raise ConfigError(
                f"{path} has {path.stat().st_size} bytes in place of {expected}; remove it, and it is made again"
            )
        if self.has_checksums and block not in self._verified:
            whole = np.memmap(path, np.uint8, "r")
            if _checksum([whole[:vectors].data]) != whole[vectors:].tobytes():
                raise ConfigError(f"{path} is damaged (its checksum is another); remove it, and it is made again")
            self._verified.add(block)
        shape = (rows, self.widths[layers])
        return np.memmap(path, np.float16, "r", offset=2 * rows * before, shape=shape)

    def _path(self, block: int) -> Path:
        return self.folder / f"{block:06d}.f16"


def open_store(
    folder: Path, *, rows: int, rows_per_block: int, sizes: Sequence[Size], fingerprints: Mapping[str, str]
) -> VectorStore:
    """The store in `folder`, made if there is none. One process calls it before the others `read_store`.

    `fingerprints`: what decides the vectors, by the name that a sentence gives it. A store of anything else is refused,
    not replaced: it may be hours of work.
    """
    if not (folder / STORE_FILE).is_file():
        if folder.is_dir() and (strangers := sorted(path.name for path in folder.iterdir() if path.suffix != ".tmp")):
            raise ConfigError(f"{folder} holds something else ({strangers[0]}); give another --vectors folder")
        _make(folder, rows, rows_per_block, sizes, fingerprints)
    content = _content(folder)
    for name, value in fingerprints.items():
        if content.fingerprints.get(name) != value:
            raise ConfigError(f"{folder} holds vectors of other {name}; {_HINTS}")
    store = read_store(folder)
    for size in widest(sizes):
        if store.widths.get(size.layers, 0) < size.dim:
            raise ConfigError(f"{folder} holds no vectors of size {size}; {_HINTS}")
    return store


def read_store(folder: Path) -> VectorStore:
    content = _content(folder)
    widths = dict(sorted(content.widths.items()))
    return VectorStore(folder, content.rows, content.rows_per_block, widths, has_checksums=content.format > 1)


def _make(folder: Path, rows: int, rows_per_block: int, sizes: Sequence[Size], fingerprints: Mapping[str, str]) -> None:
    widths = {size.layers: size.dim for size in widest(sizes)}
    needed = 2 * rows * sum(widths.values())
    place = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    if (free := shutil.disk_usage(place).free) < needed:
        raise ConfigError(
            f"--vectors needs {needed / 2**20:,.0f} MiB for {folder}, which has {free / 2**20:,.0f} left; "
            "choose another folder or fewer sizes"
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "format": _FORMAT,
        "rows": rows,
        "rows_per_block": rows_per_block,
        "widths": widths,
        "fingerprints": dict(fingerprints),
    }
    write_atomically(folder / STORE_FILE, json.dumps(content, indent=1) + "\n")


class _Description(Record):
    """store.json: `widths`, layers -> dims kept; `fingerprints` of all that decides the vectors."""

    format: Literal[1, 2]
    rows: _Count
    rows_per_block: _Count
    widths: dict[Annotated[int, pydantic.Field(strict=False, ge=1)], _Count] = pydantic.Field(min_length=1)
    fingerprints: dict[str, str]


def _content(folder: Path) -> _Description:
    return read_record(folder / STORE_FILE, _Description, what="vectors' description", hint=_HINTS)


def _checksum(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
