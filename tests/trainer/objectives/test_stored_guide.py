"""A guide whose vectors are stored: they are those that it would compute, found by text and role, computed once."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor

from data import prepare
from data.collate import PairBatch, text_hashes
from data.ground.errors import ConfigError
from data.shards.reader import ShardFolder
from data.shards.writer import npy_bytes
from data.stream import Sample
from models.encoder import Encoder, load_encoder
from models.settings import EmbeddingSettings
from tests.ranks import run_ranks
from tests.run_folder import steps_of, weights
from tests.trainer.support import float32_ds_config, loaded, recipe_of, recipe_values
from trainer import teacher_vectors
from trainer.build import build_model, open_shards
from trainer.config.schema import Recipe
from trainer.distributed import World
from trainer.losses.unit_vectors import normalize_
from trainer.objectives.contrastive_loss import contrastive_loss
from trainer.objectives.guide import Guide, StoredGuide, load_guide
from trainer.objectives.registry import maker_of
from trainer.objectives.size_schedules import build_schedule
from trainer.objectives.teacher import StoredTeacher, load_teacher
from trainer.objectives.vector_store import StoreRecord, VectorStore, query_keys, write_block, write_store_record

CPU = torch.device("cpu")
GUIDED = {"filter_false_negatives": True, "filter_by": "guide", "kl_teacher": "guide"}
COUNT = 24  # tuples
FEW_TEXTS = 16  # of a block
QUERY_ROOM, PASSAGE_ROOM = 14, 30  # what the recipe's lengths leave beside [CLS] and [SEP]

Values = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def rows(docstrings: list[str]) -> list[dict[str, Any]]:
    """Tuples of real texts. Some texts occur often, some as a query and as a passage, and most are cut."""
    texts = [text for text in docstrings if len(text.split()) > 40][: 2 * COUNT]
    found = []
    for number in range(COUNT):
        negatives = [texts[(number + offset) % COUNT] for offset in range(1, 1 + number % 3)]
        found.append({"query": texts[COUNT + number], "pos": [texts[number]], "neg": negatives})
    found[1]["query"] = found[0]["pos"][0]  # a passage that is a query, too
    found[2]["query"], found[3]["query"] = "what is it", "What is it"  # the students' tokenizer has no capitals
    return found


@pytest.fixture(scope="module")
def file(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuples") / "tuples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def shards(file: Path, tiny_tokenizer_path: Path) -> Path:
    folder = file.parent / "shards"
    prepare.run(["tuples", str(file), "--tokenizer", str(tiny_tokenizer_path), "--output", str(folder)])
    return folder


def values_of(shards: Path, frozen: Path | str, store: Path | str, **sections: Any) -> Values:
    return recipe_values(shards, objective=GUIDED, guide={"model": str(frozen), "store": str(store)}, **sections)


def stored(values: Values, file: Path, folder: Path) -> Recipe:
    """The recipe, whose stores are made."""
    recipe = loaded(values, folder)
    teacher_vectors.main(["--config", str(folder / "written.toml"), "--texts", str(file)])
    return recipe


def whole_batch(recipe: Recipe) -> PairBatch:
    """All tuples, as training gets them."""
    (source,) = open_shards(recipe)
    samples = [Sample(0, i, 0, i, payload) for i, payload in enumerate(source.tuples(range(source.num_samples)))]
    batch = maker_of(recipe).collator(recipe, [source])(samples)
    assert isinstance(batch, PairBatch)
    return batch


def places_of(rows: list[dict[str, Any]], batch: PairBatch, tokenizer: Any) -> list[int]:
    """Where each row's query is in the batch; preparation shuffles rows."""
    tokenizer.backend_tokenizer.no_truncation()

    def hashes(texts: list[str], room: int) -> list[int]:
        ids = [tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids[:room] for text in texts]
        return text_hashes([np.asarray(each) for each in ids]).tolist()

    wanted = zip(
        hashes([row["query"] for row in rows], QUERY_ROOM), hashes([row["pos"][0] for row in rows], PASSAGE_ROOM)
    )
    held = list(zip(batch.query_hashes.tolist(), batch.passage_hashes[batch.targets].tolist()))
    return [held.index(pair) for pair in wanted]


