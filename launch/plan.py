"""`python -m launch.plan RECIPE`: what a training would take on clusters that are not here, and how to set it up.

    python -m launch.plan launch/recipes/smae_bert_base_fineweb.toml --nodes 1..512 --gpu h100 --interconnect ib-ndr-8x

For every number of nodes: the ZeRO stage, micro-batch size and accumulation that are fastest and fit, the step's time,
model FLOPs utilisation, memory and bytes sent a GPU, and the days that 10 and 100 billion tokens (FineWeb's samples)
take. The formulas are launch/scaling.py's, documented and compared with measurements in docs/scaling.md. Torch-free.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.ground.command import exit_code_of
from data.ground.errors import ConfigError
from data.ground.options import Parser, Stated, flag_of, settings_among, stated_in
from launch.scaling import (
    GPUS,
    INTERCONNECTS,
    Assumptions,
    Cluster,
    FrozenGuide,
    Lengths,
    Link,
    Model,
    Prediction,
    best_of_stage,
    recommended,
    stages_for,
)
from launch.sources import config_of, frame_length
from trainer.config.load import load_recipe, read_json_object
from trainer.config.read_keys import as_read
from trainer.config.schema import Recipe
from trainer.costs.objective_costs import costs_of
from trainer.costs.shapes import Shape

FINEWEB_TOKENS = {"10BT": 10e9, "100BT": 100e9}
# Larger numbers describe no machine that could exist, and the formulas would overflow on them.
_MOST, _MOST_NODES, _MOST_GPUS = 10**9, 10**6, 1024
_LEAST_GBITS, _MOST_GBITS = 1e-3, 1e6
_LEAST_SHARE = 1e-3
CUSTOM_LATENCY = 10e-6  # of an interconnect that is given by its rate alone


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of nodes: every stage's best, and the one to take; `refused` says why there is none."""

    nodes: int
    stages: tuple[Prediction, ...]
    recommended: Prediction | None
    refused: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    return exit_code_of(lambda: _plan_and_print(args, rest))


def _plan_and_print(args: argparse.Namespace, rest: Sequence[str]) -> None:
    recipe = as_read(load_recipe(args.recipe, settings_among(rest)))
    shape = _shape_of(recipe, args)
    nodes = parse_nodes(args.nodes)
    gpus = _within("--gpus-per-node", args.gpus_per_node, 1, _MOST_GPUS)
    link = parse_interconnect(args.interconnect)
    assumed = _assumptions(args)
    _refuse_unread(args, nodes, gpus)
    rows = plan(
        recipe,
        Model.of(recipe, shape, guide=guide_of(recipe, args.guide, recipes=Path(args.recipe).parent)),
        nodes=nodes,
        gpus_per_node=gpus,
        gpu=args.gpu,
        link=link,
        lengths=_lengths(recipe, args),
        assumed=assumed,
        batch_per_gpu=_within("--batch-per-gpu", args.batch_per_gpu, 0, _MOST),
    )
    print(json.dumps([_record(row) for row in rows], indent=2) if args.json else _text(recipe, args, rows))


def _refuse_unread(args: argparse.Namespace, nodes: Sequence[int], gpus_per_node: int) -> None:
    """Refuse options of links that the command line states and that no prediction reads."""
    stated = stated_in(args) if nodes == [1] else ()
    if "interconnect" in stated:
        raise ConfigError("--interconnect joins nodes, and --nodes names a single one; leave --interconnect out")
    if gpus_per_node == 1 and "link_share" in stated:
        raise ConfigError("--link-share is of what joins GPUs, and there is a single one; leave --link-share out")


