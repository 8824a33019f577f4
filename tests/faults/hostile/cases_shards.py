"""Shards and their manifests, in a folder and behind HTTP."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.faults.hostile.assets import Assets
from tests.faults.hostile.builders import (
    answer_with,
    change_json,
    deep,
    ran,
    recipe_values,
    serve,
    small_disk,
    train,
    write,
)
from tests.faults.hostile.case import Command, case, family, row
from tests.faults.hostile.verdict import done, either, refused, same_result_as

SECRET = "s3cr3tOfTheServer"


def _with_hole(path: Path, text: str) -> None:
    """Put JSON text in the place of the value "HOLE", for texts that Python's json module does not write."""
    path.write_text(path.read_text().replace('"HOLE"', text))


@family(
    "shards/manifest",
    [
        row("samples-1e999", "samples", "1e999", quick=True),
        row("samples-text", "samples", '"5"'),
        row("bytes-1e999", "bytes", "1e999"),
        row("bytes-nan", "bytes", "NaN"),
        row("bytes-negative", "bytes", "-1"),
        row("bytes-2e63", "bytes", str(2**63)),
        row("bytes-0", "bytes", "0"),
        row("name-outside", "name", '"../../etc/passwd"'),
        row("name-absolute", "name", '"/etc/passwd"'),
        row("name-an-address", "name", '"file:///etc/passwd.tar"'),
        row("name-with-newline", "name", '"a\\nb.tar"'),
        row("name-a-number", "name", "5"),
        row("name-of-dots", "name", '"..tar"'),
        row("sha256-short", "sha256", '"abc"'),
        row("sha256-of-another", "sha256", json.dumps("0" * 64)),
        row("chunks-null", "chunks", "null"),
        row("chunks-deep", "chunks", deep()),
    ],
    refused(),
    cause=25,
)
def _(folder: Path, assets: Assets, key: str, value: str) -> Command:
    """Change one value in the first shard's record; `value` is its JSON text."""
    manifest = assets.copy(assets.documents, folder / "sh") / "manifest.json"
    change_json(manifest, lambda content: content["shards"][0].update({key: "HOLE"}))
    _with_hole(manifest, value)
    return train(folder, recipe_values("sh"))


@family(
    "shards/manifest-chunk",
    [
        row("offset-1e999", "offset", "1e999"),
        row("offset-negative", "offset", "-512"),
        row("length-negative", "length", "-1"),
        row("length-beyond", "length", str(2**40)),
        row("samples-negative", "samples", "-5"),
        row("samples-0", "samples", "0"),
        row("samples-2e63", "samples", str(2**63)),
        row("members-none", "members", "{}"),
    ],
    refused("sh/manifest.json"),
    cause=25,
)
def _(folder: Path, assets: Assets, key: str, value: str) -> Command:
    manifest = assets.copy(assets.documents, folder / "sh") / "manifest.json"

    def change(content: dict[str, Any]) -> None:
        chunk = content["shards"][0]["chunks"][0]
        if key in chunk:
            chunk[key] = "HOLE"
        else:
            chunk["members"]["tok"][0 if key == "offset" else 1] = "HOLE"

    change_json(manifest, change)
    _with_hole(manifest, value)
    return train(folder, recipe_values("sh"))


