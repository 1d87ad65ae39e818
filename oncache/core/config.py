# SPDX-License-Identifier: Apache-2.0
"""The one configuration file, read and checked completely before anything is touched.

Every complaint names the key by its path in the file (``overlay.device``) and says what would be
right. What comes out is frozen and passed down; nothing below reads the file or the environment.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, ip_address
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import yaml

from oncache.core.errors import ConfigError
from oncache.core.net import IpAddress

T = TypeVar("T")

IFNAME = re.compile(r"[^\s/:]{1,15}")
VNI_MAX = (1 << 24) - 1
MARK_BITS = range(8, 11)


class PlaneKind(StrEnum):
    """Which data path a node runs."""

    ONCACHE = "oncache"
    XMASQ = "xmasq"


class GuardMode(StrEnum):
    """What becomes of tunnel packets from senders that are not our tunnel peers."""

    OFF = "off"  # what the base path makes of them
    OBSERVE = "observe"  # counted
    ENFORCE = "enforce"  # counted and dropped


@dataclass(frozen=True)
class Node:
    """This machine: ``uplink`` is the device that carries the tunnel."""

    uplink: str
    name: str


@dataclass(frozen=True)
class ExistingOverlay:
    """An overlay that somebody else made, known by its tunnel device."""

    device: str


@dataclass(frozen=True)
class Peer:
    """Another node of the built-in overlay: its uplink's address and its pods."""

    address: IPv4Address
    pod_cidr: IPv4Network


@dataclass(frozen=True)
class BuiltinOverlay:
    """A VXLAN that the agent makes itself; ``pod_cidr`` is this node's share of the pods."""

    vni: int
    port: int
    pod_cidr: IPv4Network
    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class Limits:
    """Sizes of the maps, in entries."""

    pods: int = 1024
    peers: int = 4096
    flows: int = 65536


@dataclass(frozen=True)
class Guard:
    """The XDP guard of the uplink; ``peers`` are welcome beside those the tunnel device knows."""

    mode: GuardMode = GuardMode.OFF
    peers: tuple[IpAddress, ...] = ()


@dataclass(frozen=True)
class Config:
    """Everything the file says, with the defaults filled in. ``slices_node`` is this node's name in
    the fabric whose slices it takes part in, None if it does not."""

    node: Node
    overlay: ExistingOverlay | BuiltinOverlay
    plane: PlaneKind = PlaneKind.ONCACHE
    discover_pods: bool = True
    run_dir: Path = Path("/run/oncache")
    bpf_dir: Path = Path("/sys/fs/bpf/oncache")
    store: str = "dir:/var/lib/oncache/store"
    limits: Limits = field(default_factory=Limits)
    guard: Guard = field(default_factory=Guard)
    deadline_seconds: float = 5.0
    lease_seconds: float = 10.0
    mark_mask: int = 0xFF
    slices_node: str | None = None


