# SPDX-License-Identifier: Apache-2.0
"""IPv6 inside and outside the tunnel, in every combination, on made-up packets."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6EchoReply,
    ICMPv6EchoRequest,
    ICMPv6ND_NS,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from bench import rig as lab
from bench.rig import BASE, REDIRECT, Rig, Run
from oncache.plane import PodEntry

pytestmark = [pytest.mark.root, pytest.mark.netns]

POD, REMOTE = "fd00:1::11", "fd00:2::11"
NODE, PEER, STRANGER = "fd00:99::1", "fd00:99::2", "fd00:99::3"
HEADER = {4: 50, 6: 70}


@dataclass(frozen=True)
class Families:
    """Which IP is inside and which outside."""

    inner: int
    outer: int

    def packet(self, inward: bool, l4: Packet, ttl: int, tos: int, payload: bytes) -> Packet:
        source, target = (REMOTE, POD) if inward else (POD, REMOTE)
        if self.inner == 4:
            source, target = (lab.REMOTE, lab.POD) if inward else (lab.POD, lab.REMOTE)
            ip: Packet = IP(src=source, dst=target, ttl=ttl, tos=tos)
        else:
            ip = IPv6(src=source, dst=target, hlim=ttl, tc=tos, fl=0x12345)
        mac: dict[str, Any] = (
            {"src": lab.PEER_TUNNEL_MAC, "dst": lab.TUNNEL_MAC}
            if inward
            else {"src": lab.POD_MAC, "dst": lab.GATEWAY_MAC}
        )
        return built(Ether(**mac) / ip / l4 / Raw(payload))

    def out(self, l4: Packet, ttl: int = 64, tos: int = 0, payload: bytes = b"ping") -> Packet:
        """What the pod sends."""
        return self.packet(False, l4, ttl, tos, payload)

    def back(self, l4: Packet, ttl: int = 63, tos: int = 0, payload: bytes = b"pong") -> Packet:
        """What comes back inside the tunnel."""
        return self.packet(True, l4, ttl, tos, payload)

    def wrap(self, inner: Packet, tos: int = 0, checksum: int | None = None, **ip: str) -> Packet:
        """A tunnel packet from the peer; without a checksum over IPv4, with one over IPv6."""
        udp = UDP(sport=50000, dport=lab.PORT)
        if checksum is not None or self.outer == 4:
            udp.chksum = checksum or 0
        return built(
            Ether(src=lab.PEER_MAC, dst=lab.NODE_MAC)
            / self._outer(True, tos, **ip)
            / udp
            / VXLAN(vni=lab.VNI, flags=8)
            / inner
        )

    def encapsulated(self, packet: Packet) -> Packet:
        """What the base path puts on the wire for a packet of the pod."""
        inner = hop(packet)
        inner.src, inner.dst = lab.TUNNEL_MAC, lab.PEER_TUNNEL_MAC
        return built(
            Ether(src=lab.NODE_MAC, dst=lab.PEER_MAC)
            / self._outer(False, 0)
            / UDP(sport=40404, dport=lab.PORT, chksum=0)
            / VXLAN(vni=lab.VNI, flags=8)
            / inner
        )

    def _outer(self, inward: bool, tos: int, **ip: str) -> Packet:
        if self.outer == 4:
            ends = (lab.PEER, lab.NODE) if inward else (lab.NODE, lab.PEER)
            v4: dict[str, Any] = {"src": ends[0], "dst": ends[1], "ttl": 64, "tos": tos, **ip}
            return IP(**v4)
        ends = (PEER, NODE) if inward else (NODE, PEER)
        v6: dict[str, Any] = {"src": ends[0], "dst": ends[1], "hlim": 64, "tc": tos, "fl": 7, **ip}
        return IPv6(**v6)


def built(packet: Packet) -> Packet:
    """With lengths and checksums filled in."""
    return Ether(bytes(packet))


def hop(packet: Packet) -> Packet:
    """After one router."""
    moved = packet.copy()
    if IPv6 in moved:
        moved[IPv6].hlim -= 1
    else:
        moved[IP].ttl -= 1
        del moved[IP].chksum
    return built(moved)


def delivered(packet: Packet) -> Packet:
    """What the base path puts on the pod's device."""
    inner = hop(packet)
    inner.src, inner.dst = lab.GATEWAY_MAC, lab.POD_MAC
    return inner


