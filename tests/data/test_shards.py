"""The shard format: round trips, WebDataset compatibility, every defect by name, and a writer that may be killed."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import pickle
import signal
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from tokenizers import AddedToken
from transformers import AutoTokenizer

from data.ground.errors import DataError
from data.remote import Cache
from data.shards import reader as reading
from data.shards import writer as writing
from data.shards.format import read_manifest, token_dtype
from data.shards.reader import ShardFolder
from data.shards.writer import SplitWriter, finish_folder, finished_split
from tests.data.conftest import mapped
from tests.run_folder import contents

NUM_TEXTS = 400
OPTIONS = {"chunk_samples": 16, "shard_bytes": 20_480}


@pytest.fixture(scope="module")
def texts(tiny_tokenizer, docstrings) -> list[list[int]]:
    return tiny_tokenizer(docstrings[:NUM_TEXTS], add_special_tokens=False).input_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer, texts) -> Path:
    """Documents in three uneven units and many small shards."""
    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder, texts, tokenizer=tiny_tokenizer)
    return folder


@pytest.fixture(scope="module")
def tuples(texts) -> list[tuple[list[int], list[list[int]], int]]:
    """Ragged groups: 1 to 5 passages, of which 1 to 3 are positives."""
    samples = []
    for number in range(100):
        count = 1 + number % 5
        passages = [texts[(7 * number + j) % len(texts)] for j in range(count)]
        samples.append((texts[number][:9], passages, min(count, 1 + number % 3)))
    return samples


def write_documents(folder: Path, texts: list[list[int]], *, tokenizer, unit_starts: tuple[int, ...] = (0, 150, 163)):
    for unit, ids in enumerate(np.split(np.arange(len(texts)), unit_starts[1:])):
        with SplitWriter(
            folder, unit, kind="documents", vocabulary_size=len(tokenizer), source=f"part {unit}", **OPTIONS
        ) as writer:
            for index in ids:
                writer.add_document(texts[index])
    return finish_folder(folder, len(unit_starts), tokenizer=tokenizer, name="tiny")


def first_tar(folder: Path) -> Path:
    return min(folder.glob("shard-*.tar"))


def edit_manifest(folder: Path, edit: Callable[[dict], None]) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    edit(content)
    (folder / "manifest.json").write_text(json.dumps(content))


# ------------------------------------------------------------------------------------------------------ round trips


def test_documents_come_back_as_written(folder, texts):
    opened = ShardFolder(folder)
    assert opened.num_samples == len(opened) == len(texts)
    assert opened.num_tokens == sum(map(len, texts))
    assert len(opened.manifest.shards) > 5, "several shards, or rotation is not shown"
    assert len({len(chunks) for chunks in opened.chunk_samples}) > 1, "shards must be uneven"
    for index, text in enumerate(texts):
        assert opened.document(index).tolist() == text
    order = np.random.default_rng(1).permutation(len(texts))
    assert [ids.tolist() for ids in opened.documents(order)] == [texts[i] for i in order]
    assert opened.document(5).tolist() != texts[6]
    with pytest.raises(IndexError):
        opened.document(len(texts))


def test_documents_are_read_only_views(folder):
    document = ShardFolder(folder).document(3)
    assert document.dtype == np.uint16 and not document.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        document[0] = 1


def test_tuples_come_back_as_written(tmp_path, tiny_tokenizer, tuples):
    with SplitWriter(tmp_path, 0, kind="tuples", vocabulary_size=len(tiny_tokenizer), **OPTIONS) as writer:
        for query, passages, positives in tuples:
            writer.add_tuple(query, passages, num_positives=positives)
    finish_folder(tmp_path, 1, tokenizer=tiny_tokenizer)
    opened = ShardFolder(tmp_path)
    assert (opened.kind, opened.num_samples, opened.graded) == ("tuples", len(tuples), False)
    for index, (query, passages, positives) in enumerate(tuples):
        sample = opened.tuple(index)
        assert sample.query.tolist() == query
        assert [passage.tolist() for passage in sample.passages] == passages
        assert (sample.num_positives, sample.score) == (positives, None)
    with pytest.raises(DataError, match="not documents"):
        opened.document(0)


def test_graded_pairs_carry_scores(tmp_path, tiny_tokenizer, texts):
    with SplitWriter(tmp_path, 0, kind="tuples", graded=True, vocabulary_size=2000, **OPTIONS) as writer:
        for index in range(40):
            writer.add_tuple(texts[index], [texts[index + 1]], score=index / 8)
        with pytest.raises(DataError, match="lacks a score"):
            writer.add_tuple(texts[0], [texts[1]])
    finish_folder(tmp_path, 1, tokenizer=tiny_tokenizer)
    opened = ShardFolder(tmp_path)
    assert opened.graded
    assert [sample.score for sample in opened.tuples(range(40))] == [index / 8 for index in range(40)]


def test_examples_carry_weights(tmp_path, tiny_tokenizer, texts):
    with SplitWriter(tmp_path, 0, kind="tuples", weighted=True, vocabulary_size=2000, **OPTIONS) as writer:
        for index in range(40):
            weight = {} if index % 3 else {"weight": index / 8}
            writer.add_tuple(texts[index], [texts[index + 1]], **weight)
        for weight in (-0.5, float("nan"), float("inf")):
            with pytest.raises(DataError, match="finite number of at least 0"):
                writer.add_tuple(texts[0], [texts[1]], weight=weight)
    finish_folder(tmp_path, 1, tokenizer=tiny_tokenizer)
    opened = ShardFolder(tmp_path)
    assert opened.weighted and not opened.graded
    expected = [1.0 if index % 3 else index / 8 for index in range(40)]
    assert [sample.weight for sample in opened.tuples(range(40))] == expected
    with SplitWriter(tmp_path / "plain", 0, kind="tuples", vocabulary_size=2000) as plain:
        plain.add_tuple(texts[0], [texts[1]])
        with pytest.raises(DataError, match="has a weight, and these shards have none"):
            plain.add_tuple(texts[0], [texts[1]], weight=0.5)
    finish_folder(tmp_path / "plain", 1, tokenizer=tiny_tokenizer)
    opened = ShardFolder(tmp_path / "plain")
    assert not opened.weighted and opened.tuple(0).weight == 1.0
    for wrong in ({"kind": "documents"}, {"kind": "tuples", "graded": True}):
        with pytest.raises(DataError, match="without scores can have weights"):
            SplitWriter(tmp_path / "wrong", 0, weighted=True, vocabulary_size=2000, **wrong)


def test_ids_are_as_narrow_as_the_vocabulary_allows(tmp_path, tiny_tokenizer):
    assert token_dtype(2**16) == np.uint16
    assert token_dtype(2**16 + 1) == np.uint32
    with SplitWriter(tmp_path, 0, kind="documents", vocabulary_size=70_000) as writer:
        writer.add_document([5, 69_999])
        marker = writer.close()
    with tarfile.open(tmp_path / marker.shards[0].name) as tar:
        ids = np.load(io.BytesIO(tar.extractfile("00000-000000.tok.npy").read()), allow_pickle=False)
    assert ids.dtype == np.uint32 and ids.tolist() == [5, 69_999]


def test_shards_are_plain_tars_and_valid_webdatasets(folder, texts):
    opened = ShardFolder(folder)
    paths = [folder / shard.name for shard in opened.manifest.shards]
    expected = [(shard.name, chunk) for shard in opened.manifest.shards for chunk in shard.chunks]

    with_tarfile = []
    for path in paths:
        with tarfile.open(path) as tar:
            members = tar.getmembers()
            assert all(m.mtime == 0 and m.uid == 0 and m.uname == "" and m.offset_data % 512 == 0 for m in members)
            for token_member, offset_member in zip(members[::2], members[1::2]):
                tokens, offsets = (
                    np.load(io.BytesIO(tar.extractfile(m).read()), allow_pickle=False)
                    for m in (token_member, offset_member)
                )
                with_tarfile += [part.tolist() for part in np.split(tokens, offsets[1:-1])]
                name, chunk = expected.pop(0)
                assert name == path.name
                assert token_member.name == f"{chunk.key}.tok.npy"
                assert chunk.members["tok"] == (token_member.offset_data, token_member.size)
    assert not expected
    assert with_tarfile == texts

    with_webdataset = []
    for sample in webdataset.WebDataset([str(path) for path in paths], shardshuffle=False).decode():
        with_webdataset += [part.tolist() for part in np.split(sample["tok.npy"], sample["off.npy"][1:-1])]
    assert with_webdataset == texts


def test_a_folder_pickles_without_its_files(folder, texts):
    opened = ShardFolder(folder)
    opened.documents(range(50))
    again = pickle.loads(pickle.dumps(opened))  # an mmap has no pickle
    assert again.document(7).tolist() == texts[7]
    assert again.fingerprint == opened.fingerprint


def test_few_shards_stay_open(folder, texts, monkeypatch):
    monkeypatch.setattr(reading, "MAX_OPEN_SHARDS", 2)
    opened = ShardFolder(folder)
    held = [opened.document(index) for index in range(len(texts))]
    assert len(mapped(folder)) == len(opened.manifest.shards) > 2, "views keep their files"
    assert [ids.tolist() for ids in held] == texts, "views must outlive the closing of their shard"
    del held
    assert len(mapped(folder)) == 2


def test_the_folder_holds_its_own_tokenizer(folder, tiny_tokenizer, tmp_path):
    opened = ShardFolder(folder)
    assert opened.vocabulary.size == len(tiny_tokenizer) == opened.manifest.tokenizer["vocab_size"]
    opened.check_tokenizer(tiny_tokenizer)
    other = AutoTokenizer.from_pretrained(opened.tokenizer_path)
    other.add_tokens([AddedToken("latte")])
    with pytest.raises(DataError, match="not the one the shards in"):
        opened.check_tokenizer(other)


# ------------------------------------------------------------------------------------------------------------ defects


def refused(words: str, act: Callable[[], object], *, name: str = "") -> None:
    with pytest.raises(DataError, match=words) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message and name in message, message


def test_a_sound_copy_is_accepted(copy):
    ShardFolder(copy).check()


def test_missing_empty_truncated_and_longer_shards(copy):
    tar = first_tar(copy)
    content = tar.read_bytes()
    for damaged, words in ((content[: len(content) // 2], "truncated"), (b"", "empty"), (content + b"x", "too long")):
        tar.write_bytes(damaged)
        refused(words, lambda: ShardFolder(copy), name=str(tar))
    tar.unlink()
    refused("missing", lambda: ShardFolder(copy), name=str(tar))


def test_a_shard_that_is_cut_while_in_use(copy):
    opened = ShardFolder(copy)
    tar = first_tar(copy)
    os.truncate(tar, 1024)
    refused("truncated", lambda: opened.document(0), name=str(tar))


def test_a_flipped_bit_is_found_by_sha256_and_only_by_it(copy):
    tar = first_tar(copy)
    offset, length = read_manifest(copy).shards[0].chunks[0].members["tok"]
    content = bytearray(tar.read_bytes())
    content[offset + length - 2] ^= 1  # an id becomes its neighbour: nothing but a hash can know
    tar.write_bytes(content)
    ShardFolder(copy, verify="size").document(0)
    opened = ShardFolder(copy)
    refused("sha256", lambda: opened.document(0), name=str(tar))
    assert opened.document(opened.num_samples - 1).size, "the other shards are sound"
    refused("sha256", ShardFolder(copy, verify="size").check, name=str(tar))


@pytest.mark.parametrize(
    ("column", "place", "replacement", "words"),
    [
        ("tok", 3, b"x", "no array"),  # npy magic
        ("tok", 20, b"x", "no array"),  # npy header
        ("off", -4, b"\1\0\0\0", "offsets"),  # the last offset is not the number of tokens
        ("off", 128 + 4, b"\0\0\0\0", "offsets"),  # the first document becomes empty
        ("off", 128 + 8, b"\1\0\0\0", "offsets"),  # in range, but falling
        ("tok", -1, b"\xff", "holds id"),  # the high byte of an id
    ],
)
def test_damaged_members_are_found_when_they_are_touched(copy, column, place, replacement, words):
    tar = first_tar(copy)
    offset, length = read_manifest(copy).shards[0].chunks[0].members[column]
    start = offset + place % length
    content = bytearray(tar.read_bytes())
    content[start : start + len(replacement)] = replacement
    tar.write_bytes(content)
    refused(words, lambda: ShardFolder(copy, verify="size").document(0), name=str(tar))


def test_an_object_array_is_never_unpickled(copy):
    tar = first_tar(copy)
    offset, _ = read_manifest(copy).shards[0].chunks[0].members["tok"]
    content = bytearray(tar.read_bytes())
    header = bytes(content[offset : offset + 128]).replace(b"'<u2'", b"'|O' ")
    content[offset : offset + 128] = header
    tar.write_bytes(content)
    refused("no array", lambda: ShardFolder(copy, verify="size").document(0), name=str(tar))


def test_ids_beyond_the_vocabulary(copy):
    edit_manifest(copy, lambda content: content["tokenizer"].update(vocab_size=50))
    refused("vocabulary has 50", ShardFolder(copy).check, name=first_tar(copy).name)


def test_folders_that_are_no_shard_folders(tmp_path, tiny_tokenizer):
    refused("does not exist", lambda: ShardFolder(tmp_path / "absent"), name="absent")
    refused("holds no manifest", lambda: ShardFolder(tmp_path))
    with SplitWriter(tmp_path / "begun", 0, kind="documents", vocabulary_size=9) as writer:
        writer.add_document([1])
    refused("unfinished", lambda: ShardFolder(tmp_path / "begun"), name="begun")


def test_damaged_manifests(copy):
    sound = (copy / "manifest.json").read_text()
    edits: list[tuple[Callable[[dict], object], str]] = [
        (lambda content: content.pop("shards"), "damaged"),
        (lambda content: content.update(format=99), "format 99"),
        (lambda content: content.update(kind="images"), "kind = 'images'"),
        (lambda content: content.update(shards=[]), "no samples"),
        (lambda content: content["shards"][0].update(samples=1), "contradicts itself"),
        (lambda content: content["shards"][0]["chunks"][0]["members"].update(tok=[10**9, 4]), "contradicts itself"),
        (lambda content: content["shards"][0].update(name="../../etc/x.tar"), "damaged"),
    ]
    for edit, words in edits:
        edit_manifest(copy, edit)
        refused(words, lambda: ShardFolder(copy), name=str(copy))
        (copy / "manifest.json").write_text(sound)
    (copy / "manifest.json").write_text(sound[:-20])
    refused("damaged", lambda: ShardFolder(copy), name="manifest.json")
    (copy / "manifest.json").write_text(sound)
    ShardFolder(copy)


def first_shard(content: dict) -> dict:
    return content["shards"][0]


def first_chunk(content: dict) -> dict:
    return first_shard(content)["chunks"][0]


# Text that Python's own json module would not write.
HUGE, NAN = "@1e999@", "@NaN@"


@pytest.mark.parametrize(
    "edit",
    [
        lambda content, value: first_shard(content).update(bytes=value),
        lambda content, value: first_shard(content).update(samples=value),
        lambda content, value: first_shard(content).update(tokens=value),
        lambda content, value: first_shard(content).update(name=value),
        lambda content, value: first_shard(content).update(sha256=value),
        lambda content, value: first_shard(content).update(chunks=value),
        lambda content, value: first_chunk(content).update(samples=value),
        lambda content, value: first_chunk(content).update(members=value),
        lambda content, value: first_chunk(content)["members"].update(tok=[value, 4]),
        lambda content, value: first_chunk(content)["members"].update(tok=[1024, value]),
        lambda content, value: content["tokenizer"].update(vocab_size=value),
        lambda content, value: content["tokenizer"].update(fingerprint=value),
        lambda content, value: content.update(tokenizer=value),
        lambda content, value: content.update(kind=value),
        lambda content, value: content.update(columns=value),
        lambda content, value: content.update(shards=value),
        lambda content, value: content.update(format=[value]),
    ],
)
def test_values_that_do_not_belong_in_a_manifest(copy, edit):
    path = copy / "manifest.json"
    sound = path.read_text()
    for value in (HUGE, NAN, -1, 2**63, "1", 1.0, True, None, [], {}):
        edit_manifest(copy, lambda content, value=value: edit(content, value))
        path.write_text(path.read_text().replace(f'"{HUGE}"', "1e999").replace(f'"{NAN}"', "NaN"))
        refused("manifest|shard folder", lambda: ShardFolder(copy), name=str(copy))
        path.write_text(sound)
    ShardFolder(copy)


def test_manifests_that_contradict_themselves(copy):
    path = copy / "manifest.json"
    sound = path.read_bytes()
    edits: list[tuple[Callable[[dict], object], str]] = [
        (lambda content: content["shards"].append(first_shard(content)), "lists shard-00000-000.tar twice"),
        (lambda content: first_chunk(content).update(samples=0), "samples = 0"),
        (lambda content: first_chunk(content)["members"].pop("off"), "contradicts itself"),
        (lambda content: first_chunk(content)["members"].update(tok=[0, 4]), "contradicts itself"),
        (
            lambda content: content.update(columns=["q.tok", "q.off", "d.tok", "d.off", "grp", "pos", "score"]),
            "unknown",
        ),
        (lambda content: content["tokenizer"].update(vocab_size=2**30), "vocab_size"),
    ]
    for edit, words in edits:
        edit_manifest(copy, edit)
        refused(words, lambda: ShardFolder(copy), name=str(copy))
        path.write_bytes(sound)
    edit_manifest(copy, lambda content: content["tokenizer"].update(vocab_size=60_000))
    refused("records a vocabulary of 60000 tokens", lambda: ShardFolder(copy).vocabulary)
    for content in (b"[" * 100_000, b"\xff", b"[]", b"null", b""):
        path.write_bytes(content)
        refused("manifest", lambda: ShardFolder(copy), name=str(path))


def test_members_that_changed_places(copy):
    shards = read_manifest(copy).shards
    number = next(i for i, shard in enumerate(shards) if len(shard.chunks) > 1)

    def exchange(content: dict) -> None:
        first, second = content["shards"][number]["chunks"][:2]
        for one in (first, second):
            one["samples"] = first["samples"]
        first["members"], second["members"] = second["members"], first["members"]

    edit_manifest(copy, exchange)
    first_document = sum(shard.samples for shard in shards[:number])
    refused("is no array of the recorded size|contradicts", lambda: ShardFolder(copy).document(first_document))


@pytest.mark.parametrize("thing", ["pipe", "folder", "socket", "device"])
def test_what_stands_in_a_shards_place(copy, thing):
    tar = first_tar(copy)
    tar.unlink()
    if thing == "pipe":
        os.mkfifo(tar)
    elif thing == "folder":
        tar.mkdir()
    elif thing == "socket":
        with contextlib.chdir(copy), socket.socket(socket.AF_UNIX) as one:
            one.bind(tar.name)
    else:
        tar.symlink_to("/dev/zero")
    refused("is no regular file", lambda: ShardFolder(copy), name=str(tar))
    source = ShardFolder(copy, bad_shards="skip")
    assert len(source.document(0)), "skipped as any bad shard"


def test_a_pipe_that_takes_a_shards_place_while_it_is_in_use(copy):
    source = ShardFolder(copy)
    tar = first_tar(copy)
    tar.unlink()
    os.mkfifo(tar)
    refused("is no regular file", lambda: source.document(0), name=str(tar))


def test_files_that_may_not_be_read(copy, monkeypatch):
    tar = first_tar(copy)
    original = os.open

    def denied(path: object, *arguments: object, **options: object) -> int:
        if str(path).endswith((tar.name, "manifest.json")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return original(path, *arguments, **options)  # type: ignore[arg-type]

    source = ShardFolder(copy, bad_shards="skip")
    monkeypatch.setattr(os, "open", denied)
    refused("shard .* cannot be read .*Permission denied", lambda: source.document(0), name=str(tar))
    refused("manifest .* cannot be read .*Permission denied", lambda: ShardFolder(copy), name=str(copy))


def test_every_flip_of_a_header_is_found_or_harmless(copy):
    """numpy reads a header as Python's literals, which fail in many ways."""
    tar = first_tar(copy)
    sound = tar.read_bytes()
    offset, _ = read_manifest(copy).shards[0].chunks[0].members["tok"]
    expected = ShardFolder(copy).document(0).tolist()
    refusals = 0
    for place in range(offset - 512, offset + 128):
        content = bytearray(sound)
        content[place] ^= 1 << place % 8
        tar.write_bytes(content)
        try:
            assert ShardFolder(copy, verify="size").document(0).tolist() == expected
        except DataError:
            refusals += 1
    assert refusals > 60


