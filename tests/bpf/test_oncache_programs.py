# SPDX-License-Identifier: Apache-2.0
"""The four programs on made-up packets: what is fast, what is not, and under which counter."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import Any

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_NOP, IPOption_Router_Alert
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from bench import rig as lab
from bench.rig import BASE, REDIRECT, Rig, from_pod, tcp, tcp_back, to_pod, udp, udp_back, wrap
from oncache.plane import PodEntry

pytestmark = [pytest.mark.root, pytest.mark.netns]

UDP_OUT, UDP_IN = from_pod(udp()), to_pod(udp_back())
TCP_OUT, TCP_IN = from_pod(tcp()), to_pod(tcp_back())
PING_OUT, PING_IN = from_pod(lab.echo()), to_pod(lab.echo_back())


@pytest.fixture(scope="module")
def loaded() -> Iterator[Rig]:
    with lab.rig() as made:
        yield made


@pytest.fixture
def rig(loaded: Rig) -> Rig:
    loaded.reset()
    return loaded


@pytest.fixture
def warm(rig: Rig) -> Rig:
    for there, back in ((UDP_OUT, UDP_IN), (TCP_OUT, TCP_IN), (PING_OUT, PING_IN)):
        rig.warm(there, back)
    return rig


# --- a hit


@pytest.mark.parametrize("packet", [UDP_OUT, TCP_OUT, PING_OUT], ids=["udp", "tcp", "ping"])
def test_hit_from_pod_is_what_the_tunnel_device_would_send(warm: Rig, packet: Packet) -> None:
    run = warm.run("from_pod", packet)
    assert (run.verdict, run.moved) == (REDIRECT, {"hits.from_pod": 1})
    seen = run.packet
    assert (seen.src, seen.dst) == (lab.NODE_MAC, lab.PEER_MAC)
    assert (seen[IP].src, seen[IP].dst) == (lab.NODE, lab.PEER)
    assert (seen[IP].ttl, seen[IP].tos, int(seen[IP].flags)) == (64, 0, 0)
    assert seen[IP].len == len(packet) + 50 - 14
    assert seen[UDP].len == len(packet) + 30 - 14
    assert (seen[UDP].dport, seen[UDP].chksum) == (lab.PORT, 0)
    assert 32768 <= seen[UDP].sport < 60999
    inner = Ether(run.data[50:])
    assert (inner.src, inner.dst) == (lab.TUNNEL_MAC, lab.PEER_TUNNEL_MAC)
    assert_same_but_for_hop(packet, inner)
    assert_checksum_valid(run.data[14:34])


@pytest.mark.parametrize("packet", [UDP_IN, TCP_IN, PING_IN], ids=["udp", "tcp", "ping"])
def test_hit_from_wire_is_what_the_base_path_would_deliver(warm: Rig, packet: Packet) -> None:
    run = warm.run("from_wire", wrap(packet))
    assert (run.verdict, run.moved) == (REDIRECT, {"hits.from_wire": 1})
    assert len(run.data) == len(packet)
    assert (run.packet.src, run.packet.dst) == (lab.GATEWAY_MAC, lab.POD_MAC)
    assert_same_but_for_hop(packet, run.packet)


def assert_same_but_for_hop(before: Packet, after: Packet) -> None:
    expected = before.copy()[IP]
    expected.ttl -= 1
    del expected.chksum
    assert bytes(after[IP]) == bytes(IP(bytes(expected)))


def assert_checksum_valid(header: bytes) -> None:
    total = sum(int.from_bytes(header[i : i + 2]) for i in range(0, len(header), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    assert total == 0xFFFF


def test_every_packet_has_its_own_outer_id(warm: Rig) -> None:
    ids = {warm.run("from_pod", UDP_OUT).packet[IP].id for _ in range(20)}
    assert len(ids) > 15


def test_the_source_port_stays_with_the_flow(warm: Rig) -> None:
    ports = {warm.run("from_pod", UDP_OUT).packet[UDP].sport for _ in range(5)}
    assert len(ports) == 1


def test_a_hit_leaves_no_mark_of_ours_and_keeps_foreign_bits(warm: Rig) -> None:
    assert warm.run("from_pod", UDP_OUT, mark=0x4000).mark == 0x4000
    assert warm.run("from_wire", wrap(UDP_IN)).mark == 0


# --- what is not eligible: the packet as it was, and one counter


@dataclass(frozen=True)
class Odd:
    """A packet of a warm flow that has to take the base path."""

    name: str
    packet: Packet
    reason: str
    context: dict[str, int]


def odd(name: str, packet: Packet, reason: str, **context: int) -> Odd:
    return Odd(name, packet, f"base_path.{reason}", context)


def changed(packet: Packet, change: Callable[[Packet], Any]) -> Packet:
    made = packet.copy()
    change(made)
    return Ether(bytes(made))


def set_field(layer: type[Packet], **values: Any) -> Callable[[Packet], Any]:
    def change(packet: Packet) -> None:
        for name, value in values.items():
            setattr(packet[layer], name, value)

    return change


BIG = b"x" * (lab.MTU - 28)
OUTWARD = [
    odd("arp", Ether(src=lab.POD_MAC, dst="ff:ff:ff:ff:ff:ff") / ARP(), "not_ip"),
    odd("ipv6 of another version", Ether(type=0x86DD) / Raw(b"\x50" + bytes(60)), "not_ip"),
    odd("version 5", changed(UDP_OUT, set_field(IP, version=5)), "not_ip"),
    odd("vlan tag in the data", Ether(dst=lab.GATEWAY_MAC) / Dot1Q() / UDP_OUT[IP], "not_ip"),
    odd("router alert", from_pod(udp(), options=[IPOption_Router_Alert()]), "ip_options"),
    odd("no-op options", from_pod(tcp(), options=[IPOption_NOP()] * 40), "ip_options"),
    odd("first fragment", from_pod(udp(), flags="MF"), "fragment"),
    odd("middle fragment", from_pod(udp(), flags="MF", frag=10), "fragment"),
    odd("last fragment", from_pod(udp(), frag=10), "fragment"),
    odd("sctp", from_pod(Raw(b"\x9c\x40\x13\x88" + bytes(8)), proto=132), "protocol"),
    odd("gre", from_pod(Raw(bytes(8)), proto=47), "protocol"),
    odd("syn", from_pod(tcp("S")), "tcp_flags"),
    odd("syn-ack", from_pod(tcp("SA")), "tcp_flags"),
    odd("no flags", from_pod(tcp("")), "tcp_flags"),
    odd("all flags", from_pod(tcp("FSRPAU")), "tcp_flags"),
    odd("unreachable", from_pod(ICMP(type=3, code=1)), "icmp_type"),
    odd("echo with a code", from_pod(ICMP(type=8, code=1, id=77)), "icmp_type"),
    odd("length too long", changed(UDP_OUT, set_field(IP, len=200)), "truncated"),
    odd("length too short", changed(UDP_OUT, set_field(IP, len=30)), "truncated"),
    odd("udp length wrong", changed(UDP_OUT, set_field(UDP, len=9)), "truncated"),
    odd("tcp header too short", changed(TCP_OUT, set_field(TCP, dataofs=4)), "truncated"),
    odd("tcp header too long", changed(TCP_OUT, set_field(TCP, dataofs=15)), "truncated"),
    odd("too big", from_pod(udp(), payload=BIG + b"x"), "size"),
    odd("segment too big", from_pod(tcp(), payload=BIG * 2), "size", gso_size=lab.MTU - 39),
    odd("ttl 1", from_pod(udp(), ttl=1), "ttl"),
    odd("another gateway", changed(UDP_OUT, set_field(Ether, dst="02:00:00:00:01:02")), "mac"),
    odd("unknown flow", from_pod(UDP(sport=1, dport=2)), "miss"),
    odd("another ping", from_pod(lab.echo(78)), "miss"),
    odd("the peer's ping answered", from_pod(lab.echo_back()), "miss"),
]


@pytest.mark.parametrize("case", OUTWARD, ids=lambda case: case.name)
def test_from_pod_leaves_it_to_the_base_path(warm: Rig, case: Odd) -> None:
    run = warm.run("from_pod", case.packet, **case.context)
    assert (run.verdict, run.data) == (BASE, bytes(case.packet))
    assert run.moved == {case.reason: 1}


FILLER = b"\x00" * 40
INWARD = [
    odd("plain host traffic", Ether(dst=lab.NODE_MAC) / IP() / TCP() / FILLER, "not_tunnel"),
    odd("another port", wrap(UDP_IN, port=8472), "not_tunnel"),
    odd("another vni", wrap(UDP_IN, vni=lab.VNI + 1), "vni"),
    odd("stranger", wrap(UDP_IN, src=lab.STRANGER), "peer"),
    odd("stranger, unknown flow", wrap(to_pod(UDP(sport=9)), src=lab.STRANGER), "peer"),
    odd("another address", wrap(UDP_IN, dst="192.0.2.3"), "outer"),
    odd("another mac", changed(wrap(UDP_IN), set_field(Ether, dst="02:00:00:00:0a:02")), "outer"),
    odd("outer options", wrap(UDP_IN, options=[IPOption_NOP()] * 4), "not_tunnel"),
    odd("outer first fragment", wrap(UDP_IN, flags="MF"), "outer"),
    odd("outer last fragment", wrap(UDP_IN, frag=3), "not_tunnel"),
    odd("vxlan flags", changed(wrap(UDP_IN), set_field(VXLAN, flags=0x88)), "outer"),
    odd("vxlan reserved", changed(wrap(UDP_IN), set_field(VXLAN, reserved2=1)), "vni"),
    odd("outer length", changed(wrap(UDP_IN), set_field(IP, len=60)), "truncated"),
    odd("inner options", wrap(to_pod(udp_back(), options=[IPOption_NOP()] * 4)), "ip_options"),
    odd("inner fragment", wrap(to_pod(udp_back(), frag=5)), "fragment"),
    odd("inner sctp", wrap(to_pod(Raw(bytes(12)), proto=132)), "protocol"),
    odd("inner fin", wrap(to_pod(tcp_back("FA"))), "tcp_flags"),
    odd("inner ttl 1", wrap(to_pod(udp_back(), ttl=1)), "ttl"),
    odd("inner arp", wrap(Ether(dst=lab.TUNNEL_MAC) / ARP() / FILLER), "not_ip"),
    odd("inner mac", wrap(changed(UDP_IN, set_field(Ether, dst="02:00:00:00:aa:02"))), "mac"),
    odd("too big for the pod", wrap(to_pod(udp_back(), payload=BIG + b"x")), "size"),
    odd("ce on not-ect", wrap(UDP_IN, tos=3), "ecn"),
    odd("ect on not-ect", wrap(UDP_IN, tos=2), "ecn"),
    odd("ect(1) on ect(0)", wrap(to_pod(udp_back(), tos=2), tos=1), "ecn"),
    odd(
        "only the outer checksum",
        wrap(to_pod(UDP(sport=5000, dport=40000, chksum=0)), chksum=7),
        "checksum",
    ),
    odd("unknown flow", wrap(to_pod(UDP(sport=1, dport=2))), "miss"),
]


@pytest.mark.parametrize("case", INWARD, ids=lambda case: case.name)
def test_from_wire_leaves_it_to_the_base_path(warm: Rig, case: Odd) -> None:
    run = warm.run("from_wire", case.packet, **case.context)
    assert (run.verdict, run.data) == (BASE, bytes(case.packet))
    assert run.moved == {case.reason: 1}


@pytest.mark.parametrize("size", [lab.MTU - 28, lab.MTU - 29])
def test_the_largest_packet_is_fast(warm: Rig, size: int) -> None:
    assert warm.run("from_pod", from_pod(udp(), payload=b"x" * size)).verdict == REDIRECT


def test_a_segment_counts_not_the_whole(warm: Rig) -> None:
    """A test run has segments of no type, for which the kernel makes no room: base path."""
    packet = from_pod(tcp(), payload=b"x" * 3000)
    run = warm.run("from_pod", packet, gso_size=lab.MTU - 40, gso_segs=3)
    assert (run.verdict, run.data) == (BASE, bytes(packet))
    assert run.moved == {"base_path.helper": 1}


# --- headers that follow the packet


@pytest.mark.parametrize(
    ("inner", "outer"), [(0x00, 0x00), (0x01, 0x01), (0x02, 0x02), (0x03, 0x02), (0xB9, 0x01)]
)
def test_ecn_travels_in_the_outer_header(warm: Rig, inner: int, outer: int) -> None:
    run = warm.run("from_pod", from_pod(udp(), tos=inner))
    assert (run.packet[IP].tos, Ether(run.data[50:])[IP].tos) == (outer, inner)


@pytest.mark.parametrize(
    ("outer", "inner", "arrives"),
    [
        (0, 0, 0),
        (2, 2, 2),
        (3, 2, 3),
        (3, 1, 3),
        (3, 3, 3),
        (0, 3, 3),
        (2, 3, 3),
        (0xBB, 0x0A, 0x0B),
    ],
)
def test_ecn_arrives_from_the_outer_header(warm: Rig, outer: int, inner: int, arrives: int) -> None:
    run = warm.run("from_wire", wrap(to_pod(udp_back(), tos=inner), tos=outer))
    assert run.moved == {"hits.from_wire": 1}
    assert run.packet[IP].tos == arrives
    assert_checksum_valid(run.data[14:34])


@pytest.mark.parametrize(
    ("tos", "priority"),
    [(0x00, 0), (0x08, 2), (0x10, 6), (0x18, 4), (0xB8, 4), (0xE0, 0), (0x02, 0)],
)
def test_priority_is_what_forwarding_sets(warm: Rig, tos: int, priority: int) -> None:
    assert warm.run("from_pod", from_pod(udp(), tos=tos), priority=5).priority == priority


def test_priority_is_cleared_on_the_way_into_the_pod(warm: Rig) -> None:
    """At once where the packet goes straight in, else by the pod's queue."""
    deadline = time.monotonic() + 5
    while warm.run("from_wire", wrap(UDP_IN), priority=5).priority:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("tos", [0x00, 0xB8, 0x2E])