@pytest.fixture(scope="module")
def loaded() -> Iterator[Rig]:
    with lab.rig() as made:
        yield made


@pytest.fixture(params=[(6, 4), (4, 6), (6, 6), (4, 4)], ids=lambda p: f"{p[0]}in{p[1]}")
def families(request: pytest.FixtureRequest) -> Families:
    return Families(*request.param)


@pytest.fixture
def rig(loaded: Rig, families: Families) -> Rig:
    loaded.reset()
    addresses = (IPv4Address(lab.POD), IPv6Address(POD))
    loaded.plane.set_pod(0, PodEntry(loaded.pod, bytes.fromhex("020000000111"), addresses, "pod"))
    if families.outer == 6:
        loaded.configure(local=IPv6Address(NODE))
        loaded.plane.set_peers([IPv6Address(PEER)])
    return loaded


def exchange(rig: Rig, families: Families, out: Packet, back: Packet) -> None:
    for _ in range(3):
        first = rig.run("from_pod", out)
        if first.verdict == BASE:
            rig.run("to_wire", families.encapsulated(out), mark=first.mark)
        first = rig.run("from_wire", families.wrap(back))
        if first.verdict == BASE:
            rig.run("to_pod", delivered(back), mark=first.mark)


def ping(families: Families, number: int = 77) -> tuple[Packet, Packet]:
    if families.inner == 4:
        return lab.echo(number), lab.echo_back(number)
    return ICMPv6EchoRequest(id=number), ICMPv6EchoReply(id=number)


def flows(families: Families) -> list[tuple[Packet, Packet]]:
    return [(lab.udp(), lab.udp_back()), (lab.tcp(), lab.tcp_back()), ping(families)]


def assert_hit(run: Run, name: str) -> None:
    assert (run.verdict, run.moved) == (REDIRECT, {f"hits.{name}": 1})


def checked(packet: Packet) -> Packet:
    """The packet as if its checksums were computed anew."""
    anew = packet.copy()
    for layer in (IP, UDP, TCP):
        if layer in anew and getattr(anew[layer], "chksum", None):
            del anew[layer].chksum
    return built(anew)


@pytest.mark.parametrize("number", range(3), ids=["udp", "tcp", "ping"])
def test_both_directions_are_fast_and_right(rig: Rig, families: Families, number: int) -> None:
    there, here = flows(families)[number]
    out, back = families.out(there), families.back(here)
    exchange(rig, families, out, back)

    sent = rig.run("from_pod", out)
    assert_hit(sent, "from_pod")
    length = HEADER[families.outer]
    inner = Ether(sent.data[length:])
    assert (inner.src, inner.dst) == (lab.TUNNEL_MAC, lab.PEER_TUNNEL_MAC)
    assert bytes(inner.payload) == bytes(hop(out).payload)
    outer = sent.packet
    assert (outer.src, outer.dst) == (lab.NODE_MAC, lab.PEER_MAC)
    assert outer[UDP].len == len(out) + length - 14 - (20 if families.outer == 4 else 40)
    if families.outer == 6:
        assert (outer[IPv6].src, outer[IPv6].dst) == (NODE, PEER)
        assert (outer[IPv6].hlim, outer[IPv6].fl) == (64, 7)
        assert outer[UDP].chksum != 0
    assert bytes(checked(outer)) == sent.data

    arrived = rig.run("from_wire", families.wrap(back))
    assert_hit(arrived, "from_wire")
    assert arrived.data == bytes(delivered(back))


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", b"\xff\xfe", bytes(range(255)) * 5], ids=["0", "1", "2", "1275"]
)
def test_the_outer_checksum_holds_for_any_payload(
    rig: Rig, families: Families, payload: bytes
) -> None:
    """Over IPv6 it is derived from the inner one, not from the bytes it covers."""
    for there, here in flows(families):
        out = families.out(there, payload=payload)
        exchange(rig, families, out, families.back(here))
        sent = rig.run("from_pod", out)
        assert_hit(sent, "from_pod")
        assert bytes(checked(sent.packet)) == sent.data


