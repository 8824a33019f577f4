"""A corpus' vectors on disk, encoded once for all sizes, so that an evaluation of hours can go on after a kill.

A size is a prefix of its body's vector (models/sizes.py). So the store keeps one vector per body, as wide as the widest
size with that body: 3,520 bytes per document for the six sizes of the paper, whatever sizes of those layers are scored.
Vectors are kept as the encoder gives them and normalised when they are read, because cosine needs vectors that are
normalised after the cut. Numbers are float16 with eleven significant bits, which changes a score by about 1e-4 of it.

A store is a folder with store.json (format, documents, widths, and fingerprints of all that decides the vectors) and
one file per block, such as 000007.f16, which holds body after body, each [rows, width]. A block's file appears whole
or not at all, so its existence means that the block is done. No two writers share a file, so ranks on several machines
may write into one folder of a network file system. Blocks are memory-mapped when read: a size reads only its own
body's part.
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
from models.sizes import Body, ModelError, Size

STORE_FILE = "store.json"
# From format 2 on, a block ends in its checksum; blocks of format 1 have none.
_FORMAT = 2
_CHECKSUM_BYTES = 32
_LARGEST = float(np.finfo(np.float16).max)
_Count = Annotated[int, pydantic.Field(ge=1, lt=1 << 40)]
_HINTS = "remove it, or give another --vectors folder"


def widest(sizes: Sequence[Size]) -> list[Size]:
    """One size per body, as wide as the widest of that body: enough to encode and keep for all sizes."""
    widths = {size.body: max(each.dim for each in sizes if each.body == size.body) for size in sizes}
    return [body.of_dim(widths[body]) for body in sorted(widths)]


def cut(whole: np.ndarray, size: Size, *, similarity: str) -> Tensor:
    """float32 [n, size.dim] from a body's vectors [n, ≥ size.dim]: first cut, then normalised for cosine."""
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
    """sha256 of all that the encoder computes with; an unused pooler is left out, which may be fresh at every load."""
    config = {key: value for key, value in encoder.config.to_dict().items() if key not in NOT_COMPUTED_WITH}
    # Vectors of earlier versions, which always pooled the prompt, keep their digest.
    pooling = [encoder.pooling] if encoder.pool_prompt else [encoder.pooling, "without the prompt"]
    content = json.dumps([config, *pooling], sort_keys=True, default=str)
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
    """A store of `rows` documents in blocks of `rows_per_block`. `widths`: body -> dimensions kept."""

    folder: Path
    rows: int
    rows_per_block: int
    widths: Mapping[Body, int]
    has_checksums: bool = True
    _verified: set[int] = field(default_factory=set, repr=False, compare=False)

    @property
    def num_blocks(self) -> int:
        return -(-self.rows // self.rows_per_block)

    @property
    def sizes(self) -> list[Size]:
        """The sizes to encode for this store."""
        return [body.of_dim(width) for body, width in self.widths.items()]

    def rows_of(self, block: int) -> range:
        """The positions of a block's documents."""
        start = block * self.rows_per_block
        return range(start, min(start + self.rows_per_block, self.rows))

    def missing(self) -> list[int]:
        """Blocks that are still to be encoded."""
        return [block for block in range(self.num_blocks) if not self._path(block).is_file()]

    def write(self, block: int, vectors: Mapping[Size, np.ndarray]) -> None:
        """Write a block. `vectors`: for each of `sizes`, float32 [rows of the block, width], not normalised."""
        parts = []
        for size in self.sizes:
            whole = vectors[size]
            largest = float(np.abs(whole).max(initial=0.0))
            if largest > _LARGEST:
                raise ConfigError(
                    f"layer {size.body} gives vectors with a number of {largest:.3g}, and float16 ends at "
                    f"{_LARGEST:.0f}; evaluate without --vectors"
                )
            parts.append(whole.astype(np.float16).tobytes())
        if self.has_checksums:
            parts.append(_checksum(parts))
        write_atomically(self._path(block), b"".join(parts))

    def read(self, block: int, body: Body) -> np.ndarray:
        """float16 [rows of the block, the body's width], memory-mapped."""
        path, rows = self._path(block), len(self.rows_of(block))
        before = sum(width for other, width in self.widths.items() if other < body)
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
        shape = (rows, self.widths[body])
        return np.memmap(path, np.float16, "r", offset=2 * rows * before, shape=shape)

    def _path(self, block: int) -> Path:
        return self.folder / f"{block:06d}.f16"


def open_store(
    folder: Path, *, rows: int, rows_per_block: int, sizes: Sequence[Size], fingerprints: Mapping[str, str]
) -> VectorStore:
    """The store in `folder`, made if there is none. One process calls this before the others call `read_store`.

    `fingerprints`: digests of what decides the vectors, under the names that error messages use. A store with other
    fingerprints is refused and not replaced, because it may be hours of work.
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
        if store.widths.get(size.body, 0) < size.dim:
            raise ConfigError(f"{folder} holds no vectors of size {size}; {_HINTS}")
    return store


def read_store(folder: Path) -> VectorStore:
    content = _content(folder)
    try:
        widths = {Body.parse(name): width for name, width in content.widths.items()}
    except ModelError as error:
        raise ConfigError(f"{folder / STORE_FILE} is damaged ({error}); {_HINTS}") from None
    return VectorStore(
        folder, content.rows, content.rows_per_block, dict(sorted(widths.items())), has_checksums=content.format > 1
    )


def _make(folder: Path, rows: int, rows_per_block: int, sizes: Sequence[Size], fingerprints: Mapping[str, str]) -> None:
    widths = {str(size.body): size.dim for size in widest(sizes)}
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
    """store.json. `widths`: "LAYERS" or "LAYERSxFRACTION" -> dimensions kept; `fingerprints`: digests of all that
    decides the vectors.
    """

    format: Literal[1, 2]
    rows: _Count
    rows_per_block: _Count
    widths: dict[str, _Count] = pydantic.Field(min_length=1)
    fingerprints: dict[str, str]


def _content(folder: Path) -> _Description:
    return read_record(folder / STORE_FILE, _Description, what="vectors' description", hint=_HINTS)


def _checksum(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()
