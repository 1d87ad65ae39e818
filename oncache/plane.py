# SPDX-License-Identifier: Apache-2.0
"""The ONCache plane: load, attach, configure and read the three caches of one node.

The agent is the only writer of configuration, pods, peers and the validity of paths; the programs
write what they learn (flows and paths). Everything lives in pins below one directory, so readers
need no agent, and an agent that comes back continues where another one stopped.
"""

import ctypes as ct
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from itertools import starmap
from pathlib import Path
from typing import Any

from oncache.core import attach, bpffs, libbpf, maps
from oncache.core.addresses import pack, unpack
from oncache.core.attach import Direction
from oncache.core.config import Limits
from oncache.core.errors import ConfigError, LayoutError, NotLoadedError, OncacheError
from oncache.flows import (
    FLOW_COLUMNS,
    KEY_COLUMNS,
    PROTOCOLS,
    ROWS,
    FlowRow,
    Form,
    H,
    HalfRow,
    R,
    S,
    Validity,
    reader,
)

OBJECT = Path(__file__).parent / "bpf" / "oncache.bpf.o"
Address = IPv4Address | IPv6Address

_MAPS = "maps-"  # followed by the hash of their layout: another layout is another directory
_LINKS = "links"  # one name for each hook and device: the link, or a directory where filters serve
_QDISCS = "clsact"  # a directory for each device on which we made the qdisc
_GRACE_SECONDS = 1.0  # longer than any program run: a retired path's index is then unused
_INDEX = 0xFFFFFFFF
_HOOKS = {
    "from_pod": Direction.INGRESS,
    "to_pod": Direction.EGRESS,
    "from_wire": Direction.INGRESS,
    "to_wire": Direction.EGRESS,
}
_UPLINK_HOOKS, _POD_HOOKS = ("to_wire", "from_wire"), ("to_pod", "from_pod")


@dataclass(frozen=True)
class PodEntry:
    """A local pod: host side device, MAC inside (6 bytes), at most one address of each family."""

    ifindex: int
    mac: bytes
    addresses: tuple[Address, ...]
    name: str = ""


@dataclass(frozen=True)
class Settings:
    """What the programs must know of uplink and tunnel device; MTU in bytes of inner IP packet.

    Outer source ports are ``port_min`` .. ``port_max`` - 1, as in the kernel's udp_tunnel.h.
    """

    uplink: int
    tunnel: int
    local: Address
    vni: int
    port: int
    port_min: int
    port_max: int
    tos_inherit: bool
    ttl_inherit: bool
    df_inherit: bool
    mtu: int
    lease_seconds: float
    mark_mask: int
    zero_sum6_tx: bool = False
    zero_sum6_rx: bool = False


@dataclass(frozen=True)
class PathRow:
    """One way to a remote node, as the base path was seen to take it."""

    index: int
    generation: int
    remote: Address
    local: Address
    next_hop_mac: str
    source_mac: str
    device: int
    vni: int
    port: int
    ttl: int
    tos: int
    df: bool
    inner_source_mac: str
    inner_destination_mac: str
    mtu: int


@dataclass(frozen=True)
class Attached:
    """Interface indices our programs are on, as the kernel says."""

    uplinks: frozenset[int]
    pods: frozenset[int]


@dataclass(frozen=True)
class Explanation:
    """Why a flow is fast or not; ``reason`` is the name of the counter that moves."""

    fast: bool
    reason: str
    detail: tuple[str, ...] = field(default=())


