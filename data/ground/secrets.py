"""Hides the secrets in addresses from output, logs and files.

An address may hold a user name with a password (`https://user:password@host/…`) or a key among its parameters
(`https://host/…?token=…`). Everything that is printed, logged or written passes through `without_secrets`; only the
code that opens an address sees the secrets.

In place of a secret, an address may name an environment variable: `https://user:${BARISTA_PASSWORD}@host/…`. Such an
address contains no secret and can be written into any file; `with_variables` fills in the value when it is opened. Only
variables whose names begin with BARISTA_ are filled in, so that somebody else's recipe cannot send others to a server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import quote

from data.ground.errors import DataError

HIDDEN = "***"
VARIABLES_BEGIN_WITH = "BARISTA_"

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# Private-use characters that mark references to variables while secrets are hidden; addresses never contain them.
_OPEN, _CLOSE = "\ue000", "\ue001"
_KEPT = re.compile(f"(?:{_OPEN}[A-Za-z0-9_]+{_CLOSE})+")
_KEPT_IN_A_SENTENCE = re.compile(rf"{_KEPT.pattern}[)\]}},;:.!]*")

# Everything up to a space belongs to an address, except closing quotes, brackets and punctuation of a sentence or JSON.
# Of an address that was taken for a path, pathlib leaves one slash.
_ADDRESS = re.compile(
    r"""([A-Za-z][A-Za-z0-9+.-]*://|\b(?:https?|s?ftp|s3|gs):/)((?:(?!["'`<>][\s,;:)\]}]|["'`<>]$)\S)+)"""
)
_CLOSING = re.compile(r"""["'`<>)\]},;:.!]*$""")
# Parameters that libraries print without their address, as part of a path.
_PARAMETER = re.compile(
    r"([?&][\w.%-]*(?:token|sig|key|secret|passw|credential|auth)[\w.%-]*=)([^\s&#\"'`<>]+)", re.IGNORECASE
)


def without_secrets(text: object) -> str:
    """A text or an address with the user names, passwords and parameter values of addresses hidden.

    All parameter values are hidden, because services give their keys many names. Text without an address is unchanged,
    and hiding twice changes nothing. A variable's name, `${NAME}`, is no secret and stays.
    """
    marked = _ADDRESS.sub(_hide, _REFERENCE.sub(rf"{_OPEN}\1{_CLOSE}", str(text)))
    hidden = _PARAMETER.sub(
        lambda match: match[1] + (match[2] if _KEPT_IN_A_SENTENCE.fullmatch(match[2]) else HIDDEN), marked
    )
    return re.sub(f"{_OPEN}([A-Za-z0-9_]+){_CLOSE}", r"${\1}", hidden)


def without_variables(text: object) -> str:
    """As `without_secrets`, with the names of variables hidden too: the result does not depend on any credentials."""
    return without_secrets(_REFERENCE.sub(_OPEN, str(text)))


def variables_of(address: str) -> list[str]:
    """The environment variables that an address names."""
    return _REFERENCE.findall(address)


def with_variables(address: str, environment: Mapping[str, str] = os.environ) -> str:
    """The address with the URL-quoted values of the variables that it names.

    Raises:
        DataError: a variable is not set or may not be named, or stands where no secret is expected.

    """
    names = variables_of(address)
    for name in names:
        if not name.startswith(VARIABLES_BEGIN_WITH):
            raise DataError(
                f"{address} names the variable {name}; only those that begin with {VARIABLES_BEGIN_WITH} go into an "
                "address: choose such a name"
            )
        if not environment.get(name):
            raise DataError(f"{address} names the environment variable {name}, which is not set here; export it")
    if names and _OPEN in without_variables(address):
        raise DataError(
            f"{address} names a variable where nothing is hidden; give it in the place of a password, user:${{NAME}}@, "
            "or of a parameter's value, ?token=${NAME}"
        )
    return _REFERENCE.sub(lambda match: quote(environment[match[1]], safe=""), address)


def _hide(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    closing = _CLOSING.search(rest)
    assert closing is not None
    rest, closed = rest[: closing.start()], rest[closing.start() :]
    rest = _without_user(rest)
    # Keys may stand in the query (after "?") or in the fragment (after "#").
    place, *signs = re.split(r"([?#].*)", rest, maxsplit=1)
    parameters = re.sub(r"[^?&#]+", _hide_value, signs[0]) if signs else ""
    return f"{scheme}{place}{parameters}{closed}"


def _without_user(rest: str) -> str:
    """`rest`, an address without its scheme, without the name and the password before its host."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in host:
        user, colon, password = host[: host.rindex("@")].partition(":")
        if _KEPT.fullmatch(password if colon else user):
            return rest
        return f"{HIDDEN}@{rest[host.rindex('@') + 1 :]}"
    name, colon, port = host.rpartition(":")
    if not colon or port.isdigit() or not port or host.startswith("["):
        return rest
    # Not a port: this is a password that contains /, ? or #, which should have been written as %2F, %3F or %23.
    if "@" in rest:
        return f"{HIDDEN}@{rest[rest.rindex('@') + 1 :]}"
    return f"{name}:{HIDDEN}{rest[len(host) :]}"


def _hide_value(match: re.Match[str]) -> str:
    name, equals, value = match.group().partition("=")
    if _KEPT.fullmatch(value if equals else name):
        return match.group()
    return f"{name}={HIDDEN}" if equals else HIDDEN
