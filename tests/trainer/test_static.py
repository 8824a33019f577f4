"""A token table through the trainer: exact on any ranks, exported as a StaticEmbedding, started from other encoders.

What it must equal is `reference`'s restatement: padded texts, a normalised copy a size, full score matrices, autograd.
"""

from __future__ import annotations

import copy
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing
from torch import nn
from transformers import BertTokenizerFast

from data.ground.errors import ConfigError
from data.tokens import Frame
from models.encoder import Encoder, build_decoder, build_masked_lm, load_encoder
from models.settings import EmbeddingSettings
from models.sizes import ModelError, Size
from models.static_embedding import StaticConfig, StaticModel
from tests.needs import needed, own
from tests.ranks import run_ranks
from tests.reference import train_naively
from tests.run_folder import lines_of
from tests.trainer.support import float32_ds_config, recipe_of, recipe_values
from trainer import static_init
from trainer.build import build_model, open_shards
from trainer.distributed import World
from trainer.evaluation.encoding.encode import Embedder, encode, encoder_forward
from trainer.evaluation.subject import load_model
from trainer.evaluation.tasks.sts import cosine_of_pairs, read_sts, score_sts
from trainer.exporting.sizes import export_sizes
from trainer.static_init import principal_components, sif_weights, token_outputs

LADDER = [[1, 8], [1, 16], [1, 48]]
MODEL = {"config": {"model_type": "static", "hidden_size": 48}, "ladder": LADDER, "pooling": "mean"}
CASES = ("nested", "sharded", "dot", "taught", "one", "lonely", "unguided")
CASES += ("guided", "guided_by_a_table", "taught_by_guide", "spread", "compressed", "blocks", "by_weight", "positives")