def plan(
    recipe: Recipe,
    model: Model,
    *,
    nodes: Sequence[int],
    gpus_per_node: int,
    gpu: str,
    link: Link,
    lengths: Lengths,
    assumed: Assumptions,
    batch_per_gpu: int = 0,
) -> list[Row]:
    """batch_per_gpu: samples a GPU, in place of the recipe's global batch; 0: the recipe's, shared by all."""
    rows = []
    for count in nodes:
        cluster = Cluster(count, gpus_per_node, GPUS[gpu], link)
        here = recipe
        if batch_per_gpu:
            train = dataclasses.replace(recipe.train, global_batch_size=batch_per_gpu * cluster.ranks)
            here = dataclasses.replace(recipe, train=train)
        if here.train.global_batch_size < cluster.ranks:
            batch = here.train.global_batch_size
            rows.append(Row(count, (), None, f"train.global_batch_size = {batch} is below {cluster.ranks} GPUs"))
            continue
        best = [
            best_of_stage(here, model, cluster, stage=s, lengths=lengths, assumed=assumed) for s in stages_for(recipe)
        ]
        chosen = recommended(best)
        refused = "" if chosen else "no stage fits in the GPU's memory"
        rows.append(Row(count, tuple(best), chosen, refused))
    return rows


def parse_nodes(text: str) -> list[int]:
    """8, or 1,2,4, or 1..512: the ends and the powers of two between them."""
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            powers = [2**power for power in range(last.bit_length()) if first < 2**power < last]
            counts = sorted({first, *powers, last}) if first <= last else []
        else:
            counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > _MOST_NODES:
        raise ConfigError(f"--nodes {text!r} is no number of nodes; give 8, a list 1,2,4, or a range 1..512")
    return counts


def parse_interconnect(text: str) -> Link:
    """A known kind by name, or what a node sends in Gbit/s."""
    if text in INTERCONNECTS:
        return INTERCONNECTS[text]
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not _LEAST_GBITS <= rate <= _MOST_GBITS:
        names = ", ".join(INTERCONNECTS)
        raise ConfigError(f"--interconnect {text!r} is unknown; choose one of {names}, or give a node's Gbit/s, as 100")
    return Link(rate * 1e9 / 8, CUSTOM_LATENCY)


def _shape_of(recipe: Recipe, args: argparse.Namespace) -> Shape:
    """The encoder's shape: --model, else the recipe's own; a vocabulary by --vocabulary."""
    if not args.model and recipe.model.config:
        values, said = dict(recipe.model.config), "[model.config]"
    else:
        values, said = config_of(args.model or recipe.model.source, "--model", Path(args.recipe).parent)
    if "static" in (values.get("model_type"), recipe.model.config.get("model_type")):
        raise ConfigError(
            f"{said} is a static embedding, a table without matrix products: what is predicted here are transformer "
            "encoders; docs/static.md has measured rates and memory"
        )
    full = recipe.ladder.full
    values |= {"vocab_size": args.vocabulary} if args.vocabulary else {}
    shape = Shape.of(values, said=said, hidden=full.dim, layers=full.layers, direction=recipe.model.direction)
    if not shape.vocabulary:
        raise ConfigError(f"{said} does not say how many tokens its vocabulary has; give --vocabulary, such as 30522")
    width = recipe.model.output_dim or shape.hidden
    if (shape.layers, width) != (full.layers, full.dim) or width > shape.hidden:
        raise ConfigError(
            f"{said} has {shape.layers} layers of {shape.hidden} dimensions, and the ladder ends with {full}; "
            "give the recipe's own encoder, or change model.ladder"
        )
    return shape


