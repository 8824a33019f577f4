"""Shards and their manifests, in a folder and behind HTTP."""

from __future__ import annotations

import http.server
import json
from pathlib import Path

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import (
    answer_with,
    change_json,
    deep,
    recipe_values,
    serve,
    small_disk,
    train,
    write,
)
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.verdict import done, either, refused, same_result_as

SECRET = "s3cr3tOfTheServer"


@family(
    "shards/manifest",
    [
        row("samples-1e999", "samples", "1e999", quick=True),
        row("bytes-nan", "bytes", "NaN"),
        row("bytes-negative", "bytes", "-1"),
        row("name-outside", "name", '"../../etc/passwd"'),
        row("name-with-newline", "name", '"a\\nb.tar"'),
        row("sha256-of-another", "sha256", json.dumps("0" * 64)),
    ],
    refused(),
    cause=25,
)
def _(folder: Path, assets: Assets, key: str, value: str) -> Command:
    """The first shard's record, with a value as its JSON text."""
    manifest = assets.copy(assets.documents, folder / "sh") / "manifest.json"
    change_json(manifest, lambda content: content["shards"][0].update({key: "HOLE"}))
    manifest.write_text(manifest.read_text().replace('"HOLE"', value))
    return train(folder, recipe_values("sh"))


@family(
    "shards/manifest-itself",
    [
        row("deep", deep(), expect=refused("sh/manifest.json"), cause=25),
        row("cut", '{"format": 1, "ki', expect=refused("sh/manifest.json")),
        row("a-list", "[]", expect=refused("sh/manifest.json")),
    ],
)
def _(folder: Path, assets: Assets, text: str) -> Command:
    write(assets.copy(assets.documents, folder / "sh") / "manifest.json", text)
    return train(folder, recipe_values("sh"))


@case("shards/shard-unreadable", refused("sh/shard-00000-000.tar", untouched=True), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    (shard,) = assets.copy(assets.documents, folder / "sh").glob("*.tar")
    shard.chmod(0o000)
    return train(folder, recipe_values("sh")).but(without_rights=True)


@case("shards/cache-disk-full", either(refused("cache"), done()))
def _(folder: Path, assets: Assets) -> Command:
    write(small_disk(folder / "m", 8).path / "fill", b"")
    (folder / "m" / "fill").write_bytes(b"x" * 4000)
    return train(folder, recipe_values(assets.documents, data={"cache_dir": "m/cache"})).but(outputs=("run", "m"))


@case("shards/http-good", done(), same_result_as("assets/masked/run", "run"))
def _(folder: Path, assets: Assets) -> Command:
    return train(folder, recipe_values(serve(assets.documents)))


@case("shards/http-every-answer-500", refused("500", untouched=True))
def _(folder: Path, assets: Assets) -> Command:
    address = serve(assets.documents, lambda handler: answer_with(handler, 500))
    return train(folder, recipe_values(address))


@case("shards/http-shard-that-does-not-end", refused("shard-00000-000.tar", "too long"), cause=19)
def _(folder: Path, assets: Assets) -> Command:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> bool:
        return handler.path.endswith(".tar") and answer_with(handler, 200, bytes(20_000_000))

    return train(folder, recipe_values(serve(assets.documents, answer)))


@case("shards/http-password-in-the-address", done(), secrets=(SECRET,), cause=15, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    address = serve(assets.documents).replace("http://", f"http://user:{SECRET}@")
    return train(folder, recipe_values(address))


@case("shards/http-token-of-a-folder-that-is-not-there", refused("manifest.json"), secrets=(SECRET,), cause=15)
def _(folder: Path, assets: Assets) -> Command:
    return train(folder, recipe_values(f"{serve(assets.documents)}/nowhere?token={SECRET}"))
