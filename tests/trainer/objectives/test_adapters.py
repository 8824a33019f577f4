"""Training a part of the encoder: frozen lower layers, and low-rank adapters through peft.

Steps of 2 ranks at every ZeRO stage equal those of one plain process. For frozen layers that is the restatement in
`reference` with the same parameters frozen by name; for adapters it is y = (W + α/r · B A) x written out on the plain
encoder, without peft. Then whole commands: what a run leaves behind, and 6 steps = 3 + resume + 3.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel

from data.ground.errors import ConfigError
from models.adapters import add_adapters, freeze_lower_layers, merged_change, merged_tensors, save_adapter
from models.encoder import Encoder, build_masked_lm, load_encoder
from models.sizes import ModelError, Size
from tests import ROOT
from tests.needs import Lazy, needed, own
from tests.ranks import run_ranks
from tests.reference import first_parameters, train_naively
from tests.run_folder import steps_of, weights
from tests.trainer.support import MODEL, STEEP, float32_ds_config, recipe_of, recipe_values
from trainer.build import build_model, open_shards
from trainer.exporting.sizes import export_sizes
from trainer.optim import parameter_groups
from trainer.run_folder import check_output_folder

pytestmark = pytest.mark.long

LOSS_TOLERANCE = 1e-6  # relative
PARAMETER_TOLERANCE = 1e-5  # absolute, after steps that move parameters by up to 0.1
NORM_TOLERANCE = 2e-5  # relative
STEPS = 2  # an adapter's A has no gradient in the first, while B is 0
STAGES = (0, 1, 2, 3)
RECIPES = ("frozen_srl", "frozen_smae", "lora", "lora_above_frozen")
# What freezes layers and adds adapters at once, and the masked losses, at every stage; the others at two.
EVERY_STAGE = ("frozen_smae", "lora_above_frozen")
PRODUCT = [(name, stage) for name in RECIPES for stage in (STAGES if name in EVERY_STAGE else (1, 3))]
RECOMPUTED = ("frozen_smae", "lora_above_frozen")
ROUNDED = [(name, f"zero{stage}") for name in ("frozen_smae", "lora") for stage in (1, 3)]  # bf16 weights
# What frozen_layers = k keeps, by the names of BERT's parameters.
FROZEN_NAMES = {1: r"embeddings\.|encoder\.layer\.0\.", 2: r"embeddings\.|encoder\.layer\.[01]\."}

Values = dict[str, dict[str, Any]]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A trained encoder, as far as the trainer can tell."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(1)
    build_masked_lm(MODEL, vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recipes(source: Path, document_shards: Path, tuple_shards: Path) -> dict[str, Values]:
    def pairs(**model: Any) -> Values:
        return recipe_values(tuple_shards, model={"source": str(source), "config": {}, **model})

    smae = recipe_values(
        document_shards,
        # Two of three sizes have frozen layers alone: their losses still train the head and the decoder.
        model={"source": str(source), "config": {}, "frozen_layers": 2},
        objective={"name": "masked"},
        train={"micro_batch_size": 3},
    )
    above = {"lora_rank": 2, "lora_alpha": 6.0, "lora_targets": ["query", "output.dense"], "frozen_layers": 1}
    cases = {
        # At a rate of 0.1 the first step ends where the loss is so steep that rounding of 7e-7 in the parameters, which
        # the step has amplified, shows in the second loss by 3e-6.
        "frozen_srl": pairs(frozen_layers=1) | {"optim": {**STEEP, "lr": 0.02}},
        "frozen_smae": smae,
        "lora": pairs(lora_rank=4, lora_alpha=8.0),
        "lora_above_frozen": pairs(**above),
    }
    for name in RECOMPUTED:
        cases[f"{name}_recomputed"] = copy.deepcopy(cases[name])
        cases[f"{name}_recomputed"]["train"]["activation_checkpointing"] = True
    for name, objective in (("cached", {}), ("direct", {"backward": "direct"})):
        cases[f"dropout_{name}"] = pairs(lora_rank=4, lora_dropout=0.3)
        cases[f"dropout_{name}"]["objective"] |= objective
        # One micro-batch holds a rank's every text: both ways draw the same dropout.
        cases[f"dropout_{name}"]["train"]["micro_batch_size"] = 4096
    return cases


@pytest.fixture(scope="module")
def launched_steps(
    request: pytest.FixtureRequest,
    launcher: None,
    recipes: dict[str, Values],
    tmp_path_factory: pytest.TempPathFactory,
) -> Results:
    folder, wanted = tmp_path_factory.mktemp("two"), needed(request)
    cases = []

    def add(name: str, ds_config: Path, *, control: str = "") -> None:
        values = recipes[name] | {"engine": {"ds_config": str(ds_config)}}
        label = control or f"{name}-{ds_config.stem}"
        if label in wanted:
            cases.append({"name": label, "values": values, "steps": STEPS, "control": control})

    add("lora", float32_ds_config(folder, 1), control="no world size factor")
    # Stage 3 comes last: it changes F.linear for its process.
    for stage in STAGES:
        for name in recipes:
            add(name, float32_ds_config(folder, stage))
            add(name, ROOT / f"ds_configs/zero{stage}.json")
    assert len(cases) == len(wanted)
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks("tests.trainer.worker", "steps", str(folder / "cases.json"), str(folder), ranks=2)
    return {case["name"]: torch.load(folder / f"{case['name']}.pt") for case in cases}


@pytest.fixture
def two_ranks(request: pytest.FixtureRequest, launched_steps: Results) -> Results:
    return own(request, launched_steps)


class WrittenOut(nn.Module):
    """The plain encoder with W + α/r · B A in each adapted W's place; only the factors are parameters."""

    def __init__(self, source: Path, factors: dict[str, Tensor], *, scale: float) -> None:
        super().__init__()
        self.factors = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(v) for name, v in factors.items()})
        self.scale = scale
        # Not registered: it does not train.
        self.plain = [load_encoder(source).backbone.requires_grad_(False)]

    def backbone(self, *args: Any, **kwargs: Any) -> Any:
        (plain,) = self.plain
        named = {name.replace("/", "."): value for name, value in self.factors.items()}
        weights = {}
        for name, down in named.items():
            if ".lora_A." in name:
                path = name.removeprefix("backbone.").partition(".lora_A.")[0]
                up = named[name.replace(".lora_A.", ".lora_B.")]
                weights[f"{path}.weight"] = plain.get_parameter(f"{path}.weight") + self.scale * up @ down
        return torch.func.functional_call(plain, weights, args, kwargs)