def guide_of(recipe: Recipe, given: str = "", *, recipes: Path | None = None) -> FrozenGuide | None:
    """The frozen model that runs beside the student: of --guide, else of the recipe's guide or teacher.

    If the recipe reads stored vectors of a guide, only the vectors count, because the guide makes no passes. recipes:
    the folder with the recipes that may make the model.
    """
    live_guide = recipe.uses_guide and not recipe.guide.store
    live_teacher = recipe.is_taught and recipe.teacher.vectors == "live"
    if not recipe.uses_guide and not live_teacher:
        if given:
            raise ConfigError(f"--guide {given!r} is given, and the recipe uses no guide; leave it out")
        return None
    stored = not live_guide and not live_teacher
    if stored and not given and (width := _stored_width(recipe.guide.store)):
        return FrozenGuide.stored(width)
    own = recipe.guide.model if live_guide or stored else recipe.teacher.model or recipe.model.source
    values, said = config_of(given or own, "--guide", recipes)
    shape = Shape.of(values, said=said)
    if stored and shape.hidden:
        return FrozenGuide.stored(shape.hidden)
    if values.get("model_type") == "static":
        shape = dataclasses.replace(shape, layers=0)
    elif not shape.layers:
        raise ConfigError(f"{said} does not say num_hidden_layers; give a model's config.json")
    if not shape.hidden or not shape.vocabulary:
        raise ConfigError(f"{said} does not say hidden_size and vocab_size; give a model's config.json")
    return FrozenGuide.of(shape)


def _stored_width(folder: str) -> int:
    """The width of the vectors in a store; 0 where there is none yet."""
    path = Path(folder) / "store.json"
    if not path.is_file():
        return 0
    width = read_json_object(path, "record of stored vectors", hint="make the store again").get("width")
    if not isinstance(width, int) or width < 1:
        raise ConfigError(f"record of stored vectors {path} does not say its width; make the store again")
    return width


def _lengths(recipe: Recipe, args: argparse.Namespace) -> Lengths:
    longest = Lengths.longest(recipe)
    given = {"document": args.document_tokens, "query": args.query_tokens, "passage": args.passage_tokens}
    for name, value in given.items():
        if value is not None and recipe.reads_documents != (name == "document"):
            reads = "documents" if recipe.reads_documents else "queries and passages"
            raise ConfigError(f"--{name}-tokens {value:g} is given, and the recipe reads {reads}; leave it out")
        most = getattr(longest, name)
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"--{name}-tokens {value} must lie between 1 and {most}, where the recipe cuts texts")
    lengths = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(longest, **lengths, special=frame_length(recipe.data.shards))


def _assumptions(args: argparse.Namespace) -> Assumptions:
    shares = {"matrix_share": args.matrix_share, "memory_share": args.memory_share, "link_share": args.link_share}
    for name, value in shares.items():
        if not _LEAST_SHARE <= value <= 1:
            raise ConfigError(f"{flag_of(name)} {value} must be at least {_LEAST_SHARE} and at most 1")
    return Assumptions(**shares)