def test_a_mark_does_not_hold_for_other_bytes_of_the_same_time(copy, tmp_path):
    cache = Cache.at(tmp_path / "cache")
    ShardFolder(copy, cache=cache).document(0)
    tar = first_tar(copy)
    before = tar.stat()
    content = bytearray(tar.read_bytes())
    content[700] ^= 1
    tar.write_bytes(content)
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    refused("sha256", lambda: ShardFolder(copy, cache=cache).document(0), name=str(tar))


def test_binary_marks_count_for_nothing(copy, tmp_path):
    cache = Cache.at(tmp_path / "cache")
    source = ShardFolder(copy, cache=cache)
    marks = cache.marks(copy, source.fingerprint)
    marks.write_bytes(b"\xff\xfe\0\n")
    assert len(source.document(0))
    assert len(marks.read_bytes().splitlines()) == 3


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"[" * 100_000, b"\xff", b'{"format": 1, "unit": 1e999}', b'{"format": 1}']
)
def test_a_damaged_marker_means_an_unwritten_unit(tmp_path, content, caplog):
    with SplitWriter(tmp_path, 0, kind="documents", vocabulary_size=9) as writer:
        writer.add_document([1])
    path = tmp_path / "units" / "00000.json"
    sound = path.read_bytes()
    assert finished_split(tmp_path, 0) is not None
    path.write_bytes(content)
    assert finished_split(tmp_path, 0) is None and "input split 0 is written again" in caplog.text
    path.write_bytes(sound.replace(b'"format":1', b'"format":7'))
    refused("is of format 7", lambda: finished_split(tmp_path, 0), name=str(path))