def test_tos_inherited_packet_by_packet(rig: Rig, tos: int) -> None:
    rig.configure(tos_inherit=True)
    rig.warm(UDP_OUT, UDP_IN)
    assert rig.run("from_pod", from_pod(udp(), tos=tos)).packet[IP].tos == tos


def test_ttl_and_df_inherited_packet_by_packet(rig: Rig) -> None:
    rig.configure(ttl_inherit=True, df_inherit=True)
    rig.warm(UDP_OUT, UDP_IN)
    seen = rig.run("from_pod", from_pod(udp(), ttl=9, flags="DF")).packet[IP]
    assert (seen.ttl, int(seen.flags)) == (8, 2)
    assert_checksum_valid(bytes(seen)[:20])


def test_the_template_is_what_the_base_path_sent(rig: Rig) -> None:
    for _ in range(3):
        rig.send(UDP_OUT, ttl=17, tos=0x48, flags="DF", hops=2)
        rig.receive(UDP_IN)
    seen = rig.run("from_pod", UDP_OUT)
    assert seen.moved == {"hits.from_pod": 1}
    outer = seen.packet[IP]
    assert (outer.ttl, outer.tos, int(outer.flags)) == (17, 0x48, 2)
    assert Ether(seen.data[50:])[IP].ttl == 62


