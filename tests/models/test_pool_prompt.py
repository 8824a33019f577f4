"""Pooling without the prompt's tokens: what sentence-transformers computes with include_prompt = false."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from data.ground.errors import ConfigError, DataError, OtherFormat
from data.ground.records import Record, read_record
from data.tokens import left_out_length, prompt_length
from models.backbone import encoder_layers
from models.choices import MEANS
from models.encoder import Encoder, load_encoder
from models.packed_attention import check_packs
from models.settings import EmbeddingSettings
from models.sizes import Body, ModelError, Size
from tests.data.frame_tokenizers import FRAMED, byte_level, template
from tests.models.test_backbones import HIDDEN, LAYERS, SIZES, VOCABULARY, Cell, assert_close
from tests.trainer.exports import our_vectors
from trainer.evaluation.latency import measure_costs
from trainer.evaluation.search.vectors import weights_digest
from trainer.evaluation.subject import load_model
from trainer.exporting.sizes import export_sizes
from trainer.resizing.closed_form import depth_states

sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the package sentence-transformers")

FULL, LENGTH = SIZES[-1], 24
MODES = {"mean": "mean", "weighted_mean": "weightedmean"}
# The pooling of a cell, its tokenizer, and a prompt that is apart from the text with it.
CELLS = [
    (Cell("bert"), "bert", "query: "),
    (Cell("modernbert"), "closed", "Query:\n"),
    (Cell("qwen3", "causal"), "closed", "Query:\n"),
    (Cell("qwen3", "bidirectional"), "llama3", "Query:\n"),
    (Cell("gemma3_text", "causal"), "llama2", "Query:"),
]
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizers(docstrings: list[str], tiny_tokenizer: PreTrainedTokenizerFast) -> dict[str, PreTrainedTokenizerFast]:
    words = ["Query: the first, what is a man in this 7 of them " * 50, *docstrings[:60]]
    bert = copy.deepcopy(tiny_tokenizer)
    bert.model_input_names = ["input_ids", "attention_mask"]
    found = {name: FRAMED[name][0](words) for name in ("llama3", "llama2")}
    # Ends every text with its eos_token.
    return {"bert": bert, "closed": byte_level(words, template("<s> $A <|im_end|>")), **found}


@pytest.fixture(scope="module")
def write(tokenizers: dict[str, PreTrainedTokenizerFast], tmp_path_factory: pytest.TempPathFactory) -> Make:
    def write(cell: Cell, tokenizer: str, pooling: str = "mean", **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp("model")
        cell.build().save_pretrained(folder)
        tokenizers[tokenizer].save_pretrained(folder)
        ladder = tuple((size.layers, size.dim) for size in SIZES)
        values = {"query_max_length": LENGTH, "passage_max_length": LENGTH, "direction": cell.direction or ""}
        EmbeddingSettings(pooling, ladder=ladder, **{**values, "pool_prompt": False, **settings}).save(folder)  # type: ignore[arg-type]
        return folder

    return write


@pytest.fixture(scope="module")
def texts(docstrings: list[str]) -> list[str]:
    return [docstrings[0][:400], docstrings[1][:60], "a", docstrings[2][:100]]


def theirs_of(folder: Path, pooling: str, *, include_prompt: bool = False) -> Any:
    modules = sentence_transformers.sentence_transformer.modules
    parts = [
        modules.Transformer(str(folder), max_seq_length=LENGTH),
        modules.Pooling(HIDDEN, MODES[pooling], include_prompt=include_prompt),
        modules.Normalize(),
    ]
    return sentence_transformers.SentenceTransformer(modules=parts, device="cpu")


def flat(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Ids [T] and offsets of these texts."""
    rows = tokenizer(list(texts), truncation=True, max_length=LENGTH)["input_ids"]
    lengths = torch.tensor([0, *map(len, rows)])
    return torch.tensor([token for row in rows for token in row]), lengths.cumsum(0)