@family(
    "shards/manifest-says",
    [
        row("kind-a-list", lambda content: content.update(kind=["documents"]), cause=25),
        row("kind-tuples", lambda content: content.update(kind="tuples")),
        row("columns-of-others", lambda content: content.update(columns=["tok"])),
        row("no-shards", lambda content: content.update(shards=[])),
        row("shards-an-object", lambda content: content.update(shards={})),
        row("a-shard-twice", lambda content: content["shards"].append(content["shards"][0]), quick=True),
        row("format-2", lambda content: content.update(format=2)),
        row("format-text", lambda content: content.update(format="1")),
        row("tokenizer-null", lambda content: content.update(tokenizer=None)),
        row("vocabulary-text", lambda content: content["tokenizer"].update(vocab_size="9"), cause=25),
        row("vocabulary-negative", lambda content: content["tokenizer"].update(vocab_size=-1)),
        row("vocabulary-2e70", lambda content: content["tokenizer"].update(vocab_size=2**70)),
        row("vocabulary-10", lambda content: content["tokenizer"].update(vocab_size=10)),
        row("vocabulary-60000", lambda content: content["tokenizer"].update(vocab_size=60_000)),
        row("fingerprint-a-path", lambda content: content["tokenizer"].update(fingerprint="../../x")),
        row("fingerprint-of-another", lambda content: content["tokenizer"].update(fingerprint="0" * 64)),
    ],
    refused("sh"),
)
def _(folder: Path, assets: Assets, change: Any) -> Command:
    manifest = assets.copy(assets.documents, folder / "sh") / "manifest.json"
    change_json(manifest, lambda content: change(content) and None)
    return train(folder, recipe_values("sh"))


@family(
    "shards/manifest-itself",
    [
        row("deep", deep(), expect=refused("sh/manifest.json"), cause=25),
        row("cut", '{"format": 1, "ki', expect=refused("sh/manifest.json")),
        row("a-list", "[]", expect=refused("sh/manifest.json")),
        row("empty", "", expect=refused("sh/manifest.json")),
        row("binary", b"\xff\xfe\0", expect=refused("sh/manifest.json")),
    ],
)
def _(folder: Path, assets: Assets, text: str | bytes) -> Command:
    write(assets.copy(assets.documents, folder / "sh") / "manifest.json", text)
    return train(folder, recipe_values("sh"))


