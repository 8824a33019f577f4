"""The plan's counts against what the trainer does: parameters, products, stored activations, bytes held and sent.

What data sheets and assumptions add (seconds on GPUs) cannot be tested here; docs/scaling.md says so.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from launch import plan, scaling
from launch.known_models import KNOWN
from launch.scaling import Collective, Model, Texts
from models.encoder import build_masked_lm
from models.heads import save_heads
from models.masked_autoencoder import DecoderInputs
from models.settings import EmbeddingSettings
from tests import ROOT
from tests.launch.hosts import Unavailable, made, rank_commands, run_on_all
from tests.needs import needed, own
from tests.trainer.support import MODEL, recipe_of, recipe_values
from trainer import build
from trainer.config.load import load_recipe
from trainer.config.schema import Recipe
from trainer.costs.objective_costs import ObjectiveCosts, costs_of
from trainer.costs.parameters import embedding_parameters, encoder_parameters
from trainer.costs.shapes import Shape
from trainer.distributed import World
from trainer.objectives.backward import counting_saved
from trainer.optim import hidden_matrices
from trainer.replay import PlainEngine

RECIPE = "launch/recipes/smae_bert_base_fineweb.toml"
# Large enough for stage 3 to divide some parameters and leave others whole under DeepSpeed's own threshold.
WIDER = MODEL | {"hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 1024, "initializer_range": 0.02}
LADDER = [[1, 64], [2, 128], [3, 256]]


def wider_values(shards: Path, name: str, **train: Any) -> dict[str, Any]:
    train = {"global_batch_size": 24, "micro_batch_size": 4} | train
    model = {"config": dict(WIDER), "ladder": LADDER}
    objective = {"name": "masked", "pairs": "spans"} if name == "spans" else {"name": name}
    return recipe_values(shards, model=model, objective=objective, train=train, optim={"lr": 1e-4})


def planned_model(recipe: Recipe, vocabulary: int) -> Model:
    return Model.of(recipe, Shape.of(WIDER | {"vocab_size": vocabulary}))


@pytest.fixture(scope="module")
def wider_guide(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guide")
    config = WIDER | {"hidden_size": 192, "num_hidden_layers": 4, "intermediate_size": 768}
    build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    EmbeddingSettings("mean", "cosine", ((1, 8), (4, 192)), 64, 64, temperature=0.2).save(folder)
    return folder


@pytest.fixture(scope="module")
def wider_model(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of WIDER, as a start whose weights may stay frozen."""
    folder = tmp_path_factory.mktemp("start")
    build_masked_lm(WIDER, vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wider_heads(wider_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with linear maps of the depths below the last, as trainer.resize makes them."""
    folder = tmp_path_factory.mktemp("heads")
    for path in wider_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    shapes = {"weight": (256, 256), "bias": (256,)}
    save_heads({f"{depth}.{name}": torch.rand(shape) for depth in (1, 2) for name, shape in shapes.items()}, folder)
    return folder


RECOMPUTED = {"activation_checkpointing": True}
# Where what is recomputed is counted in a way of its own: with and without gradient caching, some layers, and none.
RECOMPUTING = ("masked", "contrastive", "frozen", "heads")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        *(({}, name) for name in ("masked", "contrastive", "guided", "heads")),
        *(pytest.param({}, name, marks=pytest.mark.full) for name in ("enhanced", "spans", "adapted", "frozen")),
        *(pytest.param(RECOMPUTED, name, marks=pytest.mark.full, id=f"recomputed-{name}") for name in RECOMPUTING),
    ],
)
def test_products_are_those_computed(
    name: str,
    changes: dict[str, Any],
    document_shards: Path,
    tuple_shards: Path,
    wider_guide: Path,
    wider_model: Path,
    wider_heads: Path,
) -> None:
    """Counted by PyTorch while a step runs; texts of one length, so that there is no padding to compute."""
    contrastive = name in ("contrastive", "guided", "adapted", "frozen", "heads")
    values = wider_values(
        tuple_shards if contrastive else document_shards,
        "contrastive" if contrastive else "masked",
        global_batch_size=8,
        **changes,
    )
    if name == "guided":
        values["guide"] = {"model": str(wider_guide)}
        values["objective"] |= {"filter_false_negatives": True, "filter_by": "guide", "kl_teacher": "guide"}
    if name in ("adapted", "frozen"):
        part = {"adapted": {"lora_rank": 8}, "frozen": {"frozen_layers": 1, "ladder": LADDER[1:]}}[name]
        values["model"] |= {"source": str(wider_model), "config": {}} | part
    if name == "heads":
        values["model"] |= {"source": str(wider_heads), "config": {}, "trains": "heads"}
    values["objective"] |= {"enhanced": {"decoding": "enhanced"}, "spans": {"pairs": "spans"}}.get(name, {})
    values["data"] |= {"max_length": 16, "query_max_length": 8, "passage_max_length": 8, "num_negatives": 1}
    recipe = recipe_of(values)
    sources = build.open_shards(recipe)
    parts = build.build_model(recipe, sources)
    stream = build.open_stream(recipe, sources, rank=0, world_size=1)
    objective = build.build_objective(recipe, parts)
    batch = next(stream)
    stream.close()
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _in_place_product}) as counter:
        engine = PlainEngine(parts.module.train(), World(0, 0, 1, torch.device("cpu")))
        report = objective.forward_backward(engine, batch, 0)
    texts = _texts_of(batch)
    recipe = _with_real_masks(recipe, batch)
    passages = len(getattr(batch, "passages", ()))
    shape = planned_model(recipe, sources[0].vocabulary.size).shape
    computed, padding = counter.get_total_flops(), report.padded_tokens / report.tokens - 1
    costs = costs_of(recipe)
    predicted = costs.computed_flops(shape, texts, vectors=passages)
    if name == "guided":
        assert computed > 1.1 * predicted
        guide = plan.guide_of(recipe)
        assert guide is not None
        predicted += costs.guide_flops(guide.shape, texts, vectors=passages)
    ratio = computed / predicted
    print(f"{name} {changes}: computed ÷ predicted {ratio:.3f}, padding {padding:.1%}")
    assert 0.97 < ratio < 1.03 + padding
    # The metrics' count, by which MFU is predicted, is another: it counts no repetition, and nothing as skipped.
    model_flops = costs.model_flops(shape, texts)
    assert model_flops == pytest.approx(report.flops, rel=1e-6)
    # At this shape, what is repeated makes up for what is skipped in two of the cases.
    if (name, bool(changes)) not in (("enhanced", False), ("frozen", True)):
        assert not 0.97 < computed / model_flops < 1.03 + padding


@pytest.mark.parametrize("num_positives", [1, 2])
@pytest.mark.parametrize("further", [[], ["query_query"], ["passage_passage", "passage_query"]])
def test_products_of_the_loss_are_those_computed(further: list[str], num_positives: int, crowded_shards: Path) -> None:
    """Of the loss alone, on any vectors: a step's own are too few to be seen beside the encoder's."""
    values = wider_values(crowded_shards, "contrastive")
    values["objective"] |= {"negatives": ["query_passage", *further], "hardness": 5.0}
    values["data"] |= {"query_max_length": 8, "passage_max_length": 8, "num_negatives": 1}
    recipe = recipe_of(values | {"data": values["data"] | {"num_positives": num_positives}})
    sources = build.open_shards(recipe)
    objective = build.build_objective(recipe, build.build_model(recipe, sources))
    stream = build.open_stream(recipe, sources, rank=0, world_size=1)
    batch = next(stream)
    stream.close()
    texts, costs, step = _texts_of(batch), costs_of(recipe), objective.schedule(0)
    vectors = costs.vectors(texts)
    reads_queries = any(name.endswith("_query") for name in further)
    assert vectors == len(batch.passages) + reads_queries * len(batch.queries)
    embeddings = [torch.randn(texts.count, size.dim) for size in step.sizes]
    alone = PlainEngine(torch.nn.Identity(), World(0, 0, 1, torch.device("cpu")))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _in_place_product}) as counter:
        objective.loss.loss_and_gradients(embeddings, batch, step, alone)
    shape = planned_model(recipe, sources[0].vocabulary.size).shape
    without = ObjectiveCosts(recipe).computed_flops(shape, texts, vectors=vectors)
    predicted = costs.computed_flops(shape, texts, vectors=vectors) - without
    assert counter.get_total_flops() == pytest.approx(predicted, rel=1e-6)


def _in_place_product(
    into: torch.Size, left: torch.Size, right: torch.Size, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """PyTorch's counter knows addmm, and not addmm_, with which losses add to gradients."""
    return 2 * left[0] * left[1] * right[1]


def _with_real_masks(recipe: Recipe, batch: Any) -> Recipe:
    """Mask ratios as they came out: whole words that do not fit the budget are left."""
    if recipe.objective.name != "masked":
        return recipe
    sides = {"encoder_mask_ratio": batch.encoder_labels, "decoder_mask_ratio": batch.decoder_labels}
    ratios = {name: float((labels != -100).sum()) / len(labels) for name, labels in sides.items()}
    return dataclasses.replace(recipe, objective=dataclasses.replace(recipe.objective, **ratios))


def _texts_of(batch: Any) -> Texts:
    if hasattr(batch, "offsets"):
        parts = [batch.offsets.diff()]
    else:
        parts = [batch.queries.lengths, batch.passages.lengths]
    lengths = torch.cat(parts).double()
    return Texts(len(lengths), float(lengths.sum()), float((lengths**2).sum()))


@pytest.mark.parametrize(("name", "positions"), [("masked", 80), ("contrastive", 80)])
def test_parameters_are_those_of_the_model(
    name: str, positions: int, document_shards: Path, tuple_shards: Path
) -> None:
    recipe = recipe_of(wider_values(document_shards if name == "masked" else tuple_shards, name))
    sources = build.open_shards(recipe)
    parameters = [p.numel() for p in build.build_model(recipe, sources).module.parameters()]
    model = planned_model(recipe, sources[0].vocabulary.size)
    assert model.parameters == model.trained == sum(parameters)
    assert model.divided == sum(count for count in parameters if count > scaling.PERSISTENT_ELEMENTS)
    assert 0 < model.divided < model.parameters
    assert model.by_muon == 0.0


@pytest.mark.parametrize("name", ["masked", "contrastive"])
def test_muons_matrices_are_those_of_the_trainer(name: str, document_shards: Path, tuple_shards: Path) -> None:
    shards = document_shards if name == "masked" else tuple_shards
    recipe = recipe_of(wider_values(shards, name) | {"optim": {"name": "muon"}})
    sources = build.open_shards(recipe)
    matrices = hidden_matrices(build.build_model(recipe, sources).module)
    model = planned_model(recipe, sources[0].vocabulary.size)
    assert model.by_muon == sum(each.numel() for each in matrices) > 0
    assert scaling.stages_for(recipe) == (0, 1, 3)
    # Between steps a matrix is one float32 value an element smaller than with AdamW.
    adamw = dataclasses.replace(model, by_muon=0.0)
    for stage, ranks in ((0, 2), (1, 2), (3, 2)):
        spared = scaling.resting_bytes(adamw, stage, ranks) - scaling.resting_bytes(model, stage, ranks)
        assert spared == 4 * model.by_muon / (ranks if stage else 1)


def test_where_heads_alone_train_no_other_parameter_does(wider_heads: Path, tuple_shards: Path) -> None:
    values = wider_values(tuple_shards, "contrastive")
    values["model"] |= {"source": str(wider_heads), "config": {}, "trains": "heads"}
    recipe = recipe_of(values)
    sources = build.open_shards(recipe)
    parameters = list(build.build_model(recipe, sources).module.parameters())
    model = planned_model(recipe, sources[0].vocabulary.size)
    assert model.parameters == sum(each.numel() for each in parameters)
    assert model.trained == sum(each.numel() for each in parameters if each.requires_grad) == 2 * (256**2 + 256)
    # Nothing of the encoder is kept for a backward pass, reduced, or gathered for one.
    whole = recipe_of(wider_values(tuple_shards, "contrastive"))
    texts, shape = Texts.alike(64, 30), model.shape
    kept, all_kept = (costs_of(each).activation_bytes(shape, texts) for each in (recipe, whole))
    assert kept < 0.6 * all_kept
    calls = scaling.collectives(recipe, model, stage=3, micro_batches=5, vectors=0)
    assert calls[0].bytes == 5 * 4 * model.trained
    assert calls[1].bytes == 5 * 2 * 2 * model.divided  # two forward passes a micro-batch


def test_autocast_casts_the_matrices_in_every_forward_pass() -> None:
    """What stage 0 moves beside the other stages: float32 weights read, bf16 copies written."""
    model = build_masked_lm(WIDER, vocab_size=2000, pad_token_id=0).base_model
    parameters = {each.data_ptr() for each in model.parameters()}
    moved = 0

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal moved
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "_to_copy" and args[0].data_ptr() in parameters:
                moved += args[0].nbytes + out.nbytes
            return out

    with torch.autocast("cpu", torch.bfloat16), Casts():
        model(torch.randint(5, 1000, (2, 12)))
    shape = Shape.of(WIDER | {"vocab_size": 2000})
    matrices = sum(encoder_parameters(shape)) - sum(embedding_parameters(shape))
    assert moved == pytest.approx(6 * matrices, rel=0.01)
    values = wider_values(Path("shards"), "contrastive")
    recipe, planned = recipe_of(values), planned_model(recipe_of(values), 2000)
    texts = Texts.alike(0, 30)
    zero, one = (
        scaling.moved_bytes(costs_of(recipe), planned, texts, stage=s, ranks=1, micro_batches=5) for s in (0, 1)
    )
    assert zero - one == 5 * (2 * planned.trained + 2 * 6 * matrices)  # with caching, two forward passes


@pytest.mark.parametrize("name", ["masked", "contrastive"])
@pytest.mark.parametrize("drops", [False, True])
def test_stored_activations_are_as_counted(name: str, drops: bool, document_shards: Path, tuple_shards: Path) -> None:
    """What autograd keeps, each storage once, weights left out.

    A CPU keeps more than a GPU with a fused attention, which is what is planned for: the attention's shares, and masks
    as wide as what they mask.
    """
    values = wider_values(document_shards if name == "masked" else tuple_shards, name)
    if drops:
        values["model"]["config"] |= {"hidden_dropout_prob": 0.1}
    recipe = recipe_of(values)
    sources = build.open_shards(recipe)
    parts = build.build_model(recipe, sources)
    texts, length = 16, 30
    ids = torch.randint(5, 1000, (texts, length), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"sizes": list(recipe.ladder)}
    if name == "masked":
        labels, decoder_labels = (torch.full_like(ids, -100) for _ in range(2))
        for each, share in ((labels, 0.2), (decoder_labels, 0.4)):
            each[:, 1 : 1 + round(share * length)] = 7
        inputs |= {"labels": labels, "decoder": DecoderInputs(ids, decoder_labels), "size_weights": [1.0] * 3}
    with counting_saved() as saved:
        _graph = parts.module.train()(ids, torch.ones_like(ids), **inputs)  # alive, so that no address is used twice
    stored = sum(saved.values())
    shape = planned_model(recipe, sources[0].vocabulary.size).shape
    counted = Texts(texts, texts * length, texts * length**2)
    costs = costs_of(recipe)
    predicted = costs.activation_bytes(shape, counted, width=4.0, drops=drops)
    predicted += costs.table_gradient_bytes(shape)  # counted among the buckets
    heads = WIDER["num_attention_heads"]
    on_cpu = 4 * shape.layers * heads * texts * length**2
    on_cpu += 2 * 3 * shape.layers * texts * length * shape.hidden if drops else 0
    print(f"{name}, dropout {drops}: stored ÷ predicted {stored / (predicted + on_cpu):.3f}")
    assert 0.93 < stored / (predicted + on_cpu) < 1.07
    assert stored > 0.95 * predicted
    # Negative control: half the layers' memory is noticed.
    fewer = dataclasses.replace(shape, layers=2)
    assert stored > 1.2 * costs.activation_bytes(fewer, counted, width=4.0, drops=drops)


CONFIGS = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero1_float32": 1}


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest,
    launcher: None,
    document_shards: Path,
    tuple_shards: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Real steps of two hosts at the shipped configurations that are needed, by name."""
    wanted = needed(request)
    folder = tmp_path_factory.mktemp("communication")
    shards = {"masked": document_shards, "contrastive": tuple_shards, "spans": document_shards}
    cases = []
    # Stage 3 comes last: it changes F.linear for its process.
    for config in sorted(CONFIGS, key=lambda each: CONFIGS[each]):
        for name in (*shards, "muon"):
            values = wider_values(shards.get(name, document_shards), name.replace("muon", "masked"))
            values |= {"engine": {"ds_config": f"ds_configs/{config}.json"}}
            values |= {"optim": {"name": "muon"}} if name == "muon" else {}
            if f"{name}-{config}" in wanted:
                cases.append({"name": f"{name}-{config}", "values": values, "steps": 1})
    (folder / "cases.json").write_text(json.dumps(cases))
    words = ["tests.launch.communication", str(folder / "cases.json"), str(folder / "results.json")]
    try:
        with made(2) as hosts:
            for done in run_on_all(hosts, rank_commands(hosts, words, port=29500)):
                assert done.returncode == 0, done.stdout[-8000:]
    except Unavailable as reason:
        pytest.skip(str(reason))
    results = json.loads((folder / "results.json").read_text())
    return {case["name"]: case | result for case, result in zip(cases, results, strict=True)}


@pytest.fixture
def counted_bytes(request: pytest.FixtureRequest, launched: dict[str, Any]) -> dict[str, Any]:
    return own(request, launched)


def planned_collectives(case: dict[str, Any], config: str) -> list[Collective]:
    recipe = recipe_of(case["values"])
    kept = scaling.ZERO1_FLOAT32 if config == "zero1_float32" else None
    counts = {"micro_batches": case["micro_batches"], "vectors": case["passages"]}
    return scaling.collectives(recipe, planned_model(recipe, 2000), stage=CONFIGS[config], kept=kept, **counts)


def sent_by_gloo(planned: list[Collective]) -> float:
    """Bytes that each of two ranks sends, where a reduce-scatter is an all-reduce."""
    kinds = (each.kind.replace("reduce_scatter", "all_reduce") for each in planned)
    return sum(dataclasses.replace(each, kind=kind).sent(2) for each, kind in zip(planned, kinds))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["masked", "contrastive"])
@pytest.mark.needs("{name}-{config}")
def test_bytes_sent_are_as_counted(name: str, config: str, counted_bytes: dict[str, Any]) -> None:
    """By collective, alike for every backend; and on the wire, where gloo's reduce-scatter is an all-reduce."""
    case = counted_bytes[f"{name}-{config}"]
    planned = planned_collectives(case, config)
    assert case["micro_batches"] > 1  # so that what is sent at every micro-batch differs from what is sent once
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        expected = sum(each.bytes for each in planned if each.kind == kind)
        assert case["collectives"][kind] == pytest.approx(expected, rel=0.03, abs=20_000), kind
    sent, expected = sum(case["sent"]) / 2, sent_by_gloo(planned)
    print(f"{name} {config}: sent {sent / 1e6:.2f} MB a step, ÷ predicted {sent / expected:.3f}")
    assert 0.97 < sent / expected < 1.06
    # Negative control: no other configuration would pass.
    for other in CONFIGS:
        if other != config:
            wrong = sent_by_gloo(planned_collectives(case, other))
            assert abs(sent / wrong - 1) > 0.06, other


@pytest.mark.needs("spans-zero3")
def test_pairs_beside_masked_losses_gather_what_is_counted(counted_bytes: dict[str, Any]) -> None:
    """Stage 3 gathers weights for the pass without a graph, too."""
    case = counted_bytes["spans-zero3"]
    assert case["micro_batches"] > 1

    def gathered(case: dict[str, Any]) -> float:
        return sum(each.bytes for each in planned_collectives(case, "zero3") if each.kind == "all_gather")

    ratio = case["collectives"]["all_gather"] / gathered(case)
    print(f"spans zero3: gathered ÷ predicted {ratio:.3f}")
    assert 0.99 < ratio < 1.01
    # Negative control: as if there were no pairs.
    alone = case | {"values": case["values"] | {"objective": {"name": "masked"}}}
    assert case["collectives"]["all_gather"] > 2 * gathered(alone)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["masked", "contrastive"])
@pytest.mark.needs("{name}-{config}")
def test_bytes_held_are_as_counted(name: str, config: str, counted_bytes: dict[str, Any]) -> None:
    case = counted_bytes[f"{name}-{config}"]
    recipe = recipe_of(case["values"])
    kept = scaling.ZERO1_FLOAT32 if config == "zero1_float32" else None
    expected = scaling.resting_bytes(planned_model(recipe, 2000), CONFIGS[config], 2, kept=kept)
    held = min(case["held"])
    print(f"{name} {config}: held {held / 1e6:.1f} MB, ÷ predicted {held / expected:.3f}")
    assert 0.95 < held / expected < 1.05


@pytest.mark.parametrize("config", ["zero0", "zero1"])  # stage 3 caches buffers that are not counted
@pytest.mark.needs("muon-{config}")
def test_bytes_held_with_muon_are_as_counted(config: str, counted_bytes: dict[str, Any]) -> None:
    case = counted_bytes[f"muon-{config}"]
    planned, stage = planned_model(recipe_of(case["values"]), 2000), CONFIGS[config]
    held, expected = min(case["held"]), scaling.resting_bytes(planned, stage, 2)
    print(f"muon {config}: held {held / 1e6:.1f} MB, ÷ predicted {held / expected:.3f}")
    assert 0.95 < held / expected < 1.05
    # Negative control: with AdamW's two moments.
    adamw = scaling.resting_bytes(dataclasses.replace(planned, by_muon=0.0), stage, 2)
    assert held / adamw < 0.95


def predictions(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "launch.plan", RECIPE, "--json", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.processes
def test_a_plan_says_what_each_number_of_nodes_gives() -> None:
    rows = predictions("--nodes", "1..512", "--gpu", "h100", "--interconnect", "ib-ndr-8x")
    assert [row["nodes"] for row in rows] == [2**power for power in range(10)]
    full = [row["recommended"] for row in rows if not row["refused"]]
    assert len(full) == 7  # 512 texts a batch reach 512 GPUs
    assert all("global_batch_size = 512" in row["refused"] for row in rows[7:])
    for best in full:
        assert best["fits"] and 0 < best["mfu"] < 0.7 and best["micro_batches"] >= 1
        assert best["days_100BT"] == pytest.approx(10 * best["days_10BT"])
        assert best["micro_batch_size"] * best["micro_batches"] * best["gpus"] >= best["global_batch_size"]
    for few, more in itertools.pairwise(full):
        assert more["step_seconds"] < 1.01 * few["step_seconds"] and more["mfu"] < few["mfu"]
    # Dividing saves memory, but stage 3 gathers all weights again for every micro-batch.
    stages = predictions("--nodes", "8", "--batch-per-gpu", "8")[0]["stages"]
    none, first, second, third = (each["memory"]["states"] for each in stages)
    assert none > first > second and 0.9 * second < third < 1.1 * second and second < none / 3


@pytest.mark.processes
def test_a_slower_link_and_a_smaller_gpu_are_noticed() -> None:
    options = ("--nodes", "16", "--batch-per-gpu", "64")
    fast, slow, old = (
        predictions(*options, *more)[0]["recommended"]
        for more in (["--interconnect", "ib-ndr-8x"], ["--interconnect", "10"], ["--gpu", "a100"])
    )
    assert slow["communication_seconds"] > 50 * fast["communication_seconds"]
    assert old["compute_seconds"] > 1.5 * fast["compute_seconds"]


@pytest.mark.usefixtures("bare_checkout")
def test_a_guide_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights whole on every GPU, its pass, its passages' vectors; a table costs memory alone."""
    bert = {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 30522}
    table = {"model_type": "static", "hidden_size": 1024, "vocab_size": 30522}
    found = {}
    for name, config in (("none", None), ("bert", bert), ("table", table)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        recipe = "launch/recipes/srl_guided_msmarco.toml" if config else "launch/recipes/srl_msmarco.toml"
        guide = ["--guide", str(tmp_path / f"{name}.json")] if config else []
        assert plan.main([recipe, "--nodes", "2", "--json", "--model", "google-bert/bert-base-uncased", *guide]) == 0
        found[name] = json.loads(capsys.readouterr().out)[0]["stages"][1]
    none, encoder, vectors = found["none"], found["bert"], found["table"]
    assert encoder["memory"]["states"] - none["memory"]["states"] == 2 * 108_891_648  # BERT base without its pooler
    assert vectors["memory"]["states"] - none["memory"]["states"] == 4 * 1024 * 30522
    assert encoder["compute_seconds"] > 1.15 * none["compute_seconds"]
    assert vectors["compute_seconds"] < 1.05 * none["compute_seconds"]
    gathered = [each["sent_bytes"] - none["sent_bytes"] for each in (encoder, vectors)]
    assert gathered[1] / gathered[0] == pytest.approx(1024 / 768)


@pytest.mark.usefixtures("bare_checkout")
def test_a_stored_guide_makes_no_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a guide whose vectors are stored, there are the vectors alone: their scores, and the passages' gathered."""
    config = {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 30522}
    (tmp_path / "bert.json").write_text(json.dumps(config))
    (tmp_path / "store").mkdir()
    stored = [f"--guide.store={tmp_path / 'store'}"]
    recipe, found = "launch/recipes/srl_guided_msmarco.toml", {}
    cases: dict[str, list[str]] = {"live": [], "not made": stored, "store": stored}
    for name, options in cases.items():
        if name == "store":
            (tmp_path / "store" / "store.json").write_text(json.dumps({"width": 768}))
        given = [] if name == "store" else ["--guide", str(tmp_path / "bert.json")]
        command = [recipe, "--nodes", "2", "--json", "--model", "google-bert/bert-base-uncased", *given, *options]
        assert plan.main(command) == 0
        found[name] = json.loads(capsys.readouterr().out)[0]["stages"][1]
    assert found["store"] == found["not made"] != found["live"]
    stored_guide, live = found["store"], found["live"]
    assert live["memory"]["states"] - stored_guide["memory"]["states"] == 2 * 108_891_648
    assert live["memory"]["loss"] == stored_guide["memory"]["loss"]
    assert live["sent_bytes"] == stored_guide["sent_bytes"]
    assert live["compute_seconds"] > 1.15 * stored_guide["compute_seconds"]
    (tmp_path / "store" / "store.json").write_text("{}")
    assert plan.main([recipe, "--nodes", "2", *stored]) == 2
    assert "does not say its width" in capsys.readouterr().err


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A loss that wants more than the GPU has, at every stage."""
    logits = "--train.logits_memory_mib=40000"
    assert plan.main([RECIPE, "--nodes", "1", logits]) == 0
    assert "no stage fits" in capsys.readouterr().out


def test_no_micro_batch_size_is_advised_where_none_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """The direct backward pass takes a rank's whole share at once."""
    command = [str(ROOT / "launch/recipes/srl_nli.toml"), "--nodes", "1"]
    said = []
    for backward in ("grad_cache", "direct"):
        assert plan.main([*command, f"--objective.backward={backward}"]) == 0
        said.append("--train.micro_batch_size=" in capsys.readouterr().out)
    assert said == [True, False]
    stages = planned(capsys, *command, "--objective.backward=direct")["stages"]
    texts = 128 / 8 * 3  # queries, each with a positive and a hard negative, on each of 8 GPUs
    assert {(each["micro_batch_size"], each["micro_batches"]) for each in stages} == {(texts, 1)}


BERT = ("--model", "google-bert/bert-base-uncased")
ALONE = ("--nodes", "1", "--gpus-per-node", "1")


@pytest.mark.parametrize("options", [("--nodes", "2", "--interconnect", "10"), ("--nodes", "1", "--link-share", "0.5")])
@pytest.mark.usefixtures("bare_checkout")
def test_what_joins_nodes_or_gpus_is_read_where_there_are_several(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = planned(capsys, RECIPE, *BERT, *options[:2])
    after = planned(capsys, RECIPE, *BERT, *options)
    assert before["recommended"]["communication_seconds"] < after["recommended"]["communication_seconds"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((RECIPE, "--nodes", "8..2"), "--nodes '8..2'"),
        ((RECIPE, "--nodes", "many"), "--nodes 'many'"),
        ((RECIPE, "--interconnect", "string"), "--interconnect 'string' is unknown"),
        ((RECIPE, "--interconnect", "-5"), "--interconnect '-5' is unknown"),
        ((RECIPE, "--gpus-per-node", "0"), "--gpus-per-node 0"),
        ((RECIPE, "--link-share", "1.5"), "--link-share 1.5"),
        ((RECIPE, "--document-tokens", "600"), "--document-tokens 600"),
        ((RECIPE, "--query-tokens", "10"), "--query-tokens 10 is given, and the recipe reads documents"),
        (("launch/recipes/srl_nli.toml", "--document-tokens", "10"), "the recipe reads queries and passages"),
        ((RECIPE, "--batch-per-gpu", "-1"), "--batch-per-gpu -1"),
        (
            (RECIPE, *BERT, "--nodes", "1", "--interconnect", "ib-ndr-8x"),
            "--interconnect joins nodes, and --nodes names",
        ),
        ((RECIPE, *BERT, *ALONE, "--link-share", "0.5"), "--link-share is of what joins GPUs, and there is a"),
        ((RECIPE, "--node", "8"), "'--node' is not understood"),
        ((RECIPE, "--train.global_batch=8"), "unknown key train.global_batch"),
        ((RECIPE, "--model", "absent.json"), "the shape of 'absent.json' is not known"),
        (("launch/recipes/demo_smae.toml",), "--vocabulary"),
        (("absent.toml",), "absent.toml"),
    ],
)
@pytest.mark.usefixtures("bare_checkout")
def test_a_user_error_is_one_sentence(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and said in err and err.count("\n") == 1


@pytest.mark.parametrize("recipe", sorted((ROOT / "launch/recipes").glob("*.toml")), ids=lambda path: path.stem)
@pytest.mark.usefixtures("bare_checkout")
def test_every_recipe_can_be_planned(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if load_recipe(recipe).model.source in set(KNOWN) - {"google-bert/bert-base-uncased"}:
        row = planned(capsys, str(recipe), "--nodes", "1")
        assert row["recommended"]["step_seconds"] > 0
        return
    own = recipe.stem.startswith(("demo", "distill"))  # for a model of the ladder's shape; the others take BERT
    layers, hidden = load_recipe(recipe).model.ladder[-1] if own else (12, 768)
    values = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": 30522}
    (tmp_path / "config.json").write_text(json.dumps(values))
    guided = bool(load_recipe(recipe).guide.model or load_recipe(recipe).teacher.model)
    command = [str(recipe), "--nodes", "1", "--model", str(tmp_path), "--json"]
    if guided and not recipe.stem.startswith("static"):
        made = recipe.stem != "distill_minilm"  # whose teacher is made by a command that is no recipe's
        assert plan.main(command) == (0 if made else 2)
        out, err = capsys.readouterr()
        assert bool(out) is made and ("give --guide" in err) is not made
    code = plan.main([*command, *(["--guide", str(tmp_path)] if guided else [])])
    if recipe.stem.startswith("static"):
        assert code == 2 and "is a static embedding" in capsys.readouterr().err
        return
    assert code == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["recommended"]["step_seconds"] > 0


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert plan.main([*arguments, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    return row


@pytest.mark.usefixtures("bare_checkout")
def test_a_later_step_of_a_chain_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """It starts from a model that does not exist yet, whose shape is that of the one from which its recipe starts."""
    for recipe in ("srl_msmarco", "cosent_stsb", "srl_guided_msmarco"):
        command = (f"launch/recipes/{recipe}.toml", "--nodes", "2")
        assert planned(capsys, *command) == planned(capsys, *command, "--model", "google-bert/bert-base-uncased")


def of_decoder(source: str, layers: int, hidden: int) -> tuple[str, ...]:
    """A retrieval recipe, of that model."""
    settings = (f"--model.source={source}", f"--model.ladder=[[{layers // 2},128],[{layers},{hidden}]]")
    return ("launch/recipes/srl_msmarco.toml", *settings, "--model.pooling=last", "--model.direction=causal")


@pytest.mark.usefixtures("bare_checkout")
def test_decoders_are_planned_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    small = planned(capsys, *of_decoder("Qwen/Qwen3-Embedding-0.6B", 28, 1024), "--nodes", "1")
    large = planned(capsys, *of_decoder("intfloat/e5-mistral-7b-instruct", 32, 4096), "--nodes", "1")
    assert small["recommended"] and large["recommended"]["stage"]
    assert not large["stages"][0]["fits"]  # 16 bytes a parameter on every GPU
    for row, parameters in ((small, 595_776_512), (large, 7_110_660_096)):
        states = row["stages"][2]["memory"]["states"]
        assert states == pytest.approx(2 * parameters + 16 * parameters / 8)
    # Stage 3 never holds all weights of the large one at once, and gathers most of them twice; it is all the same for
    # the small one.
    assert large["stages"][3]["memory"]["states"] == pytest.approx(2e9 + 18 * 7_110_660_096 / 8)
    alone = planned(capsys, *of_decoder("intfloat/e5-mistral-7b-instruct", 32, 4096), "--nodes=1", "--gpus-per-node=1")
    assert alone["refused"] == "no stage fits in the GPU's memory"
    adapters = planned(
        capsys,
        *of_decoder("intfloat/e5-mistral-7b-instruct", 32, 4096),
        *("--nodes=1", "--gpus-per-node=1", "--model.lora_rank=16"),
    )
    assert adapters["recommended"]


def test_stage_3_gathers_again_what_it_released() -> None:
    recipe = load_recipe(ROOT / RECIPE)
    shape = Shape(2048, 8192, 24, 30000)
    big = Model.of(recipe, shape)
    small = Model.of(recipe, dataclasses.replace(shape, layers=1))
    assert small.divided < scaling.LIVE_ELEMENTS / 2 < scaling.LIVE_ELEMENTS < big.divided
    gathered = [
        sum(each.bytes for each in scaling.collectives(recipe, model, stage=3, micro_batches=3, vectors=0)[1:2])
        for model in (small, big)
    ]
    assert gathered[0] == 3 * 2 * small.divided
    assert gathered[1] == pytest.approx(3 * 2 * (2 * big.divided - scaling.LIVE_ELEMENTS / 2))


def test_frozen_weights_are_divided_and_not_trained() -> None:
    """LoRA and frozen layers, at stage 3: a rank's share of what does not train, and no gathers of what is not sent."""
    values = wider_values(Path("shards"), "contrastive")
    values["model"] |= {"source": "a model", "config": {}, "lora_rank": 4}
    recipe = recipe_of(values)
    model = planned_model(recipe, 2000)
    assert model.trained == 3 * 4 * (4 * 2 * 256 + 2 * (256 + 1024)) == model.whole
    values["model"] |= {"lora_rank": 0, "frozen_layers": 2}
    frozen = planned_model(recipe_of(values), 2000)
    assert frozen.trained == 4 * (256**2 + 256) + 2 * 256 * 1024 + 1024 + 256 + 4 * 256
    assert frozen.whole == frozen.trained - 2 * 256 * 1024


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes=1..1" + "0" * 40,), "is no number of nodes"),
        (("--nodes=\u00b2",), "is no number of nodes"),
        (("--nodes=1" + "0" * 5000,), "is no number of nodes"),
        (("--gpus-per-node=1" + "0" * 30,), "must lie between 1 and 1,024"),
        (("--batch-per-gpu=1" + "0" * 30,), "must lie between 0 and"),
        (("--interconnect=nan",), "is unknown"),
        (("--interconnect=1e-320",), "is unknown"),
        (("--link-share=1e-320",), "must be at least 0.001"),
        (("--matrix-share=nan",), "must be at least 0.001"),
        (("--document-tokens=nan",), "must lie between 1 and"),
        (("--vocabulary=1" + "0" * 40,), "must be a whole number from 1 to 1,000,000,000"),
    ],
)
def test_numbers_beyond_all_machines(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert plan.main([str(ROOT / "launch/recipes/smae_bert_base_fineweb.toml"), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 10**300, True, None, "12", [12], float("inf")])
def test_configs_that_no_encoder_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object
) -> None:
    path = tmp_path / "config.json"
    sound = {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 30522, "max_position_embeddings": 512}
    path.write_text(json.dumps({**sound, key: value}))
    assert plan.main([str(ROOT / "launch/recipes/smae_bert_base_fineweb.toml"), f"--model={path}"]) == 2
    assert f"{key} = {value!r} must be a whole number" in capsys.readouterr().err


@pytest.mark.usefixtures("bare_checkout")
def test_special_tokens_are_those_of_the_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Enhanced decoding predicts all tokens but these."""
    command = [str(ROOT / "launch/recipes/retromae_bert_base_wikipedia.toml"), "--nodes=1", "--document-tokens=40"]
    absent = planned(capsys, *command)
    found = []
    for entry in ({}, {"frame": {"before": ["<s>", "<t>", "<u>"], "after": ["</s>"]}}, {"frame": {"before": 1}}):
        (tmp_path / "manifest.json").write_text(json.dumps(entry))
        shards = f'--data.shards=["{tmp_path}"]'
        if entry.get("frame", {}).get("before") == 1:
            assert plan.main([*command, shards]) == 2
            assert "frame = {'before': 1} is none" in capsys.readouterr().err
        else:
            found.append(planned(capsys, *command, shards))
    assert found[0] == absent
    texts = scaling.texts_of(load_recipe(command[0]), 8, scaling.Lengths(40, 0, 0, special=4))
    assert costs_of(load_recipe(command[0])).predicted_rows(texts)[1] == 8 * 36
    assert found[1]["stages"][1]["mfu"] < found[0]["stages"][1]["mfu"]