@pytest.mark.parametrize("pooling", MEANS)
@pytest.mark.parametrize(("cell", "name", "prompt"), CELLS, ids=str)
def test_it_is_plain_sentence_transformers(
    pooling: Any, cell: Cell, name: str, prompt: str, write: Make, texts: list[str]
) -> None:
    folder = write(cell, name, pooling)
    model = theirs_of(folder, pooling)
    ours = our_vectors(folder, texts, [FULL], prompt, max_length=LENGTH)[FULL]
    encoder, tokenizer, _ = load_model(folder)
    ids, offsets = flat(tokenizer, [prompt + text for text in texts])
    length = left_out_length(tokenizer, prompt)

    def packed(prompt_length: int) -> np.ndarray:
        lengths = torch.full((len(texts),), prompt_length)
        with torch.no_grad():
            (vectors,) = encoder.eval()(ids, None, [FULL], offsets=offsets, prompt_lengths=lengths)
        return torch.nn.functional.normalize(vectors, dim=1).numpy()

    if cell.family == "qwen3" or cell.family == "bert":
        check_packs(encoder.backbone)
        encoder.backbone.set_attn_implementation("packed")
    # Positions in a table are counted from the left, with the padding.
    for side in ("right", "left") if cell.direction else ("right",):
        model.tokenizer.padding_side = side
        theirs = model.encode(texts, prompt=prompt)
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        np.testing.assert_allclose(packed(length), theirs, atol=1e-5)
    # Without a prompt nothing is left out.
    bare = our_vectors(folder, texts, [FULL], max_length=LENGTH)[FULL]
    np.testing.assert_allclose(bare, model.encode(texts), atol=1e-5)
    # Negative controls: the prompt pooled, and a token too few and too many left out, of each text that has so many.
    others = [theirs_of(folder, pooling, include_prompt=True).encode(texts, prompt=prompt)]
    for other in (*others, packed(length - 1), packed(length + 1)):
        assert np.abs(other - theirs).max(1)[[0, 1, 3]].min() > 1e-3


@pytest.mark.parametrize("pooling", MEANS)
def test_left_right_and_packed_are_one_naive_mean(pooling: Any) -> None:
    """Prompts of several lengths in one batch; that of the last text is all of it, which keeps its last token."""
    ids = torch.randint(5, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(1))
    lengths, prompts = torch.tensor([12, 7, 3, 2]), torch.tensor([4, 0, 1, 9])
    mask = (torch.arange(12) < lengths[:, None]).long()
    left_ids, left_mask = (
        torch.stack([row.roll(12 - int(length)) for row, length in zip(each, lengths)]) for each in (ids * mask, mask)
    )
    encoder = Encoder(Cell("qwen3", "causal").build(), pooling, pool_prompt=False)
    naive = []
    with torch.no_grad():
        for row, length, prompt in zip(ids, lengths.tolist(), prompts.tolist()):
            states = encoder.backbone(input_ids=row[None, :length]).last_hidden_state[0]
            first = min(prompt, length - 1)
            weights = (
                torch.arange(first + 1.0, length + 1) if pooling == "weighted_mean" else torch.ones(length - first)
            )
            naive.append((states[first:] * weights[:, None]).sum(0) / weights.sum())
        wanted = torch.stack(naive)
        flat, offsets = ids[mask.bool()], torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        for attention in ("sdpa", "packed"):
            encoder.backbone.set_attn_implementation(attention)
            for padded in ((ids * mask, mask), (left_ids, left_mask)):
                assert_close(encoder(*padded, [FULL], prompt_lengths=prompts)[0], wanted)
            assert_close(encoder(flat, None, [FULL], offsets=offsets, prompt_lengths=prompts)[0], wanted)
        # Negative control: the same length for all.
        other = encoder(ids * mask, mask, [FULL], prompt_lengths=torch.full((4,), 4))[0]
    assert ((other - wanted).abs().amax(1) > 1e-3).tolist() == [False, True, True, False]


def test_a_forward_pass_must_be_told() -> None:
    encoder = Encoder(Cell("bert").build(), "mean", pool_prompt=False)
    ids = torch.full((1, 4), 9)
    with pytest.raises(AssertionError, match="give prompt_lengths"):
        encoder(ids, torch.ones_like(ids), [FULL])
    with pytest.raises(AssertionError, match="only a mean"):
        Encoder(encoder.backbone, "last", pool_prompt=False)


@pytest.mark.parametrize("cell", [Cell("bert"), Cell("qwen3", "causal")], ids=str)
def test_the_last_layer_reads_only_the_texts(cell: Cell) -> None:
    """Values and gradients are those of the whole layer; the feed-forward ran for fewer rows."""
    lengths, prompts = torch.tensor([12, 7, 3]), torch.tensor([5, 2, 3])
    ids = torch.randint(5, VOCABULARY, (22,), generator=torch.Generator().manual_seed(1))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    rows, gradients, values = [], [], []
    for reads in (False, True):
        # In float64, because the backward pass of other rows sums in another order.
        encoder = Encoder(cell.build().double().train(), "mean", pool_prompt=False)
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        assert encoder._last_layer_skips
        encoder._last_layer_skips = reads
        down = [m for m in encoder_layers(encoder.backbone)[-1].modules() if isinstance(m, torch.nn.Linear)][-1]
        down.register_forward_hook(lambda m, args, out: rows.append(out.shape[:-1].numel()))
        vectors = encoder(ids, None, SIZES, offsets=offsets, prompt_lengths=prompts)
        sum(each.pow(power).sum() for power, each in enumerate(vectors, start=2)).backward()
        gradients.append({name: each.grad for name, each in encoder.named_parameters()})
        values.append(vectors)
    assert rows == [3 * 12, 7 + 5 + 1]
    for whole, part in zip(*values):
        assert_close(part, whole)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(("name", "prompt"), [("closed", "Query:\n"), ("llama3", "Query:\n")])