def test_another_tokenizer_in_the_folder(copy):
    tokenizer = AutoTokenizer.from_pretrained(copy / "tokenizer")
    tokenizer.add_tokens(["latte"])
    tokenizer.save_pretrained(copy / "tokenizer")
    refused("not the one", lambda: ShardFolder(copy).vocabulary)


def test_the_fingerprint_tells_data_apart(folder, tmp_path, tiny_tokenizer, texts):
    same = write_documents(tmp_path / "same", texts, tokenizer=tiny_tokenizer)
    other = write_documents(tmp_path / "other", [*texts[:-1], texts[0]], tokenizer=tiny_tokenizer)
    assert same.fingerprint == read_manifest(folder).fingerprint != other.fingerprint


# ------------------------------------------------------------------------------------------------------------ writing


def test_samples_that_cannot_be_written(tmp_path, texts):
    documents = SplitWriter(tmp_path / "d", 0, kind="documents", vocabulary_size=50, source="corpus.jsonl")
    refused("no tokens", lambda: documents.add_document([]), name="corpus.jsonl")
    refused("negative id", lambda: documents.add_document([-1]))
    refused("take documents", lambda: documents.add_tuple([1], [[2]]))
    documents.add_document([50])
    refused("id 50", documents.close, name="corpus.jsonl")
    tuples = SplitWriter(tmp_path / "t", 0, kind="tuples", vocabulary_size=50)
    refused("take tuples", lambda: tuples.add_document([1]))
    refused("2 positives of 1", lambda: tuples.add_tuple([1], [[2]], num_positives=2))
    refused("0 positives of 0", lambda: tuples.add_tuple([1], [], num_positives=0))
    refused("has a score", lambda: tuples.add_tuple([1], [[2]], score=1.0))
    # A caller may drop a refused sample and go on: nothing of it is kept.
    refused("no tokens", lambda: tuples.add_tuple([1, 2], [[3, 4], []]))
    tuples.add_tuple([1, 2], [[3]])
    marker = tuples.close()
    assert (marker.samples, marker.tokens) == (1, 3)
    graded = SplitWriter(tmp_path / "g", 0, kind="tuples", graded=True, vocabulary_size=50)
    refused("score nan", lambda: graded.add_tuple([1], [[2]], score=float("nan")))
    # Finite, but not in the float32 of the shards, which could not be read.
    refused("score 1e\\+39", lambda: graded.add_tuple([1], [[2]], score=1e39))
    refused("weight 1e\\+39", lambda: tuples.add_tuple([1], [[2]], weight=1e39))
    refused("kind 'images'", lambda: SplitWriter(tmp_path, 0, kind="images", vocabulary_size=5))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_aborted_writer_leaves_nothing_to_be_written_later(tmp_path):
    """What tarfile holds in its buffer is flushed when it is collected, which must not meet a closed file."""
    with (
        pytest.raises(KeyError),
        SplitWriter(tmp_path, 0, kind="documents", vocabulary_size=9, chunk_samples=1) as unit,
    ):
        unit.add_document([1])
        assert contents(tmp_path), "a shard was begun"
        raise KeyError
    del unit
    gc.collect()
    assert not contents(tmp_path)