def pair_vectors(guide: Guide | StoredGuide | None, batch: PairBatch) -> tuple[Tensor, Tensor]:
    assert guide is not None
    return guide.pair_vectors(batch, device=CPU, heartbeat=lambda phase: None)


def live(recipe: Recipe) -> Guide:
    found = load_guide(
        dataclasses.replace(recipe, guide=dataclasses.replace(recipe.guide, store="")), open_shards(recipe)
    )
    assert isinstance(found, Guide)
    return found


def with_settings(model: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(model, folder)
    settings = EmbeddingSettings.load(folder)
    assert settings is not None
    dataclasses.replace(settings, **changes).save(folder)
    return folder


@pytest.mark.parametrize("kind", ["encoder", "static", "dot", "prompts"])
def test_stored_vectors_are_those_of_its_passes(
    kind: str, shards: Path, file: Path, guide_folder: Path, static_guide_folder: Path, tmp_path: Path
) -> None:
    """With the students' tokenizer: of queries, positives and negatives, to float16's eleven bits."""
    model, data = (static_guide_folder if kind == "static" else guide_folder), dict[str, Any]()
    if kind == "dot":
        model = with_settings(model, tmp_path / "model", similarity="dot")
    elif kind == "prompts":
        model = with_settings(model, tmp_path / "model", query_prompt="query: ", passage_prompt="text: ")
        data = {"query_prompts": ["query: "], "passage_prompts": ["text: "]}
    recipe = stored(values_of(shards, model, tmp_path / "store", data=data), file, tmp_path)
    guide, batch = load_guide(recipe, open_shards(recipe)), whole_batch(recipe)
    assert isinstance(guide, StoredGuide) and guide.temperature == live(recipe).temperature
    assert int(batch.queries.lengths.max()) == QUERY_ROOM + 2 and int(batch.passages.lengths.max()) == PASSAGE_ROOM + 2
    for found, expected in zip(pair_vectors(guide, batch), pair_vectors(live(recipe), batch), strict=True):
        assert float((found - expected).abs().max()) < 2**-11 * float(expected.abs().max())
        assert float((found.roll(1, 0) - expected).abs().max()) > 0.05  # negative control: another text's
        lengths = found.norm(dim=1)
        assert (lengths.std() > 0.01) if kind == "dot" else torch.allclose(lengths, torch.ones(len(found)))


def test_a_text_has_a_vector_for_each_role(
    rows: list[dict[str, Any]], shards: Path, file: Path, guide_folder: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """The query of the second tuple is the passage of the first, which the guide reads to another length."""
    recipe = stored(values_of(shards, guide_folder, tmp_path / "store"), file, tmp_path)
    batch, plain = whole_batch(recipe), recipe_of(values_of(shards, guide_folder, tmp_path / "store"))
    queries, passages = pair_vectors(load_guide(recipe, open_shards(recipe)), batch)
    expected, other = pair_vectors(live(plain), batch)
    first, second, *alike = places_of(rows[:4], batch, tiny_tokenizer)
    as_query, as_passage = queries[second], passages[batch.targets[first]]
    torch.testing.assert_close(as_query, expected[second], rtol=0, atol=1e-3)
    torch.testing.assert_close(as_passage, other[batch.targets[first]], rtol=0, atol=1e-3)
    assert float((as_query - as_passage).abs().max()) > 0.05  # one in place of the other would be noticed
    assert int(query_keys(batch.query_hashes[:1])) != int(batch.query_hashes[0])
    # Texts that the students cannot tell apart share a vector.
    assert torch.equal(queries[alike[0]], queries[alike[1]])


def test_a_model_of_another_tokenizer_reads_what_the_student_reads(
    rows: list[dict[str, Any]],
    shards: Path,
    file: Path,
    teacher_folder: Path,
    other_tokenizer: Any,
    tiny_tokenizer: Any,
    tmp_path: Path,
) -> None:
    """Naively: each text cut after the shortest beginning that has the student's ids, after the model's prompt."""
    model = with_settings(teacher_folder, tmp_path / "model", query_prompt="query: ", query_max_length=12)
    recipe = stored(values_of(shards, model, tmp_path / "store"), file, tmp_path)
    batch = whole_batch(recipe)
    queries, passages = pair_vectors(load_guide(recipe, open_shards(recipe)), batch)
    encoder = load_encoder(model).eval()
    tiny_tokenizer.backend_tokenizer.no_truncation()
    other_tokenizer.backend_tokenizer.no_truncation()

    def ids(text: str) -> list[int]:
        return tiny_tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def naive(text: str, room: int, prompt: str, longest: int) -> tuple[Tensor, bool]:
        """The vector, and whether the text was cut."""
        wanted = ids(text)[:room]
        beginnings = (text[:end] for end in range(len(text) + 1))
        read = next((beginning for beginning in beginnings if ids(beginning) == wanted), None)
        assert read is not None
        tokens = other_tokenizer.backend_tokenizer.encode(prompt + read).ids
        if len(tokens) > longest:
            tokens = [*tokens[: longest - 1], tokens[-1]]
        return vector_of(encoder, tokens), len(wanted) < len(ids(text))

    were_cut = []
    for row, place in zip(rows, places_of(rows, batch, tiny_tokenizer)):
        # Of texts that the students read alike, the first is stored; this model would tell them apart.
        query = rows[2]["query"] if row is rows[3] else row["query"]
        expected, was_cut = naive(query, QUERY_ROOM, "query: ", 12)
        torch.testing.assert_close(queries[place], expected, rtol=0, atol=1e-3)
        were_cut.append(was_cut)
        expected, was_cut = naive(row["pos"][0], PASSAGE_ROOM, "text: ", 40)
        torch.testing.assert_close(passages[batch.targets[place]], expected, rtol=0, atol=1e-3)
        were_cut.append(was_cut)
    assert sum(were_cut) > COUNT and not all(were_cut)


def vector_of(encoder: Encoder, tokens: Sequence[int]) -> Tensor:
    hidden = encoder.backbone(torch.tensor([tokens])).last_hidden_state[0].mean(0).detach()
    return hidden / hidden.norm()


def test_decisions_are_the_same(shards: Path, file: Path, guide_folder: Path, tmp_path: Path) -> None:
    """Where float16 holds the vectors, loss and gradients are bitwise those with the guide; the filter acts."""
    values = values_of(shards, guide_folder, tmp_path / "store")
    recipe = recipe_of(values)
    batch, guide = whole_batch(recipe), live(recipe)
    halves = tuple(each.half().float() for each in pair_vectors(guide, batch))

    class Rounded(Guide):
        def vectors(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
            queries, passages = (each.clone() for each in halves)
            normalize_(queries)
            normalize_(passages)
            return queries, passages

    keys = torch.cat([query_keys(batch.query_hashes), batch.passage_hashes]).numpy()
    record = StoreRecord(teacher="", tokenizer="", texts="", rooms=(1,), query_rooms=(1,), width=24, blocks=2)
    (tmp_path / "store").mkdir()
    write_store_record(tmp_path / "store", record)
    order = np.random.default_rng(0).permutation(len(keys))
    for number, part in enumerate(np.array_split(order, 2)):
        write_block(tmp_path / "store", number, keys[part, None], torch.cat(halves).half().numpy()[part])
    rounded = Rounded(**{field.name: getattr(guide, field.name) for field in dataclasses.fields(Guide)})
    looked_up = StoredGuide(VectorStore.open(tmp_path / "store", tokenizer=""), guide.temperature)
    passes: Any = type("", (), {"world": World.alone("cpu"), "device": CPU, "heartbeat": lambda phase: None})
    plan = build_schedule(recipe.step_sizes, reduction="mean", seed=0, teacher_outside=True)(0)
    torch.manual_seed(0)
    embeddings = [torch.randn(len(batch.queries) + len(batch.passages), size.dim) for size in plan.sizes]
    found = [
        contrastive_loss(recipe, guide=each).loss_and_gradients([e.clone() for e in embeddings], batch, plan, passes)
        for each in (rounded, looked_up)
    ]
    assert found[0][0].keys() == found[1][0].keys()
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])
    assert all(map(torch.equal, found[0][1], found[1][1]))
    values["objective"] |= {"false_negative_margin": -9.0}
    lax = contrastive_loss(recipe_of(values), guide=looked_up)
    assert not torch.equal(lax.loss_and_gradients(embeddings, batch, plan, passes)[0]["loss"], found[1][0]["loss"])


def test_no_text_is_embedded_twice(
    rows: list[dict[str, Any]],
    shards: Path,
    file: Path,
    guide_folder: Path,
    teacher_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once as a query and once as a passage, in blocks, by one command for guide and teacher; and then never again."""
    monkeypatch.setattr(teacher_vectors, "BLOCK_TEXTS", 7)
    texts = [("query", row["query"]) for row in rows]
    texts += [("passage", text) for row in rows for text in (*row["pos"], *row["neg"])]
    assert len(set(texts)) < len(texts)
    read: list[str] = []

    def counted(function: Any) -> Any:
        def count_and_read(block: Any, *more: Any) -> np.ndarray:
            read.extend(block.texts)
            return function(block, *more)

        return count_and_read

    for reader in ("_vectors_of_ids", "_vectors_of_texts"):
        monkeypatch.setattr(teacher_vectors, reader, counted(getattr(teacher_vectors, reader)))
    for number, model in enumerate((guide_folder, teacher_folder)):
        store = tmp_path / f"store{number}"
        teacher = {"model": str(model), "vectors": "stored", "store": str(store)}
        stored(values_of(shards, model, store, teacher=teacher, model={"ladder": [[1, 8], [3, 16]]}), file, tmp_path)
        # Two queries that the students read alike are embedded once if they are in one block.
        alike = ("what is it", "What is it")
        assert sorted(set(read) - set(alike)) == sorted({text for _, text in texts} - set(alike))
        assert len(set(texts)) - 1 <= len(read) <= len(set(texts))
        read.clear()
        teacher_vectors.main(["--config", str(tmp_path / "written.toml"), "--texts", str(file)])
        assert not read


def test_what_was_seen_is_what_a_set_says() -> None:
    seen, naive, generator = teacher_vectors._Seen(), set[int](), np.random.default_rng(0)
    for count in (1, 5, 3, 200, 50, 50, 1000, 7):
        hashes = generator.integers(0, 900, count).astype(np.uint64)
        expected = []
        for row, value in enumerate(hashes.tolist()):
            if value not in naive:
                expected.append(row)
                naive.add(value)
        assert seen.first_seen(hashes).tolist() == expected


def test_folders_with_prompts_of_other_lengths_find_their_vectors(
    shards: Path, file: Path, guide_folder: Path, tmp_path: Path
) -> None:
    """A long text is cut at two lengths, and each of the two has its vector."""
    copied = tmp_path / "copied"
    texts = tmp_path / "more.jsonl"
    texts.write_text("".join(file.read_text().splitlines(keepends=True)[:9]))
    prepare.run(["tuples", str(texts), "--tokenizer", str(shards / "tokenizer"), "--output", str(copied)])
    values = values_of(shards, guide_folder, tmp_path / "store")
    values["data"] |= {"shards": [str(shards), str(copied)], "passage_prompts": ["", "a longer text: "]}
    recipe = stored(values, file, tmp_path)
    sources, collate = open_shards(recipe), maker_of(recipe).collator(recipe, open_shards(recipe))
    samples = [
        Sample(number, i, 0, i, source.tuples([i])[0]) for number, source in enumerate(sources) for i in range(9)
    ]
    batch = collate(samples)
    guide = load_guide(recipe, sources)
    assert isinstance(guide, StoredGuide) and len(guide.store.record.rooms) == 2
    _, found = pair_vectors(guide, batch)
    plain = recipe_of(values_of(shards, guide_folder, tmp_path / "store"))
    whole = whole_batch(plain)
    places = {int(key): int(row) for key, row in zip(whole.query_hashes, whole.targets)}
    hashes = batch.passage_hashes[batch.targets]
    cut_at_both = [place for place in range(9, 18) if int(hashes[place]) not in set(whole.passage_hashes.tolist())]
    assert len(cut_at_both) > 5 and len(places) > COUNT - 2
    # The guide reads twenty tokens, fewer than are left at either length, and none of the recipe's prompts.
    _, expected = pair_vectors(
        load_guide(recipe_of(values_of(shards, guide_folder, tmp_path / "store")), sources[:1]), whole
    )
    for place in cut_at_both:
        if batch.query_hashes[9:].tolist().count(key := int(batch.query_hashes[place])) > 1:
            continue
        row = places[key]
        torch.testing.assert_close(found[batch.targets[place]], expected[row], rtol=0, atol=1e-3)


def test_one_folder_is_opened_once(shards: Path, file: Path, guide_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    teacher = {"model": str(guide_folder), "vectors": "stored", "store": str(tmp_path / "link")}
    values = values_of(shards, guide_folder, tmp_path / "store", teacher=teacher, model={"ladder": [[1, 8], [3, 16]]})
    values["model"]["config"] = {**values["model"]["config"], "hidden_size": 16, "num_attention_heads": 2}
    recipe = stored(values, file, tmp_path)
    parts = build_model(recipe, open_shards(recipe))
    assert isinstance(parts.guide, StoredGuide) and isinstance(parts.teacher, StoredTeacher)
    assert parts.teacher.store is parts.guide.store
    batch = whole_batch(recipe)
    both = torch.cat(pair_vectors(parts.guide, batch))
    assert torch.equal(parts.teacher.vectors(batch, device=CPU, heartbeat=lambda phase: None), both)
    values["teacher"]["store"] = str(tmp_path / "store")
    values["teacher"]["model"] = str(tmp_path / "another")
    with pytest.raises(ConfigError, match=r"guide.store and teacher.store are one folder, .* are two models"):
        loaded(values, tmp_path)


def test_blocks_hold_no_files_open(shards: Path, file: Path, guide_folder: Path, tmp_path: Path) -> None:
    """A process may open some thousand files, and a store of ten million texts has more blocks."""
    recipe = stored(values_of(shards, guide_folder, tmp_path / "store"), file, tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    guide = load_guide(recipe, open_shards(recipe))
    assert guide is not None and len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture(scope="module")
def whole(
    shards: Path, file: Path, guide_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Values, Path]:
    """A recipe and its store, of several blocks."""
    folder = tmp_path_factory.mktemp("whole")
    values = values_of(shards, guide_folder, folder / "store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teacher_vectors, "BLOCK_TEXTS", FEW_TEXTS)
        stored(values, file, folder)
    return values, folder / "store"


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda store: shutil.rmtree(store), r"guide.store .* holds no vectors; make it again with"),
        ({"blocks": None}, "guide.store .* is unfinished; run the same command again"),
        ({"tokenizer": "f" * 64}, "guide.store .* by another tokenizer than the shards'"),
        ({"query_rooms": []}, "guide.store .* has no vectors of queries; make it again"),
        ({"rooms": [11]}, "data.passage_max_length and the prompts leave 30 tokens, and its vectors are of 11"),
        ({"query_rooms": [9, 11]}, "data.query_max_length and the prompts leave 14 tokens.*of 9 or 11"),
        ({"width": 23}, r"block of vectors .*store/000000\.\* does not fit store\.json; run .* again"),
        ({"temperature": None}, "guide.store .* without a barista.json that names its temperature; set guide.temp"),
        ({"similarity": "angle"}, "record of stored vectors .* is damaged"),
        ({"format": 9}, "of format 9, and this version reads format 1 and 2"),
    ],
)
def test_a_store_that_does_not_fit_is_refused(
    damage: Any, match: str, whole: tuple[Values, Path], tmp_path: Path
) -> None:
    values, store = copy.deepcopy(whole[0]), tmp_path / "store"
    shutil.copytree(whole[1], store)
    values["guide"]["store"] = str(store)
    recipe = recipe_of(values)
    sources = open_shards(recipe)
    assert isinstance(load_guide(recipe, sources), StoredGuide)
    if callable(damage):
        damage(store)
    else:
        record = json.loads((store / "store.json").read_text())
        (store / "store.json").write_text(json.dumps(record | damage))
    with pytest.raises(Exception, match=match) as refusal:
        load_guide(recipe, sources)
    assert isinstance(refusal.value, ConfigError) or type(refusal.value).__module__ == "data.ground.errors"


@pytest.mark.parametrize("part", ["keys", "f16"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other rows", "a number", "other numbers"])
def test_a_damaged_block_is_refused_and_made_again(
    part: str,
    damage: str,
    whole: tuple[Values, Path],
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teacher_vectors, "BLOCK_TEXTS", FEW_TEXTS)
    values, store = copy.deepcopy(whole[0]), tmp_path / "store"
    shutil.copytree(whole[1], store)
    values["guide"]["store"] = str(store)
    path = store / f"000000.{part}.npy"
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-10])
    elif damage == "gone":
        path.unlink()
    elif damage == "a number":
        np.save(path, np.load(path)[0, 0])  # an array without dimensions
    elif damage == "other numbers":
        path.write_bytes(npy_bytes(np.load(path).astype(np.float64)))
    else:
        path.write_bytes(npy_bytes(np.load(path)[1:]))
    recipe = loaded(values, tmp_path)
    with pytest.raises(ConfigError, match=r"block of vectors .*000000.* run .* again, which makes the block anew"):
        load_guide(recipe, open_shards(recipe))
    others = {each: each.stat().st_mtime_ns for each in store.glob("*.npy") if not each.name.startswith("000000.")}
    assert others
    teacher_vectors.main(["--config", str(tmp_path / "written.toml"), "--texts", str(file)])
    assert path.read_bytes() == content
    assert others == {each: each.stat().st_mtime_ns for each in others}, "sound blocks stay as they are"
    load_guide(recipe, open_shards(recipe))


def test_a_damaged_store_of_an_earlier_version_cannot_be_mended(
    whole: tuple[Values, Path], file: Path, tmp_path: Path
) -> None:
    """Its blocks hold other texts than this version's, so that none of them can be made anew."""
    values, store = copy.deepcopy(whole[0]), tmp_path / "store"
    shutil.copytree(whole[1], store)
    values["guide"]["store"] = str(store)
    record = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps(record | {"format": 1}))
    stored(values, file, tmp_path)  # which has nothing to do
    (store / "000000.f16.npy").unlink()
    with pytest.raises(ConfigError, match=r"guide.store .* was made by an earlier version and is damaged; name"):
        stored(values, file, tmp_path)
    assert not (store / "000000.f16.npy").exists()


def test_texts_that_are_not_in_it_are_refused(whole: tuple[Values, Path]) -> None:
    recipe = recipe_of(whole[0])
    guide, batch = load_guide(recipe, open_shards(recipe)), whole_batch(recipe)
    strange = torch.from_numpy(text_hashes([np.asarray([5, 6, 7])]))
    unknown = dataclasses.replace(batch, query_hashes=torch.cat([strange, batch.query_hashes[1:]]))
    with pytest.raises(ConfigError, match=r"guide.store .* has no vector of 1 of a batch's \d+ texts; make it again"):
        pair_vectors(guide, unknown)
    swapped = dataclasses.replace(batch, query_hashes=batch.passage_hashes[batch.targets])  # a passage is no query
    with pytest.raises(ConfigError, match="has no vector of"):
        pair_vectors(guide, swapped)


def test_documents_do_not_fit_a_store_of_pairs(whole: tuple[Values, Path], document_shards: Path) -> None:
    teacher = {"model": "a/model", "vectors": "stored", "store": str(whole[1])}
    recipe = recipe_of(recipe_values(document_shards, objective={"name": "distill"}, teacher=teacher))
    with pytest.raises(ConfigError, match=r"teacher.store .* of queries and passages, and this recipe reads documents"):
        load_teacher(recipe, open_shards(recipe))


def test_shards_that_were_prepared_with_prompts_are_refused(
    file: Path, guide_folder: Path, tiny_tokenizer_path: Path, tmp_path: Path
) -> None:
    command = ["tuples", str(file), "--tokenizer", str(tiny_tokenizer_path), "--output", str(tmp_path / "shards")]
    prepare.run([*command, "--query-prompt", "query: "])
    values = values_of(tmp_path / "shards", guide_folder, tmp_path / "store")
    loaded(values, tmp_path)
    with pytest.raises(ConfigError, match=r"prepared with prompts, .* or remove guide.store"):
        teacher_vectors.main(["--config", str(tmp_path / "written.toml"), "--texts", str(file)])
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("guide", "match"),
    [
        ({"store": "a/store"}, "stores no vectors; set .* guide.model and guide.store"),
        ({"model": "a/guide"}, "stores no vectors; set .* guide.model and guide.store"),
    ],
)
def test_a_recipe_that_stores_nothing_is_refused(
    guide: dict[str, str], match: str, shards: Path, file: Path, tmp_path: Path
) -> None:
    loaded(recipe_values(shards, objective=GUIDED, guide=guide), tmp_path)
    with pytest.raises(ConfigError, match=match):
        teacher_vectors.main(["--config", str(tmp_path / "written.toml"), "--texts", str(file)])


