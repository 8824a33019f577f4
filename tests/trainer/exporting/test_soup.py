"""Model soups: the mean of the weights, and refusals of what has no meaningful mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data.ground.errors import ConfigError
from models.encoder import load_encoder
from models.heads import linear_head, save_heads
from models.settings import EmbeddingSettings
from models.static_embedding import StaticConfig, StaticModel
from trainer import soup


@pytest.fixture
def folders(tiny_tokenizer, tmp_path: Path) -> dict[str, Path]:
    found = {}
    for seed, (name, width) in enumerate({"a": 8, "b": 8, "wide": 16, "other": 8}.items()):
        torch.manual_seed(seed)
        found[name] = tmp_path / name
        StaticModel(StaticConfig(vocab_size=len(tiny_tokenizer), hidden_size=width)).save_pretrained(found[name])
        tiny_tokenizer.save_pretrained(found[name])
        similarity = "dot" if name == "other" else "cosine"
        EmbeddingSettings("mean", similarity, ladder=((1, 8),)).save(found[name])
    for name in ("specials", "nan", "cut"):
        found[name] = shutil.copytree(found["b"], tmp_path / name)
    config = json.loads((found["specials"] / "config.json").read_text())
    (found["specials"] / "config.json").write_text(json.dumps({**config, "special_ids": [1]}))
    save_file(
        {"embedding.weight": table(found["b"]) / 0}, found["nan"] / "model.safetensors", metadata={"format": "pt"}
    )
    (found["cut"] / "model.safetensors").write_bytes(b"cut")
    found["linked"] = tmp_path / "linked"
    found["linked"].symlink_to("a")
    return found


def table(folder: Path) -> torch.Tensor:
    return load_encoder(folder).word_embeddings.weight.detach()


@pytest.mark.parametrize(("weights", "share"), [([], 0.5), (["3", "1"], 0.75)])
def test_a_soup_is_the_mean(weights: list[str], share: float, folders: dict[str, Path], tmp_path: Path) -> None:
    a, b, output = folders["a"], folders["b"], tmp_path / "out" / "soup"
    arguments = ["--models", str(a), str(b), "--output", str(output), *(["--weights", *weights] if weights else [])]
    assert soup.main(arguments) == 0
    torch.testing.assert_close(table(output), share * table(a) + (1 - share) * table(b))
    assert (table(output) - table(a)).abs().max() > 0.1
    assert EmbeddingSettings.load(output) == EmbeddingSettings.load(a)
    assert [path.name for path in output.parent.iterdir()] == ["soup"]


@pytest.mark.parametrize(
    ("models", "extra", "word"),
    [
        (["a"], [], "two or more"),
        (["a", "wide"], [], "architecture"),
        (["a", "other"], [], "barista.json"),
        (["a", "b"], ["--weights", "1"], "--weights"),
        (["a", "b"], ["--weights", "nan", "1"], "--weights"),
        (["a", "b"], ["--weights", "inf", "1"], "--weights"),
        (["a", "missing"], [], "holds no"),
        (["a", "a"], [], "one folder"),
        (["a", "linked"], [], "one folder"),
        (["a", "specials"], [], "another special_ids in its config.json"),
        (["a", "nan"], [], "embedding.weight"),
        (["a", "cut"], [], "cut/model.safetensors"),
    ],
)
def test_refused(
    models: list[str], extra: list[str], word: str, folders: dict[str, Path], tmp_path: Path, capsys
) -> None:
    chosen = [str(folders.get(name, tmp_path / name)) for name in models]
    output = tmp_path / "soup"
    assert soup.main(["--models", *chosen, "--output", str(output), *extra]) == 2
    assert word in capsys.readouterr().err
    assert not output.exists()


def test_heads_are_averaged_with_the_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    models = [folders["a"], folders["b"]]
    weights = [torch.randn(8, 8) for _ in models]
    for folder, weight in zip(models, weights):
        save_heads(linear_head(weight, weight[0]).state_dict(prefix="1."), folder)
    heads = load_encoder(soup.soup(models, tmp_path / "soup")).heads
    torch.testing.assert_close(heads["1"].weight.detach(), (weights[0] + weights[1]) / 2)
    torch.testing.assert_close(heads["1"].bias.detach(), (weights[0] + weights[1])[0] / 2)
    (folders["b"] / "heads.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"a has heads .* and .*b has none"):
        soup.soup(models, tmp_path / "mixed")


def test_folders_of_sentence_transformers_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    for name in ("a", "b"):
        (folders[name] / "barista.json").unlink()
        (folders[name] / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="whose other modules would be lost"):
        soup.soup([folders["a"], folders["b"]], tmp_path / "soup")


def test_only_a_model_s_own_files_are_copied(folders: dict[str, Path], tmp_path: Path) -> None:
    (folders["a"] / "linked.json").symlink_to("/etc/hostname")
    (folders["a"] / "notes").mkdir()
    before = {path.name for path in folders["a"].iterdir()}
    output = soup.soup([folders["a"], folders["b"]], tmp_path / "soup")
    assert {path.name for path in output.iterdir()} == before - {"linked.json", "notes"}
