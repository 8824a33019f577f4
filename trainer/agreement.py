"""What all ranks must have in common before the first step: the recipe, the data, the models, and the software.

Each rank reads its own command line and its own files, which may be on a disk of its own. Differences would not stop a
run: batches would overlap, learning rates would diverge, or a guide would filter by other weights. So every rank's
facts are gathered once, and a run in which they differ is refused; the message names the ranks and the differences.

Files are compared by content, never by path, so each machine may keep its copies where it likes. At ZeRO stage 3 the
model's weights are those of rank 0, which alone reads them, so only shapes and configuration are compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from data.ground.records import digest_of
from data.ground.secrets import without_secrets
from data.shards.reader import ShardFolder
from models.encoder import Encoder
from models.loading import NOT_COMPUTED_WITH
from trainer.build import ModelParts
from trainer.config.schema import Recipe, flat
from trainer.distributed import Refused, World, gather_objects, named_ranks
from trainer.ds_config import takes_weights_of_rank_0
from trainer.environment import versions
from trainer.objectives.guide import StoredGuide
from trainer.objectives.teacher import LiveTeacher, StoredTeacher

Facts = dict[str, str]

# Keys that may differ between ranks: places, whose content is compared instead, a machine's resources, and settings
# that each rank follows by itself.
FREE_KEYS = frozenset(
    {
        "data.shards",
        "model.source",
        "guide.model",
        "guide.store",
        "teacher.model",
        "teacher.store",
        "engine.ds_config",
        "data.cache_dir",
        "data.cache_gib",
        "data.num_workers",
        "data.verify",
        "train.stop_after_minutes",
        "train.hang_seconds",
    }
)
_NAMED = 3
_SHOWN = 60


def check_agreement(
    recipe: Recipe, ds_config: Mapping[str, Any], sources: Sequence[ShardFolder], parts: ModelParts, world: World
) -> None:
    """Raises Refused, on all ranks, where ranks differ. All ranks call it. ds_config: the engine's, as it was read."""
    if world.size == 1:
        return
    facts = facts_of(recipe, ds_config, sources, parts)
    # Ranks are usually equal, and to see that, one digest a rank is enough.
    digests = gather_objects(digest_of(facts))
    if len(set(digests)) > 1 and (problem := disagreement(gather_objects(facts))) is not None:
        raise Refused(problem)


def facts_of(recipe: Recipe, ds_config: Mapping[str, Any], sources: Sequence[ShardFolder], parts: ModelParts) -> Facts:
    """Name -> value, as messages show it, of all that this rank must have in common with the others."""
    facts = {key: json.dumps(value, sort_keys=True) for key, value in flat(recipe).items() if key not in FREE_KEYS}
    facts |= {f"data.shards[{index}]": f"manifest {each.fingerprint}" for index, each in enumerate(sources)}
    facts["engine.ds_config"] = json.dumps(ds_config, sort_keys=True)
    facts["tokenizer"] = sources[0].manifest.tokenizer["fingerprint"]
    if recipe.model.source and takes_weights_of_rank_0(recipe, ds_config):
        facts["model.source"] = f"shape {_shape_of(parts.encoder)}"
    elif recipe.model.source:
        # The fingerprint leaves adapters out, because they are drawn, not read.
        facts["model.source"] = f"weights {fingerprint(_read(parts.encoder))}"
    if isinstance(parts.guide, StoredGuide):
        facts["guide.store"] = f"record {parts.guide.store.fingerprint}"
    elif parts.guide is not None:
        facts["guide.model"] = f"weights {fingerprint(_read(parts.guide.encoder))}"
    if isinstance(parts.teacher, LiveTeacher):
        facts["teacher.model"] = f"weights {fingerprint(_read(parts.teacher.frozen.encoder))}"
    elif isinstance(parts.teacher, StoredTeacher):
        facts["teacher.store"] = f"record {parts.teacher.store.fingerprint}"
    return facts | {f"the version of {name}": version for name, version in versions().items()}


def disagreement(everyone: Sequence[Mapping[str, str]]) -> str | None:
    """One sentence about what ranks differ in, or None."""
    names = dict.fromkeys(name for facts in everyone for name in facts)
    differing = [name for name in names if len({facts.get(name) for facts in everyone}) > 1]
    if not differing:
        return None
    told = [f"{name} is {_who_has_what(name, everyone)}" for name in differing[:_NAMED]]
    more = f"; and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    return without_secrets(
        f"the ranks do not train the same: {'; '.join(told)}{more}; start every rank with the same recipe, and give "
        "every machine the same files"
    )


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 of named values, their types and shapes; the same on every machine."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{values.dtype}\0{list(values.shape)}\0".encode())
        digest.update(values.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def frozen_fingerprint(module: nn.Module) -> str:
    """The fingerprint of the parameters that do not train, which no checkpoint holds; "" where all train."""
    frozen = [(name, parameter) for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return fingerprint(frozen) if frozen else ""


def _shape_of(encoder: Encoder) -> str:
    """The digest of a model without its weights: the shapes and types of its parameters, and its configuration."""
    shapes = {name: [str(parameter.dtype), *parameter.shape] for name, parameter in encoder.named_parameters()}
    config = {key: value for key, value in encoder.config.to_dict().items() if key not in NOT_COMPUTED_WITH}
    return digest_of([shapes, json.loads(json.dumps(config, default=str))])


def _read(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in module.named_parameters() if "lora_" not in name]


def _who_has_what(name: str, everyone: Sequence[Mapping[str, str]]) -> str:
    """ "7 on ranks 0, 2 and 8 on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        ranks.setdefault(facts.get(name, "absent"), []).append(rank)
    shown = [f"{_short(value)} on {named_ranks(where, most=8)}" for value, where in ranks.items()]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _short(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
