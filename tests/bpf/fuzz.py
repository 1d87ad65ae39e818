# SPDX-License-Identifier: Apache-2.0
"""Millions of damaged packets through the real programs, judged by a reference of its own.

    python -m tests.bpf.fuzz [--packets N] [--seed S]          the last line is one JSON object
    python -m tests.bpf.fuzz --variant V --seed S --only N     one packet again

This side knows how to set up a node with warm flows and what valid packets look like; fuzz.c
damages them and judges.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_NOP, IPOption_Router_Alert
from scapy.layers.inet6 import (
    ICMPv6EchoReply,
    ICMPv6EchoRequest,
    ICMPv6ND_NS,
    ICMPv6PacketTooBig,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from bench import rig as lab
from bench.rig import Rig
from netns_tests.nodes import flat
from oncache.core import libbpf
from oncache.core.addresses import V4_MAPPED
from oncache.plane import PodEntry

POD6, REMOTE6 = "fd00:1::11", "fd00:2::11"
NODE6, PEER6, STRANGER6 = "fd00:99::1", "fd00:99::2", "fd00:99::3"
SOURCE = Path(__file__).with_name("fuzz.c")
CFLAGS = ["-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror"]
ECHO = 77
PACKETS = 5_000_000


@dataclass(frozen=True)
class Variant:
    """How the tunnel device is set, and how many hops the base path takes."""

    outer6: bool = False
    tos: int = 0
    ttl: int = 64
    df: bool = False
    label: int = 0
    zero_sum6_tx: bool = False
    zero_sum6_rx: bool = False
    tos_inherit: bool = False
    ttl_inherit: bool = False
    df_inherit: bool = False
    hops: int = 1


VARIANTS = (
    Variant(),
    Variant(outer6=True, label=0x12345),
    Variant(tos_inherit=True, ttl_inherit=True, df_inherit=True),
    Variant(tos=0x48, ttl=17, df=True, hops=2),
    Variant(outer6=True, tos_inherit=True, ttl_inherit=True, zero_sum6_tx=True, zero_sum6_rx=True),
    Variant(outer6=True, tos=0x48, ttl=17, hops=2),
)


@dataclass(frozen=True)
class Result:
    """What one or more runs of the driver counted; `moved` are the counters of the programs."""

    packets: int = 0
    violations: int = 0
    hits: int = 0
    learned: int = 0
    refused: int = 0
    moved: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Result") -> "Result":
        return Result(
            packets=self.packets + other.packets,
            violations=self.violations + other.violations,
            hits=self.hits + other.hits,
            learned=self.learned + other.learned,
            refused=self.refused + other.refused,
            moved=self.moved + other.moved,
        )


# --- valid packets of every kind


def _pod_frame(ip: Packet, l4: Packet, payload: bytes = b"ping") -> Packet:
    return Ether(src=lab.POD_MAC, dst=lab.GATEWAY_MAC) / ip / l4 / Raw(payload)


def _remote_frame(ip: Packet, l4: Packet, payload: bytes = b"pong") -> Packet:
    """As its own node sends it through the tunnel."""
    return Ether(src=lab.PEER_TUNNEL_MAC, dst=lab.TUNNEL_MAC) / ip / l4 / Raw(payload)


@dataclass(frozen=True)
class Side:
    """One direction: how frames and ports look."""

    frame: Callable[..., Packet]
    ends: tuple[str, str]
    ends6: tuple[str, str]
    ports: tuple[int, int]
    echo: int
    echo6: type[Packet]

    def ip(self, **fields: Any) -> Packet:
        return IP(src=self.ends[0], dst=self.ends[1], **fields)

    def ip6(self, **fields: Any) -> Packet:
        return IPv6(src=self.ends6[0], dst=self.ends6[1], fl=0x54321, **fields)

    def udp(self, **fields: Any) -> Packet:
        return UDP(sport=self.ports[0], dport=self.ports[1], **fields)

    def tcp(self, flags: str = "A", **fields: Any) -> Packet:
        return TCP(sport=self.ports[0], dport=self.ports[1], flags=flags, seq=1, ack=2, **fields)


OUT = Side(
    _pod_frame,
    (lab.POD, lab.REMOTE),
    (POD6, REMOTE6),
    (lab.SPORT, lab.DPORT),
    8,
    ICMPv6EchoRequest,
)
IN = Side(
    _remote_frame,
    (lab.REMOTE, lab.POD),
    (REMOTE6, POD6),
    (lab.DPORT, lab.SPORT),
    0,
    ICMPv6EchoReply,
)
TIMESTAMP = [("NOP", None), ("NOP", None), ("Timestamp", (1, 2))]


def _flow(side: Side) -> Iterator[Packet]:
    """IPv4 between the two pods; the first three are the flows that are warm."""
    frame, ip, udp, tcp = side.frame, side.ip, side.udp(), side.tcp()
    yield frame(ip(), udp)
    yield frame(ip(), tcp)
    yield frame(ip(), ICMP(type=side.echo, id=ECHO, seq=1))
    yield frame(ip(flags="DF", tos=2), side.tcp("PA", options=TIMESTAMP))
    yield frame(ip(), udp, b"")
    yield frame(ip(), udp, b"odd")
    yield frame(ip(), side.udp(chksum=0))
    yield frame(ip(), udp, b"x" * (lab.MTU - 28))
    yield frame(ip(), udp, b"x" * (lab.MTU - 27))
    yield frame(ip(tos=0xB9, ttl=3), udp)
    yield frame(ip(flags="MF"), udp)
    yield frame(ip(flags="MF", frag=10), udp)
    yield frame(ip(frag=10), udp)
    yield frame(ip(options=[IPOption_Router_Alert()]), udp)
    yield frame(ip(options=[IPOption_NOP()] * 40), tcp)
    yield from (frame(ip(), side.tcp(flags)) for flags in ("S", "SA", "FA", "R", "RA", ""))
    yield frame(ip(), UDP(sport=1, dport=2))
    yield frame(ip(), ICMP(type=3, code=4))
    yield frame(ip(proto=132), Raw(bytes(12)))
    yield frame(ip(proto=47), Raw(bytes(8)))


def _flow6(side: Side) -> Iterator[Packet]:
    """The same over IPv6."""
    frame, ip, udp, tcp = side.frame, side.ip6, side.udp(), side.tcp()
    yield frame(ip(), udp)
    yield frame(ip(), tcp)
    yield frame(ip(), side.echo6(id=ECHO, seq=1))
    yield frame(ip(tc=2), side.tcp("PA", options=TIMESTAMP))
    yield frame(ip(), udp, b"")
    yield frame(ip(), udp, b"odd")
    yield frame(ip(), side.udp(chksum=0))
    yield frame(ip(), udp, b"x" * (lab.MTU - 48))
    yield frame(ip(), udp, b"x" * (lab.MTU - 47))
    yield frame(ip(tc=0xB9, hlim=3), udp)
    yield frame(ip(), IPv6ExtHdrHopByHop() / udp)
    yield frame(ip(), IPv6ExtHdrRouting() / udp)
    yield frame(ip(), IPv6ExtHdrDestOpt() / tcp)
    yield frame(ip(), IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / IPv6ExtHdrFragment(m=1) / udp)
    yield frame(ip(), IPv6ExtHdrHopByHop() / IPv6ExtHdrRouting() / IPv6ExtHdrDestOpt() / udp)
    yield frame(ip(), IPv6ExtHdrFragment(m=1) / udp)
    yield frame(ip(), IPv6ExtHdrFragment(offset=9) / udp)
    yield from (frame(ip(), side.tcp(flags)) for flags in ("S", "SA", "FA", "R"))
    yield frame(ip(), UDP(sport=1, dport=2))
    yield frame(ip(), ICMPv6ND_NS(tgt=REMOTE6))
    yield frame(ip(), ICMPv6PacketTooBig())
    yield frame(ip(nh=132), Raw(bytes(12)))


def _odd_from_pod() -> Iterator[Packet]:
    mapped = IPv6(src=f"::ffff:{lab.POD}", dst=f"::ffff:{lab.REMOTE}")
    yield Ether(src=lab.POD_MAC, dst="ff:ff:ff:ff:ff:ff") / ARP(pdst=lab.REMOTE)
    yield Ether(src=lab.POD_MAC, dst=lab.GATEWAY_MAC) / Dot1Q(vlan=5) / OUT.ip() / OUT.udp()
    yield OUT.frame(mapped, OUT.udp())
    yield OUT.frame(IN.ip(), OUT.udp())


def _wrap(inner: Packet, ip: Packet, chksum: int | None = None, vni: int = lab.VNI) -> Packet:
    """A tunnel packet; without a checksum over IPv4, with one over IPv6."""
    udp = UDP(sport=50000, dport=lab.PORT, chksum=chksum)
    if chksum is None and IP in ip:
        udp.chksum = 0
    return Ether(src=lab.PEER_MAC, dst=lab.NODE_MAC) / ip / udp / VXLAN(vni=vni, flags=8) / inner


def _odd_from_wire(outer: Callable[..., Packet], field: str) -> Iterator[Packet]:
    inner, unsummed = IN.frame(IN.ip(), IN.udp()), IN.frame(IN.ip(), IN.udp(chksum=0))
    stranger = lab.STRANGER if field == "tos" else STRANGER6
    mapped = IPv6(src=f"::ffff:{lab.PEER}", dst=f"::ffff:{lab.NODE}")
    yield _wrap(unsummed, outer(), 7)
    yield _wrap(inner, outer(), 7)
    yield _wrap(inner, outer(), 0)
    yield _wrap(IN.frame(IN.ip(tos=2), IN.tcp()), outer(**{field: 3}))
    yield _wrap(IN.frame(IN.ip6(tc=1), IN.tcp()), outer(**{field: 3}))
    yield _wrap(inner, outer(src=stranger))
    yield _wrap(inner, outer(), vni=lab.VNI + 1)
    yield _wrap(inner, mapped)
    yield _wrap(Ether(dst=lab.TUNNEL_MAC) / ARP(), outer())
    yield Ether(dst=lab.NODE_MAC) / outer() / TCP() / Raw(bytes(60))
    yield Ether(dst=lab.NODE_MAC) / Dot1Q(vlan=5) / outer() / UDP(dport=lab.PORT) / Raw(bytes(60))


def kinds(outer6: bool) -> list[tuple[str, Packet]]:
    """(program, packet): what both first hooks may see."""

    def outer(**fields: Any) -> Packet:
        if outer6:
            return IPv6(**{"src": PEER6, "dst": NODE6, **fields})
        return IP(**{"src": lab.PEER, "dst": lab.NODE, "id": 1, **fields})

    outward = [*_flow(OUT), *_flow6(OUT), *_odd_from_pod()]
    inward = [_wrap(inner, outer()) for inner in (*_flow(IN), *_flow6(IN))]
    inward += _odd_from_wire(outer, "tc" if outer6 else "tos")
    return [*(("from_pod", made) for made in outward), *(("from_wire", made) for made in inward)]


# --- the driver


def build(folder: Path) -> Path:
    """Compile the driver into a folder."""
    made = folder / "fuzz"
    command = [os.environ.get("CC", "gcc"), *CFLAGS, "-o", str(made), str(SOURCE), "-lbpf"]
    subprocess.run(command, check=True)
    return made


def _set_up(rig: Rig, variant: Variant) -> None:
    """A dual-stack pod; the driver warms its flows."""
    rig.reset()
    plane, pods = rig.plane, (IPv4Address(lab.POD), IPv6Address(POD6))
    device = {
        name: value
        for name, value in asdict(variant).items()
        if name.endswith("inherit") or name.startswith("zero")
    }
    # No flow is to age meanwhile.
    rig.configure(local=ip_address(_node(variant)), lease_seconds=86400.0, **device)
    plane.set_peers([ip_address(_peer(variant))])
    plane.set_pod(0, PodEntry(rig.pod, bytes.fromhex(lab.POD_MAC.replace(":", "")), pods))


def _node(variant: Variant) -> str:
    return NODE6 if variant.outer6 else lab.NODE


def _peer(variant: Variant) -> str:
    return PEER6 if variant.outer6 else lab.PEER


def _address(text: str) -> str:
    """As the driver reads it: 16 bytes in hex, IPv4 mapped."""
    address = ip_address(text)
    return (b"" if address.version == 6 else V4_MAPPED).hex() + address.packed.hex()


def _mac(text: str) -> int:
    return int(text.replace(":", ""), 16)


def _settings(rig: Rig, variant: Variant) -> dict[str, int | str]:
    settings = rig.settings
    return {
        **{name: int(value) for name, value in asdict(variant).items()},
        "uplink": rig.uplink,
        "pod_device": rig.pod,
        "other_device": rig.other,
        "pod4": _address(lab.POD),
        "pod6": _address(POD6),
        "remote4": _address(lab.REMOTE),
        "remote6": _address(REMOTE6),
        "node": _address(_node(variant)),
        "peer": _address(_peer(variant)),
        "pod_mac": _mac(lab.POD_MAC),
        "gateway_mac": _mac(lab.GATEWAY_MAC),
        "node_mac": _mac(lab.NODE_MAC),
        "peer_mac": _mac(lab.PEER_MAC),
        "tunnel_mac": _mac(lab.TUNNEL_MAC),
        "peer_tunnel_mac": _mac(lab.PEER_TUNNEL_MAC),
        "vni": settings.vni,
        "port": settings.port,
        "port_min": settings.port_min,
        "port_max": settings.port_max,
        "mtu": settings.mtu,
        "mark_mask": settings.mark_mask,
        "sport": lab.SPORT,
        "dport": lab.DPORT,
        "echo": ECHO,
    }


@contextmanager
def _descriptors(rig: Rig) -> Iterator[dict[str, int]]:
    """Programs and maps by name, to hand down."""
    home = next(rig.plane.directory.glob("maps-*"))
    names = ("filter_cache", "path_index", "path_free", "counters")
    maps = {name: libbpf.get(home / name) for name in names}
    try:
        yield {**rig.programs, **maps}
    finally:
        for fd in maps.values():
            os.close(fd)


def run(rig: Rig, driver: Path, number: int, **which: int | str) -> Result:
    """One run of the driver; `which` packets: seed, first, packets."""
    variant = VARIANTS[number]
    _set_up(rig, variant)
    before = flat(rig.plane.counters())
    lines = [f"{program} {bytes(packet).hex()}\n" for program, packet in kinds(variant.outer6)]
    with _descriptors(rig) as fds:
        settings = {**_settings(rig, variant), **fds, **which, "variant": number}
        arguments = [f"{name}={value}" for name, value in settings.items()]
        done = subprocess.run(
            [str(driver), f"names={','.join(before)}", *arguments],
            input="".join(lines),
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[*fds.values()],
            check=False,
        )
    if not done.stdout:
        raise SystemExit(f"error: the driver ended with {done.returncode}\nnext: see above")
    after = flat(rig.plane.counters())
    moved = Counter({name: after[name] - before[name] for name in after})
    return Result(**json.loads(done.stdout), moved=+moved)


def fuzz(rig: Rig, driver: Path, packets: int, seed: int) -> Result:
    """All variants, with an equal share of the packets each."""
    share = -(-packets // len(VARIANTS))
    results = (
        run(rig, driver, number, seed=seed, first=0, packets=share)
        for number in range(len(VARIANTS))
    )
    return sum(results, Result())


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bpf.fuzz", description=__doc__)
    parser.add_argument("--packets", type=int, default=PACKETS)
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    parser.add_argument("--variant", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one packet")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] = sys.argv[1:]) -> int:
    options = _arguments(arguments)
    with tempfile.TemporaryDirectory() as folder, lab.rig() as rig:
        driver = build(Path(folder))
        if options.only is None:
            result = fuzz(rig, driver, options.packets, options.seed)
        else:
            which = {"seed": options.seed, "first": options.only, "packets": 1}
            result = run(rig, driver, options.variant, **which)
    for name, count in result.moved.most_common():
        print(f"{count:>10}  {name}")
    numbers = {name: value for name, value in vars(result).items() if name != "moved"}
    print(json.dumps({**numbers, "seed": options.seed}))
    return bool(result.violations)


if __name__ == "__main__":
    sys.exit(main())