# --- learning


def test_one_direction_alone_is_not_enough(rig: Rig) -> None:
    for _ in range(5):
        first, second = rig.send(UDP_OUT)
    assert second is not None
    assert (first.moved, second.moved) == ({"base_path.unconfirmed": 1}, {"learned": 1})


def test_a_reply_makes_both_directions_fast(rig: Rig) -> None:
    reasons = []
    for _ in range(4):
        reasons.append([*rig.send(UDP_OUT)[0].moved, *rig.receive(UDP_IN)[0].moved])
    assert reasons == [
        ["base_path.miss", "base_path.unconfirmed"],
        ["base_path.order", "hits.from_wire"],
        ["hits.from_pod", "hits.from_wire"],
        ["hits.from_pod", "hits.from_wire"],
    ]


def test_the_second_hook_takes_the_mark_off(rig: Rig) -> None:
    first, second = rig.send(UDP_OUT)
    assert second is not None
    assert 0 < first.mark <= 0xFF
    assert second.mark == 0
    foreign = rig.run("from_pod", UDP_OUT, mark=0xC000)
    assert foreign.mark & ~0xFF == 0xC000


def test_a_wider_mark_elsewhere(rig: Rig) -> None:
    rig.configure(mark_mask=0x3FF0000)
    first, second = rig.send(UDP_OUT)
    assert second is not None
    assert first.mark & ~0x3FF0000 == 0
    assert first.mark
    assert second.moved == {"learned": 1}