def test_a_full_disk_and_an_unwritable_folder_are_named(tmp_path, monkeypatch):
    opened = Path.open

    def on_full_disk(path: Path, *args: Any, **options: Any) -> Any:
        path.touch()
        return opened(Path("/dev/full"), *args, **options)

    def write() -> None:
        with monkeypatch.context() as context:
            context.setattr(Path, "open", on_full_disk)
            with SplitWriter(tmp_path / "full", 0, kind="documents", vocabulary_size=9) as writer:
                writer.add_document([1])

    refused("No space left", write, name="shard-00000-000.tar")
    assert not contents(tmp_path / "full")
    (tmp_path / "file").touch()
    refused("cannot be made", lambda: SplitWriter(tmp_path / "file" / "x", 0, kind="documents", vocabulary_size=9))


def test_an_error_inside_a_unit_leaves_nothing_behind(tmp_path, texts):
    with (
        pytest.raises(RuntimeError, match="the source broke"),
        SplitWriter(tmp_path, 0, kind="documents", vocabulary_size=2000, **OPTIONS) as writer,
    ):
        for text in texts[:150]:
            writer.add_document(text)
        assert list(tmp_path.glob("shard-*.tar"))
        raise RuntimeError("the source broke")
    assert not contents(tmp_path)
    assert finished_split(tmp_path, 0) is None