def test_a_device_without_checksums_over_ipv6(rig: Rig, families: Families) -> None:
    local = rig.plane.settings()
    assert local is not None
    rig.plane.configure(replace(local, zero_sum6_tx=True, zero_sum6_rx=True))
    rig.plane.enable(3600)
    out, back = families.out(lab.udp()), families.back(lab.udp_back())
    exchange(rig, families, out, back)
    assert rig.run("from_pod", out).packet[UDP].chksum == 0
    assert_hit(rig.run("from_wire", families.wrap(back, checksum=0)), "from_wire")


def test_no_checksum_over_ipv6_is_the_base_paths_to_refuse(rig: Rig, families: Families) -> None:
    out, back = families.out(lab.udp()), families.back(lab.udp_back())
    exchange(rig, families, out, back)
    run = rig.run("from_wire", families.wrap(back, checksum=0))
    expected = "base_path.checksum" if families.outer == 6 else "hits.from_wire"
    assert run.moved == {expected: 1}


def test_segments_over_ipv6_have_no_checksum_to_derive(rig: Rig, families: Families) -> None:
    out, back = families.out(lab.tcp(), payload=bytes(3000)), families.back(lab.tcp_back())
    exchange(rig, families, families.out(lab.tcp()), back)
    run = rig.run("from_pod", out, gso_size=1200, gso_segs=3)
    # A test run has segments of no type, for which the kernel makes no room.
    expected = "checksum" if families.outer == 6 else "helper"
    assert run.moved == {f"base_path.{expected}": 1}


@pytest.mark.parametrize(("inner", "outer"), [(0, 0), (1, 1), (2, 2), (3, 2), (0xB9, 1)])
def test_ecn_goes_out(rig: Rig, families: Families, inner: int, outer: int) -> None:
    exchange(rig, families, families.out(lab.udp()), families.back(lab.udp_back()))
    sent = rig.run("from_pod", families.out(lab.udp(), tos=inner)).packet
    assert (sent[IP].tos if families.outer == 4 else sent[IPv6].tc) == outer


@pytest.mark.parametrize(
    ("outer", "inner", "arrives"), [(3, 2, 3), (3, 1, 3), (0, 2, 2), (2, 3, 3)]
)
def test_ecn_comes_in(rig: Rig, families: Families, outer: int, inner: int, arrives: int) -> None:
    exchange(rig, families, families.out(lab.udp()), families.back(lab.udp_back()))
    back = families.back(lab.udp_back(), tos=inner)
    got = rig.run("from_wire", families.wrap(back, tos=outer)).packet
    assert (got[IP].tos if families.inner == 4 else got[IPv6].tc) == arrives
    if families.inner == 6:
        assert got[IPv6].fl == 0x12345


def test_inherited_fields(rig: Rig, families: Families) -> None:
    local = rig.plane.settings()
    assert local is not None
    inherit = replace(local, tos_inherit=True, ttl_inherit=True, df_inherit=True)
    rig.plane.configure(inherit)
    rig.plane.enable(3600)
    exchange(rig, families, families.out(lab.udp()), families.back(lab.udp_back()))
    sent = rig.run("from_pod", families.out(lab.udp(), ttl=9, tos=0xB8)).packet
    if families.outer == 4:
        assert (sent[IP].tos, sent[IP].ttl) == (0xB8, 8)
        assert bool(sent[IP].flags.DF) is (families.inner == 6)
    else:
        assert (sent[IPv6].tc, sent[IPv6].hlim) == (0xB8, 8)
    assert bytes(checked(sent)) == bytes(sent)


