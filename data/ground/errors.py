"""How a command may end other than by success, as exceptions with an exit code and one sentence.

`data.ground.command` ends every command by them. Every other exception is a fault of the program and keeps its
traceback.
"""

from __future__ import annotations


class CommandEnd(Exception):
    """Ends a command with `exit_code`, after its sentence; `prefix` stands before the sentence."""

    exit_code = 1
    prefix = "error: "


class UserError(CommandEnd, ValueError):
    """What a user can fix: one sentence that names the thing and says what to do."""

    exit_code = 2


class DataError(UserError):
    """A user's mistake about a file or about data."""


class OtherFormat(DataError):
    """A file of a format that this version does not read: another version wrote it, and it is not damaged."""


class ConfigError(UserError):
    """A user's mistake in a recipe or on the command line."""
