# SPDX-License-Identifier: Apache-2.0
"""The guard on made-up frames: what it drops, what it counts, and that it never touches a frame."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from errno import E2BIG
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import IPRoute
from scapy.layers.inet import IP, TCP, UDP, IPOption_NOP, fragment
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.ipsec import AH
from scapy.layers.l2 import ARP, Dot1AD, Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from oncache.core import libbpf
from oncache.core.net import IpAddress
from oncache.guard import Guard
from tests.bpf import toy

pytestmark = [pytest.mark.root, pytest.mark.netns]

NODE, PEER, STRANGER, ROUTER = "192.0.2.1", "192.0.2.2", "192.0.2.99", "192.0.2.254"
ELSEWHERE, ANY_IP = "198.51.100.7", "203.0.113.5"
NODE6, PEER6, STRANGER6, ELSEWHERE6 = "2001:db8::1", "2001:db8::2", "2001:db8::99", "2001:db8:9::7"
PORT, OTHER_PORT = 8472, 53
DROP, PASS = 1, 2
ROOM = 8


@dataclass(frozen=True)
class Run:
    verdict: int
    moved: dict[str, int]


class Rig:
    """A loaded guard in a namespace with the node's addresses; nothing is attached."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.reset()

    def reset(self) -> None:
        self.guard.configure(PORT, enforce=True)
        self.guard.set_peers([ip_address(PEER), ip_address(PEER6)])
        self.guard.enable(3600)

    def run(self, frame: Packet | bytes) -> Run:
        before = self.guard.counters()
        ran = libbpf.test_run(self.guard.program_fd(), bytes(frame))
        after = self.guard.counters()
        assert ran.data == bytes(frame)
        moved = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        return Run(ran.retval, moved)

    def outcome(self, frame: Packet | bytes) -> str:
        """The one counter that moved, checked against the verdict."""
        ran = self.run(frame)
        if ran.verdict == DROP:
            assert ran.moved.pop("dropped") == 1
        else:
            assert ran.verdict == PASS
        ((name, count),) = ran.moved.items()
        assert count == 1
        return f"{name}, dropped" if ran.verdict == DROP else name


@contextmanager
def addressed() -> Iterator[None]:
    """A namespace whose loopback, where test runs arrive, is the node's uplink."""
    with toy.namespace(), IPRoute() as netlink:
        for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path("/proc/sys/net", name).write_text("1")
        lo = netlink.link_lookup(ifname="lo")[0]
        netlink.link("set", index=lo, state="up")
        uplink = toy.add_veth("uplink", "wire")
        netlink.addr("add", index=uplink, address=NODE, prefixlen=24, broadcast="192.0.2.255")
        netlink.addr("add", index=uplink, address=NODE6, prefixlen=64, flags=2)  # IFA_F_NODAD
        netlink.route("add", dst="0.0.0.0/0", gateway=ROUTER)
        netlink.route("add", dst="2001:db8:9::/64", oif=uplink)
        netlink.route("add", dst=f"{ANY_IP}/32", oif=lo, type="local", table=255, scope="host")
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with toy.bpffs(tmp_path_factory.mktemp("guard")) as mount, addressed():
        with closing(Guard.load(mount / "node", ROOM)) as guard:
            yield Rig(guard)
        Guard.unload(mount / "node")


@pytest.fixture
def rig(loaded: Rig) -> Rig:
    loaded.reset()
    return loaded


# ---------------------------------------------------------------------------------------- frames


def inner() -> Packet:
    return (
        Ether(src="02:00:00:00:bb:01", dst="02:00:00:00:aa:01")
        / IP(src="10.2.0.11", dst="10.1.0.11")
        / UDP(sport=5000, dport=40000)
        / Raw(b"data")
    )


def tunnel(port: int = PORT) -> Packet:
    return UDP(sport=50000, dport=port) / VXLAN(vni=7, flags=8) / inner()


def ether(*tags: Packet) -> Packet:
    frame = Ether(src="02:00:00:00:0b:01", dst="02:00:00:00:0a:01")
    for tag in tags:
        frame /= tag
    return frame


def ip(source: str = STRANGER, destination: str = NODE, **fields: Any) -> Packet:
    return IP(src=source, dst=destination, **fields)


def ip6(source: str = STRANGER6, destination: str = NODE6) -> Packet:
    return IPv6(src=source, dst=destination)


def extensions(count: int) -> Packet:
    chain = IPv6ExtHdrHopByHop()
    for _ in range(count - 1):
        chain /= IPv6ExtHdrDestOpt()
    return chain


def first_fragment(more: int = 1) -> Packet:
    return IPv6ExtHdrFragment(nh=17, offset=0, m=more, id=1)


