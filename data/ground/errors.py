"""Exceptions that end a command with an exit code and one sentence.

`data.ground.command` catches them at the end of every command. Every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations


class CommandEnd(Exception):
    """Ends a command with `exit_code` after printing `prefix` and the exception's sentence."""

    exit_code = 1
    prefix = "error: "


class UserError(CommandEnd, ValueError):
    """An error that the user can fix: one sentence that names the thing and says what to do."""

    exit_code = 2


class DataError(UserError):
    """A user error about a file or about data."""


class OtherFormat(DataError):
    """A file in a format that this version does not read: another version wrote it, and it is not damaged."""


class ConfigError(UserError):
    """A user error in a recipe or on the command line."""
