# SPDX-License-Identifier: Apache-2.0
"""The guard of an uplink: an XDP program that keeps strangers' tunnel packets out.

Its maps and its link are pinned below the plane's directory, and live and die apart from the plane:
the guard works for the base path, too. See docs/guard.md.
"""

import ctypes as ct
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from oncache.core import attach, bpffs, libbpf, maps
from oncache.core.addresses import pack, unpack
from oncache.core.attach import XdpHook
from oncache.core.errors import LayoutError, NotLoadedError
from oncache.core.net import IpAddress

OBJECT = Path(__file__).parent / "bpf" / "guard.bpf.o"

_HOME = "guard"
_LINK = "link"  # beside the maps' pins


class Guard:
    """The guard of one node, below ``bpf_dir``."""

    def __init__(self, bpf_dir: Path, fds: dict[str, int], programs: libbpf.Object | None) -> None:
        self.directory = bpf_dir
        self._fds = fds
        self._object = programs
        types = {name: maps.map_types(fd) for name, fd in fds.items()}
        self._address = types["guard_peers"][0]
        self._config: Any = maps.Shared(fds["guard_config"], types["guard_config"][1]).value[0]
        self._counters = maps.PerCpuArray(fds["guard_counters"], types["guard_counters"][1])
        self._peers: Any = maps.Map(fds["guard_peers"], *types["guard_peers"])
        self._strangers: Any = maps.Map(fds["guard_strangers"], *types["guard_strangers"])

    # --- life

    @classmethod
    def load(cls, bpf_dir: Path, peers: int, path: Path = OBJECT) -> "Guard":
        """Load the program, with room for so many peers; counters go on where an earlier one of
        this layout stopped. Nothing is attached by this, or lets go. HostError if the kernel
        refuses."""
        bpffs.require(bpf_dir)
        home = bpf_dir / _HOME
        home.mkdir(mode=0o700, exist_ok=True)
        programs = libbpf.Object(path)
        programs.resize("guard_peers", peers)
        for name in _pinned(programs):
            _take_over(programs, name, home / name)
        programs.load()
        for name in _pinned(programs):
            if not (home / name).exists():
                libbpf.pin(programs.maps[name], home / name)
        return cls(bpf_dir, {name: programs.maps[name] for name in _pinned(programs)}, programs)

    @classmethod
    def open(cls, bpf_dir: Path) -> "Guard":
        """The pinned maps alone, for reading; NotLoadedError if there is no guard."""
        home = bpf_dir / _HOME
        if not (home / "guard_config").exists():
            raise NotLoadedError(
                f"no guard is loaded under {bpf_dir}", hint="set guard.mode and start the agent"
            )
        pins = (pin for pin in home.iterdir() if pin.name != _LINK)
        return cls(bpf_dir, {pin.name: libbpf.get(pin) for pin in pins}, None)

    def close(self) -> None:
        """Let go of descriptors; whatever is attached and pinned stays."""
        if self._object:
            self._object.close()
        else:
            for fd in self._fds.values():
                os.close(fd)

    @staticmethod
    def unload(bpf_dir: Path) -> None:
        """Take the guard off its uplink and remove its pins, whatever the layout. Idempotent."""
        home = bpf_dir / _HOME
        if not home.is_dir():
            return
        attach.detach_xdp(link_pin(bpf_dir))
        for pin in home.iterdir():
            pin.unlink()
        home.rmdir()

    # --- attaching

    def attach(self, ifindex: int) -> None:
        """Put the program on this uplink and no other; BusyError if it has another XDP program."""
        if self._object is None:
            raise NotLoadedError("this process has no programs", hint="start the node agent")
        attach.attach_xdp(ifindex, self._object.programs["guard"], link_pin(self.directory))

    def hook(self, ifindex: int) -> XdpHook | None:
        """What the kernel says is on the uplink's XDP hook."""
        return attach.xdp(ifindex, link_pin(self.directory))

    def is_attached(self, ifindex: int) -> bool:
        """Whether it is this process's program that runs on the uplink."""
        hook = self.hook(ifindex)
        if hook is None or self._object is None:
            return False
        return hook.program.id == libbpf.prog_info(self._object.programs["guard"]).id

    # --- configuration

    def configure(self, port: int, *, enforce: bool) -> None:
        """Watch for tunnel packets to this UDP port; drop strangers' or only count them."""
        self._config.port = port
        self._config.enforce = enforce

    def enable(self, deadline_seconds: float) -> None:
        """Judge for so long from now; then everything passes. Call it again in time."""
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._config.deadline = now + int(deadline_seconds * 1e9)

    def disable(self) -> None:
        """Everything passes from now on."""
        self._config.deadline = 0

    def peers(self) -> frozenset[IpAddress]:
        """Whose tunnel packets are welcome."""
        found = (unpack(key) for key, _ in self._peers.items())
        return frozenset(address for address in found if address is not None)

    def set_peers(self, wanted: Iterable[IpAddress]) -> None:
        """Welcome these and no others, the new ones first. OSError (E2BIG) if they do not fit: some
        that are wanted are then missing."""
        wanted, have = frozenset(wanted), self.peers()
        for address in wanted - have:
            self._peers.update(pack(self._address, address), ct.c_uint32(1))
        for address in have - wanted:
            self._peers.delete(pack(self._address, address))

    # --- reading

    def counters(self) -> dict[str, int]:
        """Packets by outcome, all CPUs together; names as in bpf/guard.bpf.c."""
        counted: dict[str, int] = maps.total(self._counters.read(0))
        return counted

    def strangers(self) -> dict[str, int]:
        """Packets by outer source, most first; of many strangers only the latest are known."""
        rows = ((str(unpack(key) or "::"), count) for key, count in self._strangers.items())
        return dict(sorted(rows, key=lambda row: -row[1]))

    def program_fd(self) -> int:
        """The program this process has loaded, for test runs."""
        if self._object is None:
            raise NotLoadedError("this process has no programs", hint="load the guard")
        return self._object.programs["guard"]


def report(bpf_dir: Path) -> dict[str, Any] | None:
    """Counters of the node's guard, and strangers by address; None if it has no guard."""
    try:
        with closing(Guard.open(bpf_dir)) as guard:
            return {**guard.counters(), "strangers": guard.strangers()}
    except NotLoadedError:
        return None


def link_pin(bpf_dir: Path) -> Path:
    """The name of the guard's attachment."""
    return bpf_dir / _HOME / _LINK


def _pinned(programs: libbpf.Object) -> Iterator[str]:
    """The maps with a name of their own; sections of constants are not among them."""
    return (name for name in programs.map_names if "." not in name)


def _take_over(programs: libbpf.Object, name: str, pin: Path) -> None:
    """Use a map that an earlier guard left, unless it is another build's or of another size: what
    is attached keeps that one until it is replaced."""
    if not pin.exists():
        return
    fd = libbpf.get(pin)
    try:
        programs.reuse(name, fd)
    except LayoutError:
        pin.unlink()
    finally:
        os.close(fd)