@case("shards/shard-unreadable", refused("sh/shard-00000-000.tar", untouched=True), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    (shard,) = assets.copy(assets.documents, folder / "sh").glob("*.tar")
    shard.chmod(0o000)
    return train(folder, recipe_values("sh")).but(without_rights=True)


@case("shards/manifest-unreadable", refused("sh/manifest.json", untouched=True), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    (assets.copy(assets.documents, folder / "sh") / "manifest.json").chmod(0o000)
    return train(folder, recipe_values("sh")).but(without_rights=True)


@family(
    "shards/in-a-shards-place",
    [
        row("a-pipe", os.mkfifo, expect=refused("shard-00000-000.tar", "regular"), cause=25, quick=True),
        row("a-folder", Path.mkdir, expect=refused("shard-00000-000.tar", "regular")),
        row("nothing", lambda path: None, expect=refused("shard-00000-000.tar", "missing")),
        row("an-empty-file", Path.touch, expect=refused("shard-00000-000.tar", "empty")),
        row("a-link-to-passwd", lambda path: path.symlink_to("/etc/passwd"), expect=refused("shard-00000-000.tar")),
        row("a-link-to-zeros", lambda path: path.symlink_to("/dev/zero"), expect=refused("regular")),
    ],
)
def _(folder: Path, assets: Assets, make: Any) -> Command:
    (shard,) = assets.copy(assets.documents, folder / "sh").glob("*.tar")
    shard.unlink()
    make(shard)
    return train(folder, recipe_values("sh"))


@family(
    "shards/flipped-bit-in",
    [
        row("an-npy-header", 30, "size", cause=25),
        row("a-tar-name", -500, "size"),
        row("the-ids", 200, "first_read"),
    ],
    refused("shard-00000-000.tar"),
)
def _(folder: Path, assets: Assets, place: int, verify: str) -> Command:
    sh = assets.copy(assets.documents, folder / "sh")
    (shard,) = sh.glob("*.tar")
    manifest = json.loads((sh / "manifest.json").read_text())
    offset = manifest["shards"][0]["chunks"][0]["members"]["tok"][0] + place
    content = bytearray(shard.read_bytes())
    content[offset] ^= 8
    shard.write_bytes(content)
    return train(folder, recipe_values("sh", data={"verify": verify}))


@case("shards/marks-of-binary-bytes", done(), same_result_as("assets/masked/run", "run"), cause=25)
def _(folder: Path, assets: Assets) -> Command:
    cache = {"cache_dir": "cache"}
    first = train(folder, recipe_values(assets.documents, data=cache), "--train.steps=1")
    ran(first.but(outputs=("run", "cache")))
    shutil.rmtree(folder / "run")
    for mark in (folder / "cache" / "verified").iterdir():
        mark.write_bytes(b"\xff\xfe\n")
    return train(folder, recipe_values(assets.documents, data=cache)).but(outputs=("run", "cache"))


@case("shards/changed-under-its-mark-and-its-time", refused("shard-00000-000.tar", "sha256"), cause=11)
def _(folder: Path, assets: Assets) -> Command:
    values = recipe_values("sh", data={"cache_dir": "cache"})
    (shard,) = assets.copy(assets.documents, folder / "sh").glob("*.tar")
    ran(train(folder, values, "--train.steps=1").but(outputs=("run", "cache")))
    shutil.rmtree(folder / "run")
    about = shard.stat()
    shard.write_bytes(shard.read_bytes().replace(b"\0\0\0\0", b"\0\0\0\1", 1))
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    return train(folder, values).but(outputs=("run", "cache"))


@family(
    "shards/default-cache-is",
    [
        row("a-link", lambda path: path.symlink_to("/tmp"), expect=refused("link"), cause=22, quick=True),
        row("a-file", Path.touch, expect=refused("barista-"), cause=22),
        row(
            "open-to-all",
            lambda path: (path.mkdir(), path.chmod(0o777)),
            expect=refused("open to other users"),
            cause=22,
        ),
    ],
)
def _(folder: Path, assets: Assets, make: Any) -> Command:
    """The odd default cache is in a temporary folder of the case's own."""
    (folder / "t").mkdir(mode=0o700)
    make(folder / "t" / f"barista-{os.getuid()}")
    command = train(folder, recipe_values(serve(assets.documents)))
    return command.but(environment={"TMPDIR": str(folder / "t")}, outputs=("run", "t"))


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


@case("shards/http-shard-that-does-not-end", refused("shard-00000-000.tar", "too long"), cause=19, quick=True)
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


@family(
    "shards/address",
    [
        row("ftp", "ftp://127.0.0.1/x", expect=refused("begins with ftp://", untouched=True)),
        row("upper-case", "FILE:///x", expect=refused("begins with FILE://", untouched=True)),
        row("simplecache", "simplecache::file:///x", expect=refused("begins with", untouched=True)),
        row("chained", "http://127.0.0.1:9/a::file:///x", expect=refused("chains addresses", untouched=True)),
        row("without-a-protocol", "://", expect=refused("begins with", untouched=True)),
        row("protocol-alone", "http:", expect=refused("does not exist", untouched=True)),
        row("nobody-listens", "http://127.0.0.1:9/x", expect=refused("127.0.0.1:9", untouched=True)),
        row("no-such-port", "http://127.0.0.1:99999/x", expect=refused("99999", untouched=True)),
        row("a-folder-of-the-disk", "file:///etc", expect=refused("/etc", untouched=True)),
    ],
)
def _(folder: Path, assets: Assets, address: str) -> Command:
    return train(folder, recipe_values(address))


def _own(assets: Assets, part: str, code: int, body: bytes = b"", **headers: str) -> str:
    """Start a server of the documents' shards that gives this answer for paths ending in `part`."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> bool:
        return handler.path.endswith(part) and answer_with(handler, code, body, **headers)

    return serve(assets.documents, answer)


@family(
    "shards/http-answers",
    [
        row(
            "redirect-to-a-file", "manifest.json", 302, b"", {"Location": "file:///etc/passwd"}, expect=refused("file")
        ),
        row(
            "redirect-in-a-circle",
            "manifest.json",
            302,
            b"",
            {"Location": "manifest.json"},
            expect=refused("redirects"),
        ),
        row("login-page", "", 200, b"<html>log in</html>", {}, expect=refused("manifest.json")),
        row("manifest-403", "manifest.json", 403, b"", {}, expect=refused("403")),
        row("manifest-empty", "manifest.json", 200, b"", {}, expect=refused("manifest.json")),
        row("tokenizer-404", "tokenizer.json", 404, b"", {}, expect=refused("tokenizer.json")),
        row("tokenizer-a-page", "tokenizer.json", 200, b"<html>", {}, expect=refused("tokenizer")),
        row("shard-404", ".tar", 404, b"", {}, expect=refused("shard-00000-000.tar", "missing")),
        row("shard-empty", ".tar", 200, b"", {}, expect=refused("shard-00000-000.tar", "empty")),
        row("shard-short", ".tar", 200, b"x" * 99, {}, expect=refused("shard-00000-000.tar", "truncated")),
    ],
)
def _(folder: Path, assets: Assets, part: str, code: int, body: bytes, headers: dict[str, str]) -> Command:
    return train(folder, recipe_values(_own(assets, part, code, body, **headers)))


@family(
    "shards/http-manifest-of-300-mib",
    [row("plain", False), row("packed", True)],
    refused("manifest.json", "268435456 bytes"),
    cause=19,
)
def _(folder: Path, assets: Assets, packed: bool) -> Command:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> bool:
        if not handler.path.endswith("manifest.json"):
            return False
        block = gzip.compress(b" " * 2**20) if packed else b" " * 2**20
        handler.send_response(200)
        if packed:
            handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(300 * len(block)))
        handler.end_headers()
        for _ in range(300):
            handler.wfile.write(block)
        return True

    return train(folder, recipe_values(serve(assets.documents, answer)))


@case("shards/http-bad-tokenizer-then-fixed", done(), same_result_as("assets/masked/run", "run"), cause=18, quick=True)
def _(folder: Path, assets: Assets) -> Command:
    sh = assets.copy(assets.documents, folder / "sh")
    config = sh / "tokenizer" / "tokenizer_config.json"
    good = config.read_bytes()
    write(config, json.dumps({"auto_map": {"AutoTokenizer": ["x.X", "x.X"]}, "tokenizer_class": "X"}))
    command = train(folder, recipe_values(serve(sh), data={"cache_dir": "cache"})).but(outputs=("run", "cache"))
    ended = ran(command, code=2)
    assert "not the one that its manifest names" in ended.err
    write(config, good)
    return command


@case("shards/http-cached-shard-changed", done(), same_result_as("assets/masked/run", "run"), cause=11)
def _(folder: Path, assets: Assets) -> Command:
    values = recipe_values(serve(assets.documents), data={"cache_dir": "cache"})
    ran(train(folder, values, "--train.steps=1").but(outputs=("run", "cache")))
    shutil.rmtree(folder / "run")
    (shard,) = (folder / "cache" / "shards").glob("*.tar")
    shard.write_bytes(shard.read_bytes().replace(b"\0\0\0\0", b"\0\0\0\1", 1))
    return train(folder, values).but(outputs=("run", "cache"))


@case("shards/http-token-in-the-address", done(), secrets=(SECRET,), cause=15)
def _(folder: Path, assets: Assets) -> Command:
    return train(folder, recipe_values(f"{serve(assets.documents)}/?token={SECRET}"))


@case("shards/http-password-and-every-answer-403", refused("403"), secrets=(SECRET,), cause=15)
def _(folder: Path, assets: Assets) -> Command:
    address = serve(assets.documents, lambda handler: answer_with(handler, 403))
    return train(folder, recipe_values(address.replace("http://", f"http://user:{SECRET}@")))