def test_a_translated_packet_teaches_nothing(rig: Rig) -> None:
    first = rig.run("from_pod", UDP_OUT)
    other = from_pod(UDP(sport=lab.SPORT, dport=8080))
    second = rig.run("to_wire", lab.encapsulated(other), mark=first.mark)
    assert second.moved == {"not_learned.translated": 1}


@pytest.mark.parametrize(
    "sent",
    [
        UDP_OUT,
        lab.encapsulated(UDP_OUT, src="192.0.2.7"),
        changed(lab.encapsulated(UDP_OUT), set_field(VXLAN, vni=8)),
        changed(lab.encapsulated(UDP_OUT), set_field(UDP, dport=1234)),
        lab.encapsulated(UDP_OUT, flags="MF"),
    ],
    ids=["bare", "another source", "another vni", "another port", "fragment"],
)
def test_only_our_tunnel_teaches(rig: Rig, sent: Packet) -> None:
    first = rig.run("from_pod", UDP_OUT)
    assert rig.run("to_wire", sent, mark=first.mark).moved == {"not_learned.tunnel": 1}


def test_a_flooded_packet_teaches_nothing_at_the_wrong_pod(rig: Rig) -> None:
    first = rig.run("from_wire", wrap(UDP_IN))
    wrong = rig.run("to_pod", lab.delivered(UDP_IN), mark=first.mark, ifindex=rig.other)
    assert wrong.moved == {"not_learned.foreign": 1}