def test_a_unit_that_outgrows_a_chunk_in_tokens_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "CHUNK_TOKENS", 100)
    with SplitWriter(tmp_path, 0, kind="documents", vocabulary_size=9) as writer:
        for _ in range(10):
            writer.add_document([1] * 40)
        marker = writer.close()
    assert [chunk.samples for shard in marker.shards for chunk in shard.chunks] == [3, 3, 3, 1]


def test_units_without_samples_are_skipped_but_a_folder_needs_some(tmp_path, tiny_tokenizer):
    size = len(tiny_tokenizer)
    SplitWriter(tmp_path, 0, kind="documents", vocabulary_size=size).close()
    refused("no samples", lambda: finish_folder(tmp_path, 1, tokenizer=tiny_tokenizer))
    with SplitWriter(tmp_path, 1, kind="documents", vocabulary_size=size) as writer:
        writer.add_document([7])
    assert finish_folder(tmp_path, 2, tokenizer=tiny_tokenizer).samples == 1


def test_finished_splits_are_known_by_their_markers(tmp_path, texts):
    settings = {"source": "a.jsonl", "rows": (0, 10)}
    assert finished_split(tmp_path, 0, settings=settings) is None
    with SplitWriter(tmp_path, 0, kind="documents", vocabulary_size=2000, settings=settings, **OPTIONS) as writer:
        for text in texts[:50]:
            writer.add_document(text)
    marker = finished_split(tmp_path, 0, settings={"source": "a.jsonl", "rows": [0, 10]})
    assert marker is not None and marker.samples == 50
    refused("another rows", lambda: finished_split(tmp_path, 0, settings={"source": "a.jsonl", "rows": [0, 11]}))
    os.truncate(first_tar(tmp_path), 100)
    assert finished_split(tmp_path, 0, settings=settings) is None, "a damaged unit must be written again"