@pytest.fixture(scope="module")
def starts(recipes: dict[str, Values]) -> dict[str, dict[str, Tensor]]:
    return {name: first_parameters(recipes[name]) for name in RECIPES}


@pytest.fixture(scope="module")
def expected(recipes: dict[str, Values], starts: dict[str, dict[str, Tensor]], source: Path) -> Results:
    """Each recipe restated; of adapters, the factors alone are among the parameters."""

    def restate(name: str) -> list[dict[str, Any]]:
        values = copy.deepcopy(recipes[name])
        if not name.startswith("lora"):
            frozen_layers = values["model"].pop("frozen_layers")
            recipe = recipe_of(values)
            module = build_model(recipe, open_shards(recipe)).module
            for key, parameter in module.named_parameters():
                parameter.requires_grad_(not re.search(FROZEN_NAMES[frozen_layers], key))
            return train_naively(values, steps=STEPS, module=module)
        factors = {key: value.clone() for key, value in starts[name].items() if ".lora_" in key}
        written_out = WrittenOut(source, factors, scale=values["model"]["lora_alpha"] / values["model"]["lora_rank"])
        steps = train_naively(values, steps=STEPS, module=written_out)
        for step in steps:
            step["parameters"] = {
                key.removeprefix("factors.").replace("/", "."): value for key, value in step["parameters"].items()
            }
        return steps

    return Lazy(restate)


