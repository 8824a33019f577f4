"""Settings of the recipe among a command's arguments."""

from __future__ import annotations

import pytest

from data.ground.errors import ConfigError
from data.ground.options import settings_among


def test_settings():
    assert settings_among(["--optim.lr=1e-4", "--run.output=a=b"]) == ["optim.lr=1e-4", "run.output=a=b"]


@pytest.mark.parametrize("word", ["--enb", "--enb=s3cr3t.x", "A=s3cr3t.x", "optim.lr=s3cr3t", "--optim.lr"])
def test_what_is_no_setting_is_named_without_its_value(word):
    with pytest.raises(ConfigError, match="is not understood") as refused:
        settings_among(["--optim.lr=1", word])
    assert repr(word.partition("=")[0]) in str(refused.value) and "s3cr3t" not in str(refused.value)
