# SPDX-License-Identifier: Apache-2.0
"""Network namespaces: make, enter, end.

A thread enters a namespace by itself (setns), without a mount namespace around it as `ip netns
exec` makes one: /sys/fs/bpf and every other mount stay what they were.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pyroute2 import IPRoute

from netns_tests.lab import processes
from netns_tests.lab.errors import LabError
from oncache.core.errors import HostError

T = TypeVar("T")

RUN = Path("/run/netns")
PREFIX = "onc-"

_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MNT_DETACH = 2
_NEEDED = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_SYS_ADMIN": 21}

_libc = ctypes.CDLL(None, use_errno=True)


class Closable(Protocol):
    def close(self) -> object: ...


def missing_capabilities() -> list[str]:
    """The capabilities this process lacks to build namespaces."""
    status = Path("/proc/thread-self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], 16)
    return [name for name, bit in _NEEDED.items() if not effective >> bit & 1]


def require() -> None:
    """Raise HostError when this process may not build network namespaces."""
    missing = missing_capabilities()
    if missing:
        raise HostError(
            f"the laboratory builds network namespaces and lacks {', '.join(missing)}",
            hint="run it as root",
        )


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: Path, kind: str | None, flags: int = 0) -> None:
    """mount(2); OSError when the kernel refuses."""
    encoded = None if kind is None else kind.encode()
    result = _libc.mount(source.encode(), str(target).encode(), encoded, flags, None)
    _check(result, f"mount {target}")


def unmount(target: Path) -> None:
    """umount2(2), detached: what still uses it keeps it, new look-ups do not find it."""
    _check(_libc.umount2(str(target).encode(), _MNT_DETACH), f"unmount {target}")


@contextlib.contextmanager
def inside(namespace: Namespace | Path | str) -> Iterator[None]:
    """The calling thread is in `namespace` for the length of the block; other threads are not.

    A string is a name under /run/netns. Sockets opened in the block, and processes and threads
    started in it, stay in the namespace for their lifetime.
    """
    path = namespace.path if isinstance(namespace, Namespace) else RUN / namespace
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.setns(there, _CLONE_NEWNET), f"enter {path}")
        finally:
            os.close(there)
        try:
            yield
        finally:
            _check(_libc.setns(home, _CLONE_NEWNET), "leave the network namespace")
    finally:
        os.close(home)


def _bind_new(path: Path) -> None:
    """Make a namespace and bind it to `path`; the calling thread is back home afterwards."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.unshare(_CLONE_NEWNET), "make a network namespace")
        try:
            mount("/proc/thread-self/ns/net", path, None, _MS_BIND)
        finally:
            _check(_libc.setns(home, _CLONE_NEWNET), "leave the network namespace")
    finally:
        os.close(home)


def _touch(path: Path) -> None:
    # Another laboratory may remove the empty directory between our two steps.
    for _ in range(100):
        RUN.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.touch(exist_ok=False)
            return
    raise LabError(f"cannot create {path}", hint=f"see who removes {RUN}")


class Namespace:
    """One network namespace, bound under /run/netns so that others can find it.

    It owns what was opened or started in it through its methods: `delete` ends all of that, since
    one forgotten socket keeps a namespace and its devices alive.
    """

    def __init__(self, name: str, *, ip6: bool = False) -> None:
        """Make the namespace `name`, with lo up; without `ip6`, IPv6 is off to keep the wire quiet.

        With it, addresses are usable at once (no duplicate detection) and nobody asks for routers.
        """
        self.name = name
        self.path = RUN / name
        self._owned = contextlib.ExitStack()
        self._netlink: Any = None
        _touch(self.path)
        try:
            _bind_new(self.path)
            for scope in ("default", "all"):
                self.sysctl(f"net.ipv6.conf.{scope}.disable_ipv6", int(not ip6))
                self.sysctl(f"net.ipv6.conf.{scope}.accept_dad", 0)
                self.sysctl(f"net.ipv6.conf.{scope}.router_solicitations", 0)
                self.sysctl(f"net.ipv4.conf.{scope}.rp_filter", 0)
            self.up("lo")
        except BaseException:
            Namespace.delete(self)
            raise

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    @property
    def netlink(self) -> Any:
        """A pyroute2 IPRoute of this namespace, kept open (opening one costs milliseconds)."""
        if self._netlink is None:
            self._netlink = self.run(IPRoute)
            self.own(self._netlink)
        return self._netlink

    def own(self, thing: Closable) -> None:
        """Close `thing` when the namespace goes; closing it twice must do no harm."""
        self._owned.callback(thing.close)

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function` with the calling thread in this namespace."""
        with inside(self):
            return function(*args, **kwargs)

    def index(self, device: str) -> int:
        """The interface index of `device`; OSError if there is none."""
        return self.run(socket.if_nametoindex, device)

    def up(self, device: str) -> None:
        self.netlink.link("set", index=self.index(device), state="up")

    def sysctl(self, name: str, value: int | str | None = None) -> str:
        """Write a dotted network sysctl of this namespace if given a value; return it as it is."""
        path = Path("/proc/sys") / name.replace(".", "/")
        with inside(self):
            if value is not None:
                path.write_text(str(value))
            return path.read_text().strip()

    def socket(self, family: int, kind: int, protocol: int = 0) -> socket.socket:
        """A socket of this namespace, closed with it."""
        made = self.run(socket.socket, family, kind, protocol)
        self.own(made)
        return made

    def spawn(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program in this namespace (options as for Popen); ended with it."""
        child = self.run(processes.start, argv, **options)
        self.own(processes.Ending(child))
        return child

    def command(
        self, argv: Sequence[str], *, text: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end in this namespace, with `text` on its standard input."""
        return self.run(processes.finish, argv, text=text, check=check)

    def delete(self) -> None:
        """End what runs here, close what was opened here, and let the namespace go."""
        try:
            self._owned.close()
        finally:
            self._netlink = None
            self._unlink()

    def _unlink(self) -> None:
        with contextlib.suppress(OSError):
            unmount(self.path)
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            RUN.rmdir()