@pytest.mark.parametrize("pooling", MEANS)
def test_a_text_that_is_nothing_but_its_prompt_has_a_vector(
    pooling: Any, name: str, prompt: str, write: Make, texts: list[str]
) -> None:
    """Where a token closes it, that one, as in sentence-transformers; else its last one, where theirs is all zeros."""
    folder = write(Cell("qwen3", "causal"), name, pooling)
    model = theirs_of(folder, pooling)
    ours = our_vectors(folder, ["", *texts], [FULL], prompt, max_length=LENGTH)[FULL]
    theirs = model.encode(["", *texts], prompt=prompt)
    assert np.isfinite(ours).all() and np.abs(np.linalg.norm(ours, axis=1) - 1).max() < 1e-5
    np.testing.assert_allclose(ours[1:], theirs[1:], atol=1e-5)
    if name == "closed":
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)
        return
    assert np.abs(theirs[0]).max() == 0
    encoder, tokenizer, _ = load_model(folder)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    with torch.no_grad():
        last = encoder.backbone(input_ids=ids).last_hidden_state[0, -1]
    np.testing.assert_allclose(ours[0], torch.nn.functional.normalize(last, dim=0).numpy(), atol=1e-5)


@pytest.mark.parametrize("router", [False, True])
def test_exports_say_it_and_are_read_again(router: bool, write: Make, texts: list[str], tmp_path: Path) -> None:
    cell, name, query = CELLS[2]
    passage = "the text of this page:\n"
    folder = write(cell, name, "weighted_mean", query_prompt=query, passage_prompt=passage)
    routers = ["3x32:3x32"] if router else []
    exported = export_sizes(folder, tmp_path / "out", sizes=[FULL], routers=routers)
    out = exported["router-3x32-3x32"] if router else next(iter(exported.values()))
    poolings = [json.loads(path.read_text()) for path in out.glob("*_Pooling/config.json")]
    assert len(poolings) == 1 + router and all(each["include_prompt"] is False for each in poolings)
    model = sentence_transformers.SentenceTransformer(str(out), device="cpu")
    for encode, prompt in ((model.encode_query, query), (model.encode_document, passage)):
        ours = our_vectors(folder, texts, [FULL], prompt, max_length=LENGTH)[FULL]
        np.testing.assert_allclose(ours, encode(texts), atol=1e-5)
    if router:
        return
    assert "weighted_mean pooling without the prompt's tokens" in (out / "README.md").read_text()
    settings = EmbeddingSettings.load(out)
    assert settings is not None and settings.pool_prompt is False and settings.pooling == "weighted_mean"
    again = our_vectors(out, texts, [FULL], passage, max_length=LENGTH)[FULL]
    np.testing.assert_allclose(again, ours, atol=1e-5)
    # Negative control: the same folder without the word.
    path = next(out.glob("*_Pooling/config.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "include_prompt": True}))
    assert np.abs(our_vectors(out, texts, [FULL], passage, max_length=LENGTH)[FULL] - ours).max() > 1e-3


def test_exports_that_pool_the_prompt_are_what_they_were(write: Make, tmp_path: Path) -> None:
    exported = export_sizes(write(Cell("bert"), "bert", pool_prompt=True), tmp_path / "out", sizes=[FULL])
    (out,) = exported.values()
    assert "include_prompt" not in json.loads((out / "1_Pooling" / "config.json").read_text())


def test_what_cannot_be_exported_is_refused(write: Make, tokenizers: dict[str, Any], tmp_path: Path) -> None:
    strange = write(*CELLS[3][:2], query_prompt="Query: ")
    with pytest.raises(DataError, match="makes its end a part of the text's first token"):
        export_sizes(strange, tmp_path / "out")
    pytest.importorskip("onnxruntime")
    folder = write(Cell("bert"), "bert", query_prompt="query: ")
    with pytest.raises(ConfigError, match=r"leaves the prompt out .* not told how long a prompt is; leave --onnx out"):
        export_sizes(folder, tmp_path / "out", onnx=["float32"])


@pytest.mark.parametrize(
    ("name", "prompt", "sentence"),
    [
        # The token of the space is another one's beginning, and would be left out with the text's first word.
        ("llama3", "Query: ", "a part of the text's first token"),
        ("llama2", "Query: ", "a part of the text's first token"),
        # The closing token is none that the tokenizer's configuration names.
        ("modernbert", "Query:\n", "would leave out 4; end texts with one token"),
        ("two-and-two", "Query:\n", "end texts with one token"),
        # The prompt's own last token is special, and none closes it.
        ("llama3", "Query:<|im_end|>", "the prompt with an ordinary one"),
    ],
)
def test_prompts_that_are_counted_otherwise_are_refused(
    name: str, prompt: str, sentence: str, docstrings: list[str], write: Make, tmp_path: Path
) -> None:
    """sentence-transformers would leave out other tokens than the prompt's: refused here, wherever it matters."""
    words = ["Query: the first, what is a man in this 7 of them " * 50, *docstrings[:60]]
    tokenizer = FRAMED[name][0](words)
    with pytest.raises(DataError, match=sentence) as caught:
        left_out_length(tokenizer, prompt)
    assert "\n" not in str(caught.value)
    # That is what it does.
    folder = write(Cell("qwen3", "causal"), "closed")
    tokenizer.save_pretrained(folder)
    found = theirs_of(folder, "mean").preprocess(["the first"], prompt=prompt)
    length, ids = found["prompt_length"], found["input_ids"][0].tolist()
    if "first token" in sentence:
        text = tokenizer("the first", add_special_tokens=False).input_ids
        assert len(ids) - length < len(text)  # a part of the text is gone
    else:
        assert length != prompt_length(tokenizer, prompt)


@pytest.mark.parametrize("name", ["bert", "closed", "llama3", "llama2"])
def test_lengths_are_those_of_sentence_transformers(name: str, tokenizers: dict[str, Any], write: Make) -> None:
    """Whatever padding and truncation earlier calls have left in the tokenizer."""
    tokenizer = copy.deepcopy(tokenizers[name])
    prompt = "query: " if name == "bert" else "Query:"
    model = theirs_of(write(Cell("qwen3", "causal"), name), "mean")
    theirs = model[0].preprocess(["the first"], prompt=prompt)["prompt_length"]
    assert left_out_length(tokenizer, prompt) == theirs > 1
    tokenizer.backend_tokenizer.enable_padding(length=40)
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert left_out_length(tokenizer, prompt) == prompt_length(tokenizer, prompt) == theirs
    assert left_out_length(tokenizer, "") == 0


def test_settings(tmp_path: Path) -> None:
    settings = EmbeddingSettings("mean", ladder=((LAYERS, HIDDEN),), pool_prompt=False)
    settings.save(tmp_path)
    assert EmbeddingSettings.load(tmp_path) == settings and settings.format == 2
    assert EmbeddingSettings("mean").format == 1

    class Before(Record):
        format: Literal[1] = 1

    # Versions that know format 1 alone refuse it: they would pool the prompt.
    with pytest.raises(OtherFormat, match="is of format 2, and this version reads format 1"):
        read_record(tmp_path / "barista.json", Before)
    for pooling in ("cls", "last"):
        with pytest.raises(ModelError, match=f"pooling '{pooling}' takes one token"):
            EmbeddingSettings(pooling, pool_prompt=False)  # type: ignore[arg-type]


def test_another_pooling_of_one_token_takes_it(write: Make) -> None:
    folder = write(Cell("bert"), "bert")
    assert not load_encoder(folder).pool_prompt and not load_encoder(folder, pooling="weighted_mean").pool_prompt
    assert load_encoder(folder, pooling="cls").pool_prompt
    digests = {weights_digest(load_encoder(folder, pool_prompt=each)) for each in (True, False)}
    assert len(digests) == 2


def test_the_resizing_baseline_and_the_clock_are_told(write: Make, texts: list[str]) -> None:
    prompt = "query: "
    encoder, tokenizer, settings = load_model(write(Cell("bert"), "bert", query_prompt=prompt))
    assert settings is not None
    states = depth_states(
        encoder, tokenizer, texts, [Body(2)], max_length=LENGTH, prompt=prompt, device=torch.device("cpu")
    )
    ids, offsets = flat(tokenizer, [prompt + text for text in texts])
    lengths = torch.full((len(texts),), left_out_length(tokenizer, prompt))
    with torch.no_grad():
        (wanted,) = encoder(ids, None, [Size(2, HIDDEN)], offsets=offsets, prompt_lengths=lengths)
    assert_close(states[Body(2)], wanted)
    costs = measure_costs(encoder, tokenizer, [FULL], settings, texts, warm_up=0)
    assert costs[FULL].milliseconds > 0