def test_a_mark_of_the_other_journey_teaches_nothing(rig: Rig) -> None:
    first = rig.run("from_pod", UDP_OUT)
    assert rig.run("to_pod", lab.delivered(UDP_IN), mark=first.mark).moved == {
        "not_learned.mark": 1
    }


def test_a_packet_of_the_old_state_cannot_install(rig: Rig) -> None:
    first = rig.run("from_pod", UDP_OUT)
    rig.plane.invalidate_pod(1)  # anything at all has changed
    second = rig.run("to_wire", lab.encapsulated(UDP_OUT), mark=first.mark)
    assert second.moved == {"not_learned.paused": 1}


def test_nothing_is_learned_while_paused(rig: Rig) -> None:
    rig.plane.pause_learning()
    _, second = rig.send(UDP_OUT)
    assert second is not None
    assert second.moved == {"not_learned.paused": 1}


def test_packets_of_one_pod_do_not_use_anothers_entries(warm: Rig) -> None:
    run = warm.run("from_pod", UDP_OUT, ifindex=warm.other)
    assert (run.verdict, run.moved) == (BASE, {"base_path.spoofed": 1})
    assert run.mark == 0


def test_a_foreign_source_is_neither_fast_nor_noted(rig: Rig) -> None:
    run = rig.run("from_pod", from_pod(udp(), src="10.1.0.99"))
    assert (run.moved, run.mark) == ({"base_path.spoofed": 1}, 0)


def test_an_unknown_device_is_left_alone(rig: Rig) -> None:
    run = rig.run("from_pod", UDP_OUT, ifindex=rig.uplink)
    assert (run.moved, run.mark) == ({"base_path.unknown_pod": 1}, 0)


# --- order: nothing overtakes what is still in the base path


def test_not_fast_while_an_earlier_packet_is_on_its_way(rig: Rig) -> None:
    rig.warm(UDP_OUT, UDP_IN)
    big = from_pod(udp(), payload=BIG + b"x")
    on_its_way = rig.run("from_pod", big)
    behind = rig.run("from_pod", UDP_OUT)
    assert behind.moved == {"base_path.order": 1}
    rig.run("to_wire", lab.encapsulated(big), mark=on_its_way.mark)
    assert rig.run("from_pod", UDP_OUT).moved == {"base_path.order": 1}
    rig.send(UDP_OUT)
    assert rig.run("from_pod", UDP_OUT).moved == {"hits.from_pod": 1}


