"""What `objective.preset` sets: the points where the Starbucks paper and its authors' released code differ, as data.

Each row is a point of the method, with its settings in the paper and in the released code. A setting that a column
leaves out is not decided there and keeps the recipe's own value or the default. Keys that a recipe, its base or the
command line writes out win over a preset. The table "Published numbers" of docs/objectives.md says where each number is
published. Torch-free, like trainer/config/load.py, which applies the presets.

The released code is the repository ielab/Starbucks: smae/, retrieval/ (on Tevatron), sts/ (on sentence-transformers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PRESETS = ("paper", "released-code")
PRESETS_FOR = ("retrieval", "sts")  # the two fine-tunings of the paper (§4.2)

Settings = Mapping[str, Any]  # section.key -> value


@dataclass(frozen=True)
class Row:
    """One point of the method. `where`: its place in the paper, and in the code where that differs."""

    point: str
    where: str
    paper: Settings
    released_code: Settings


# No row sets the amount of data (FineWeb 10BT or 100BT): a recipe names its own shards in `data.shards`.
SMAE = (
    Row(
        "mask ratios",
        "§3.2: p_dec is larger than p_enc, without numbers; the code's are taken",
        paper={"objective.encoder_mask_ratio": 0.2, "objective.decoder_mask_ratio": 0.4},
        released_code={"objective.encoder_mask_ratio": 0.2, "objective.decoder_mask_ratio": 0.4},
    ),
    Row(
        "relation of the masks",
        "§3.2, eq. 6: two maskings of one text; in the code the encoder's are a subset of the decoder's",
        paper={"objective.nested_masks": False},
        released_code={"objective.nested_masks": True},
    ),
    Row(
        "encoder and decoder loss",
        "§3.2, eq. 8: their sum; in the code their mean",
        paper={"objective.loss_scale": 1.0},
        released_code={"objective.loss_scale": 0.5},
    ),
    Row(
        "weight decay",
        "§4.1",
        paper={"optim.weight_decay": 0.05},
        released_code={"optim.weight_decay": 0.001},
    ),
)

_REDUCTION = Row(
    "reduction over sizes",
    "§3.1, eq. 4 and 5",
    paper={"objective.reduction": "mean"},
    released_code={"objective.reduction": "sum"},
)
_EQUAL_TEXTS = Row(
    "equal texts",
    "§3.1: the other passages are negatives; in the code too, for neither library leaves out equal ones",
    paper={"objective.mask_false_negatives": False},
    released_code={"objective.mask_false_negatives": False},
)
_KL_OVER_SCORES = {"objective.kl": "scores", "objective.kl_weight": 1.0, "objective.detach_teacher": True}
_SCHEDULE = {
    "optim.schedule": "linear",
    "optim.warmup_ratio": 0.1,
    # In neither table: the default of Hugging Face's trainer, on which both libraries build.
    "optim.weight_decay": 0.0,
    "train.global_batch_size": 128,
}
_MSMARCO = {"optim.lr": 1e-4, "train.epochs": 3.0, "data.num_negatives": 7, **_SCHEDULE}
_NLI = {"optim.lr": 5e-5, "train.epochs": 1.0, **_SCHEDULE}
_DOT = {"objective.similarity": "dot", "objective.temperature": 1.0}
# MultipleNegativesRankingLoss's own scale of 20, which table 5 names without a number.
_COSINE = {"objective.similarity": "cosine", "objective.temperature": 0.05}

SRL_RETRIEVAL = (
    _REDUCTION,
    _EQUAL_TEXTS,
    Row("KL", "§3.1, eq. 5; table 6: kl_temperature 1", paper=_KL_OVER_SCORES, released_code=_KL_OVER_SCORES),
    Row("similarity and temperature", "table 6", paper=_DOT, released_code=_DOT),
    Row("optimiser", "table 6", paper=_MSMARCO, released_code=_MSMARCO),
    Row(
        "lengths and pooling",
        "not in the paper",
        paper={},
        released_code={"data.query_max_length": 32, "data.passage_max_length": 196, "model.pooling": "cls"},
    ),
)

SRL_STS = (
    _REDUCTION,
    _EQUAL_TEXTS,
    Row(
        "KL",
        "§3.1, eq. 5; table 5: kl_temperature 0.3, by which the code multiplies the divergence and divides nothing; in "
        "the code it is over the embeddings' first d coordinates, through the teacher too",
        paper=_KL_OVER_SCORES | {"objective.kl_weight": 0.3},
        released_code={
            "objective.kl": "coordinates",
            "objective.kl_weight": 0.3,
            "objective.kl_temperature": 1.0,
            "objective.detach_teacher": False,
        },
    ),
    Row("similarity and temperature", "table 5", paper=_COSINE, released_code=_COSINE),
    Row("optimiser", "table 5", paper=_NLI, released_code=_NLI),
    # The code takes its lengths from the model's tokenizer, so the recipe must set them.
    Row("lengths and pooling", "not in the paper", paper={}, released_code={"model.pooling": "mean"}),
)

_TABLES = {("masked", ""): SMAE, ("contrastive", "retrieval"): SRL_RETRIEVAL, ("contrastive", "sts"): SRL_STS}
# The values of objective.name that have presets.
WITH_PRESETS = tuple(dict.fromkeys(name for name, _ in _TABLES))


def preset_settings(name: str, preset: str, preset_for: str) -> dict[str, Any]:
    """All settings of a preset; an empty dict where the arguments name no preset.

    name: objective.name. preset_for: which fine-tuning; ignored for pre-training, of which there is one.
    """
    settings: dict[str, Any] = {}
    if preset in PRESETS:
        for row in _TABLES.get((name, preset_for), _TABLES.get((name, ""), ())):
            settings |= row.paper if preset == "paper" else row.released_code
    return settings