def test_a_guide_without_a_model_beside_a_teacher_is_refused(shards: Path, file: Path, tmp_path: Path) -> None:
    teacher = {"model": "a/model", "vectors": "stored", "store": str(tmp_path / "teacher")}
    loaded(recipe_values(shards, objective=GUIDED, guide={"store": "a/store"}, teacher=teacher), tmp_path)
    with pytest.raises(ConfigError, match=r"guide.store .* to hold a model's vectors; name the model in guide.model"):
        teacher_vectors.main(["--config", str(tmp_path / "written.toml"), "--texts", str(file)])


def test_spans_have_no_stored_guide(document_shards: Path) -> None:
    objective = {"name": "masked", "pairs": "spans", "filter_false_negatives": True, "filter_by": "guide"}
    with pytest.raises(ConfigError, match=r"guide.store = 'a/store' holds vectors of whole texts, .* guide.model"):
        recipe_of(recipe_values(document_shards, objective=objective, guide={"store": "a/store"}))


@pytest.mark.launcher
def test_resumed_equals_uninterrupted(shards: Path, file: Path, guide_folder: Path, tmp_path: Path) -> None:
    """Two ranks; guide and teacher are read from one store, roles weigh the same."""
    teacher = {"model": str(guide_folder), "vectors": "stored", "store": str(tmp_path / "store")}
    teacher |= {"balance": "roles", "gram_weight": 1.0, "similarity_weight": 0.5}
    small = {"config": {}, "ladder": [[1, 8], [2, 24]], "source": str(guide_folder), "pooling": "mean"}
    engine = {"ds_config": str(float32_ds_config(tmp_path, 2))}
    values = values_of(shards, guide_folder, tmp_path / "store", teacher=teacher, model=small, engine=engine)
    values["optim"] = {"lr": 1e-3}
    stored(values, file, tmp_path)
    settings = {"train.steps": 4, "checkpoint.every_steps": 2}

    def run(name: str, **more: Any) -> dict[str, Any]:
        chosen = settings | {"run.output": str(tmp_path / name)} | more
        arguments = [f"--{key}={value}" for key, value in chosen.items()]
        return {"task": "contrastive", "arguments": ["--config", str(tmp_path / "written.toml"), *arguments]}

    def start(*runs: dict[str, Any]) -> None:
        (tmp_path / "cases.json").write_text(json.dumps(runs))
        run_ranks("tests.trainer.worker", "runs", str(tmp_path / "cases.json"), str(tmp_path), ranks=2)

    start(run("whole"), run("resumed", **{"train.stop_at_step": 2}))
    start(run("resumed", **{"run.resume": "required"}))
    losses = [
        [{key: value for key, value in line.items() if "/" in key and "second" not in key} for line in steps_of(folder)]
        for folder in (tmp_path / "whole", tmp_path / "resumed")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert any("distill/" in key or "distillation" in key for key in losses[0][0])
    first, second = (weights(tmp_path / name) for name in ("whole", "resumed"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_the_written_recipe_is_read_again(whole: tuple[Values, Path], tmp_path: Path) -> None:
    """guide.store is a place: a run's recipe.toml shows it, and training reads it without the model."""
    values = copy.deepcopy(whole[0])
    del values["guide"]["model"]
    (tmp_path / "written.toml").write_text(tomli_w.dumps(values))
    recipe = loaded(values, tmp_path)
    assert isinstance(load_guide(recipe, [ShardFolder(path) for path in recipe.data.shards]), StoredGuide)
