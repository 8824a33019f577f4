"""What options of commands are read by, and settings of the recipe among a command's arguments."""

from __future__ import annotations

import pytest

from data.ground.errors import ConfigError
from data.ground.options import Parser, count, settings_among
from tests import ROOT


def test_settings():
    assert settings_among(["--optim.lr=1e-4", "--run.output=a=b"]) == ["optim.lr=1e-4", "run.output=a=b"]


@pytest.mark.parametrize("word", ["--enb", "--enb=s3cr3t.x", "A=s3cr3t.x", "optim.lr=s3cr3t", "--optim.lr"])
def test_what_is_no_setting_is_named_without_its_value(word):
    with pytest.raises(ConfigError, match="is not understood") as refused:
        settings_among(["--optim.lr=1", word])
    assert repr(word.partition("=")[0]) in str(refused.value) and "s3cr3t" not in str(refused.value)


def test_errors_about_words_of_the_command_line_hide_secrets(capsys):
    """Those of subcommands too. Negative control: the rest of the word is shown."""
    parser = Parser(prog="x")
    parser.add_subparsers().add_parser("sub").add_argument("--number", type=count())
    address = "https://me:s3cr3t@h/a?t=s3cr3t"
    for words in (["sub", f"--number={address}"], ["sub", address], [address]):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(words)
        said = capsys.readouterr().err
        assert ended.value.code == 2 and "https://***@h/a?t=***" in said and "s3cr3t" not in said


def test_every_command_reads_its_options_by_that_parser():
    """But launch/node.py, which runs outside containers with the standard library only."""
    files = [path for folder in ("data", "launch", "models", "trainer") for path in (ROOT / folder).rglob("*.py")]
    others = {path.relative_to(ROOT).as_posix() for path in files if "ArgumentParser(" in path.read_text("utf-8")}
    assert others == {"launch/node.py"}