class Plane:
    """The plane of one node, below one directory of a BPF file system."""

    def __init__(self, bpf_dir: Path, fds: dict[str, int], programs: libbpf.Object | None) -> None:
        self.directory = bpf_dir
        self._fds = fds
        self._object = programs
        types = {name: maps.map_types(fd) for name, fd in fds.items() if name in _TYPED}
        self._config: Any = maps.Shared(fds["config"], types["config"][1]).value[0]
        self._counters = maps.PerCpuArray(fds["counters"], types["counters"][1])
        self._pods: Any = maps.Shared(fds["ingress_cache"], types["ingress_cache"][1]).value
        self._states: Any = maps.Shared(fds["path_states"], types["path_states"][1]).value
        self._devices: Any = maps.Map(fds["pod_devices"], *types["pod_devices"])
        self._peers: Any = maps.Map(fds["peers"], *types["peers"])
        self._paths: Any = maps.Map(fds["egress_cache"], *types["egress_cache"])
        self._index: Any = maps.Map(fds["path_index"], *types["path_index"])
        self._flows: Any = maps.Map(fds["filter_cache"], *types["filter_cache"])
        self._types = types
        self._names: dict[int, str] = {}
        self._retired: list[tuple[float, int]] = []

    # --- life

    @classmethod
    def load(cls, bpf_dir: Path, limits: Limits, path: Path = OBJECT) -> "Plane":
        """Create the plane, or take over what an earlier agent of this layout left.

        Programs already attached go on running until ``attach_*`` replaces them in place.
        Raises HostError (kernel, privileges, no BPF file system) or LayoutError (pins of
        another build or other sizes). Nothing is attached yet.
        """
        bpffs.require(bpf_dir)
        programs = libbpf.Object(path)
        _resize(programs, limits)
        wanted = _layout(programs)
        _refuse_other_layouts(bpf_dir, wanted)
        home = bpf_dir / wanted
        for name in _pinned(programs):
            if (home / name).exists():
                _reuse(programs, name, home / name)
        programs.load()
        _pin_maps(programs, home)
        (bpf_dir / _LINKS).mkdir(exist_ok=True)
        plane = cls(bpf_dir, {name: programs.maps[name] for name in _pinned(programs)}, programs)
        plane._adopt()
        return plane

    @classmethod
    def open(cls, bpf_dir: Path) -> "Plane":
        """The pinned maps alone, for reading.

        Raises NotLoadedError if there are none, LayoutError if they are another build's.
        """
        home = _home(bpf_dir)
        with closing(libbpf.Object(OBJECT)) as programs:
            _refuse(bpf_dir, [home.name], _layout(programs))
        return cls(bpf_dir, {pin.name: libbpf.get(pin) for pin in home.iterdir()}, None)

    def close(self) -> None:
        """Let go of descriptors; whatever is attached and pinned stays."""
        if self._object:
            self._object.close()
        else:
            for fd in self._fds.values():
                os.close(fd)

    @staticmethod
    def unload(bpf_dir: Path) -> None:
        """Detach every program of ours and remove every pin, whatever the layout. Idempotent."""
        links = bpf_dir / _LINKS
        # to_ before from_: once nothing learns, the caches only get emptier
        for pin in sorted(links.iterdir(), reverse=True) if links.is_dir() else ():
            _detach(bpf_dir, pin)
        for home in bpf_dir.glob(_MAPS + "*"):
            for pin in home.iterdir():
                pin.unlink()
            home.rmdir()
        for directory in (links, bpf_dir / _QDISCS, bpf_dir):
            with suppress(FileNotFoundError):
                directory.rmdir()

    def _adopt(self) -> None:
        """First use of the maps, or the first after another agent: give every path an index."""
        self.pause_learning()
        time.sleep(0.01)  # a program that was learning has finished
        unused = ct.c_uint32()
        while libbpf.pop(self._fds["path_free"], unused):
            pass
        used = {index for _, index in self._index.items()}
        for state in self._states:
            state.generation = state.generation or 1
        for pod in self._pods:
            pod.generation = pod.generation or 1
        for index in range(len(self._states)):
            if index not in used:
                libbpf.push(self._fds["path_free"], ct.c_uint32(index))
        self.resume_learning()

    # --- configuration

    def configure(self, settings: Settings) -> None:
        """Set everything that is derived from uplink, tunnel and configuration.

        The fast path is off until the next ``enable``, and nothing learned before is used again.
        Raises ConfigError for a mark mask that is not 8 to 10 contiguous bits.
        """
        shift, nonces = _mark(settings.mark_mask)
        self.disable()
        self.pause_learning()
        config = self._config
        config.uplink, config.tunnel, config.mtu = settings.uplink, settings.tunnel, settings.mtu
        config.vni = settings.vni << 8
        config.port, config.port_min = settings.port, settings.port_min
        config.port_max = settings.port_max
        config.tos_inherit = settings.tos_inherit
        config.ttl_inherit = settings.ttl_inherit
        config.df_inherit = settings.df_inherit
        config.zero_sum6_tx = settings.zero_sum6_tx
        config.zero_sum6_rx = settings.zero_sum6_rx
        config.lease = int(settings.lease_seconds * 1e9)
        config.mark_mask, config.mark_shift, config.nonces = settings.mark_mask, shift, nonces
        config.local = pack(type(config.local), settings.local)
        self.invalidate_all()
        self.resume_learning()

    def settings(self) -> Settings | None:
        """What the programs were told; None before the first ``configure``."""
        config = self._config
        local = unpack(config.local)
        if local is None:
            return None
        return Settings(
            uplink=config.uplink,
            tunnel=config.tunnel,
            local=local,
            vni=config.vni >> 8,
            port=config.port,
            port_min=config.port_min,
            port_max=config.port_max,
            tos_inherit=bool(config.tos_inherit),
            ttl_inherit=bool(config.ttl_inherit),
            df_inherit=bool(config.df_inherit),
            mtu=config.mtu,
            lease_seconds=config.lease / 1e9,
            mark_mask=config.mark_mask,
            zero_sum6_tx=bool(config.zero_sum6_tx),
            zero_sum6_rx=bool(config.zero_sum6_rx),
        )

    def enable(self, deadline_seconds: float) -> None:
        """The dead-man switch: programs may work for so long from now. Call it again in time."""
        self._config.deadline = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(
            deadline_seconds * 1e9
        )
        self._free_retired()

    def disable(self) -> None:
        """Everything takes the base path from now on."""
        self._config.deadline = 0

    def deadline_margin(self) -> float:
        """Seconds until the dead-man switch acts; negative when it has, or when disabled."""
        deadline: int = self._config.deadline
        return (deadline - time.clock_gettime_ns(time.CLOCK_MONOTONIC)) / 1e9

    def pause_learning(self) -> None:
        """Nothing is learned until ``resume_learning``, nor from packets now on their way."""
        self._config.learning = 0
        self._config.epoch = (self._config.epoch + 1) & _INDEX

    def resume_learning(self) -> None:
        """Learn again."""
        self._config.learning = 1

    # --- validity. The epoch moves before the generation: see learn_half() in bpf/oncache.bpf.c.

    def _bump(self, what: Any) -> None:
        self._config.epoch = (self._config.epoch + 1) & _INDEX
        what.generation = (what.generation + 1) & _INDEX or 1

    def invalidate_all(self) -> None:
        """No entry learned until now is used again."""
        self._bump(self._config)

    def invalidate_pod(self, index: int) -> None:
        """No entry of this pod learned until now is used again."""
        self._bump(self._pods[index])

    def invalidate_path(self, index: int) -> None:
        """No entry that leads over this path is used again; its index is free after a while."""
        path = self._paths.lookup(ct.c_uint32(index))
        known = self._index.lookup(path) if path is not None else None
        self._bump(self._states[index])
        if known is not None and known.value == index:
            self._index.delete(path)
            self._retired.append((time.monotonic(), index))

    def set_path_mtu(self, index: int, mtu: int) -> None:
        """Limit one path to inner IP packets of so many bytes; 0 lifts the limit."""
        self._states[index].mtu = mtu

    def _free_retired(self) -> None:
        due = time.monotonic() - _GRACE_SECONDS
        while self._retired and self._retired[0][0] < due:
            libbpf.push(self._fds["path_free"], ct.c_uint32(self._retired.pop(0)[1]))

    # --- pods and peers

    def pods(self) -> dict[int, PodEntry]:
        """Index -> pod, as the programs know them; names only of pods this process has set."""
        return {
            index: PodEntry(
                ifindex=pod.ifindex,
                mac=bytes(pod.mac),
                addresses=tuple(a for a in map(unpack, pod.address) if a is not None),
                name=self._names.get(index, ""),
            )
            for index, pod in enumerate(self._pods)
            if pod.ifindex
        }

    def pod_generation(self, index: int) -> int:
        """The number that entries of this pod must carry to be used."""
        generation: int = self._pods[index].generation
        return generation

    def set_pod(self, index: int, entry: PodEntry) -> None:
        """Tell the programs of a pod; entries of the slot's former owner are stale from now on."""
        if len({a.version for a in entry.addresses}) != len(entry.addresses):
            raise OncacheError(
                f"pod {entry.name or entry.ifindex} has two addresses of one family",
                hint="only one IPv4 and one IPv6 address of a pod can be accelerated",
            )
        self.clear_pod(index)
        pod = self._pods[index]
        pod.mac = (ct.c_uint8 * 6).from_buffer_copy(entry.mac)
        for slot, address in enumerate(sorted(entry.addresses, key=lambda a: a.version)):
            pod.address[slot] = pack(type(pod.address[slot]), address)
        self._bump(pod)
        pod.ifindex = entry.ifindex
        self._devices.update(ct.c_uint32(entry.ifindex), ct.c_uint32(index))
        self._names[index] = entry.name

    def clear_pod(self, index: int) -> None:
        """Forget a pod. Its device's entry goes only if it still names this pod."""
        pod = self._pods[index]
        key = ct.c_uint32(pod.ifindex)
        pod.ifindex = 0
        self._bump(pod)
        owner = self._devices.lookup(key)
        if owner is not None and owner.value == index:
            self._devices.delete(key)
        for slot in range(len(pod.address)):
            pod.address[slot] = type(pod.address[slot])()
        self._names.pop(index, None)

    def peers(self) -> frozenset[Address]:
        """Tunnel addresses of the nodes that packets are learned from."""
        found = (unpack(key) for key, _ in self._peers.items())
        return frozenset(address for address in found if address is not None)

    def set_peers(self, wanted: Iterable[Address]) -> None:
        """Learn from these nodes and no others (the tunnel device's forwarding table)."""
        wanted, have = frozenset(wanted), self.peers()
        key_type = self._types["peers"][0]
        for address in have - wanted:
            self._peers.delete(pack(key_type, address))
        for address in wanted - have:
            self._peers.update(pack(key_type, address), ct.c_uint32(1))

    # --- attaching

    def attach_uplink(self, ifindex: int) -> None:
        """Put to_wire and from_wire on the uplink, or this build's in place of older ones."""
        self._attach(ifindex, _UPLINK_HOOKS)

    def attach_pod(self, ifindex: int) -> None:
        """Put to_pod and from_pod on a pod's host side device."""
        self._attach(ifindex, _POD_HOOKS)

    def _attach(self, ifindex: int, hooks: tuple[str, ...]) -> None:
        if self._object is None:
            raise NotLoadedError("this process has no programs", hint="start the node agent")
        for hook in hooks:
            pin = self.directory / _LINKS / f"{hook}-{ifindex}"
            if attach.attach(ifindex, _HOOKS[hook], self._object.programs[hook], pin):
                (self.directory / _QDISCS / str(ifindex)).mkdir(parents=True, exist_ok=True)
            if not libbpf.tcx_available():
                pin.mkdir(exist_ok=True)

    def detach(self, ifindex: int) -> None:
        """Take our programs off a device, or clear up after one that is gone."""
        for pin in sorted((self.directory / _LINKS).glob(f"*-{ifindex}"), reverse=True):
            _detach(self.directory, pin)

    def attached(self) -> Attached:
        """Devices that have both our programs, read from the kernel."""
        on: dict[str, set[int]] = {hook: set() for hook in _HOOKS}
        for pin in (self.directory / _LINKS).iterdir():
            hook, ifindex = _link_name(pin)
            if attach.is_attached(ifindex, _HOOKS[hook], pin):
                on[hook].add(ifindex)
        return Attached(
            uplinks=frozenset(on["to_wire"] & on["from_wire"]),
            pods=frozenset(on["to_pod"] & on["from_pod"]),
        )

    def pinned_devices(self) -> frozenset[int]:
        """Every interface index we have a pin for, its device gone or not."""
        return frozenset(_link_name(pin)[1] for pin in (self.directory / _LINKS).iterdir())

    def programs(self) -> dict[str, libbpf.ProgInfo]:
        """Name -> what the kernel says of each program this process has loaded."""
        found = self._object.programs if self._object else {}
        return {hook: libbpf.prog_info(fd) for hook, fd in found.items()}

    def program_fds(self) -> dict[str, int]:
        """Name -> descriptor of each program this process has loaded, for test runs."""
        return dict(self._object.programs) if self._object else {}

    # --- reading

    def counters(self) -> dict[str, Any]:
        """Packets by outcome, all CPUs together; names as in bpf/lib/counters.h."""
        return maps.total(self._counters.read(0))

    def paths(self) -> list[PathRow]:
        """The egress cache: every path in use."""
        return [self._path_row(path, index) for path, index in self._index.items()]

    def _path_row(self, path: Any, index: int) -> PathRow:
        state, overlay = self._states[index], path.header
        is_ip4 = path.length == ct.sizeof(overlay.v4)
        h = overlay.v4 if is_ip4 else overlay.v6
        flow = 0 if is_ip4 else h.ip.flow
        return PathRow(
            index=index,
            generation=state.generation,
            remote=IPv4Address(h.ip.daddr) if is_ip4 else IPv6Address(bytes(h.ip.daddr)),
            local=IPv4Address(h.ip.saddr) if is_ip4 else IPv6Address(bytes(h.ip.saddr)),
            next_hop_mac=_mac(h.eth.dst),
            source_mac=_mac(h.eth.src),
            device=path.ifindex,
            vni=h.vxlan.vni >> 8,
            port=h.udp.dport,
            ttl=h.ip.ttl if is_ip4 else h.ip.hop_limit,
            tos=h.ip.tos if is_ip4 else flow >> 20 & 0xFF,
            df=bool(h.ip.frag_off & 0x4000) if is_ip4 else True,
            inner_source_mac=_mac(h.inner.src),
            inner_destination_mac=_mac(h.inner.dst),
            mtu=state.mtu or self._config.mtu,
        )

    def flows(self) -> Iterator[FlowRow]:
        """The filter cache, in no order."""
        return self.flows_as(ROWS)

    def flows_as(self, form: Form[S, H, R]) -> Iterator[R]:
        """The filter cache as something else than rows."""
        entries = self._flows.columns(KEY_COLUMNS, FLOW_COLUMNS)
        return starmap(reader(self._validity(), form), entries)

    def flow_count(self) -> int:
        """How many entries the filter cache holds."""
        count: int = self._flows.count()
        return count

    def explain(
        self, protocol: str, source: Address, sport: int, destination: Address, dport: int
    ) -> Explanation:
        """Would the next packet of this flow be fast on this node, and if not, why not?

        For ICMP both ports are the echo identifier and the packet is a request.
        """
        down = self._down()
        if down:
            return Explanation(False, down, ("no packet is fast on this node now",))
        owners = {a: (i, p) for i, p in self.pods().items() for a in p.addresses}
        if source not in owners and destination not in owners:
            return Explanation(False, "unknown_pod", ("neither end is a known pod of this node",))
        outward = source in owners
        here, there = (source, destination) if outward else (destination, source)
        ports = (sport, dport) if outward else (dport, sport)
        if protocol == "icmp":
            ports = (sport, 0) if outward else (0, sport)
            protocol = "icmp6" if source.version == 6 else protocol
        if outward and destination in owners:
            return Explanation(False, "miss", ("both ends are pods of this node",))
        key = self._flow_key(protocol, here, ports[0], there, ports[1])
        flow = self._flows.lookup(key)
        if flow is None:
            return Explanation(False, "miss", ("no entry: no packet was learned, or evicted",))
        row = reader(self._validity(), ROWS)(
            maps.columns(type(key), KEY_COLUMNS).unpack(bytes(key)),
            maps.columns(type(flow), FLOW_COLUMNS).unpack(bytes(flow)),
        )
        half = row.egress if outward else row.ingress
        return Explanation(not half.reason, half.reason, _details(half, outward))

    def _down(self) -> str:
        if not self._config.deadline:
            return "disabled"
        return "deadline" if self.deadline_margin() < 0 else ""

    def _flow_key(
        self, protocol: str, local: Address, lport: int, remote: Address, rport: int
    ) -> Any:
        key = self._types["filter_cache"][0]()
        key.local, key.remote = pack(type(key.local), local), pack(type(key.remote), remote)
        key.local_port, key.remote_port = lport, rport
        key.protocol = PROTOCOLS[protocol]
        return key

    def _validity(self) -> Validity:
        return Validity(
            now=time.clock_gettime_ns(time.CLOCK_MONOTONIC),
            lease=self._config.lease,
            down=self._down(),
            generation=self._config.generation,
            pods=[pod.generation for pod in self._pods],
            paths=[state.generation for state in self._states],
        )


