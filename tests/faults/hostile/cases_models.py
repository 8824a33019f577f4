"""Damaged or forged model folders, given to every command that reads one."""

from __future__ import annotations

import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import (
    change_json,
    change_tensors,
    deep,
    evaluate,
    export,
    mine,
    ran,
    recipe_values,
    safetensors_header,
    small_disk,
    soup,
    train,
    wait_for,
    write,
)
from tests.faults.hostile.case import Command, Row, case, family, row
from tests.faults.hostile.verdict import Check, absent, done, either, gave_up, kept, misused, refused

WEIGHTS = "model.safetensors"
Damage = Callable[[Path], object]


def command_on(which: str, folder: Path, assets: Assets) -> Command:
    """The command named `which`, reading the model in the folder `model`."""
    if which == "finetune":
        values = recipe_values(assets.tuples, "contrastive", train={"steps": 2})
        values["model"] |= {"config": {}, "source": "model"}
        return train(folder, values)
    if which == "evaluate":
        return evaluate("model", "--sts", str(assets.sts_file), "--beir", str(assets.beir))
    if which == "mine":
        return mine("model", str(assets.tuples_file))
    assert which == "export", which
    return export("model")


ALL = ("finetune", "evaluate", "export", "mine")


def for_each_command(name: str, damage: Damage, *, commands: tuple[str, ...] = ALL, **fields: Any) -> Iterator[Row]:
    """One row per command; only the first command is in the short form."""
    for which in commands:
        quick = fields.get("quick", False) and which == commands[0]
        yield row(f"{name}-{which}", which, damage, **{**fields, "quick": quick})


def without_a_layer(model: Path) -> None:
    change_tensors(
        model / WEIGHTS, lambda tensors: {name: each for name, each in tensors.items() if ".layer.1." not in f".{name}"}
    )


def renamed(model: Path) -> None:
    change_tensors(model / WEIGHTS, lambda tensors: {f"other.{name}": each for name, each in tensors.items()})


def with_nan(model: Path) -> None:
    def change(tensors: dict) -> None:
        next(each for name, each in tensors.items() if "word_embeddings" in name).fill_(float("nan"))

    change_tensors(model / WEIGHTS, change)


def cut(model: Path) -> None:
    weights = model / WEIGHTS
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def set_config(**changes: object) -> Damage:
    return lambda model: change_json(model / "config.json", lambda config: config.update(changes))


def set_settings(**changes: object) -> Damage:
    return lambda model: change_json(model / "barista.json", lambda settings: settings.update(changes))


def scaled(tensor: str, change: Callable[[Any], Any]) -> Damage:
    """Damage that changes one tensor of the weights, found by a part of its name."""

    def damage(model: Path) -> None:
        def change_one(tensors: dict) -> None:
            name = next(name for name in sorted(tensors) if tensor in name)
            tensors[name] = change(tensors[name])

        change_tensors(model / WEIGHTS, change_one)

    return damage


def without(tensor: str) -> Damage:
    """Damage that removes the tensors with `tensor` in their name."""

    def damage(model: Path) -> None:
        change_tensors(model / WEIGHTS, lambda tensors: {n: each for n, each in tensors.items() if tensor not in n})

    return damage


def with_more(model: Path) -> None:
    """Add a layer to the weights that the configuration does not have."""

    def change(tensors: dict) -> None:
        for name in [name for name in tensors if "layer.1." in name]:
            tensors[name.replace("layer.1.", "layer.2.")] = tensors[name].clone()

    change_tensors(model / WEIGHTS, change)


class Touch:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def bomb(name: str, *, zipped: bool = False) -> Damage:
    """Damage that puts code in place of weights; if it runs, it makes the file `ran` beside the model."""

    def damage(model: Path) -> None:
        import torch

        (model / WEIGHTS).unlink()
        what = {"weight": Touch(model.parent / "ran")}
        if zipped:
            torch.save(what, model / name)
        else:
            (model / name).write_bytes(pickle.dumps(what))

    return damage