def _within(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise ConfigError(f"{name} {value} must lie between {least} and {most:,}")
    return value


def _record(row: Row) -> dict[str, Any]:
    def one(each: Prediction | None) -> dict[str, Any] | None:
        if each is None:
            return None
        days = {f"days_{name}": each.days(tokens) for name, tokens in FINEWEB_TOKENS.items()}
        return dataclasses.asdict(each) | {"memory_bytes": each.memory.total} | days

    return {
        "nodes": row.nodes,
        "refused": row.refused,
        "recommended": one(row.recommended),
        "stages": [one(each) for each in row.stages],
    }


_COLUMNS = "nodes  GPUs   batch  ZeRO  micro × accumulation   step s    MFU  link %  GiB/GPU  GB sent/GPU"


def _text(recipe: Recipe, args: argparse.Namespace, rows: Sequence[Row]) -> str:
    pretrains = costs_of(recipe).pretrains
    spans = "".join(f"  days {name:>5}" for name in FINEWEB_TOKENS) if pretrains else "  tokens/s"
    lines = [f"{args.recipe} on {args.gpu}, {args.gpus_per_node} a node, {args.interconnect}: predicted, not measured"]
    lines += ["", _COLUMNS + spans]
    for row in rows:
        best = row.recommended
        if best is None:
            lines.append(f"{row.nodes:5d}  {row.refused}")
            continue
        line = f"{best.nodes:5d} {best.gpus:5d} {best.global_batch_size:7d}  {best.stage:4d}"
        line += f"  {best.micro_batch_size:5d} × {best.micro_batches:<12d} {best.step_seconds:8.3f}  {best.mfu:5.1%}"
        line += f"  {best.communication_seconds / best.step_seconds:6.1%}  {best.memory.total / 2**30:7.1f}"
        line += f"  {best.sent_bytes / 1e9:11.2f}"
        if pretrains:
            line += "".join(f"  {best.days(tokens):10.3g}" for tokens in FINEWEB_TOKENS.values())
        else:
            line += f"  {best.tokens_per_second:8.3g}"
        lines.append(line)
    whole = [row for row in rows if row.stages]
    for row in whole[:1] + (whole[-1:] if len(whole) > 1 else []):
        lines += ["", f"By stage on {_nodes(row.nodes)}, each at its best micro-batch:"]
        lines.append("ZeRO  micro × accumulation   step s  GB sent/GPU   GiB/GPU: states  buckets  activations  loss")
        for each in row.stages:
            memory = each.memory
            parts = (memory.states, memory.buckets, memory.activations, memory.loss)
            shown = "  ".join(f"{part / 2**30:7.2f}" for part in parts)
            line = f"{each.stage:4d}  {each.micro_batch_size:5d} × {each.micro_batches:<12d} {each.step_seconds:8.3f}"
            line += f"  {each.sent_bytes / 1e9:11.2f}   {memory.total / 2**30:7.1f}: {shown}"
            lines.append(line + ("" if each.fits else "  does not fit"))
    if whole and (best := whole[-1].recommended):
        lines += ["", f"For {_nodes(best.nodes)}: --engine.ds_config=ds_configs/zero{best.stage}.json"]
        if costs_of(recipe).cuts:
            lines[-1] += f" --train.micro_batch_size={best.micro_batch_size}"
        if args.batch_per_gpu:
            lines[-1] += f" --train.global_batch_size={best.global_batch_size}"
    lines.append("Formulas, assumptions and what was measured: docs/scaling.md")
    return "\n".join(lines)


def _nodes(count: int) -> str:
    return f"{count} node{'s' if count > 1 else ''}"


def _parser() -> argparse.ArgumentParser:
    default = Assumptions()
    parser = Parser(
        prog="python -m launch.plan",
        description="Predict time, utilisation, memory and bytes sent of a recipe, and recommend how to set it up.",
        epilog="Any key of the recipe can be set as --section.key=value.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", help="a recipe; see launch/recipes")
    parser.add_argument("--nodes", default="1..512", help="8, or 1,2,4, or 1..512 (powers of two); default %(default)s")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu", choices=tuple(GPUS), default="h100")
    parser.add_argument(
        "--interconnect",
        action=Stated,
        default="ib-ndr-8x",
        help=f"{', '.join(INTERCONNECTS)}, or a node's Gbit/s",
    )
    parser.add_argument(
        "--model", default="", help="config.json, a model's folder or a known hub name; default: the recipe's"
    )
    parser.add_argument("--guide", default="", help="the same for guide.model, where the recipe has one")
    parser.add_argument("--vocabulary", type=int, default=0, help="tokens, where no config.json says it")
    parser.add_argument(
        "--batch-per-gpu", type=int, default=0, help="samples a GPU; default: the recipe's global batch"
    )
    for name in ("document", "query", "passage"):
        parser.add_argument(f"--{name}-tokens", type=float, help=f"mean tokens of a {name}; default: the longest")
    for name in ("matrix", "memory", "link"):
        value = getattr(default, f"{name}_share")
        share = "of the data sheet; default %(default)s"
        parser.add_argument(f"--{name}-share", action=Stated, type=float, default=value, help=share)
    parser.add_argument("--json", action="store_true", help="everything, all stages, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