_TYPED = (
    "config",
    "counters",
    "ingress_cache",
    "path_states",
    "pod_devices",
    "peers",
    "egress_cache",
    "path_index",
    "filter_cache",
)


def _details(half: HalfRow, outward: bool) -> tuple[str, ...]:
    lines = [f"direction {'egress' if outward else 'ingress'}, entry {half.state}"]
    if half.state != "empty":
        lines.append(f"learned {half.age_seconds:.1f} s ago, {half.hops} hop(s)")
        lines.append(f"pod {half.pod}" + (f", path {half.path}" if outward else ""))
    if half.peer:
        lines.append(f"from node {half.peer}")
    return tuple(lines)


def _mac(value: Any) -> str:
    return bytes(value).hex(":")


def _mark(mask: int) -> tuple[int, int]:
    """(shift, usable nonces) of a contiguous mask of 8 to 10 bits."""
    shift = (mask & -mask).bit_length() - 1 if mask else 0
    nonces = mask >> shift
    if not 8 <= nonces.bit_length() <= 10 or nonces & (nonces + 1) or mask >> 32:
        raise ConfigError(
            f"mark_mask {mask:#x} is not 8 to 10 contiguous bits", hint="use for example 0xff"
        )
    return shift, nonces


def _pinned(programs: libbpf.Object) -> tuple[str, ...]:
    """The maps with a name of their own; sections of constants are not among them."""
    return tuple(sorted(name for name in programs.map_names if "." not in name))


