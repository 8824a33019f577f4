"""A process of this machine, told apart from a later one with the same number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True)
class Process:
    pid: int
    created: float  # seconds since the epoch

    @classmethod
    def of(cls, process: psutil.Process) -> Self:
        return cls(process.pid, process.create_time())

    @classmethod
    def me(cls) -> Self:
        return cls.of(psutil.Process())

    @property
    def lives(self) -> bool:
        """False for one that has ended and was not waited for, too."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