@pytest.fixture(scope="module")
def cases(
    tuple_shards: Path,
    crowded_shards: Path,
    weighted_shards: Path,
    guide_folder: Path,
    static_guide_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("ds_configs")
    stages = {stage: str(float32_ds_config(folder, stage)) for stage in (0, 1)}

    def values(shards: Path, stage: int, **objective: Any) -> dict[str, Any]:
        sections = {"objective": {"kl": "none", **objective}, "model": MODEL, "engine": {"ds_config": stages[stage]}}
        return recipe_values(shards, **sections)

    found = {
        "nested": values(tuple_shards, 0),
        "sharded": values(crowded_shards, 1, reduction="sum"),
        "dot": values(tuple_shards, 0, similarity="dot", temperature=8.0, mask_false_negatives=False),
        "taught": values(tuple_shards, 0, kl="scores"),
        "one": values(tuple_shards, 1, sizes="one", size="1x16"),
        "compressed": values(tuple_shards, 0, compression_weight=2.0, compression_temperature=0.3),
        "spread": values(crowded_shards, 1, spread_weight=4.0),
        "lonely": values(crowded_shards, 0),
        "unguided": values(crowded_shards, 0),
    }
    guide = {"filter_false_negatives": True, "filter_by": "guide", "false_negative_margin": 0.05}
    taught = values(crowded_shards, 0, **guide, kl="scores", kl_teacher="guide")
    found |= {
        "guided": values(crowded_shards, 0, **guide) | {"guide": {"model": str(guide_folder)}},
        "guided_by_a_table": values(tuple_shards, 1, **guide) | {"guide": {"model": str(static_guide_folder)}},
        "taught_by_guide": taught | {"guide": {"model": str(guide_folder)}},
    }
    every = ["query_passage", "query_query", "passage_passage", "passage_query"]
    found["blocks"] = values(crowded_shards, 0, negatives=every, hardness=5.0)
    found["by_weight"] = values(weighted_shards, 0)
    found["positives"] = values(crowded_shards, 0)
    found["positives"]["data"] |= {"num_positives": 2}
    # One sample, so the other rank has no text. At a lower temperature its loss would be nearly 0.
    found["lonely"]["train"] |= {"steps": 0, "epochs": 1 / 24}
    found["lonely"]["objective"] |= {"temperature": 1.0}
    assert found.keys() == set(CASES)
    return found


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, launcher: None, cases: dict[str, dict], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Each needed case's one step, by "NAME-RANKS"; one launch a number of ranks."""
    found, wanted = {}, needed(request)
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp("steps")
        names = [name for name in cases if f"{name}-{ranks}" in wanted]
        listed = [{"name": name, "values": cases[name], "steps": 1, "control": ""} for name in names]
        (folder / "cases.json").write_text(json.dumps(listed))
        if names:
            run_ranks("tests.trainer.worker", "steps", str(folder / "cases.json"), str(folder), ranks=ranks)
        found |= {f"{name}-{ranks}": torch.load(folder / f"{name}.pt")[0] for name in names}
    return found


@pytest.fixture
def steps(request: pytest.FixtureRequest, launched: dict[str, Any]) -> dict[str, Any]:
    return own(request, launched)


@pytest.mark.parametrize(("name", "ranks"), [("nested", 1), ("sharded", 1), *((name, 2) for name in CASES)])
@pytest.mark.needs("{name}-{ranks}")
def test_a_step_is_the_step_of_one_plain_process(
    name: str, ranks: int, cases: dict[str, dict], steps: dict[str, Any]
) -> None:
    got = steps[f"{name}-{ranks}"]
    (want,) = train_naively(cases[name], steps=1)
    # The restatement subtracts scores of up to 20 in float32.
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-6, abs=2e-6)
    assert got["norm"] == pytest.approx(want["norm"], rel=2e-5)
    assert got["parameters"].keys() == want["parameters"].keys()
    for key, value in want["parameters"].items():
        assert (got["parameters"][key] - value).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("name", "other"), [("guided", "unguided"), ("nested", "taught"), ("blocks", "unguided"), ("positives", "unguided")]
)
def test_other_losses_are_far(name: str, other: str, cases: dict[str, dict]) -> None:
    """Negative controls of the equality: a guide acts, and another loss is another step."""
    (one,), (another,) = train_naively(cases[name], steps=1), train_naively(cases[other], steps=1)
    assert abs(one["loss"] - another["loss"]) > 1e-2
    (key,) = another["parameters"]
    assert (one["parameters"][key] - another["parameters"][key]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("section", "change", "word"),
    [
        ("model", {"pooling": "cls"}, "pooling"),
        ("model", {"ladder": [[1, 16]]}, "stops short"),
        ("objective", {"sizes": "two_d"}, "two_d"),
        ("objective", {"sizes": "espresso"}, "espresso"),
        ("train", {"compile": True}, "compile"),
    ],
)
def test_what_a_table_cannot_do_is_refused(
    section: str, change: dict[str, Any], word: str, cases: dict[str, dict]
) -> None:
    values = copy.deepcopy(cases["nested"])
    values[section] = {**values[section], **change}
    recipe = recipe_of(values)
    with pytest.raises(ValueError, match=word):
        build_model(recipe, open_shards(recipe))


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained folder, with random weights."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("static")
    special_ids = [0, 2, 3, 4]
    StaticModel(StaticConfig(vocab_size=len(tiny_tokenizer), hidden_size=48, special_ids=special_ids)).save_pretrained(
        path
    )
    tiny_tokenizer.save_pretrained(path)
    ladder = tuple((n, d) for n, d in LADDER)
    settings = EmbeddingSettings("mean", "cosine", ladder, query_max_length=16, passage_max_length=24)
    settings.save(path)
    return path