def _resize(programs: libbpf.Object, limits: Limits) -> None:
    sizes = (
        (limits.pods, ("ingress_cache", "pod_devices")),
        (limits.peers, ("egress_cache", "path_states", "path_index", "path_free", "peers")),
        (limits.flows, ("filter_cache",)),
    )
    for entries, names in sizes:
        for name in names:
            programs.resize(name, entries)


def _reuse(programs: libbpf.Object, name: str, pin: Path) -> None:
    fd = libbpf.get(pin)
    try:
        programs.reuse(name, fd)
    finally:
        os.close(fd)


def _pin_maps(programs: libbpf.Object, home: Path) -> None:
    home.mkdir(mode=0o700, exist_ok=True)
    for name in _pinned(programs):
        if not (home / name).exists():
            libbpf.pin(programs.maps[name], home / name)


def _refuse_other_layouts(bpf_dir: Path, wanted: str) -> None:
    bpf_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse(bpf_dir, (home.name for home in bpf_dir.glob(_MAPS + "*")), wanted)


def _refuse(bpf_dir: Path, homes: Iterable[str], wanted: str) -> None:
    others = sorted(home for home in homes if home != wanted)
    if others:
        raise LayoutError(
            f"{bpf_dir} holds the maps of another build ({others[0]}, this one needs {wanted})",
            hint="run 'oncache detach' (traffic goes on by the base path), then start again",
        )


