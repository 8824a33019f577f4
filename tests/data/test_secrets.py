"""Nothing that an address keeps for its owner may be printed or written."""

from __future__ import annotations

import pytest

from data.secrets import without_secrets


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
    ],
)
def test_what_holds_no_secret_is_left(text):
    assert without_secrets(text) == text.replace("?b", "?***")


def test_other_objects_are_shown_as_text(tmp_path):
    assert without_secrets(tmp_path) == str(tmp_path)
    assert without_secrets(ValueError("at http://u:p@h")) == "at http://***@h"
