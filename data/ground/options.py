"""What options of commands are read by: a parser, numbers with bounds, lists of names, and settings of the recipe.

Numbers are types of argparse, which ends a command with code 2 if a number is out of bounds.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn, TypeAlias

from data.ground.errors import ConfigError
from data.ground.secrets import without_secrets

LARGEST_COUNT = 2**31 - 1  # of texts, tokens, documents
LARGEST_SEED = 2**63 - 1

SubParsers: TypeAlias = "argparse._SubParsersAction[Parser]"
"""What `add_subparsers` returns; argparse has no public name for it."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors, which repeat words of the command line, do not show the secrets in addresses."""

    def error(self, message: str) -> NoReturn:
        super().error(without_secrets(message))


class Stated(argparse.Action):
    """Stores a value, and that the command line states it: its name is in `stated_in`, unlike that of a default."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.stated = {*stated_in(namespace), self.dest}


class StatedEach(Stated):
    """The same for an option that may be repeated, whose values make a list."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        super().__call__(parser, namespace, [*getattr(namespace, self.dest), values], option)


def flag_of(name: str) -> str:
    """The option as the command line has it, by the name of its value among the parsed arguments."""
    return f"--{name.replace('_', '-')}"


def stated_in(arguments: argparse.Namespace) -> Collection[str]:
    """The names of the options of the actions `Stated` and `StatedEach` that the command line states."""
    stated: Collection[str] = getattr(arguments, "stated", ())
    return stated


def count(*, least: int = 1, most: int = LARGEST_COUNT) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def parse(text: str) -> int:
        # Only ASCII digits: str.isdigit accepts "²", but int does not.
        if not re.fullmatch(r"[+-]?[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to {most}")
        return int(text)

    return parse


def real(
    *, least: float | None = None, above: float | None = None, below: float | None = None
) -> Callable[[str], float]:
    """A finite number within the given bounds."""
    words = (("of at least", least), ("above", above), ("below", below))
    kind = " ".join(["a finite number", *(f"{word} {bound:g}" for word, bound in words if bound is not None)])

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = (
            math.isfinite(value)
            and (least is None or value >= least)
            and (above is None or value > above)
            and (below is None or value < below)
        )
        if not inside:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {kind}")
        return value

    return parse


def listed(text: str) -> list[str]:
    """The names in a comma-separated list, without the spaces around them. Empty names are left out."""
    return [name.strip() for name in text.split(",") if name.strip()]


def settings_among(rest: Sequence[str], *, decided: Collection[str] = ()) -> list[str]:
    """The recipe's settings in the arguments that are no options of the command: --section.key=value, without dashes.

    decided: keys that the command sets itself. Raises ConfigError for one of these, and for an argument of another
    form. Its value is not shown: it may be a secret of a misspelt option.
    """
    for text in rest:
        name, equals, _ = text.partition("=")
        if not (name.startswith("--") and equals and "." in name):
            raise ConfigError(f"{name!r} is not understood; settings are given as --section.key=value")
        if name[2:] in decided:
            raise ConfigError(f"{name} is what this command decides itself; leave it out")
    return [text[2:] for text in rest]
