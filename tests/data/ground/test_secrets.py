"""Nothing that an address keeps for its owner may be printed or written."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.ground.errors import DataError
from data.ground.secrets import with_variables, without_secrets, without_variables


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:s3cr3t@host:80/a/b", "http://***@host:80/a/b"),
        ("https://s3cr3t@host/a", "https://***@host/a"),
        ("s3://KEY:s3cr3t@bucket/shards", "s3://***@bucket/shards"),
        ("https://u:a@s3cr3t@host/", "https://***@host/"),
        ("https://host/a?token=s3cr3t", "https://host/a?token=***"),
        ("https://host/?token=s3cr3t/manifest.json", "https://host/?token=***"),
        ("https://host/a?s3cr3t", "https://host/a?***"),
        ("https://host/a?x=s3cr3t&y=s3cr3t=#s3cr3t", "https://host/a?x=***&y=***#***"),
        ("https://host/a#access_token=s3cr3t&b", "https://host/a#access_token=***&***"),
        ("https://u:s3cr3t/s3cr3t@host/a", "https://***@host/a"),
        ("https://u:s3#cr3t@host/a", "https://***@host/a"),
        ("https://u:s3cr3t/a", "https://u:***/a"),
        ("simplecache::https://u:s3cr3t@host/a", "simplecache::https://***@host/a"),
        ("HTTPS://u:s3cr3t@HOST", "HTTPS://***@HOST"),
        ("https://u:s3cr3t@[::1]:80/a", "https://***@[::1]:80/a"),
        ("(url='http://u:s3cr3t@h/a?k=s3cr3t'); try", "(url='http://***@h/a?k=***'); try"),
        ('{"a":"http://u:s3cr3t@h?k=s3cr3t","b":1}', '{"a":"http://***@h?k=***","b":1}'),
        ("from http://h/?k=s3cr3t, http://u:s3cr3t@h.", "from http://h/?k=***, http://***@h."),
        ("https://u:it's3cr3t@h/a", "https://***@h/a"),
        (f"{Path('https://u:s3cr3t@h/a')} is no folder", "https:/***@h/a is no folder"),
        (f"{Path('https://h/a.tar?t=s3cr3t')}", "https:/h/a.tar?t=***"),
        ("GET /a?X-Amz-Signature=s3cr3t&b=1 failed", "GET /a?X-Amz-Signature=***&b=1 failed"),
    ],
)
def test_secrets_of_addresses_are_hidden(text, shown):
    assert without_secrets(text) == shown
    assert "cr3t" not in shown
    assert without_secrets(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s3://bucket/shards",
        "http://host:8000/a/@scope/b",
        "http://[::1]:8000/a",
        "file:///data/a?b",
        "memory://shards/docs",
        "git@host:a/b",
        "2 samples, tokens=4; what? key=1",
        "./a/b::c",
        "host:/a@b/c",
    ],
)
def test_what_holds_no_secret_is_left(text):
    assert without_secrets(text) == text.replace("?b", "?***")


def test_other_objects_are_shown_as_text(tmp_path):
    assert without_secrets(tmp_path) == str(tmp_path)
    assert without_secrets(ValueError("at http://u:p@h")) == "at http://***@h"


NAMED = (
    "http://user:${BARISTA_PW}@host/a",
    "https://${BARISTA_TOKEN}@host/a",
    "https://host/a?token=${BARISTA_TOKEN}",
    "https://host/a?token=${BARISTA_A}${BARISTA_B}&k=${BARISTA_B}",
)


@pytest.mark.parametrize("address", NAMED)
def test_names_of_variables_are_no_secrets(address):
    for text in (address, f"({address}); try again", f'{{"a":"{address}","b":1}}', f"'{address}'"):
        assert without_secrets(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:s3cr3t${BARISTA_PW}@host/a", "http://***@host/a"),
        ("http://user:s3cr3t@host/a?t=${BARISTA_PW}", "http://***@host/a?t=${BARISTA_PW}"),
        ("http://user:${BARISTA_PW}@host/a?t=s3cr3t", "http://user:${BARISTA_PW}@host/a?t=***"),
    ],
)
def test_a_secret_beside_a_variable_is_hidden(text, shown):
    assert without_secrets(text) == shown


@pytest.mark.parametrize("address", NAMED)
def test_variables_are_filled_in_and_hidden_again(address):
    values = {"BARISTA_PW": "s3cr3t/@:x", "BARISTA_TOKEN": "s3cr3t&y=1", "BARISTA_A": "s3cr3t", "BARISTA_B": "#"}
    filled = with_variables(address, values)
    assert "s3cr3t" in filled and "${" not in filled
    assert "s3cr3t" not in without_secrets(filled)
    assert without_variables(address) == without_secrets(filled), "the same whether written out or named"


def test_what_is_filled_in_is_quoted():
    assert with_variables("http://u:${BARISTA_PW}@h/a", {"BARISTA_PW": "a@b/c?"}) == "http://u:a%40b%2Fc%3F@h/a"
    assert with_variables("http://h/a?b=$c") == "http://h/a?b=$c"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://u:${BARISTA_PW}@h/a", "BARISTA_PW, which is not set here"),
        ("http://u:${WANDB_API_KEY}@h/a", "names the variable WANDB_API_KEY; only those that begin with BARISTA_"),
        ("http://h/${BARISTA_SET}/a", "where nothing is hidden"),
        ("http://${BARISTA_SET}/a", "where nothing is hidden"),
    ],
)
def test_variables_that_are_refused(address, words):
    with pytest.raises(DataError, match=words):
        with_variables(address, {"BARISTA_SET": "s3cr3t", "WANDB_API_KEY": "s3cr3t"})