def differences(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Largest over steps: loss (relative), norm (relative), any parameter that `want` has (absolute)."""
    loss = norm = parameter = 0.0
    for ours, theirs in zip(got, want, strict=True):
        loss = max(loss, abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"]))
        norm = max(norm, abs(ours["norm"] - theirs["norm"]) / theirs["norm"])
        for name, value in theirs["parameters"].items():
            parameter = max(parameter, float((ours["parameters"][name] - value).abs().max()))
    return loss, norm, parameter


def assert_equal(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    loss, norm, parameter = differences(got, want)
    assert loss < LOSS_TOLERANCE
    assert norm < NORM_TOLERANCE
    assert parameter < PARAMETER_TOLERANCE


def stays(name: str, key: str) -> bool:
    """Whether a recipe keeps a parameter, by its name."""
    if name.startswith("lora"):
        return ".lora_" not in key
    return bool(re.search(FROZEN_NAMES[2 if name == "frozen_smae" else 1], key))


@pytest.mark.parametrize(("name", "stage"), PRODUCT)
@pytest.mark.needs("{name}-float32_zero{stage}")
def test_two_ranks_equal_one_plain_process(name: str, stage: int, two_ranks: Results, expected: Results) -> None:
    assert_equal(two_ranks[f"{name}-float32_zero{stage}"], expected[name])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", RECOMPUTED)
@pytest.mark.needs("{name}_recomputed-float32_zero{stage}")
def test_activation_checkpointing_changes_nothing(name: str, stage: int, two_ranks: Results, expected: Results) -> None:
    assert_equal(two_ranks[f"{name}_recomputed-float32_zero{stage}"], expected[name])


@pytest.mark.needs("dropout_cached-float32_zero1", "dropout_direct-float32_zero1", "lora-float32_zero1")
def test_adapter_dropout_is_the_same_in_both_passes(two_ranks: Results) -> None:
    assert_equal(two_ranks["dropout_cached-float32_zero1"], two_ranks["dropout_direct-float32_zero1"])
    loss, *_ = differences(two_ranks["dropout_cached-float32_zero1"], two_ranks["lora-float32_zero1"])
    assert loss > 1e-3  # dropout acts


@pytest.mark.parametrize(("name", "engine"), [(name, f"float32_zero{stage}") for name, stage in PRODUCT] + ROUNDED)
@pytest.mark.needs("{name}-{engine}")
def test_what_is_frozen_stays_to_the_last_bit(
    name: str, engine: str, two_ranks: Results, starts: dict[str, dict[str, Tensor]]
) -> None:
    """Also in bf16, where the engine's own copy is rounded; and everything else trains."""
    after = two_ranks[f"{name}-{engine}"][-1]["parameters"]
    assert after.keys() == starts[name].keys()
    kept = {key for key, value in starts[name].items() if torch.equal(after[key], value)}
    assert kept == {key for key in after if stays(name, key)}


@pytest.mark.needs("no world size factor", "frozen_srl-float32_zero1", "frozen_smae-float32_zero1")
def test_the_equalities_can_fail(two_ranks: Results, expected: Results, recipes: dict[str, Values]) -> None:
    """Negative controls: a factor lost between ranks, nothing frozen, and an adapter of another scale."""
    _, _, parameter = differences(two_ranks["no world size factor"], expected["lora"])
    assert parameter > 100 * PARAMETER_TOLERANCE
    for name in ("frozen_srl", "frozen_smae"):
        values = copy.deepcopy(recipes[name])
        del values["model"]["frozen_layers"]
        _, _, parameter = differences(two_ranks[f"{name}-float32_zero1"], train_naively(values, steps=STEPS))
        assert parameter > 100 * PARAMETER_TOLERANCE
    # Steps move the adapters by far more than the tolerance, and the loss with them.
    first, last = expected["lora"][0], expected["lora"][-1]
    assert abs(first["loss"] - last["loss"]) > 100 * LOSS_TOLERANCE
    moves = [float((last["parameters"][key] - value).abs().max()) for key, value in first["parameters"].items()]
    assert max(moves) > 1e3 * PARAMETER_TOLERANCE


FAMILIES: dict[str, dict[str, Any]] = {
    "bert": MODEL,
    "distilbert": {"model_type": "distilbert", "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 96},
    "modernbert": {
        "model_type": "modernbert",
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        **{f"{kind}_token_id": None for kind in ("bos", "eos", "cls", "sep")},
    },
}


def plain_encoder(family: str, folder: Path) -> Encoder:
    torch.manual_seed(2)
    build_masked_lm(FAMILIES[family], vocab_size=300, pad_token_id=0).save_pretrained(folder)
    return load_encoder(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_what_the_adapted_encoder_computes(family: str, tmp_path: Path) -> None:
    encoder = plain_encoder(family, tmp_path / "plain")
    adapter = add_adapters(encoder.backbone, rank=3, alpha=6.0, dropout=0.2, targets=[], first_layer=1)
    for name, parameter in encoder.backbone.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    encoder.eval()
    ids = torch.randint(5, 300, (2, 9))
    ones = torch.ones_like(ids)
    with torch.no_grad():
        (want,) = encoder(ids, ones, [Size(3, 48)])
        (before,) = load_encoder(tmp_path / "plain").eval()(ids, ones, [Size(3, 48)])
    tensors = {name: value.detach().clone() for name, value in encoder.backbone.named_parameters()}
    merged = merged_tensors(encoder.backbone, tensors)
    save_adapter(adapter, tensors, tmp_path / "adapter")
    encoder.backbone.save_pretrained(tmp_path / "merged", state_dict=dict(merged))

    again = load_encoder(tmp_path / "merged").eval()
    assert {name for name, _ in again.backbone.named_parameters()} == set(merged)
    with torch.no_grad():
        (got,) = again(ids, ones, [Size(3, 48)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert float((before - want).abs().max()) > 0.1  # the adapters act
    # The change that the log tells is that of the merged weights; a fresh adapter's is 0.
    plain = dict(load_encoder(tmp_path / "plain").backbone.named_parameters())
    differing = [name for name, value in merged.items() if not torch.equal(value, plain[name])]
    change, norm = (
        torch.cat([of(name).detach().double().flatten() for name in differing]).norm()
        for of in (lambda name: merged[name] - plain[name], lambda name: plain[name])
    )
    assert merged_change(encoder.backbone, tensors) == (len(differing), pytest.approx(float(change / norm), rel=1e-5))
    fresh = {name: torch.zeros_like(value) if ".lora_B." in name else value for name, value in tensors.items()}
    assert merged_change(encoder.backbone, fresh) == (len(differing), 0.0)
    # peft reads the adapter, and merges it into the very same weights.
    theirs = PeftModel.from_pretrained(load_encoder(tmp_path / "plain").backbone, str(tmp_path / "adapter"))
    for name, value in theirs.merge_and_unload().named_parameters():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_frozen_layers_keeps(family: str, tmp_path: Path) -> None:
    """The embeddings with their norm and the first k layers; 0 keeps nothing."""
    backbone = plain_encoder(family, tmp_path).backbone
    freeze_lower_layers(backbone, 0)
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    freeze_lower_layers(backbone, 2)
    kept = {name for name, parameter in backbone.named_parameters() if not parameter.requires_grad}
    assert kept == {name for name, _ in backbone.named_parameters() if re.search(r"embeddings\.|layers?\.[01]\.", name)}
    grouped = {
        id(p) for group in parameter_groups(backbone.named_parameters(), weight_decay=0.1) for p in group["params"]
    }
    assert grouped == {id(p) for name, p in backbone.named_parameters() if name not in kept}


def adapted(encoder: Encoder) -> set[str]:
    return {name.partition(".lora_A.")[0] for name, _ in encoder.backbone.named_parameters() if ".lora_A." in name}


def test_targets(tmp_path: Path) -> None:
    common: dict[str, Any] = {"rank": 2, "alpha": 4.0, "dropout": 0.0}
    everywhere = plain_encoder("bert", tmp_path)
    add_adapters(everywhere.backbone, targets=[], **common)
    assert len(adapted(everywhere)) == 3 * 6  # query, key, value, and the three dense layers of each block
    some = load_encoder(tmp_path)
    add_adapters(some.backbone, targets=["query", "attention.output.dense"], first_layer=2, **common)
    names = ("self.query", "output.dense")
    assert adapted(some) == {f"encoder.layer.2.attention.{name}" for name in names}
    assert all(".lora_" in name for name, parameter in some.backbone.named_parameters() if parameter.requires_grad)
    with pytest.raises(ModelError, match=r"'q_proj'.*dense, key, query, value"):
        add_adapters(load_encoder(tmp_path).backbone, targets=["query", "q_proj"], **common)


def test_without_peft_the_command_to_install_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = plain_encoder("bert", tmp_path).backbone
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"model\.lora_rank = 2 needs the package peft.*pip install"):
        add_adapters(backbone, rank=2, alpha=4.0, dropout=0.0, targets=[])


RUNS = ("lora_bf16", "lora_zero3", "frozen_bf16_zero3")  # stage 3 comes last


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest,
    launcher: None,
    recipes: dict[str, Values],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """The needed of whole commands: <name>, and <name>-resumed, stopped at step 3 and gone on with by new processes."""
    folder, wanted = tmp_path_factory.mktemp("runs"), needed(request)
    gentle = {"lr": 1e-2, "eps": 1e-8, "schedule": "cosine", "warmup_ratio": 0.3}
    lora, smae = copy.deepcopy(recipes["lora_above_frozen"]), copy.deepcopy(recipes["frozen_smae"])
    lora["model"]["lora_dropout"] = 0.1
    for name, values, ds_config in zip(
        RUNS,
        (lora, lora, smae),
        (ROOT / "ds_configs/zero1.json", float32_ds_config(folder, 3), ROOT / "ds_configs/zero3.json"),
        strict=True,
    ):
        complete = values | {"optim": {**values["optim"], **gentle}, "engine": {"ds_config": str(ds_config)}}
        (folder / f"{name}.toml").write_text(tomli_w.dumps(complete | {"checkpoint": {"every_steps": 3}}))

    def start(label: str, *extra: str, outputs: tuple[str, ...]) -> None:
        cases = []
        for name in RUNS:
            for suffix in outputs:
                if f"{name}{suffix}" not in wanted:
                    continue
                stop = ["--train.stop_at_step=3"] if suffix and not extra else []
                arguments = ["--config", str(folder / f"{name}.toml"), f"--run.output={folder / name}{suffix}"]
                task = "contrastive" if name.startswith("lora") else "masked"
                cases.append({"task": task, "arguments": [*arguments, *stop, *extra]})
        (folder / f"{label}.json").write_text(json.dumps(cases))
        if cases:
            run_ranks("tests.trainer.worker", "runs", str(folder / f"{label}.json"), str(folder), ranks=2)

    start("first", outputs=("", "-resumed"))
    assert not any((folder / f"{name}-resumed" / "DONE").exists() for name in RUNS)
    start("second", "--resume=required", outputs=("-resumed",))
    return {name: folder / name for name in wanted}


@pytest.fixture
def runs(request: pytest.FixtureRequest, launched: dict[str, Path]) -> dict[str, Path]:
    return own(request, launched)


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in steps_of(run)]


@pytest.mark.parametrize("name", ["lora_bf16", "frozen_bf16_zero3"])  # with adapters, and at stage 3
@pytest.mark.needs("{name}", "{name}-resumed")
def test_resumed_equals_uninterrupted(name: str, runs: dict[str, Path]) -> None:
    assert [step for step, *_ in losses(runs[name])] == list(range(1, 7))
    assert losses(runs[f"{name}-resumed"]) == losses(runs[name])
    files = ["model/model.safetensors"] + ["adapter/adapter_model.safetensors"] * name.startswith("lora")
    for file in files:
        got, want = load_file(runs[f"{name}-resumed"] / file), load_file(runs[name] / file)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("name", ["lora_bf16", "lora_zero3"])
@pytest.mark.needs("{name}")
def test_the_model_of_a_run_is_ordinary_and_merged(
    name: str, runs: dict[str, Path], source: Path, tmp_path: Path
) -> None:
    """It is the source with the adapter of the run merged by peft, and needs no peft to be read."""
    model, report = AutoModel.from_pretrained(runs[name] / "model", output_loading_info=True)
    assert not report["unexpected_keys"] and all(key.startswith("pooler.") for key in report["missing_keys"])
    assert not (runs[name] / "model" / "adapter_config.json").exists()
    before = load_encoder(source).backbone
    untouched = {key: value.clone() for key, value in before.state_dict().items()}
    theirs = PeftModel.from_pretrained(before, str(runs[name] / "adapter")).merge_and_unload().state_dict()
    saved = weights(runs[name])
    assert saved.keys() == theirs.keys()
    changed = set()
    for key, value in theirs.items():
        torch.testing.assert_close(saved[key], value, rtol=0, atol=1e-6)
        if not torch.equal(saved[key], untouched[key]):
            changed.add(key)
    layers = ("attention.self.query", "attention.output.dense", "output.dense")
    assert changed == {f"encoder.layer.{n}.{layer}.weight" for n in (1, 2) for layer in layers}
    assert model.config.num_hidden_layers == 3
    folders = export_sizes(runs[name] / "model", tmp_path)
    assert len(folders) == 3


@pytest.mark.needs("frozen_bf16_zero3")
def test_frozen_layers_of_a_saved_model_are_the_sources(runs: dict[str, Path], source: Path) -> None:
    run = runs["frozen_bf16_zero3"]
    before, after = (load_file(folder / "model.safetensors") for folder in (source, run / "model"))
    assert before.keys() == after.keys()
    kept = {key for key, value in before.items() if torch.equal(after[key], value)}
    assert kept == {key for key in before if re.search(FROZEN_NAMES[2], key)}
    assert not (run / "adapter").exists()


@pytest.mark.parametrize(("key", "value"), [("lora_rank", 4), ("lora_alpha", 7.0), ("frozen_layers", 0)])
@pytest.mark.needs("lora_zero3")
def test_a_resume_with_other_adapters_is_refused(key: str, value: Any, runs: dict[str, Path]) -> None:
    values = tomllib.loads((runs["lora_zero3"] / "recipe.toml").read_text())
    values["run"]["resume"] = "auto"
    check_output_folder(recipe_of(values))
    values["model"][key] = value
    with pytest.raises(ConfigError, match=rf"model\.{key} = .*, not {value!r}"):
        check_output_folder(recipe_of(values))
