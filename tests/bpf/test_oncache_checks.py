# SPDX-License-Identifier: Apache-2.0
"""Checks of the programs one by one, where only this one stands between a packet and a mistake.

tests/mutation.py takes each of them out and expects a test of this folder to fail.
"""

import subprocess
from collections.abc import Iterator

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet

from bench import rig as lab
from bench.rig import BASE, REDIRECT, Rig, from_pod, tcp, tcp_back, to_pod, udp, udp_back, wrap

pytestmark = [pytest.mark.root, pytest.mark.netns]

UDP_OUT, UDP_IN = from_pod(udp()), to_pod(udp_back())
TCP_OUT, TCP_IN = from_pod(tcp()), to_pod(tcp_back())
OTHER_MAC = "02:00:00:00:01:12"
LEARNED, HIT_OUT, HIT_IN = {"learned": 1}, {"hits.from_pod": 1}, {"hits.from_wire": 1}


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
    for there, back in ((UDP_OUT, UDP_IN), (TCP_OUT, TCP_IN)):
        rig.warm(there, back)
    return rig


def readdressed(packet: Packet, **ether: str) -> Packet:
    changed = packet.copy()
    for name, value in ether.items():
        setattr(changed, name, value)
    return changed


# --- what teaches


@pytest.mark.parametrize(
    ("device", "packet"),
    [
        ("other", readdressed(lab.delivered(UDP_IN), dst=OTHER_MAC)),
        ("pod", readdressed(lab.delivered(UDP_IN), dst=OTHER_MAC)),
        ("uplink", lab.delivered(UDP_IN)),
    ],
    ids=["another pod's address", "another pod's mac", "no pod"],
)
def test_only_the_pod_itself_teaches(rig: Rig, device: str, packet: Packet) -> None:
    first = rig.run("from_wire", wrap(UDP_IN))
    second = rig.run("to_pod", packet, mark=first.mark, ifindex=getattr(rig, device))
    assert second.moved == {"not_learned.foreign": 1}


def test_a_packet_with_more_hops_left_than_it_had_teaches_nothing(rig: Rig) -> None:
    first = rig.run("from_pod", UDP_OUT)
    sent = lab.encapsulated(from_pod(udp(), ttl=70))
    assert rig.run("to_wire", sent, mark=first.mark).moved == {"not_learned.translated": 1}


def test_a_mark_that_names_no_slot_is_left_as_it_was(rig: Rig) -> None:
    """It is somebody else's: IGMP packets seem to carry one."""
    rig.configure(mark_mask=0x3FF)
    run = rig.run("to_wire", lab.encapsulated(UDP_OUT), mark=0x3FF)
    assert (run.moved, run.mark) == ({"not_learned.mark": 1}, 0x3FF)


# --- lengths that disagree; TCP has none of its own


TRUNCATED = {"base_path.truncated": 1}


def shortened(packet: Packet, *layers: type[Packet]) -> Packet:
    """Some layers say that they are a byte shorter than they are."""
    changed = Ether(bytes(packet))
    for layer in layers:
        changed[layer].len -= 1
        if layer is IP:
            del changed[IP].chksum
    return Ether(bytes(changed))


@pytest.mark.parametrize(
    "packet",
    [shortened(TCP_OUT, IP), bytes(TCP_OUT) + b"x", bytes(TCP_OUT)[:-1]],
    ids=["ip", "bytes behind", "bytes missing"],
)
def test_a_pods_frame_that_is_not_as_long_as_it_says(warm: Rig, packet: Packet | bytes) -> None:
    run = warm.run("from_pod", packet)
    assert (run.verdict, run.data, run.moved) == (BASE, bytes(packet), TRUNCATED)


@pytest.mark.parametrize(
    "packet",
    [
        shortened(wrap(TCP_IN), IP, UDP),
        shortened(wrap(TCP_IN), UDP),
        wrap(shortened(TCP_IN, IP)),
        bytes(wrap(TCP_IN)) + b"x",
        bytes(wrap(TCP_IN))[:-1],
    ],
    ids=["tunnel", "udp", "inner", "bytes behind", "bytes missing"],
)
def test_an_arriving_frame_that_is_not_as_long_as_it_says(
    warm: Rig, packet: Packet | bytes
) -> None:
    run = warm.run("from_wire", packet)
    assert (run.verdict, run.data, run.moved) == (BASE, bytes(packet), TRUNCATED)


# --- what others may do to a flow


@pytest.mark.parametrize("flags", ["FA", "R", "S"])
def test_another_pod_does_not_end_a_flow(warm: Rig, flags: str) -> None:
    warm.run("from_pod", from_pod(tcp(flags)), ifindex=warm.other)
    assert warm.run("from_pod", TCP_OUT).moved == HIT_OUT
    assert warm.run("from_wire", wrap(TCP_IN)).moved == HIT_IN


@pytest.mark.parametrize("flags", ["FA", "R", "S"])
def test_a_stranger_does_not_end_a_flow(warm: Rig, flags: str) -> None:
    warm.run("from_wire", wrap(to_pod(tcp_back(flags)), src=lab.STRANGER))
    assert warm.run("from_pod", TCP_OUT).moved == HIT_OUT
    assert warm.run("from_wire", wrap(TCP_IN)).moved == HIT_IN