def test_a_folder_is_finished_only_when_whole(tmp_path, tiny_tokenizer, texts):
    for unit in (0, 2):
        with SplitWriter(tmp_path, unit, kind="documents", vocabulary_size=len(tiny_tokenizer)) as writer:
            writer.add_document(texts[unit])
    refused(
        "lacks 1 of 3 input splits, the first of them 1", lambda: finish_folder(tmp_path, 3, tokenizer=tiny_tokenizer)
    )
    refused("none of this command.s 1 input splits", lambda: finish_folder(tmp_path, 1, tokenizer=tiny_tokenizer))
    assert finish_folder(tmp_path, [2, 0], tokenizer=tiny_tokenizer).samples == 2
    refused("already holds", lambda: SplitWriter(tmp_path, 1, kind="documents", vocabulary_size=len(tiny_tokenizer)))


def test_the_wrong_tokenizer_cannot_finish_a_folder(tmp_path, tiny_tokenizer):
    with SplitWriter(tmp_path, 0, kind="documents", vocabulary_size=5) as writer:
        writer.add_document([1])
    refused("vocabulary of 5", lambda: finish_folder(tmp_path, 1, tokenizer=tiny_tokenizer))


def test_a_lost_shard_is_mended_by_writing_its_unit_again(copy, texts, tiny_tokenizer):
    before = contents(copy)
    lost = copy / "shard-00001-000.tar"
    lost.unlink()
    assert finished_split(copy, 1) is None
    with SplitWriter(
        copy, 1, kind="documents", vocabulary_size=len(tiny_tokenizer), source="part 1", **OPTIONS
    ) as writer:
        for text in texts[150:163]:
            writer.add_document(text)
    assert contents(copy) == before