@pytest.mark.parametrize(
    "unseen",
    [from_pod(udp(), flags="MF"), from_pod(udp(), options=[IPOption_Router_Alert()])],
    ids=["fragment", "options"],
)
def test_what_cannot_be_followed_holds_its_flow_back_once(warm: Rig, unseen: Packet) -> None:
    warm.run("from_pod", unseen)
    assert warm.send(UDP_OUT)[0].moved == {"base_path.order": 1}
    assert warm.run("from_pod", UDP_OUT).moved == {"hits.from_pod": 1}


# --- beginning and end of a flow


def test_the_handshake_takes_the_base_path_and_the_first_data_is_fast(rig: Rig) -> None:
    """Seen by the client's node: SYN, SYN-ACK, ACK, then data both ways."""
    assert rig.run("from_pod", from_pod(tcp("S"))).mark == 0
    first, second = rig.receive(to_pod(tcp_back("SA")))
    assert second is not None
    assert (first.moved, second.moved) == ({"base_path.tcp_flags": 1}, {"learned": 1})
    first, second = rig.send(TCP_OUT)
    assert second is not None
    assert (first.moved, second.moved) == ({"base_path.unconfirmed": 1}, {"learned": 1})
    assert rig.run("from_pod", TCP_OUT).moved == {"hits.from_pod": 1}
    assert rig.run("from_wire", wrap(TCP_IN)).moved == {"hits.from_wire": 1}


def test_the_same_seen_by_the_servers_node(rig: Rig) -> None:
    assert rig.run("from_wire", wrap(to_pod(tcp_back("S")))).mark == 0
    rig.send(from_pod(tcp("SA")))
    rig.receive(TCP_IN)
    assert rig.run("from_wire", wrap(TCP_IN)).moved == {"hits.from_wire": 1}
    assert rig.run("from_pod", TCP_OUT).moved == {"hits.from_pod": 1}


@pytest.mark.parametrize(
    ("flags", "learns"), [("FA", {}), ("R", {"not_learned.unestablished": 1})], ids=["fin", "rst"]
)
@pytest.mark.parametrize("inward", [False, True], ids=["out", "in"])
def test_fin_and_rst_end_a_flow(
    warm: Rig, flags: str, learns: dict[str, int], inward: bool
) -> None:
    """Without conntrack to ask, for good; with it an RST may turn out to be nothing."""
    if inward:
        warm.run("from_wire", wrap(to_pod(tcp_back(flags))))
    else:
        warm.run("from_pod", from_pod(tcp(flags)))
    for _ in range(4):
        first, second = warm.send(TCP_OUT)
        assert second is not None
        assert first.moved == {"base_path.closed": 1}
        assert second.moved == learns
        assert warm.receive(TCP_IN)[0].moved == {"base_path.closed": 1}


def test_a_new_connection_of_the_same_tuple_starts_from_nothing(warm: Rig) -> None:
    warm.run("from_pod", from_pod(tcp("FA")))
    warm.run("from_pod", from_pod(tcp("S")))
    assert warm.run("from_pod", TCP_OUT).moved == {"base_path.miss": 1}
    warm.warm(TCP_OUT, TCP_IN)
    assert warm.run("from_pod", TCP_OUT).moved == {"hits.from_pod": 1}


# --- validity


def invalidate_paths(rig: Rig) -> None:
    for path in rig.plane.paths():
        rig.plane.invalidate_path(path.index)


@pytest.mark.parametrize("change", ["all", "pod", "path"])
def test_invalidation_is_at_the_next_packet(warm: Rig, change: str) -> None:
    if change == "all":
        warm.plane.invalidate_all()
    elif change == "pod":
        warm.plane.invalidate_pod(0)
    else:
        invalidate_paths(warm)
    assert warm.run("from_pod", UDP_OUT).moved == {"base_path.stale": 1}
    inward = warm.run("from_wire", wrap(UDP_IN)).moved
    assert inward == ({"hits.from_wire": 1} if change == "path" else {"base_path.stale": 1})
    warm.warm(UDP_OUT, UDP_IN)
    assert warm.run("from_pod", UDP_OUT).moved == {"hits.from_pod": 1}


def test_another_pods_invalidation_changes_nothing(warm: Rig) -> None:
    warm.plane.invalidate_pod(1)
    assert warm.run("from_pod", UDP_OUT).verdict == REDIRECT


