"""Hiding what nobody but its owner may read: the secrets that addresses carry.

An address may hold a name with a password (`https://user:password@host/…`) or a key among its parameters
(`https://host/…?token=…`). Whatever is printed, logged or written passes through `without_secrets`; only the code that
opens an address sees it whole.
"""

from __future__ import annotations

import re

HIDDEN = "***"

# Everything up to a space belongs to an address, but for what closes it in a sentence or in JSON.
_ADDRESS = re.compile(r"""([A-Za-z][A-Za-z0-9+.-]*://)((?:(?!["'`<>][\s,;:)\]}]|["'`<>]$)\S)+)""")
_CLOSING = re.compile(r"""["'`<>)\]},;:.!]*$""")
# Parameters that are shown without their address, as libraries do of a path.
_PARAMETER = re.compile(
    r"([?&][\w.%-]*(?:token|sig|key|secret|passw|credential|auth)[\w.%-]*=)[^\s&#\"'`<>]+", re.IGNORECASE
)


def without_secrets(text: object) -> str:
    """A text or an address in which names and passwords of addresses and the values of their parameters are hidden.

    All values of parameters go, for nobody knows every name that a service gives to its keys. What holds no address is
    left as it is; hiding twice changes nothing.
    """
    return _PARAMETER.sub(rf"\g<1>{HIDDEN}", _ADDRESS.sub(_hide, str(text)))


def _hide(match: re.Match[str]) -> str:
    scheme, rest = match.groups()
    closing = _CLOSING.search(rest)
    assert closing is not None
    rest, closed = rest[: closing.start()], rest[closing.start() :]
    rest = _without_user(rest)
    # Keys stand behind either sign: in what a server reads, and in what it handed to a browser.
    place, *signs = re.split(r"([?#].*)", rest, maxsplit=1)
    parameters = re.sub(r"[^?&#]+", _hide_value, signs[0]) if signs else ""
    return f"{scheme}{place}{parameters}{closed}"


def _without_user(rest: str) -> str:
    """`rest`, an address without its scheme, without the name and the password before its host."""
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in host:
        return f"{HIDDEN}@{rest[host.rindex('@') + 1 :]}"
    name, colon, port = host.rpartition(":")
    if not colon or port.isdigit() or not port or host.startswith("["):
        return rest
    # No port: a password with a sign that should have been written as %2F, %3F or %23.
    if "@" in rest:
        return f"{HIDDEN}@{rest[rest.rindex('@') + 1 :]}"
    return f"{name}:{HIDDEN}{rest[len(host) :]}"


def _hide_value(match: re.Match[str]) -> str:
    name, equals, _ = match.group().partition("=")
    return f"{name}={HIDDEN}" if equals else HIDDEN