# ------------------------------------------------------------------------------------------------- kill and restart


def write_all_units(folder: Path, texts: list[list[int]], tokenizer, *, after_event: Callable[[], None]) -> None:
    """What a prepare command does: skip what is finished, write the rest, assemble. Every durable act is an event."""
    acts = {"fsync": os.fsync, "replace": Path.replace, "unlink": Path.unlink, "write": writing.HashedFile.write}

    def counted(act: Callable) -> Callable:
        def acting(*args, **kwargs):
            result = act(*args, **kwargs)
            after_event()
            return result

        return acting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", counted(acts["fsync"]))
        patch.setattr(Path, "replace", counted(acts["replace"]))
        patch.setattr(Path, "unlink", counted(acts["unlink"]))
        patch.setattr(writing.HashedFile, "write", counted(acts["write"]))
        for unit in range(3):
            settings = {"rows": [unit * 60, unit * 60 + 60]}
            if finished_split(folder, unit, settings=settings):
                continue
            with SplitWriter(
                folder, unit, kind="documents", vocabulary_size=len(tokenizer), settings=settings, **OPTIONS
            ) as writer:
                for text in texts[unit * 60 : unit * 60 + 60]:
                    writer.add_document(text)
        finish_folder(folder, 3, tokenizer=tokenizer)


