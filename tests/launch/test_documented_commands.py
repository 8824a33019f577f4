"""Commands in the documentation: each is one that its parser takes, with recipes that exist and keys that are read."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from data.ground.errors import ConfigError
from launch.barista import COMMANDS
from launch.reference import STARTED_BY_OTHERS, WITHOUT_OPTIONS, parser_of
from tests import ROOT
from tests.test_links import pages
from trainer.config.load import load_recipe
from trainer.config.schema import Recipe, flat

_OURS = {command.module for command in COMMANDS.values()} | {*STARTED_BY_OTHERS}
_TRAINING = ("trainer.pretrain", "trainer.finetune", "trainer.distill")
_SETTING = re.compile(r"--([a-z]+\.[a-z0-9_]+)=")
# Where the words of a command end.
_ENDS = ("|", "&&", ";", "&", ">", "2>", ">>")


def written_commands(page: str) -> Iterator[list[str]]:
    """The words of each command of ours: of fenced blocks line by line, and of code spans."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    for block in blocks:
        yield from _in_block(block)
    prose = re.sub(r"^```[a-z]*\n.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", prose):
        yield from _in_block(" ".join(span.split()))


def _in_block(block: str) -> Iterator[list[str]]:
    waiting = ""
    for line in block.replace("\\\n", " ").splitlines():
        waiting += line.removeprefix("$ ")
        try:
            words = shlex.split(waiting, comments=True)
        except ValueError:  # a quotation goes on in the next line
            waiting += " "
            continue
        waiting = ""
        if command := _of_ours(words):
            yield command


def _of_ours(words: Sequence[str]) -> list[str]:
    """[module, word, …] of a line's first command of ours; empty if there is none."""
    for place, (word, following) in enumerate(itertools.pairwise(words)):
        by_name = word == "barista" and following in COMMANDS
        if by_name or (word in ("-m", "--module") and following.startswith(("data.", "trainer.", "launch."))):
            rest = words[place + 2 :]
            end = next((number for number, each in enumerate(rest) if each in _ENDS), len(rest))
            return [COMMANDS[following].module if by_name else following, *rest[:end]]
    return []


def complaint(words: Sequence[str]) -> str:
    """What is wrong with a command; empty if nothing is. A part of a command may lack arguments."""
    module, *rest = words
    # Places for words that a reader fills in; a command's own name is one only in capitals.
    if module == "trainer.X" or any(each in ("…", "...", "COMMAND") or each.startswith("[") for each in rest):
        return ""
    if module in (*WITHOUT_OPTIONS, "launch.barista"):
        return ""
    if module not in _OURS:
        return f"{module} is no command"
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            arguments, others = parser_of(module).parse_known_args(rest)
    except SystemExit as end:
        last = said.getvalue().strip().rpartition("\n")[2]
        return "" if not end.code or "arguments are required" in last else last
    for each in others:
        key = _SETTING.match(each)
        if not key and "$" not in each:
            return f"{module} does not know {each}"
        if key and key[1] not in flat(Recipe()):
            return f"{key[1]} is no key of a recipe"
    recipe = ROOT / str(getattr(arguments, "config", ""))
    if module not in _TRAINING or "$" in " ".join(rest) or not str(arguments.config).startswith("launch/"):
        return ""
    try:
        load_recipe(recipe, [each.removeprefix("--") for each in others])
    except ConfigError as error:
        return str(error)
    return ""


# docs/commands.md is made of the parsers themselves.
WRITTEN = [page for page in pages(ROOT) if page.name != "commands.md"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_one_that_its_parser_takes(page: Path) -> None:
    wrong = [
        f"{shlex.join(words)}: {said}"
        for words in written_commands(page.read_text("utf-8"))
        if (said := complaint(words))
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_are_found() -> None:
    page = """Run `python -m launch.plan RECIPE` or `barista status runs/x`.

```
M=runs
deepspeed --num_gpus 2 --module trainer.finetune --config launch/recipes/srl_nli.toml \\
    --model.config='{"model_type":
    "bert"}'   # a comment
python -m data.prepare tokenizer a.jsonl --output b | head
```
"""
    assert list(written_commands(page)) == [
        ["trainer.finetune", "--config", "launch/recipes/srl_nli.toml", '--model.config={"model_type":     "bert"}'],
        ["data.prepare", "tokenizer", "a.jsonl", "--output", "b"],
        ["launch.plan", "RECIPE"],
        ["launch.status", "runs/x"],
    ]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python -m trainer.nothing", "is no command"),
        ("python -m trainer.export --model M --output O --onxx int8", "--onxx"),
        ("python -m trainer.evaluate size --model M", "invalid choice"),
        ("python -m trainer.resize M --texts F --output R --objective.kll=none", "objective.kll is no key"),
        ("python -m trainer.finetune --config launch/recipes/srl_nil.toml", "srl_nil.toml"),
        ("python -m trainer.finetune --config launch/recipes/srl_nli.toml --objective.decoder=false", "decoder"),
        ("python -m trainer.export --model M", ""),
        ("python -m trainer.finetune --config launch/recipes/srl_nli.toml --optim.lr=1e-5", ""),
    ],
)
def test_what_is_wrong_with_a_command_is_said(command: str, said: str) -> None:
    """Negative controls, and two that are right."""
    (words,) = written_commands(f"```\n{command}\n```")
    found = complaint(words)
    assert said in found and bool(said) == bool(found)
