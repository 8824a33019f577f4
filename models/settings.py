"""The settings that turn hidden states into embeddings, and barista.json, the file that holds them."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch
from pydantic import Field, create_model
from transformers import AutoModel

from data.ground.errors import DataError, OtherFormat
from data.ground.files import refused_by, write_atomically
from data.ground.records import Record, read_record
from data.model_folders import SETTINGS_FILE
from models.backbone import most_tokens
from models.choices import MEANS, Direction, Pooling, Similarity
from models.direction import is_decoder, said_by
from models.loading import load_config
from models.sentence_transformers import read_sentence_model
from models.sizes import Ladder, ModelError

_Count = Annotated[int, Field(ge=1, le=1 << 20)]
_Fraction = Annotated[float, Field(gt=0, le=1)]
_Length = Annotated[int, Field(ge=1, le=1 << 31)]


@dataclass(frozen=True)
class EmbeddingSettings:
    """The settings that turn hidden states into embeddings, stored beside the weights in `barista.json`.

    `ladder` has each size in its `numbers`: layers, dimensions, and the fraction of narrower feed-forwards.
    `temperature` divides the scores in training. Lengths are in tokens, special tokens included. `tokenizer` is the
    fingerprint of the tokenizer that the weights were trained with; it is None in folders of older versions, and the
    tokenizer is then not compared. `direction` is that of a decoder; encoders need none. `pool_prompt`: whether a mean
    takes the tokens of a text's prompt. Without them the format is 2, because versions that know format 1 alone would
    take them.
    """

    pooling: Pooling = "cls"
    similarity: Similarity = "cosine"
    ladder: tuple[tuple[_Count, _Count] | tuple[_Count, _Count, _Fraction], ...] = ()
    query_max_length: _Length = 64
    passage_max_length: _Length = 256
    query_prompt: str = ""
    passage_prompt: str = ""
    temperature: Annotated[float, Field(gt=0)] = 0.05
    format: Literal[1, 2] = 1
    tokenizer: str | None = None
    direction: Literal["", Direction] = ""
    pool_prompt: bool = True

    def __post_init__(self) -> None:
        for name, choices in (("pooling", get_args(Pooling)), ("similarity", get_args(Similarity))):
            if (value := getattr(self, name)) not in choices:
                raise ModelError(f"{name} {value!r} is unknown; use {' or '.join(map(repr, choices))}")
        if not self.pool_prompt and self.pooling not in MEANS:
            raise ModelError(
                f"pooling {self.pooling!r} takes one token, and pool_prompt = false is for "
                f"{' and '.join(map(repr, MEANS))}; set pool_prompt to true"
            )
        object.__setattr__(self, "format", 1 if self.pool_prompt else 2)

    @property
    def sizes(self) -> Ladder:
        return Ladder.of(self.ladder)

    @property
    def max_length(self) -> int:
        """The longer of the two lengths: of texts that are neither queries nor passages, such as those of STS."""
        return max(self.query_max_length, self.passage_max_length)

    def save(self, folder: str | Path) -> None:
        write_atomically(Path(folder) / SETTINGS_FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, source: str | Path) -> EmbeddingSettings | None:
        """The settings beside a model, or None if there are none.

        They are read from barista.json, or else from a sentence-transformers folder or hub name. The ladder of the
        latter has only the full size.
        """
        path = Path(source) / SETTINGS_FILE
        if not os.path.lexists(path):
            return _settings_of_sentence_model(source)
        try:
            found = read_record(path, _FILE, what="settings file", hint="export the model again")
            settings = cls(**found.model_dump())
            _ = settings.sizes if settings.ladder else None
        except OtherFormat:
            raise
        except ModelError as error:
            raise ModelError(f"settings file {path}: {error}") from error
        except DataError as error:
            raise ModelError(str(error)) from error
        return settings


def _file_schema() -> type[Record]:
    """The schema of barista.json: the fields of EmbeddingSettings, of which only the ladder must be there."""
    hints = get_type_hints(EmbeddingSettings, include_extras=True)
    defaults = {each.name: each.default for each in dataclasses.fields(EmbeddingSettings)} | {"ladder": ...}
    content: dict[str, Any] = {name: (hints[name], default) for name, default in defaults.items()}
    return create_model("SettingsFile", __base__=Record, **content)


_FILE = _file_schema()


def _settings_of_sentence_model(source: str | Path) -> EmbeddingSettings | None:
    found = read_sentence_model(source)
    if found is None:
        return None
    config = load_config(source)
    thing = f"sentence-transformers folder {source}"
    with torch.device("meta"), refused_by("transformers", thing, hint="give another", kind=ModelError):
        limit = most_tokens(AutoModel.from_config(config, trust_remote_code=False))
    lengths = [min(each for each in (named, limit) if each) for named in found.lengths if named or limit]
    if len(lengths) < 2:
        raise ModelError(
            f"{thing} does not say how many tokens it takes; write max_seq_length into its sentence_bert_config.json"
        )
    linear = found.linear_map(int(config.hidden_size))
    width = int(config.hidden_size) if linear is None else len(linear.bias)
    return EmbeddingSettings(
        pooling=found.pooling,
        similarity=found.similarity,
        ladder=((int(config.num_hidden_layers), width),),
        query_max_length=lengths[0],
        passage_max_length=lengths[1],
        query_prompt=found.query_prompt,
        passage_prompt=found.passage_prompt,
        direction=said_by(config) if is_decoder(config) else "",
        pool_prompt=found.pool_prompt,
    )