def run_and_kill(folder: Path, texts: list[list[int]], tokenizer, *, kill_after: int) -> bool:
    """Write in a child that kills itself, as by kill -9, after so many events; True if it was killed."""
    child = os.fork()
    if child == 0:
        events = iter(range(kill_after))
        next(events)

        def event() -> None:
            if next(events, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            write_all_units(folder, texts, tokenizer, after_event=event)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed instead of being killed"
    return os.WIFSIGNALED(status)


@pytest.mark.processes
def test_a_killed_writer_goes_on_to_the_same_bytes(tmp_path, tiny_tokenizer, texts):
    events: list[None] = []
    write_all_units(tmp_path / "undisturbed", texts, tiny_tokenizer, after_event=lambda: events.append(None))
    expected = contents(tmp_path / "undisturbed")
    assert len([name for name in expected if name.endswith(".tar")]) > 3

    rng = np.random.default_rng(11)
    kills_in_a_row = [[int(k)] for k in rng.integers(1, len(events), size=12)] + [rng.integers(1, 8, size=6).tolist()]
    kills_in_a_row += [[len(events) - late] for late in (1, 2, 4)]
    states_seen = set()
    for number, kills in enumerate(kills_in_a_row):
        folder = tmp_path / f"killed-{number}"
        for kill_after in kills:
            assert run_and_kill(folder, texts, tiny_tokenizer, kill_after=kill_after)
            finished = len(list((folder / "units").glob("*.json")))
            states_seen.add((finished, bool(list(folder.glob("*.tmp")))))
            if not (folder / "manifest.json").exists():
                refused("unfinished", lambda folder=folder: ShardFolder(folder))
        assert not run_and_kill(folder, texts, tiny_tokenizer, kill_after=10**6)
        assert contents(folder) == expected
    assert len(states_seen) >= 4, f"the kills must fall into different phases, not only {states_seen}"


def test_other_texts_give_other_bytes(tmp_path, tiny_tokenizer, texts):
    write_all_units(tmp_path / "a", texts, tiny_tokenizer, after_event=lambda: None)
    write_all_units(tmp_path / "b", texts[1:], tiny_tokenizer, after_event=lambda: None)
    names = [name for name in contents(tmp_path / "a") if name.endswith(".tar")]
    assert all(contents(tmp_path / "a")[name] != contents(tmp_path / "b").get(name) for name in names)