OPTIONS = [IPOption_NOP()] * 40
VALID: dict[str, tuple[Packet, str]] = {
    "a peer": (ether() / ip(PEER) / tunnel(), "passed"),
    "a stranger": (ether() / ip() / tunnel(), "stranger, dropped"),
    "a stranger, with options": (ether() / ip(options=OPTIONS) / tunnel(), "stranger, dropped"),
    "a peer, with options": (ether() / ip(PEER, options=OPTIONS) / tunnel(), "passed"),
    "a stranger to another port": (ether() / ip() / tunnel(OTHER_PORT), "other"),
    "a stranger from the tunnel port": (ether() / ip() / UDP(sport=PORT, dport=53), "other"),
    "a stranger by TCP": (ether() / ip() / TCP(sport=50000, dport=PORT), "other"),
    "address resolution": (ether() / ARP(psrc=STRANGER, pdst=NODE), "other"),
    "a stranger to a host behind": (ether() / ip(destination=ELSEWHERE) / tunnel(), "elsewhere"),
    "a stranger to a neighbour": (ether() / ip(destination=ROUTER) / tunnel(), "elsewhere"),
    "a peer to a host behind": (ether() / ip(PEER, ELSEWHERE) / tunnel(), "passed"),
    "a stranger to a local route": (ether() / ip(destination=ANY_IP) / tunnel(),
                                    "stranger, dropped"),
    "a stranger to a broadcast": (ether() / ip(destination="192.0.2.255") / tunnel(),
                                  "stranger, dropped"),
    "a stranger to everybody": (ether() / ip(destination="255.255.255.255") / tunnel(),
                                "stranger, dropped"),
    "a stranger to a group": (ether() / ip(destination="239.1.1.1") / tunnel(),
                              "stranger, dropped"),
    "nobody to nobody": (ether() / ip("0.0.0.0", "0.0.0.0") / tunnel(), "stranger, dropped"),
    "a first fragment": (ether() / ip(flags="MF") / tunnel(), "stranger, dropped"),
    "a later fragment": (ether() / ip(frag=1, proto=17) / Raw(bytes(8)), "fragment"),
    "a peer's first fragment": (ether() / ip(PEER, flags="MF") / tunnel(), "passed"),
    "a peer's later fragment": (ether() / ip(PEER, frag=1, proto=17) / Raw(bytes(8)), "fragment"),
    "a priority tag": (ether(Dot1Q(vlan=0)) / ip() / tunnel(), "stranger, dropped"),
    "a VLAN": (ether(Dot1Q(vlan=5)) / ip() / tunnel(), "stranger, dropped"),
    "a peer in a VLAN": (ether(Dot1Q(vlan=5)) / ip(PEER) / tunnel(), "passed"),
    "two tags": (ether(Dot1AD(vlan=5), Dot1Q(vlan=6)) / ip() / tunnel(), "stranger, dropped"),
    "a peer in two tags": (ether(Dot1AD(vlan=5), Dot1Q(vlan=6)) / ip(PEER) / tunnel(), "passed"),
    "four tags": (ether(*[Dot1Q(vlan=0)] * 4) / ip() / tunnel(), "stranger, dropped"),
    "five tags": (ether(*[Dot1Q(vlan=0)] * 5) / ip() / tunnel(), "obscure, dropped"),
    "IPv6: a peer": (ether() / ip6(PEER6) / tunnel(), "passed"),
    "IPv6: a stranger": (ether() / ip6() / tunnel(), "stranger, dropped"),
    "IPv6: another port": (ether() / ip6() / tunnel(OTHER_PORT), "other"),
    "IPv6: a host behind": (ether() / ip6(destination=ELSEWHERE6) / tunnel(), "elsewhere"),
    "IPv6: a group": (ether() / ip6(destination="ff02::1") / tunnel(), "stranger, dropped"),
    "IPv6 in a VLAN": (ether(Dot1Q(vlan=5)) / ip6() / tunnel(), "stranger, dropped"),
    "IPv6: a mapped peer": (ether() / ip6(f"::ffff:{PEER}") / tunnel(), "other"),
    "IPv6: hop-by-hop": (ether() / ip6() / extensions(1) / tunnel(), "stranger, dropped"),
    "IPv6: seven extensions": (ether() / ip6() / extensions(7) / tunnel(), "stranger, dropped"),
    "IPv6: eight extensions": (ether() / ip6() / extensions(8) / tunnel(), "obscure, dropped"),
    "IPv6: a peer's eight": (ether() / ip6(PEER6) / extensions(8) / tunnel(), "passed"),
    "IPv6: a routing header": (ether() / ip6() / IPv6ExtHdrRouting(addresses=[NODE6]) / tunnel(),
                               "stranger, dropped"),
    "IPv6: authenticated": (ether() / ip6() / AH(nh=17, icv=bytes(12), payloadlen=4) / tunnel(),
                            "stranger, dropped"),
    "IPv6: a first fragment": (ether() / ip6() / first_fragment() / tunnel(), "stranger, dropped"),
    "IPv6: an atomic fragment": (ether() / ip6() / first_fragment(0) / tunnel(),
                                 "stranger, dropped"),
    "IPv6: a later fragment": (ether() / ip6() / IPv6ExtHdrFragment(nh=17, offset=1, id=1)
                               / Raw(bytes(8)), "fragment"),
    "IPv6: no next header": (ether() / IPv6(src=STRANGER6, dst=NODE6, nh=59), "other"),
}  # fmt: skip