@pytest.mark.parametrize("families", [Families(6, 4), Families(6, 6)], ids=["6in4", "6in6"])
@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (IPv6ExtHdrHopByHop(), "ip_options"),
        (IPv6ExtHdrRouting(), "ip_options"),
        (IPv6ExtHdrDestOpt(), "ip_options"),
        (IPv6ExtHdrFragment(offset=0, m=1), "fragment"),
        (IPv6ExtHdrFragment(offset=9), "fragment"),
    ],
    ids=["hop-by-hop", "routing", "destination", "first fragment", "last fragment"],
)
def test_extension_headers_take_the_base_path(
    rig: Rig, families: Families, header: Packet, reason: str
) -> None:
    exchange(rig, families, families.out(lab.udp()), families.back(lab.udp_back()))
    for program, packet in (
        ("from_pod", families.out(header / lab.udp())),
        ("from_wire", families.wrap(families.back(header / lab.udp_back()))),
    ):
        run = rig.run(program, packet)
        assert (run.verdict, run.data) == (BASE, bytes(packet))
        assert run.moved == {f"base_path.{reason}": 1}


@pytest.mark.parametrize("families", [Families(6, 4)], ids=["6in4"])
def test_neighbour_discovery_takes_the_base_path(rig: Rig, families: Families) -> None:
    run = rig.run("from_pod", families.out(ICMPv6ND_NS(tgt=REMOTE)))
    assert run.moved == {"base_path.icmp_type": 1}


@pytest.mark.parametrize("families", [Families(6, 6)], ids=["6in6"])
def test_strangers_and_other_addresses(rig: Rig, families: Families) -> None:
    back = families.back(lab.udp_back())
    exchange(rig, families, families.out(lab.udp()), back)
    assert rig.run("from_wire", families.wrap(back, src=STRANGER)).moved == {"base_path.peer": 1}
    assert rig.run("from_wire", families.wrap(back, dst=STRANGER)).moved == {"base_path.outer": 1}


@pytest.mark.parametrize("families", [Families(6, 4)], ids=["6in4"])
def test_a_mapped_address_is_no_ipv4_flow(rig: Rig, families: Families) -> None:
    """::ffff:10.1.0.11 on the wire must not find the entry of 10.1.0.11."""
    v4 = Families(4, 4)
    exchange(rig, v4, v4.out(lab.udp()), v4.back(lab.udp_back()))
    forged = built(
        Ether(src=lab.POD_MAC, dst=lab.GATEWAY_MAC)
        / IPv6(src=f"::ffff:{lab.POD}", dst=f"::ffff:{lab.REMOTE}")
        / lab.udp()
        / Raw(b"ping")
    )
    run = rig.run("from_pod", forged)
    assert (run.verdict, run.moved) == (BASE, {"base_path.not_ip": 1})


def test_what_the_plane_shows(rig: Rig, families: Families) -> None:
    exchange(rig, families, families.out(lab.udp()), families.back(lab.udp_back()))
    source, target = (POD, REMOTE) if families.inner == 6 else (lab.POD, lab.REMOTE)
    assert {(flow.local, flow.remote) for flow in rig.plane.flows()} == {(source, target)}
    peer = PEER if families.outer == 6 else lab.PEER
    assert peer in {str(path.remote) for path in rig.plane.paths()}
    version = IPv6Address if families.inner == 6 else IPv4Address
    told = rig.plane.explain("udp", version(source), lab.SPORT, version(target), lab.DPORT)
    assert (told.fast, told.reason) == (True, "")