def vectors_of(
    folder: Path, texts: list[str], sizes: list[Size], *, flat: bool, max_length: int = 24
) -> dict[Size, np.ndarray]:
    from data.tokens import load_tokenizer

    encoder = load_encoder(folder).eval()

    def padded(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return encoder(input_ids, attention_mask, sizes)

    forward = encoder_forward(encoder, sizes) if flat else padded
    embedder = Embedder(forward, load_tokenizer(folder), sizes, World.alone(), flat=flat)
    return encode(embedder, texts, similarity="cosine", max_length=max_length)


def test_flat_encoding_equals_padded(folder: Path, docstrings: list[str]) -> None:
    """Both tokenizations: with special tokens that the model drops, and without any; long texts are cut alike."""
    texts, sizes = [*docstrings[:40], "", docstrings[3]], [Size(1, 8), Size(1, 48)]
    flat, padded = (vectors_of(folder, texts, sizes, flat=flat) for flat in (True, False))
    for size in sizes:
        np.testing.assert_allclose(flat[size], padded[size], atol=1e-6)
        assert np.abs(flat[size][:20] - flat[size][20:40]).max() > 0.1
        assert not flat[size][40].any()


def test_an_export_is_a_static_embedding(folder: Path, docstrings: list[str], tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="needs the package sentence-transformers")
    texts, sizes = docstrings[:40], [Size(n, d) for n, d in LADDER]
    ours = vectors_of(folder, texts, sizes, flat=True)
    folders = export_sizes(folder, tmp_path / "export")
    assert any(len(text.split()) > 24 for text in texts)  # so that the cut counts
    for size in sizes:
        model = library.SentenceTransformer(str(folders[str(size)]), device="cpu")
        assert type(model[0]).__name__ == "StaticEmbedding"
        assert model.get_embedding_dimension() == size.dim
        np.testing.assert_allclose(model.encode(texts, batch_size=7), ours[size], atol=1e-6)
        model[0].tokenizer.no_truncation()
        assert np.abs(model.encode(texts) - ours[size]).max() > 1e-2  # negative control
    assert load_encoder(tmp_path / "export" / "encoder").is_static


@pytest.fixture(scope="module")
def encoder_folder(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = {"model_type": "bert", **shape, "max_position_embeddings": 32, "initializer_range": 0.2}
    path = tmp_path_factory.mktemp("encoder")
    build_masked_lm(config, vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    EmbeddingSettings("mean", ladder=((1, 16), (2, 32)), query_max_length=16, passage_max_length=32).save(path)
    return path


@pytest.mark.parametrize("source", ["tokens", "outputs"])
def test_a_table_made_of_an_encoder(source: str, encoder_folder: Path, tiny_tokenizer, tmp_path: Path) -> None:
    """Without weights and at full width it is a rotation: distances between tokens are the encoder's own."""
    output = tmp_path / "start"
    arguments = ["--model", str(encoder_folder), "--output", str(output), "--from", source, "--sif", "0"]
    assert static_init.main(arguments) == 0
    table = load_encoder(output).word_embeddings.weight.detach()
    encoder: Encoder = load_encoder(encoder_folder).eval()
    words = torch.arange(5, 60)
    if source == "tokens":
        vectors = encoder.word_embeddings.weight.detach()[words]
    else:
        rows = [torch.tensor([[2, word, 3]]) for word in words.tolist()]
        with torch.no_grad():
            vectors = torch.cat([encoder(row, torch.ones_like(row), (Size(2, 32),))[0] for row in rows])
    table_distances, distances = (torch.cdist(v.double(), v.double()) for v in (table[words], vectors))
    torch.testing.assert_close(table_distances, distances, atol=1e-4, rtol=0)
    assert distances.max() > 0.1
    assert not table[[0, 2, 3, 4]].any() and table[1].any()  # all special tokens but the unknown one
    assert static_init.main(arguments) == 2  # the folder is not empty any more
    assert static_init.main([*arguments[:3], str(tmp_path / "wide"), "--dim", "33"]) == 2
    assert not (tmp_path / "wide").exists()


def test_tokens_go_through_heads_and_where_prompts_are_left_out(encoder_folder: Path) -> None:
    """Heads may widen the embedding, and a pooling that leaves prompts out takes a token that has none."""
    backbone, frame = load_encoder(encoder_folder).backbone, Frame((2,), (3,))
    torch.manual_seed(4)
    heads = nn.ModuleDict({depth: nn.Linear(32, 40) for depth in ("1", "2")})
    found = token_outputs(Encoder(backbone, "mean", heads, pool_prompt=False).eval(), 20, frame)
    assert found.shape == (20, 40)
    plain = token_outputs(Encoder(backbone, "mean").eval(), 20, frame)
    with torch.no_grad():
        torch.testing.assert_close(found, heads["2"](plain))


def test_a_table_has_a_row_for_the_largest_id(tiny_tokenizer, encoder_folder: Path, tmp_path: Path) -> None:
    """Also where ids have gaps, so that there are fewer tokens than the largest id says."""
    content = json.loads((encoder_folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last, rows = max(vocabulary, key=vocabulary.get), len(vocabulary) + 5
    vocabulary[last] = rows - 1
    folder = shutil.copytree(encoder_folder, tmp_path / "gap")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    build_masked_lm({"model_type": "bert", **shape}, vocab_size=rows, pad_token_id=0).save_pretrained(folder)
    EmbeddingSettings("mean", ladder=((1, 8),)).save(folder)
    start = static_init.make_start(str(folder), tmp_path / "start", source="tokens", dim=8, sif=0.0)
    table = load_model(start)[0].word_embeddings.weight
    assert len(table) == rows and table[rows - 1].any()


def test_free_places_and_gaps_have_no_rank(tmp_path: Path) -> None:
    """BERT's vocabulary begins with places that it keeps free; its most frequent tokens weigh least all the same."""
    places = [f"[unused{number}]" for number in range(40)]
    words = ["[PAD]", *places[:20], "[UNK]", "[CLS]", "[SEP]", "[MASK]", *places[20:], "the", *"abcdefghij", "[CUT]"]
    ids = {word: index for index, word in enumerate(words)}
    ids["rare"] = len(words) + 3  # after three ids without a token
    folder = tmp_path / "encoder"
    backend = Tokenizer(WordPiece(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = BertPreTokenizer()
    backend.post_processor = BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    tokenizer = BertTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[CUT]"]})
    tokenizer.save_pretrained(folder)
    rows = ids["rare"] + 1
    torch.manual_seed(2)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    build_masked_lm({"model_type": "bert", **shape}, vocab_size=rows, pad_token_id=0).save_pretrained(folder)
    EmbeddingSettings("mean", ladder=((1, 8),)).save(folder)
    tables = {}
    for sif in (0.0, 0.1):
        start = static_init.make_start(str(folder), tmp_path / str(sif), source="tokens", dim=8, sif=sif)
        encoder = load_model(start)[0]
        tables[sif] = encoder.word_embeddings.weight.detach()
    assert sorted(encoder.config.special_ids) == sorted(
        ids[each] for each in ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[CUT]")
    )
    used = [ids[word] for word in ("[UNK]", "the", *"abcdefghij", "rare")]
    others = sorted(set(range(rows)) - set(used))
    assert not tables[0.0][others].any() and not tables[0.1][others].any()
    weights = (tables[0.1][used] / tables[0.0][used]).mean(1)
    torch.testing.assert_close(weights, sif_weights(len(used), sif=0.1))
    # Components of the used rows alone: their mean is zero.
    assert tables[0.0][used].mean(0).abs().max() < 1e-6


def test_token_embeddings_need_no_pooling(tiny_tokenizer, tmp_path: Path) -> None:
    """A plain decoder does not say how it pools. A special token that it does not embed has a row of zeros."""
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = {"model_type": "qwen3", **shape, "num_key_value_heads": 1, "head_dim": 8}
    folder, output = tmp_path / "decoder", tmp_path / "start"
    build_decoder(config, "causal", vocab_size=len(tiny_tokenizer), pad_token_id=0).save_pretrained(folder)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match="does not say how it pools"):
        static_init.make_start(str(folder), output, source="outputs", dim=0, sif=0.0)
    static_init.make_start(str(folder), output, source="tokens", dim=0, sif=0.0)
    table = load_encoder(output).word_embeddings.weight
    assert table.shape == (len(tokenizer), 16) and not table[-1].any() and table[-2].any()


def test_components_come_strongest_first_and_frequent_tokens_weigh_least() -> None:
    torch.manual_seed(3)
    vectors = torch.randn(200, 6) * torch.tensor([1.0, 5.0, 0.1, 2.0, 0.5, 3.0]) + 4.0
    parts = principal_components(vectors, 4)
    assert parts.mean(0).abs().max() < 1e-4
    deviations = parts.std(0)
    assert (deviations.diff() < 0).all() and deviations[0] == pytest.approx(float(vectors[:, 1].std()), rel=0.05)
    weights = sif_weights(1000, sif=1e-3)
    total = sum(1 / rank for rank in range(1, 1001))
    assert float(weights[9]) == pytest.approx(1e-3 / (1e-3 + 1 / 10 / total))
    assert (weights.diff() > 0).all()


def test_training_starts_from_a_table(encoder_folder: Path, cases: dict[str, dict], tmp_path: Path) -> None:
    static_init.make_start(str(encoder_folder), tmp_path / "start", source="tokens", dim=16, sif=1e-4)
    values = copy.deepcopy(cases["nested"])
    values["model"] = {"source": str(tmp_path / "start"), "ladder": [[1, 8], [1, 16]], "pooling": "mean"}
    values["train"] = {name: value for name, value in values["train"].items() if name != "micro_batch_size"}
    recipe = recipe_of(values)
    parts = build_model(recipe, open_shards(recipe))
    start = load_encoder(tmp_path / "start").word_embeddings.weight
    assert parts.encoder.is_static and torch.equal(parts.encoder.word_embeddings.weight, start)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.micro_batch_size", 64),
        ("objective.backward", "direct"),
        ("model.dropout", 0.5),
        ("train.activation_memory_mib", 100.0),
        ("model.attention", "eager"),
        ("train.compile", True),
    ],
)
def test_a_table_in_model_source_refuses_what_only_layers_read(
    key: str, value: Any, encoder_folder: Path, cases: dict[str, dict], tmp_path: Path
) -> None:
    static_init.make_start(str(encoder_folder), tmp_path / "start", source="tokens", dim=16, sif=1e-4)
    values = copy.deepcopy(cases["nested"])
    values["model"] = {"source": str(tmp_path / "start"), "ladder": [[1, 8], [1, 16]], "pooling": "mean"}
    values["train"] = {name: value for name, value in values["train"].items() if name != "micro_batch_size"}
    plain = recipe_of(values)
    build_model(plain, open_shards(plain))  # negative control
    section, _, name = key.partition(".")
    values[section] = {**values.get(section, {}), name: value}
    recipe = recipe_of(values)
    with pytest.raises(ConfigError, match=f"static token table, so {key} = .* is read by nothing"):
        build_model(recipe, open_shards(recipe))


@pytest.mark.launcher
def test_a_run_on_two_ranks_evaluates_what_it_saves(tuple_shards: Path, docstrings: list[str], tmp_path: Path) -> None:
    """Flat evaluation through the engine, ranks together, gives the scores of the saved folder by padded passes."""
    rows = [
        f"{index % 6}\t{' '.join(a.split()[:12])}\t{' '.join(b.split()[:12])}"
        for index, (a, b) in enumerate(pairwise(docstrings[:42]))
    ]
    sts = tmp_path / "pairs.tsv"
    sts.write_text("\n".join(rows) + "\n", encoding="utf-8")
    settings = {
        "run.output": str(tmp_path / "run"),
        "model.config": {"model_type": "static", "hidden_size": 48},
        "model.ladder": LADDER,
        "data.shards": [str(tuple_shards)],
        "data.num_workers": 0,
        "train.steps": 2,
        "train.global_batch_size": 9,
        "evaluation.sts": [str(sts)],
        "evaluation.every_steps": 1,
        "log.tensorboard": False,
    }
    arguments = ["--config", "launch/recipes/static_retrieval_english.toml"]
    arguments += [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items()]
    (tmp_path / "cases.json").write_text(json.dumps([{"task": "contrastive", "arguments": arguments}]))
    run_ranks("tests.trainer.worker", "runs", str(tmp_path / "cases.json"), str(tmp_path), ranks=2)
    folder = tmp_path / "run" / "model"
    task, sizes = read_sts(sts), [Size(n, d) for n, d in LADDER]
    sides = [
        vectors_of(folder, [pair[side] for pair in task.pairs], sizes, flat=False, max_length=4096) for side in (0, 1)
    ]
    lines = lines_of(tmp_path / "run")
    scores = [value for line in lines for key, value in line.items() if "1x48" in key and "spearman" in key]
    assert len(scores) == 2 and scores[0] != scores[1]  # training moved it
    full = Size(1, 48)
    assert scores[-1] == pytest.approx(score_sts(task, cosine_of_pairs(sides[0][full], sides[1][full]))["spearman"])