# ----------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", VALID)
def test_a_frame_is_judged(rig: Rig, name: str) -> None:
    frame, expected = VALID[name]
    assert rig.outcome(frame) == expected


@pytest.mark.parametrize("name", VALID)
def test_observing_drops_nothing_and_counts_the_same(rig: Rig, name: str) -> None:
    frame, expected = VALID[name]
    rig.guard.configure(PORT, enforce=False)
    assert rig.outcome(frame) == expected.removesuffix(", dropped")


@pytest.mark.parametrize("name", VALID)
def test_every_prefix_is_judged_as_the_whole_or_passes(rig: Rig, name: str) -> None:
    """A frame cut off before its port is one the kernel itself throws away."""
    frame, expected = VALID[name]
    raw = bytes(frame)
    outcomes = [rig.outcome(raw[:length]) for length in range(14, len(raw) + 1)]
    first = outcomes.index(expected)
    assert set(outcomes[:first]) <= {"other"}
    assert set(outcomes[first:]) == {expected}


def test_every_outcome_is_among_the_frames() -> None:
    expected = {outcome.removesuffix(", dropped") for _, outcome in VALID.values()}
    assert expected == {"other", "passed", "stranger", "obscure", "elsewhere", "fragment"}


@pytest.mark.parametrize("name", VALID)
def test_after_the_deadline_everything_passes(rig: Rig, name: str) -> None:
    frame, expected = VALID[name]
    rig.guard.disable()
    outcome = rig.outcome(frame)
    judged = expected.startswith(("stranger", "obscure", "elsewhere"))
    assert outcome == ("deadline" if judged else expected)


def test_the_deadline_is_a_moment_in_time(rig: Rig) -> None:
    stranger = VALID["a stranger"][0]
    rig.guard.enable(-0.1)
    assert rig.outcome(stranger) == "deadline"
    rig.guard.enable(60)
    assert rig.outcome(stranger) == "stranger, dropped"


def test_only_the_tunnel_port_matters(rig: Rig) -> None:
    rig.guard.configure(4789, enforce=True)
    assert rig.outcome(VALID["a stranger"][0]) == "other"
    assert rig.outcome(ether() / ip() / tunnel(4789)) == "stranger, dropped"


def test_a_host_that_does_not_forward_keeps_everything(rig: Rig) -> None:
    forwarding = Path("/proc/sys/net/ipv4/ip_forward")
    forwarding.write_text("0")
    try:
        assert rig.outcome(VALID["a stranger to a host behind"][0]) == "stranger, dropped"
        assert rig.outcome(VALID["a stranger"][0]) == "stranger, dropped"
    finally:
        forwarding.write_text("1")


def test_peers_come_and_go(rig: Rig) -> None:
    stranger = VALID["a stranger"][0]
    rig.guard.set_peers([ip_address(STRANGER)])
    assert rig.guard.peers() == {ip_address(STRANGER)}
    assert rig.outcome(stranger) == "passed"
    assert rig.outcome(VALID["a peer"][0]) == "stranger, dropped"
    rig.guard.set_peers([])
    assert rig.outcome(stranger) == "stranger, dropped"


def test_peers_that_do_not_fit_are_an_error(rig: Rig) -> None:
    many: list[IpAddress] = [ip_address(f"198.51.100.{n}") for n in range(ROOM + 1)]
    with pytest.raises(OSError, match="write map entry") as caught:
        rig.guard.set_peers(many)
    assert caught.value.errno == E2BIG


def test_strangers_are_counted_by_address(rig: Rig) -> None:
    before = rig.guard.strangers()
    for source in ("203.0.113.1", "203.0.113.1", "203.0.113.2"):
        rig.run(ether() / ip(source) / tunnel())
    rig.run(ether() / ip6("2001:db8::66") / tunnel())
    after = rig.guard.strangers()
    moved = {name: count for name, count in after.items() if count != before.get(name)}
    assert moved == {"203.0.113.1": 2, "203.0.113.2": 1, "2001:db8::66": 1}


def test_all_fragments_of_a_datagram(rig: Rig) -> None:
    pieces = fragment(ip() / UDP(dport=PORT) / Raw(bytes(3000)), 1000)  # type: ignore[no-untyped-call]
    assert len(pieces) > 3
    outcomes = [rig.outcome(ether() / piece) for piece in pieces]
    assert outcomes == ["stranger, dropped", *["fragment"] * (len(pieces) - 1)]


@pytest.mark.parametrize("version", [0, 5, 6, 15])
def test_a_version_that_lies(rig: Rig, version: int) -> None:
    assert rig.outcome(ether() / ip(version=version) / tunnel()) == "other"


@pytest.mark.parametrize("words", range(5))
def test_a_header_shorter_than_a_header(rig: Rig, words: int) -> None:
    assert rig.outcome(ether() / ip(ihl=words) / tunnel()) == "other"


def test_a_large_frame(rig: Rig) -> None:
    frame = ether() / ip() / tunnel() / Raw(bytes(3000))
    assert rig.outcome(frame) == "stranger, dropped"
