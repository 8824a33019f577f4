"""Free ports of this machine, for processes that talk to each other."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