@pytest.mark.parametrize("flags", ["FA", "R"])
def test_a_stranger_does_not_end_a_flow_that_begins(rig: Rig, flags: str) -> None:
    """Nothing has arrived yet from where its packets come from."""
    rig.send(TCP_OUT)
    rig.run("from_wire", wrap(to_pod(tcp_back(flags)), src=lab.STRANGER))
    rig.warm(TCP_OUT, TCP_IN)
    assert rig.run("from_pod", TCP_OUT).moved == HIT_OUT


def test_a_mapped_outer_source_is_no_ipv4_peer(warm: Rig) -> None:
    """The kernel drops IPv6 from ::ffff:0:0/96; it must not pass for the peer of that address."""
    forged = (
        Ether(src=lab.PEER_MAC, dst=lab.NODE_MAC)
        / IPv6(src=f"::ffff:{lab.PEER}", dst=f"::ffff:{lab.NODE}")
        / UDP(sport=50000, dport=lab.PORT)
        / VXLAN(vni=lab.VNI, flags=8)
        / UDP_IN
    )
    run = warm.run("from_wire", forged)
    assert (run.verdict, run.data) == (BASE, bytes(forged))


@pytest.mark.parametrize("outward", [True, False], ids=["out", "in"])
def test_nothing_overtakes_what_the_kernel_refused_room_for(warm: Rig, outward: bool) -> None:
    """It is in the base path like any other miss."""
    program, packet = ("from_pod", TCP_OUT) if outward else ("from_wire", wrap(TCP_IN))
    refused = warm.run(program, packet, gso_size=100, gso_segs=2)
    assert (refused.verdict, refused.moved) == (BASE, {"base_path.helper": 1})
    assert warm.run(program, packet).moved == {"base_path.order": 1}


def test_what_the_kernel_refused_room_for_is_as_it_was(warm: Rig) -> None:
    urgent = from_pod(tcp(), tos=0x10)
    refused = warm.run("from_pod", urgent, gso_size=100, gso_segs=2, priority=5)
    assert (refused.data, refused.priority) == (bytes(urgent), 5)


# --- what connection tracking says


@pytest.fixture
def tracked(rig: Rig) -> Iterator[Rig]:
    """A namespace with a table of its own; what a test puts there is gone afterwards."""
    yield rig
    conntrack("-F")


def conntrack(*arguments: str) -> None:
    subprocess.run(["conntrack", *arguments], check=True, capture_output=True)


def track(packet: Packet, *more: str) -> None:
    """An entry as the packet would make it, lasting longer than the test."""
    l4 = packet[TCP] if TCP in packet else packet[UDP]
    conntrack(
        *("-I", "-p", "tcp" if TCP in packet else "udp", "-t", "600"),
        *("-s", packet[IP].src, "-d", packet[IP].dst),
        *("--sport", str(l4.sport), "--dport", str(l4.dport), *more),
    )


def learns(rig: Rig, packet: Packet) -> dict[str, int]:
    _, second = rig.send(packet)
    assert second is not None
    return second.moved


SEEN = ("-u", "SEEN_REPLY,ASSURED")
UNESTABLISHED = {"not_learned.unestablished": 1}


@pytest.mark.parametrize(
    ("packet", "entry", "moved"),
    [
        (UDP_OUT, SEEN, LEARNED),
        (UDP_OUT, (), UNESTABLISHED),
        (TCP_OUT, ("--state", "ESTABLISHED", *SEEN), LEARNED),
        (TCP_OUT, ("--state", "CLOSE_WAIT", *SEEN), UNESTABLISHED),
        (TCP_OUT, ("--state", "SYN_SENT"), UNESTABLISHED),
        (UDP_OUT, (*SEEN, "-n", "10.9.9.9"), UNESTABLISHED),
        (UDP_OUT, (*SEEN, "-g", "10.9.9.9"), UNESTABLISHED),
    ],
    ids=["udp", "udp unanswered", "tcp", "half closed", "handshake", "source nat", "hidden nat"],
)
def test_only_established_flows_teach(
    tracked: Rig, packet: Packet, entry: tuple[str, ...], moved: dict[str, int]
) -> None:
    track(packet, *entry)
    assert learns(tracked, packet) == moved


def test_the_answer_to_a_handshake_teaches_but_is_not_enough(tracked: Rig) -> None:
    track(TCP_OUT, "--state", "SYN_RECV", *SEEN)
    assert learns(tracked, TCP_OUT) == LEARNED
    tracked.receive(TCP_IN)
    assert tracked.run("from_pod", TCP_OUT).moved == {"base_path.unconfirmed": 1}


def test_a_reset_that_nobody_believed_is_forgotten(tracked: Rig) -> None:
    """Conntrack still calls the flow established: it is learned again, and is fast again."""
    track(TCP_OUT, "--state", "ESTABLISHED", *SEEN)
    tracked.warm(TCP_OUT, TCP_IN)
    tracked.run("from_pod", from_pod(tcp("R")))
    assert tracked.run("from_pod", TCP_OUT).moved == {"base_path.closed": 1}
    tracked.warm(TCP_OUT, TCP_IN)
    assert tracked.run("from_pod", TCP_OUT).verdict == REDIRECT