def as_bin(model: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(model / WEIGHTS), model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()


def in_half(model: Path) -> None:
    change_tensors(model / WEIGHTS, lambda tensors: {name: each.half() for name, each in tensors.items()})


def sharded(content: str) -> Damage:
    def damage(model: Path) -> None:
        (model / WEIGHTS).unlink()
        write(model / f"{WEIGHTS}.index.json", content)

    return damage


def link(name: str, to: str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).unlink()
        (model / name).symlink_to(to)

    return damage


def folder_named(name: str) -> Damage:
    def damage(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).mkdir()

    return damage


def put(name: str, content: str | bytes) -> Damage:
    return lambda model: write(model / name, content)


def cut_file(name: str) -> Damage:
    def damage(model: Path) -> None:
        whole = (model / name).read_bytes()
        (model / name).write_bytes(whole[: len(whole) // 2])

    return damage


def no_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def other_tokenizer(change: Callable[[dict[str, int]], dict[str, int]]) -> Damage:
    """Damage that changes the tokenizer's vocabulary."""
    return lambda model: change_json(
        model / "tokenizer.json", lambda value: value["model"].update(vocab=change(value["model"]["vocab"]))
    )


def shuffled(vocabulary: dict[str, int]) -> dict[str, int]:
    """A vocabulary of the same size, with other ids for words."""
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    return {word: index for index, word in enumerate([*words[:5], *reversed(words[5:])])}


def larger(vocabulary: dict[str, int]) -> dict[str, int]:
    return {**vocabulary, "zyzzyva": len(vocabulary), "zyzzyvas": len(vocabulary) + 1}


def smaller(vocabulary: dict[str, int]) -> dict[str, int]:
    return {word: index for word, index in vocabulary.items() if index < len(vocabulary) - 9}


REFUSED: Check = refused("model")
THREE = ("finetune", "evaluate", "export")
READERS = ("evaluate", "export", "mine")  # commands that read barista.json and the tokenizer beside it
DEEP = deep()


@family(
    "models",
    [
        *for_each_command("good", lambda model: None, expect=done()),
        *for_each_command("good-bin", as_bin, expect=done()),
        *for_each_command("good-half-precision", in_half, expect=done(), commands=THREE),
        *for_each_command("without-a-layer", without_a_layer, cause=2, quick=True),
        *for_each_command("without-a-bias", without("layer.0.attention.self.query.bias"), cause=2, commands=THREE),
        *for_each_command("without-words", without("word_embeddings"), cause=2, commands=THREE),
        *for_each_command("nothing-fits", renamed, cause=2),
        *for_each_command("a-layer-more", with_more, cause=2),
        *for_each_command("a-layer-less-in-the-config", set_config(num_hidden_layers=1), cause=2, commands=THREE),
        *for_each_command("layers-that-are-not-there", set_config(num_hidden_layers=4), cause=2, commands=THREE),
        *for_each_command("another-width", scaled("word_embeddings", lambda t: t.repeat(1, 2)), cause=25),
        *for_each_command("another-rank", scaled("query.bias", lambda t: t[None]), cause=25, commands=THREE),
        *for_each_command("weights-nan", with_nan, cause=8, commands=("evaluate", "export", "mine"), quick=True),
        row("weights-nan-finetune", "finetune", with_nan, cause=8, expect=either(refused("model"), gave_up())),
        *for_each_command("weights-inf", scaled("layer.1.output.dense.bias", lambda t: t / 0), cause=8),
        *for_each_command("weights-cut", cut, cause=25),
        *for_each_command("weights-empty", put(WEIGHTS, b""), cause=25),
        *for_each_command("weights-a-folder", folder_named(WEIGHTS), commands=THREE),
        *for_each_command("weights-a-dangling-link", link(WEIGHTS, "nowhere"), commands=THREE),
        *for_each_command(
            "weights-header-too-long", lambda model: write(model / WEIGHTS, safetensors_header(2**62)), cause=25
        ),
        *for_each_command("shards-not-there", sharded('{"metadata": {}, "weight_map": {"a": "b.safetensors"}}')),
        *for_each_command("shards-deep", sharded(DEEP), commands=THREE),
        *for_each_command("shards-no-json", sharded("{"), commands=THREE),
        *for_each_command("shards-a-list", sharded("[]"), commands=THREE),
        *for_each_command("an-adapter", put("adapter_config.json", '{"base_model_name_or_path": "/etc"}')),
        *for_each_command("config-cut", cut_file("config.json")),
        *for_each_command("config-deep", put("config.json", DEEP), cause=25, quick=True),
        *for_each_command("config-latin-1", put("config.json", b'{"model_type": "caf\xe9"}'), commands=THREE),
        *for_each_command("config-a-list", put("config.json", "[]"), commands=THREE),
        *for_each_command("config-a-folder", folder_named("config.json"), commands=THREE),
        *for_each_command("config-missing", lambda model: (model / "config.json").unlink(), commands=THREE),
        *for_each_command("no-attention-heads", set_config(num_attention_heads=0), cause=25),
        *for_each_command("three-heads", set_config(num_attention_heads=3), cause=25, commands=THREE),
        *for_each_command("no-width", set_config(hidden_size=0), cause=25, commands=THREE),
        *for_each_command("width-a-text", set_config(hidden_size="32"), cause=25, commands=THREE),
        *for_each_command("width-true", set_config(hidden_size=True), commands=THREE),
        *for_each_command("width-huge", set_config(hidden_size=10**9), commands=THREE),
        *for_each_command("width-plausible", set_config(hidden_size=65536, num_hidden_layers=900), commands=THREE),
        *for_each_command("layers-minus-one", set_config(num_hidden_layers=-1), commands=THREE),
        *for_each_command("a-million-layers", set_config(num_hidden_layers=10**6), cause=25, quick=True),
        *for_each_command("activation-unknown", set_config(hidden_act="gelo"), cause=25, commands=THREE),
        *for_each_command("vocabulary-too-small", set_config(vocab_size=10), cause=25, commands=THREE),
        *for_each_command("dropout-five", set_config(hidden_dropout_prob=5.0), commands=("finetune", "export")),
        *for_each_command("dtype-unknown", set_config(dtype="float99"), cause=25, commands=THREE),
        *for_each_command("quantised-by-nobody", set_config(quantization_config={"quant_method": "x"}), commands=THREE),
        *for_each_command("type-missing", set_config(model_type=None), cause=25, commands=THREE),
        *for_each_command("gpt2", set_config(model_type="gpt2"), cause=2),
        *for_each_command("bart", set_config(model_type="bart"), cause=2, commands=THREE),
        *for_each_command("vit", set_config(model_type="vit"), cause=2, commands=THREE),
        *for_each_command("bert-as-a-decoder", set_config(is_decoder=True), cause=2, commands=THREE),
        *for_each_command(
            "auto-map-unknown", set_config(model_type="evil", auto_map={"AutoConfig": "evil.Config"}), cause=17
        ),
        *for_each_command("ladder-of-letters", set_settings(ladder=["a", "b"]), cause=25, commands=READERS),
        *for_each_command("ladder-of-triples", set_settings(ladder=[[1, 16, 2]]), cause=25, commands=READERS),
        *for_each_command(
            "ladder-outgrows", set_settings(ladder=[[1, 16], [9, 512]]), expect=refused("9x512"), commands=READERS
        ),
        *for_each_command("ladder-huge", set_settings(ladder=[[1, 16], [2, 10**400]]), commands=READERS),
        *for_each_command("ladder-empty", set_settings(ladder=[]), commands=READERS),
        *for_each_command("ladder-missing", put("barista.json", "{}"), commands=READERS),
        *for_each_command("length-zero", set_settings(query_max_length=0), cause=25, commands=READERS),
        *for_each_command("length-minus-five", set_settings(passage_max_length=-5), cause=25, commands=READERS),
        *for_each_command("length-a-text", set_settings(query_max_length="64"), cause=25, commands=READERS),
        *for_each_command("length-without-room", set_settings(query_max_length=2), commands=READERS),
        *for_each_command("length-huge", set_settings(query_max_length=10**30), commands=READERS),
        *for_each_command("prompt-a-number", set_settings(query_prompt=3), cause=25, commands=READERS),
        *for_each_command("pooling-max", set_settings(pooling="max"), commands=READERS),
        *for_each_command("similarity-unknown", set_settings(similarity="euclid"), commands=READERS),
        *for_each_command("temperature-zero", set_settings(temperature=0), commands=READERS),
        *for_each_command(
            "settings-of-a-later-version", set_settings(format=99), cause=25, commands=READERS, quick=True
        ),
        *for_each_command("settings-a-list", put("barista.json", "[]"), commands=READERS),
        *for_each_command("settings-deep", put("barista.json", DEEP), cause=25, commands=READERS),
        *for_each_command("settings-latin-1", put("barista.json", b"\xff"), cause=25, commands=READERS),
        *for_each_command("settings-a-folder", folder_named("barista.json"), commands=READERS),
        *for_each_command("settings-a-dangling-link", link("barista.json", "nowhere"), commands=READERS),
        *for_each_command("settings-with-a-key-more", set_settings(colour="blue"), expect=done(), commands=READERS),
        *for_each_command("settings-of-before", set_settings(tokenizer=None), expect=done(), commands=READERS),
        *for_each_command("tokenizer-of-another", set_settings(tokenizer="0" * 64), cause=10, commands=ALL),
        *for_each_command("tokenizer-shuffled", other_tokenizer(shuffled), cause=10, commands=ALL, quick=True),
        *for_each_command("tokenizer-smaller", other_tokenizer(smaller), cause=10, commands=ALL),
        *for_each_command("tokenizer-larger", other_tokenizer(larger), cause=10, commands=ALL),
        *for_each_command("tokenizer-cut", cut_file("tokenizer.json"), commands=ALL),
        *for_each_command("tokenizer-missing", no_tokenizer, commands=READERS),
        *for_each_command("tokenizer-missing", no_tokenizer, expect=done(), commands=("finetune",)),
    ],
    REFUSED,
)
def _(folder: Path, assets: Assets, which: str, damage: Damage) -> Command:
    damage(assets.copy(assets.model, folder / "model"))
    return command_on(which, folder, assets)


@family(
    "models/larger-tokenizer-of-before",
    [*for_each_command("on", lambda model: None, commands=READERS)],
    refused("tokenizer"),
    cause=10,
)
def _(folder: Path, assets: Assets, which: str, damage: Damage) -> Command:
    """Without a fingerprint, only its size shows that a tokenizer is a wrong one."""
    model = assets.copy(assets.model, folder / "model")
    set_settings(tokenizer=None)(model)
    other_tokenizer(larger)(model)
    return command_on(which, folder, assets)


@family(
    "models/bomb",
    [
        *for_each_command("as-safetensors", bomb(WEIGHTS)),
        *for_each_command("as-bin", bomb("pytorch_model.bin"), quick=True),
        *for_each_command("zipped-bin", bomb("pytorch_model.bin", zipped=True)),
    ],
    refused("model"),
    absent("ran"),
    cause=25,
)
def _(folder: Path, assets: Assets, which: str, damage: Damage) -> Command:
    damage(assets.copy(assets.model, folder / "model"))
    return command_on(which, folder, assets)


@family(
    "models/code-beside-a-known-family",
    [*for_each_command("y-on-stdin", lambda model: None, commands=THREE)],
    done(),
    absent("ran"),
    cause=17,
)
def _(folder: Path, assets: Assets, which: str, damage: Damage) -> Command:
    model = assets.copy(assets.model, folder / "model")
    write(model / "evil.py", f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\n")
    set_config(auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})(model)
    return command_on(which, folder, assets).but(stdin=b"y\n" * 100)


@family(
    "models/code-from-the-folder",
    [*for_each_command("y-on-stdin", lambda model: None, commands=("finetune", "evaluate", "export"), quick=True)],
    refused("model"),
    absent("ran"),
    cause=17,
)
def _(folder: Path, assets: Assets, which: str, damage: Damage) -> Command:
    model = assets.copy(assets.model, folder / "model")
    write(model / "evil.py", f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\n")
    change_json(
        model / "config.json",
        lambda config: config.update(
            model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
        ),
    )
    return command_on(which, folder, assets).but(stdin=b"y\n" * 100)


@case("models/soup", done())
def _(folder: Path, assets: Assets) -> Command:
    assets.copy(assets.model, folder / "a")
    assets.copy(assets.model, folder / "b")
    return soup("a", "b")


@family(
    "models/soup-weights",
    [row(name, weights) for name, weights in (("nan", ("nan", "1")), ("inf", ("inf", "1")), ("minus", ("1", "-1")))],
    refused("--weights", untouched=True),
    cause=8,
)
def _(folder: Path, assets: Assets, weights: tuple[str, ...]) -> Command:
    assets.copy(assets.model, folder / "a")
    assets.copy(assets.model, folder / "b")
    return soup("a", "b", weights=weights)


@case("models/export-over-an-export-with-a-note", refused("export", "note.txt"), cause=24, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    command = export(assets.model)
    ran(command)
    write(folder / "export" / "1x16" / "note.txt", "mine")
    return command


@case("models/export-into-a-read-only-folder", refused("shut/export"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    (folder / "shut").mkdir(mode=0o500)
    return export(assets.model, output="shut/export").but(without_rights=True)


@family(
    "models/soup-of",
    [
        row("weights-cut", cut, cause=25),
        row("nan", with_nan, cause=8),
        row("inf", scaled("dense.bias", lambda tensor: tensor / 0), cause=8),
        row("another-number-of-heads", set_config(num_attention_heads=2)),
        row("another-activation", set_config(hidden_act="relu")),
        row("another-architecture", set_config(model_type="roberta")),
        row("another-tokenizer", other_tokenizer(shuffled)),
        row("another-ladder", set_settings(ladder=[[2, 32]])),
        row("fewer-tensors", without_a_layer),
        row("other-shapes", scaled("word_embeddings", lambda tensor: tensor[:-1])),
        row("config-deep", put("config.json", DEEP), cause=25),
        row("config-a-list", put("config.json", "[]")),
        row("no-weights", lambda model: (model / WEIGHTS).unlink()),
        row("weights-a-pickle", bomb(WEIGHTS)),
    ],
    refused("b", untouched=True),
    absent("ran"),
)
def _(folder: Path, assets: Assets, damage: Damage) -> Command:
    assets.copy(assets.model, folder / "a")
    damage(assets.copy(assets.model, folder / "b"))
    return soup("a", "b")


@family(
    "models/soup-of-one",
    [row("named-twice", "a"), row("and-its-link", "link"), row("by-another-path", "../work/a"), row("alone", "")],
    refused("a", untouched=True),
)
def _(folder: Path, assets: Assets, other: str) -> Command:
    assets.copy(assets.model, folder / "a")
    (folder / "link").symlink_to("a")
    return soup(*filter(None, ("a", other)))


@case("models/soup-beside-a-link", done(), absent("soup/secret.json"), absent("soup/notes"))
def _(folder: Path, assets: Assets) -> Command:
    """Other files in the first model's folder are not copied."""
    assets.copy(assets.model, folder / "a")
    assets.copy(assets.model, folder / "b")
    (folder / "a" / "secret.json").symlink_to("/etc/passwd")
    write(folder / "a" / "notes" / "mine.txt", "mine")
    return soup("a", "b")


def export_twice(assets: Assets, folder: Path) -> Command:
    command = export(assets.model)
    ran(command)
    return command


def manifest(change: Callable[[Any], Any]) -> Damage:
    return lambda folder: change_json(folder / "export" / "export.json", change)


@family(
    "models/export-over",
    [
        row("an-export", lambda folder: None, expect=done()),
        row("a-changed-card", lambda folder: write(folder / "export" / "1x16" / "README.md", "mine")),
        row("a-link-inside", lambda folder: (folder / "export" / "1x16" / "mine").symlink_to("/etc")),
        row("a-folder-inside", lambda folder: write(folder / "export" / "2x32" / "notes" / "a.txt", "mine")),
        row("a-manifest-of-before", manifest(lambda value: value.pop("files") and None)),
        row("a-manifest-of-later", manifest(lambda value: value.update(format=2))),
        row("a-manifest-that-is-deep", lambda folder: write(folder / "export" / "export.json", DEEP)),
        row("a-manifest-that-is-cut", lambda folder: write(folder / "export" / "export.json", "{")),
        row("no-manifest", lambda folder: (folder / "export" / "export.json").unlink()),
    ],
    refused("export"),
    cause=24,
)
def _(folder: Path, assets: Assets, damage: Damage) -> Command:
    command = export_twice(assets, folder)
    damage(folder)
    return command


@family(
    "models/export-to",
    [
        row("a-link", lambda folder: ((folder / "there").mkdir(), (folder / "export").symlink_to("there"))),
        row("a-dangling-link", lambda folder: (folder / "export").symlink_to("nowhere")),
        row("a-file", lambda folder: write(folder / "export", "mine")),
        row("a-foreign-folder", lambda folder: write(folder / "export" / "thesis", "mine")),
        row(
            "where-a-killed-one-left",
            lambda folder: write(folder / ".export.abcd1234.partial" / "x", "half"),
            expect=(done(), absent(".export.abcd1234.partial")),
        ),
        row(
            "where-another-s-hidden-file-lies",
            lambda folder: write(folder / ".export.abcd1234.partial.txt", "mine"),
            expect=(done(), kept(".export.abcd1234.partial.txt")),
            may_leave=(".export.abcd1234.partial.txt",),
        ),
    ],
    refused("export", untouched=True),
    cause=24,
)
def _(folder: Path, assets: Assets, damage: Damage) -> Command:
    damage(folder)
    return export(assets.model).but(outputs=("export", ".export.abcd1234.partial"))


@family(
    "models/export-options",
    [
        row("sizes-traversal", ("--sizes", "../../x")),
        row("sizes-none", ("--sizes", "0x0")),
        row("sizes-huge", ("--sizes", "1x" + "9" * 400)),
        row("sizes-superscript", ("--sizes", "²x16")),
        row("watts-nan", ("--watts-per-rank", "nan")),
        row("watts-inf", ("--watts-per-rank", "inf")),
        row("watts-minus", ("--watts-per-rank", "-1")),
        row("watts-of-no-run", ("--watts-per-rank", "60", "--model", "elsewhere/model")),
        row("table-of-an-encoder", ("--table", "int8")),
        row("results-nowhere", ("--results", "nowhere.json")),
    ],
    misused(),
)
def _(folder: Path, assets: Assets, words: tuple[str, ...]) -> Command:
    assets.copy(assets.model, folder / "elsewhere" / "model")
    return export(assets.model, *words)


@family(
    "models/export-results",
    [
        row("without-keys", '{"format": 1, "records": [{"method": "trained"}]}'),
        row("records-a-number", '{"format": 1, "records": 3}'),
        row(
            "a-value-a-text",
            '{"format": 1, "records": [{"method": "trained", "task": "t", "layers": 1, "dim": 16, '
            '"metric": "spearman", "value": "high"}]}',
        ),
        row("of-a-later-version", '{"format": 2, "records": []}'),
        row("a-list", "[]"),
        row("deep", DEEP),
        row("latin-1", b"\xff"),
        row("empty", ""),
    ],
    refused("results.json", untouched=True),
    cause=25,
)
def _(folder: Path, assets: Assets, content: str | bytes) -> Command:
    write(folder / "results.json", content)
    return export(assets.model, "--results", "results.json")


@family(
    "models/export-of-a-run-with",
    [
        row("metrics-damaged-inside", "metrics.jsonl", b'{"step": 1\n{"step": 2, "seconds": 1.0}\n'),
        row("metrics-deep", "metrics.jsonl", DEEP.encode() + b"\n"),
        row("metrics-steps-of-letters", "metrics.jsonl", b'{"step": "x", "seconds": 1.0}\n'),
        row("metrics-latin-1", "metrics.jsonl", b"\xff\n"),
        row("metrics-a-list", "metrics.jsonl", b"[]\n"),
        row("metrics-of-a-later-version", "metrics.jsonl", b'{"format": 2, "step": 8}\n'),
        row("environment-deep", "environment.json", DEEP.encode()),
        row("environment-a-list", "environment.json", b"[]"),
        row("environment-versions-a-list", "environment.json", b'{"versions": ["torch"]}'),
        row("environment-of-no-ranks", "environment.json", b'{"world_size": 0}'),
        row("recipe-cut", "recipe.toml", b"[run"),
        row("recipe-latin-1", "recipe.toml", b"# caf\xe9"),
        row("recipe-of-a-later-version", "recipe.toml", b"[new]\nkey = 1\n"),
    ],
    refused(untouched=True),
    cause=25,
)
def _(folder: Path, assets: Assets, name: str, content: bytes) -> Command:
    run = assets.copy(assets.finetuned_run, folder / "run")
    write(run / name, content)
    return export("run/model")


@case("models/export-on-a-full-disk", refused("disk/export"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    small_disk(folder / "disk", 64)
    return export(assets.model, output="disk/export")


@case("models/soup-on-a-full-disk", refused("disk/soup"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    small_disk(folder / "disk", 64)
    assets.copy(assets.model, folder / "a")
    assets.copy(assets.model, folder / "b")
    return soup("a", "b", output="disk/soup")


@family(
    "models/table",
    [
        row("good", (), lambda model: None, expect=done()),
        row("sif-nan", ("--sif", "nan"), lambda model: None),
        row("sif-minus", ("--sif", "-1"), lambda model: None),
        row("width-too-large", ("--dim", "64"), lambda model: None),
        row("width-minus", ("--dim", "-1"), lambda model: None),
        row("weights-nan", (), with_nan, cause=8),
        row("nothing-fits", (), renamed, cause=2),
        row("tokenizer-shuffled", (), other_tokenizer(shuffled), cause=10),
    ],
    misused(),
)
def _(folder: Path, assets: Assets, words: tuple[str, ...], damage: Damage) -> Command:
    damage(assets.copy(assets.model, folder / "model"))
    return Command("trainer.static_init", ("--model", "model", "--output", "start", *words), outputs=("start",))


@family(
    "models/mine-options",
    [
        row("negatives-huge", ("--num-negatives", "1" + "0" * 30)),
        row("negatives-superscript", ("--num-negatives", "²")),
        row("margin-nan", ("--absolute-margin", "nan")),
        row("relative-margin-one", ("--relative-margin", "1")),
        row("score-inf", ("--max-score", "inf")),
        row("range-minus", ("--range-min", "-1")),
        row("batch-zero", ("--batch-tokens", "0")),
        row("seed-minus", ("--sampling", "random", "--seed", "-1")),
        row("limit-zero", ("--limit", "0")),
        row("stop-nan", ("--stop-after-minutes", "nan")),
        row("size-unknown", ("--size", "grande")),
        row("rerank-smaller", ("--size", "2x32", "--rerank", "1x16")),
        row("corpus-nowhere", ("--corpus", "nowhere.jsonl")),
        row("seed-of-nothing", ("--seed", "3")),
        row("split-of-files", ("--split", "test")),
        row("columns-of-objects", ("--columns", "query,positive")),
    ],
    misused(),
)
def _(folder: Path, assets: Assets, words: tuple[str, ...]) -> Command:
    return mine(assets.model, str(assets.tuples_file), *words)


@family(
    "models/mine-after-a-kill",
    [
        row("good", lambda work: None, expect=done()),
        row("counter-of-letters", lambda work: write(work / "encoded", "x")),
        row("counter-minus", lambda work: write(work / "encoded", "-5")),
        row("counter-superscript", lambda work: write(work / "encoded", "²")),
        row("counter-huge", lambda work: write(work / "encoded", "1000000")),
        row("counter-latin-1", lambda work: write(work / "encoded", b"\xff")),
        row("vectors-gone", lambda work: next(work.glob("passages_*.f32")).unlink()),
        row("vectors-cut", lambda work: write(next(work.glob("passages_*.f32")), b"abc")),
        row("record-deep", lambda work: write(work.parent / "mining.json", DEEP)),
        row("record-a-list", lambda work: write(work.parent / "mining.json", "[]")),
        row("record-of-others", lambda work: write(work.parent / "mining.json", "{}")),
    ],
    refused("mined"),
    cause=25,
    seconds=90.0,
)
def _(folder: Path, assets: Assets, damage: Damage) -> Command:
    command = mine(assets.model, str(assets.tuples_file), "--passages-per-block", "2")
    work = folder / "mined" / "work"

    def kill(process: int) -> None:
        wait_for((work / "encoded").is_file)
        os.kill(process, signal.SIGKILL)

    ran(command.but(meanwhile=kill), code=-signal.SIGKILL)
    damage(work)
    return command


@family(
    "models/mine-finished",
    [
        row("report-empty", "{}"),
        row("report-deep", DEEP),
        row("report-of-letters", '{"tuples": "x"}'),
    ],
    refused("mined", "report.json"),
)
def _(folder: Path, assets: Assets, content: str) -> Command:
    command = mine(assets.model, str(assets.tuples_file))
    ran(command)
    write(folder / "mined" / "report.json", content)
    return command


@family(
    "models/mine-to",
    [
        row("below-a-file", lambda folder: write(folder / "mined", "mine")),
        row("a-foreign-folder", lambda folder: write(folder / "mined" / "thesis", "mine")),
        row("a-dangling-link", lambda folder: (folder / "mined").symlink_to("nowhere")),
    ],
    refused("mined"),
)
def _(folder: Path, assets: Assets, damage: Damage) -> Command:
    damage(folder)
    return mine(assets.model, str(assets.tuples_file))


@case("models/export-after-a-kill-in-the-metrics", done(), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    run = assets.copy(assets.finetuned_run, folder / "run")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 3})[:-3])
    return export("run/model")