def _layout(programs: libbpf.Object) -> str:
    """The name of the directory in which maps of this build's layout are pinned."""
    return _MAPS + programs.btf.layout_hash(_pinned(programs))


def _home(bpf_dir: Path) -> Path:
    # Not glob(), which takes a directory that we may not read for an empty one.
    try:
        homes = sorted(home for home in bpf_dir.iterdir() if home.name.startswith(_MAPS))
    except (FileNotFoundError, NotADirectoryError):
        homes = []
    if not homes:
        raise NotLoadedError(
            f"nothing is loaded under {bpf_dir}", hint="start the agent: fabric-agent node -c FILE"
        )
    return homes[0]


def _detach(bpf_dir: Path, pin: Path) -> None:
    """Undo one attachment; with the last filter on a device goes the qdisc we made for it."""
    hook, ifindex = _link_name(pin)
    note = bpf_dir / _QDISCS / str(ifindex)
    attach.detach(ifindex, _HOOKS[hook], pin, created_qdisc=note.exists())
    if pin.is_dir():
        pin.rmdir()
    if note.exists() and not list(pin.parent.glob(f"*-{ifindex}")):
        note.rmdir()


def _link_name(pin: Path) -> tuple[str, int]:
    hook, _, ifindex = pin.name.rpartition("-")
    return hook, int(ifindex)