def test_the_address_moves_to_another_pod(warm: Rig) -> None:
    """The old owner's entries serve neither the old device nor the new one."""
    warm.plane.clear_pod(0)
    moved = PodEntry(warm.other, bytes.fromhex("020000000112"), (IPv4Address(lab.POD),))
    warm.plane.set_pod(1, moved)
    assert warm.run("from_wire", wrap(UDP_IN)).moved == {"base_path.stale": 1}
    assert warm.run("from_pod", UDP_OUT).moved == {"base_path.unknown_pod": 1}
    assert warm.run("from_pod", UDP_OUT, ifindex=warm.other).moved == {"base_path.stale": 1}


def test_a_new_next_hop_is_a_new_path(warm: Rig) -> None:
    invalidate_paths(warm)
    moved = changed(lab.encapsulated(UDP_OUT), set_field(Ether, dst="02:00:00:00:0b:77"))
    first = warm.run("from_pod", UDP_OUT)
    assert warm.run("to_wire", moved, mark=first.mark).moved == {"learned": 1}
    run = warm.run("from_pod", UDP_OUT)
    assert (run.verdict, run.packet.dst) == (REDIRECT, "02:00:00:00:0b:77")


def test_the_lease_sends_a_packet_by_the_base_path(rig: Rig) -> None:
    rig.configure(lease_seconds=0.05)
    rig.warm(UDP_OUT, UDP_IN)
    deadline = time.monotonic() + 5
    while rig.run("from_pod", UDP_OUT).moved == {"hits.from_pod": 1}:
        assert time.monotonic() < deadline
    first, second = rig.send(UDP_OUT)
    assert second is not None
    assert (first.moved, second.moved) == ({"base_path.lease": 1}, {"learned": 1})
    assert rig.run("from_pod", UDP_OUT).moved == {"hits.from_pod": 1}


def test_the_dead_mans_switch(warm: Rig) -> None:
    warm.plane.enable(-0.1)
    for program, packet in (("from_pod", UDP_OUT), ("from_wire", wrap(UDP_IN))):
        run = warm.run(program, packet)
        assert (run.verdict, run.moved) == (BASE, {"base_path.deadline": 1})
    warm.plane.enable(60)
    assert warm.run("from_pod", UDP_OUT).verdict == REDIRECT
    warm.plane.disable()
    assert warm.run("from_pod", UDP_OUT).moved == {"base_path.disabled": 1}


def test_a_smaller_mtu_of_one_path_counts(warm: Rig) -> None:
    for path in warm.plane.paths():
        warm.plane.set_path_mtu(path.index, 1000)
    assert warm.run("from_pod", from_pod(udp(), payload=b"x" * 972)).verdict == REDIRECT
    big = warm.run("from_pod", from_pod(udp(), payload=b"x" * 973))
    assert big.moved == {"base_path.size": 1}


def test_a_full_table_makes_flows_slow_not_wrong() -> None:
    with lab.rig() as fresh:
        learn_more_paths_than_there_are(fresh)


def learn_more_paths_than_there_are(rig: Rig) -> None:
    for number in range(lab.LIMITS.peers + 3):
        packet = from_pod(UDP(sport=1000 + number, dport=lab.DPORT))
        first = rig.run("from_pod", packet)
        sent = changed(
            lab.encapsulated(packet), set_field(Ether, dst=f"02:00:00:00:0b:{number:02x}")
        )
        second = rig.run("to_wire", sent, mark=first.mark)
        expected = "learned" if number < lab.LIMITS.peers else "not_learned.full"
        assert second.moved == {expected: 1}


def test_a_second_load_keeps_what_was_learned() -> None:
    # Not the rig of the others: two planes on one set of maps both hand out free paths.
    with lab.rig() as first:
        first.warm(UDP_OUT, UDP_IN)
        plane = first.plane
        with closing(type(plane).load(plane.directory, lab.LIMITS)) as again:
            assert [flow.local_port for flow in again.flows()] == [lab.SPORT]
            assert again.settings() == first.settings
            assert [path.index for path in again.paths()] == [path.index for path in plane.paths()]
            assert again.pods().keys() == {0, 1}


def test_settings_come_back_as_they_were_given(rig: Rig) -> None:
    wanted = replace(rig.settings, tos_inherit=True, mtu=1234, mark_mask=0xFF00)
    rig.plane.configure(wanted)
    assert rig.plane.settings() == wanted
