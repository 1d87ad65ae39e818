# SPDX-License-Identifier: Apache-2.0
"""The BPF file system, where pinned maps and links outlive the process that made them."""

import ctypes as ct
import fcntl
import os
from pathlib import Path

from oncache.core.errors import BusyError, HostError

_BPF_FS_MAGIC = 0xCAFE4A11  # include/uapi/linux/magic.h
_STATFS_MAX = 256  # larger than struct statfs of any architecture; its first word is the type


def is_bpffs(path: Path) -> bool:
    """Whether an existing path lies in a BPF file system; OSError if it does not exist."""
    statfs = ct.CDLL(None, use_errno=True).statfs
    buffer = ct.create_string_buffer(_STATFS_MAX)
    if statfs(os.fsencode(path), buffer) != 0:
        raise OSError(ct.get_errno(), os.strerror(ct.get_errno()), str(path))
    return ct.c_long.from_buffer(buffer).value & 0xFFFFFFFF == _BPF_FS_MAGIC


def require(path: Path) -> None:
    """Make ``path`` a directory in a BPF file system, or raise HostError."""
    there = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not is_bpffs(there):
        raise HostError(
            f"{path} is not in a BPF file system",
            hint="mount -t bpf bpf /sys/fs/bpf",
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(
            f"cannot make {path}: {error.strerror}",
            hint="run as root, and use names without dots (the BPF file system refuses them)",
        ) from error


def lock_dir(path: Path) -> int:
    """Lock a directory for this process; held until the returned descriptor is closed.

    Raises BusyError if another process holds it. A dead process holds nothing.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise BusyError(
            f"another process works with {path}",
            hint="stop the other agent, or give this one its own bpf_dir",
        ) from error
    return fd