def load(path: Path) -> Config:
    """Read and check ``path``; ConfigError names the key that is wrong and the remedy."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(
            f"cannot read {path}: {reason}", hint="name a configuration file with -c FILE"
        ) from error
    return parse(text, str(path))


def parse(text: str, source: str = "configuration") -> Config:
    """Check a configuration given as text; ``source`` is its name in messages."""
    try:
        document = yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        raise ConfigError(
            f"{source}{line}: {getattr(error, 'problem', None) or 'not valid YAML'}",
            hint="correct the YAML there",
        ) from error
    if not isinstance(document, dict):
        raise ConfigError(
            f"{source}: not a table of settings", hint="begin with 'node: {uplink: eth0}'"
        )
    return _config(Section("", document))


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML lets the last of two equal keys win in silence; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key '{key.value}' is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class Section:
    """One table of the file: values are taken by name, and what nobody may take is an error."""

    def __init__(self, path: str, values: dict[Any, Any]) -> None:
        self.path = path
        self._values = values

    def name(self, key: object) -> str:
        """The path of ``key`` from the top of the file."""
        return f"{self.path}.{key}" if self.path else str(key)

    def only(self, *valid: str) -> "Section":
        """Refuse every other key, naming the nearest valid one."""
        for key in self._values:
            if key not in valid:
                near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
                meant = f"did you mean '{self.name(near[0])}'? " if near else ""
                raise ConfigError(
                    f"unknown key {self.name(key)}", hint=f"{meant}valid here: {', '.join(valid)}"
                )
        return self

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, read: Callable[[str, Any], T], default: T | None = None) -> T:
        """The value of ``key`` through ``read(path, raw)``; without a default it must be there."""
        if key in self._values:
            return read(self.name(key), self._values[key])
        if default is None:
            raise ConfigError(f"{self.name(key)} is missing", hint=f"add {self.name(key)}")
        return default

    def section(self, key: str) -> "Section":
        """The table under ``key``; an empty one if the key is absent."""
        return Section(self.name(key), self.take(key, _table, {}))


def _config(top: Section) -> Config:
    top.only(
        *("node", "overlay", "plane", "pods", "run_dir", "bpf_dir", "store", "limits", "guard"),
        *("deadline_seconds", "lease_seconds", "mark_mask", "slices"),
    )
    default = Config(Node("", ""), ExistingOverlay(""))
    config = Config(
        node=_node(top.section("node")),
        overlay=_overlay(top.section("overlay")),
        plane=top.take("plane", _plane, default.plane),
        discover_pods=top.section("pods").only("discover").take("discover", _boolean, True),
        run_dir=top.take("run_dir", _directory, default.run_dir),
        bpf_dir=top.take("bpf_dir", _directory, default.bpf_dir),
        store=top.take("store", _store, default.store),
        limits=_limits(top.section("limits")),
        guard=_guard(top.section("guard")),
        deadline_seconds=top.take("deadline_seconds", _seconds(0.5, 60), default.deadline_seconds),
        # conntrack may see a flow only every second lease, and gives a young UDP flow 30 s.
        lease_seconds=top.take("lease_seconds", _seconds(0.1, 14), default.lease_seconds),
        mark_mask=top.take("mark_mask", _mark_mask, default.mark_mask),
        slices_node=_slices_node(top.section("slices")) if "slices" in top else None,
    )
    if config.run_dir.is_relative_to(config.bpf_dir):
        raise ConfigError(
            f"run_dir {config.run_dir} lies inside bpf_dir",
            hint="a bpf file system holds pins only; name a directory such as /run/oncache",
        )
    return config


def _node(section: Section) -> Node:
    section.only("uplink", "name")
    return Node(section.take("uplink", _device), section.take("name", _string, os.uname().nodename))


def _slices_node(section: Section) -> str:
    return section.only("node").take("node", _string)


def _overlay(section: Section) -> ExistingOverlay | BuiltinOverlay:
    section.only("device", "builtin")
    if ("device" in section) == ("builtin" in section):
        raise ConfigError(
            "overlay needs exactly one of overlay.device and overlay.builtin",
            hint="name the overlay's tunnel device: 'overlay: {device: flannel.1}'",
        )
    if "device" in section:
        return ExistingOverlay(section.take("device", _device))
    return _builtin(section.section("builtin"))


def _builtin(section: Section) -> BuiltinOverlay:
    section.only("vni", "port", "pod_cidr", "peers")
    overlay = BuiltinOverlay(
        vni=section.take("vni", _integer(1, VNI_MAX)),
        port=section.take("port", _integer(1, 65535), 4789),
        pod_cidr=section.take("pod_cidr", _network),
        peers=section.take("peers", _peers),
    )
    ranges = [overlay.pod_cidr, *(peer.pod_cidr for peer in overlay.peers)]
    _refuse_overlaps(section.name("peers"), ranges)
    _refuse_repeats(section.name("peers"), [peer.address for peer in overlay.peers])
    return overlay


def _peers(path: str, raw: Any) -> tuple[Peer, ...]:
    if not isinstance(raw, list):
        raise _wrong(path, raw, "a list of {address, pod_cidr}")
    named = [(f"{path}[{index}]", peer) for index, peer in enumerate(raw)]
    return tuple(_peer(Section(name, _table(name, peer))) for name, peer in named)


def _peer(section: Section) -> Peer:
    section.only("address", "pod_cidr")
    return Peer(section.take("address", _address), section.take("pod_cidr", _network))


def _refuse_overlaps(path: str, ranges: Sequence[IPv4Network]) -> None:
    for one, other in combinations(ranges, 2):
        if one.overlaps(other):
            raise ConfigError(
                f"{path}: {one} and {other} overlap", hint="give every node its own pod_cidr"
            )


def _refuse_repeats(path: str, addresses: Sequence[IpAddress]) -> None:
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"{path}: {address} is given twice", hint="list every node once")


def _limits(section: Section) -> Limits:
    section.only("pods", "peers", "flows")
    default = Limits()
    return Limits(
        pods=section.take("pods", _integer(1, 1 << 16), default.pods),
        peers=section.take("peers", _integer(1, 1 << 16), default.peers),
        flows=section.take("flows", _integer(64, 1 << 24), default.flows),
    )


def _guard(section: Section) -> Guard:
    section.only("mode", "peers")
    guard = Guard(
        section.take("mode", _guard_mode, GuardMode.OFF), section.take("peers", _guard_peers, ())
    )
    _refuse_repeats(section.name("peers"), guard.peers)
    return guard


def _guard_mode(path: str, raw: Any) -> GuardMode:
    if raw is False:  # what YAML 1.1 makes of a bare "off"
        return GuardMode.OFF
    if raw not in list(GuardMode):
        raise _wrong(path, raw, "off, observe or enforce")
    return GuardMode(raw)


def _guard_peers(path: str, raw: Any) -> tuple[IpAddress, ...]:
    if not isinstance(raw, list):
        raise _wrong(path, raw, "a list of addresses")
    return tuple(_guard_peer(f"{path}[{index}]", peer) for index, peer in enumerate(raw))


def _guard_peer(path: str, raw: Any) -> IpAddress:
    wanted = "the tunnel address of one node, such as 192.0.2.7 or 2001:db8::7"
    try:
        address = ip_address(_string(path, raw))
    except ValueError as error:
        raise _wrong(path, raw, wanted) from error
    if address.is_multicast or address.is_unspecified or address.is_loopback:
        raise _wrong(path, raw, wanted)
    if address.version == 6 and (address.scope_id or address.ipv4_mapped):
        raise _wrong(path, raw, wanted)
    return address


def _wrong(path: str, raw: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{path} is {raw!r}", hint=f"it must be {wanted}")


def _table(path: str, raw: Any) -> dict[Any, Any]:
    if not isinstance(raw, dict):
        raise _wrong(path, raw, "a table of settings")
    return raw


def _string(path: str, raw: Any) -> str:
    if not isinstance(raw, str) or not raw:
        raise _wrong(path, raw, "a word (quote it if YAML reads it as something else)")
    return raw


def _device(path: str, raw: Any) -> str:
    if not isinstance(raw, str) or not IFNAME.fullmatch(raw):
        raise _wrong(path, raw, "the name of a network device, 1 to 15 characters")
    return raw


def _boolean(path: str, raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise _wrong(path, raw, "true or false")
    return raw


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def read(path: str, raw: Any) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int) or not low <= raw <= high:
            raise _wrong(path, raw, f"a whole number from {low} to {high}")
        return raw

    return read


def _seconds(low: float, high: float) -> Callable[[str, Any], float]:
    def read(path: str, raw: Any) -> float:
        number = isinstance(raw, int | float) and not isinstance(raw, bool) and math.isfinite(raw)
        if not number or not low <= raw <= high:
            raise _wrong(path, raw, f"a number of seconds from {low} to {high}")
        return float(raw)

    return read


def _directory(path: str, raw: Any) -> Path:
    if not isinstance(raw, str) or not raw.startswith("/"):
        raise _wrong(path, raw, "an absolute path")
    return Path(os.path.normpath(raw))


def _store(path: str, raw: Any) -> str:
    if not isinstance(raw, str) or not raw.startswith(("dir:/", "etcd://")):
        raise _wrong(path, raw, "dir:/an/absolute/path or etcd://host:port")
    return raw


def _plane(path: str, raw: Any) -> PlaneKind:
    if raw == PlaneKind.XMASQ:
        raise ConfigError(f"{path}: xmasq is not available in this version", hint="use oncache")
    if raw != PlaneKind.ONCACHE:
        raise _wrong(path, raw, "oncache")
    return PlaneKind.ONCACHE


def _mark_mask(path: str, raw: Any) -> int:
    number = isinstance(raw, int) and not isinstance(raw, bool) and 0 < raw < 1 << 32
    if not number or not _contiguous(raw) or raw.bit_count() not in MARK_BITS:
        raise _wrong(path, raw, "8 to 10 neighbouring bits of a 32-bit mark, such as 0xff")
    return int(raw)


def _contiguous(mask: int) -> bool:
    return (mask | mask - 1) + 1 & mask == 0


def _address(path: str, raw: Any) -> IPv4Address:
    try:
        return IPv4Address(_string(path, raw))
    except ValueError as error:
        raise _wrong(path, raw, "an IPv4 address such as 192.0.2.1") from error


def _network(path: str, raw: Any) -> IPv4Network:
    try:
        network = IPv4Network(_string(path, raw))
    except ValueError as error:
        raise _wrong(path, raw, "an IPv4 network such as 10.244.1.0/24, host bits zero") from error
    if network.prefixlen > 30:
        raise _wrong(path, raw, "a network with room for pods, /30 or larger")
    return network


def keys(config: Config) -> Iterator[tuple[str, str]]:
    """Pairs of key and value as the operator would write them, for ``check-config``."""
    yield "node.uplink", config.node.uplink
    yield "node.name", config.node.name
    match config.overlay:
        case ExistingOverlay(device):
            yield "overlay.device", device
        case BuiltinOverlay(vni, port, pod_cidr, peers):
            yield "overlay.builtin", f"vni {vni}, port {port}, {pod_cidr}, {len(peers)} peers"
    yield "plane", config.plane
    yield "guard", f"{config.guard.mode}, {len(config.guard.peers)} peers of its own"
    yield "run_dir", str(config.run_dir)
    yield "bpf_dir", str(config.bpf_dir)
    if config.slices_node is not None:
        yield "slices.node", f"{config.slices_node} in {config.store}"
