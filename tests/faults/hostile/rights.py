"""Kernel calls that take root's right to all files or disk space from processes, or adopt their orphans."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_NEWNS = 0x00020000
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000


class Skip(Exception):
    """This machine cannot do what the case needs."""


def adopt_orphans() -> None:
    """Make processes below this one its children when their parents die, whatever session they are in."""
    _call(_libc.prctl, _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Data(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


def drop_rights(probe: Path) -> None:
    """Make file modes bind this process, as they bind every user but root. `probe`: a folder for a file to test it."""
    if os.geteuid() == 0:
        header, data = _Header(_CAPABILITY_VERSION_3, 0), (_Data * 2)()
        try:
            _call(_libc.capget, ctypes.byref(header), ctypes.byref(data))
            for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
                # Without it in the bounding set, programs that this process starts lose the capability too.
                _call(_libc.prctl, _PR_CAPBSET_DROP, capability, 0, 0, 0)
                for sets in ("effective", "permitted", "inheritable"):
                    setattr(data[0], sets, getattr(data[0], sets) & ~(1 << capability))
            _call(_libc.capset, ctypes.byref(header), ctypes.byref(data))
        except OSError as error:
            raise Skip(f"root's right to all files cannot be dropped ({error.strerror})") from error
    file = probe / "unreadable"
    file.touch(mode=0o000)
    try:
        file.open("rb").close()
    except PermissionError:
        return
    finally:
        file.unlink()
    raise Skip("a file of mode 000 can be read here")


@dataclass(frozen=True)
class SmallDisk:
    """A file system of a few KiB that only this process and its descendants see."""

    path: Path

    def resize(self, kib: int) -> None:
        options = f"size={kib}k".encode()
        _call(_libc.mount, None, os.fsencode(self.path), b"tmpfs", ctypes.c_ulong(_MS_REMOUNT), options)


def mount_small_disk(path: Path, kib: int) -> SmallDisk:
    """Mount a small file system at a new or empty folder. It is gone when the last process of this namespace ends."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        _own_mounts()
        _call(_libc.mount, b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(0), f"size={kib}k".encode())
    except OSError as error:
        raise Skip(f"a small disk cannot be mounted ({error.strerror})") from error
    return SmallDisk(path)


def mount_over(file: Path, target: Path) -> None:
    """Make this process and its descendants see `file` at `target`, for example another /proc/stat."""
    try:
        _own_mounts()
        _call(_libc.mount, os.fsencode(file), os.fsencode(target), None, ctypes.c_ulong(_MS_BIND), None)
    except OSError as error:
        raise Skip(f"{target} cannot be mounted over ({error.strerror})") from error


_mounts_are_own = False


def _own_mounts() -> None:
    global _mounts_are_own
    if not _mounts_are_own:
        if sys.platform != "linux":
            raise Skip("mount namespaces are Linux's")
        _call(_libc.unshare, _CLONE_NEWNS)
        # Without this, the mounts would still be visible to all processes.
        _call(_libc.mount, None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
        _mounts_are_own = True


def _call(function: object, *arguments: object) -> None:
    if function(*arguments) != 0:  # type: ignore[operator]
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
