# SPDX-License-Identifier: Apache-2.0
"""The guard against a stranger on the underlay who forges tunnel packets.

Hosts a and b share an overlay; x is a third machine on their wire and no part of it. Every
forgery is first sent without a guard: the base path delivers it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scapy.layers.inet import IP, UDP, IPOption_NOP, fragment
from scapy.layers.inet6 import (
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    fragment6,
)
from scapy.layers.l2 import Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet, Raw

from netns_tests.lab import Agent, Host, Lab, Vxlan, inject, sockets, until
from netns_tests.lab.hosts import Kind, mac
from netns_tests.lab.processes import python
from netns_tests.nodes import FAST, LONG_LEASE, SECONDS, Nodes, accelerated, numbered, warm
from oncache.core import attach, control, libbpf
from oncache.core.libbpf import AttachType, XdpMode
from oncache.guard import Guard, link_pin, report

LITTLE = 0.2
EVERYBODY = "ff:ff:ff:ff:ff:ff"


@dataclass(frozen=True)
class Scene:
    """Hosts a and b with a pod each, and the stranger x."""

    a: Host
    b: Host
    x: Host

    @property
    def pair(self) -> tuple[Host, Host]:
        return self.a, self.b


@pytest.fixture
def version() -> int:
    """IP version of the underlay; a test may parametrize it."""
    return 4


@pytest.fixture
def scene(lab: Lab, version: int) -> Scene:
    made = Scene(*(lab.host(label, ip6=version == 6) for label in ("a", "b", "x")))
    lab.wire(made.a, made.b, made.x)
    lab.vxlan(*made.pair, device=Vxlan(outer=version))
    for host in made.pair:
        host.pod("p1")
    return made


# ------------------------------------------------------------------------------------- forgeries


def inner(scene: Scene, port: int, payload: bytes) -> Packet:
    """A datagram as from b's pod to a's."""
    source, target = scene.b.pods["p1"], scene.a.pods["p1"]
    return (
        VXLAN(vni=1, flags=8)
        / Ether(src=mac(Kind.TUNNEL, scene.b.number), dst=mac(Kind.TUNNEL, scene.a.number))
        / IP(src=str(source.address), dst=str(target.address))
        / UDP(sport=4000, dport=port)
        / Raw(payload)
    )


def ether(scene: Scene, *tags: Packet, to: str = "") -> Packet:
    frame = Ether(src=mac(Kind.UPLINK, scene.x.number), dst=to or mac(Kind.UPLINK, scene.a.number))
    for tag in tags:
        frame /= tag
    return frame


def outer(scene: Scene, **fields: Any) -> Packet:
    return IP(**{"src": str(scene.x.address), "dst": str(scene.a.address), **fields}) / UDP(
        sport=50000, dport=8472, chksum=0
    )


def plain(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    return [ether(scene) / outer(scene) / inner(scene, port, payload)]


def with_options(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    options = outer(scene, options=[IPOption_NOP()] * 8)
    return [ether(scene) / options / inner(scene, port, payload)]


def with_priority_tags(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    """The kernel strips any number of tags of VLAN 0."""
    tags = [Dot1Q(vlan=0)] * 6
    return [ether(scene, *tags) / outer(scene) / inner(scene, port, payload)]


def in_fragments(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    whole = outer(scene, id=7, flags=0) / inner(scene, port, payload + bytes(600))
    return [ether(scene) / piece for piece in fragment(IP(bytes(whole)), 200)]  # type: ignore[no-untyped-call]


def to_everybody(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    address = outer(scene, dst="255.255.255.255")
    return [ether(scene, to=EVERYBODY) / address / inner(scene, port, payload)]


def to_another_address_of_the_host(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    """The tunnel device listens on all of them."""
    address = outer(scene, dst=str(scene.a.gateway))
    return [ether(scene) / address / inner(scene, port, payload)]


def from_a_new_mac(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    """As from a pod's node that nobody knows yet; a tunnel that learns does not let known ones
    move."""
    (frame,) = plain(scene, port, payload)
    frame[VXLAN].payload.src = "02:00:00:00:00:bb"
    return [frame]


def outer6(scene: Scene, *extensions: Packet) -> Packet:
    packet = IPv6(src=str(scene.x.address6), dst=str(scene.a.address6))
    for extension in extensions:
        packet /= extension
    return packet / UDP(sport=50000, dport=8472)


def plain6(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    return [ether(scene) / outer6(scene) / inner(scene, port, payload)]


def with_extensions6(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    chain = IPv6ExtHdrHopByHop(), IPv6ExtHdrDestOpt(), IPv6ExtHdrDestOpt()
    return [ether(scene) / outer6(scene, *chain) / inner(scene, port, payload)]


def with_many_extensions6(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    chain = [IPv6ExtHdrDestOpt() for _ in range(12)]
    return [ether(scene) / outer6(scene, *chain) / inner(scene, port, payload)]


def in_fragments6(scene: Scene, port: int, payload: bytes) -> list[Packet]:
    whole = outer6(scene, IPv6ExtHdrFragment(id=7)) / inner(scene, port, payload + bytes(600))
    return [ether(scene) / piece for piece in fragment6(whole, 300)]  # type: ignore[no-untyped-call]


Forge = Callable[[Scene, int, bytes], list[Packet]]

FORGERIES: dict[int, tuple[Forge, ...]] = {
    4: (
        plain,
        with_options,
        with_priority_tags,
        in_fragments,
        to_everybody,
        to_another_address_of_the_host,
    ),
    6: (plain6, with_extensions6, with_many_extensions6, in_fragments6),
}


class Victim:
    """A socket of a's pod, and a way to tell whether a forgery has reached it."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._socket = sockets.udp(scene.a.pods["p1"])
        self.port: int = self._socket.getsockname()[1]

    def reached_by(self, forge: Forge = plain) -> bool:
        """Send a forgery, then a datagram of b's pod, which must arrive: what was sent before it
        arrives before it, or but little later if another CPU works on it."""
        forged, honest = os.urandom(16), os.urandom(16)
        frames = forge(self.scene, self.port, forged)
        inject(self.scene.x, self.scene.x.uplink, *map(bytes, frames))
        with closing(sockets.udp(self.scene.b.pods["p1"])) as friend:
            friend.sendto(honest, (str(self.scene.a.pods["p1"].address), self.port))
        self._socket.settimeout(SECONDS)
        seen = {self._received()}
        while honest not in seen:
            seen.add(self._received())
        self._socket.settimeout(LITTLE)
        with contextlib.suppress(TimeoutError):
            while forged not in seen:
                seen.add(self._received())
        return forged in seen

    def _received(self) -> bytes:
        return self._socket.recv(2048)[:16]

    def struck(self, forgeries: tuple[Forge, ...]) -> dict[str, bool]:
        """Of each forgery whether it arrives."""
        return {forge.__name__: self.reached_by(forge) for forge in forgeries}


@pytest.fixture
def victim(scene: Scene) -> Victim:
    return Victim(scene)


# ---------------------------------------------------------------------------------------- guards


def guarded(scene: Scene, mode: str, **config: Any) -> contextlib.AbstractContextManager[Nodes]:
    return accelerated(scene.pair, guard={"mode": mode}, **{"lease_seconds": LONG_LEASE, **config})


@contextlib.contextmanager
def agent_on_a(scene: Scene, mode: str, **config: Any) -> Iterator[Agent]:
    with scene.a.agent(scene.a.config(guard={"mode": mode}, **config)) as running:
        yield running


def counted(host: Host) -> dict[str, Any]:
    found = report(host.bpf_dir)
    assert found is not None
    return found


def on_uplink(host: Host) -> attach.XdpHook | None:
    return host.run(lambda: attach.xdp(host.index(host.uplink), link_pin(host.bpf_dir)))


def doctor(host: Host) -> dict[str, dict[str, str]]:
    argv = python("oncache.cli", "doctor", "--json", "-c", str(host.config_path))
    done = host.command(argv, check=False)
    return {check["name"]: check for check in json.loads(done.stdout)}


# ----------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("version", FORGERIES)
def test_forgeries_are_delivered_without_the_guard_and_dropped_with_it(
    scene: Scene, victim: Victim, version: int
) -> None:
    forgeries, source = FORGERIES[version], str(scene.x.ip(version))
    count = len(forgeries)
    delivered, dropped = (dict.fromkeys((f.__name__ for f in forgeries), x) for x in (True, False))
    assert victim.struck(forgeries) == delivered, "the base path takes them"
    with agent_on_a(scene, "off"):
        assert victim.struck(forgeries) == delivered, "and so it does beside the fast path"
        assert on_uplink(scene.a) is None
    with agent_on_a(scene, "observe"):
        assert victim.struck(forgeries) == delivered
        seen = counted(scene.a)
        assert (seen["stranger"], seen["obscure"], seen["dropped"]) == (count - 1, 1, 0)
    with agent_on_a(scene, "enforce"):
        assert victim.struck(forgeries) == dropped
        seen = counted(scene.a)
        assert (seen["stranger"], seen["obscure"]) == (2 * (count - 1), 2)
        assert seen["dropped"] == count
        assert seen["strangers"].keys() == {source}


def test_honest_traffic_loses_nothing_and_stays_fast(scene: Scene, victim: Victim) -> None:
    near, far = scene.a.pods["p1"], scene.b.pods["p1"]
    with guarded(scene, "enforce") as nodes:
        assert all(hook and hook.native for hook in map(on_uplink, scene.pair))
        one, other = sockets.connection(near, far, far.address)
        warm(nodes, lambda: sockets.exchange(one, other))
        meters = [node.meter() for node in nodes]
        for size in (1, 100, 20_000, 200_000):
            sockets.exchange(one, other, os.urandom(size))
        assert all(meter.moved().keys() == FAST for meter in meters)
        with numbered(near, far) as flow:
            for _ in range(20):
                assert not victim.reached_by()
        flow.assert_whole()
        for host in scene.pair:
            seen = counted(host)
            assert seen["passed"] > flow.sent
            assert seen["stranger"] == seen["dropped"] == (20 if host is scene.a else 0)


def test_a_new_peer_is_welcome_at_once(scene: Scene, victim: Victim) -> None:
    a, x = scene.a, scene.x
    with agent_on_a(scene, "enforce") as agent, closing(Guard.open(agent.bpf_dir)) as guard:
        assert guard.peers() == {scene.b.address}
        entry = {"ifindex": a.index(a.tunnel), "lladdr": "02:00:00:00:00:aa", "dst": str(x.address)}
        a.netlink.fdb("add", **entry)
        until(lambda: x.address in guard.peers(), 1.0, "the new peer")
        assert victim.reached_by()
        a.netlink.fdb("del", **entry)
        until(lambda: x.address not in guard.peers(), 1.0, "the peer is none any more")
        assert not victim.reached_by()


def test_configured_peers_are_welcome(scene: Scene, victim: Victim) -> None:
    config = scene.a.config(guard={"mode": "enforce", "peers": [str(scene.x.address)]})
    with scene.a.agent(config):
        assert victim.reached_by()
        assert counted(scene.a)["stranger"] == 0


def test_a_dead_agents_guard_lets_everybody_in(scene: Scene, victim: Victim) -> None:
    with agent_on_a(scene, "enforce", deadline_seconds=1.0) as agent:
        assert not victim.reached_by()
        agent.kill()
        until(victim.reached_by, SECONDS, "the deadline has passed")
        hook = on_uplink(scene.a)
        assert hook is not None
        assert hook.program.ours
        assert counted(scene.a)["deadline"] > 0
        before = counted(scene.a)["dropped"]
        agent.start()
        assert not victim.reached_by()
        assert counted(scene.a)["dropped"] == before + 1, "counters go on"
        assert on_uplink(scene.a) != hook, "the program is this agent's"


def test_an_agent_that_stops_and_one_that_hangs_are_the_same(scene: Scene, victim: Victim) -> None:
    with agent_on_a(scene, "enforce", deadline_seconds=1.0) as agent:
        assert not victim.reached_by()
        assert agent.stop() == 0
        until(victim.reached_by, SECONDS, "the deadline has passed")


def test_detach_removes_it(scene: Scene, victim: Victim) -> None:
    with agent_on_a(scene, "enforce") as agent:
        assert not victim.reached_by()
        control.call(agent.run_dir, "detach")
        assert on_uplink(scene.a) is None
        assert not scene.a.bpf_dir.exists()
        assert victim.reached_by()
        control.call(agent.run_dir, "attach")
        assert not victim.reached_by()
        agent.kill()
        argv = python("oncache.cli", "detach", "-c", str(scene.a.config_path))
        scene.a.command(argv)
        assert on_uplink(scene.a) is None
        assert not scene.a.bpf_dir.exists()


def test_mode_off_removes_what_an_earlier_agent_left(scene: Scene, victim: Victim) -> None:
    with agent_on_a(scene, "enforce"):
        pass
    assert on_uplink(scene.a) is not None
    with agent_on_a(scene, "off"):
        assert on_uplink(scene.a) is None
        assert report(scene.a.bpf_dir) is None
        assert victim.reached_by()


def test_an_uplink_made_anew_is_guarded_again(scene: Scene, victim: Victim) -> None:
    """As when somebody takes the link off: at the next look it is back."""
    with agent_on_a(scene, "enforce"):
        attach.detach_xdp(link_pin(scene.a.bpf_dir))
        assert victim.reached_by()
        index = scene.a.index(scene.a.uplink)
        scene.a.netlink.addr("add", index=index, address="198.51.100.1", prefixlen=32)
        until(lambda: on_uplink(scene.a), SECONDS, "the guard is back")
        until(lambda: not victim.reached_by(), SECONDS, "and at work")


@contextlib.contextmanager
def foreign_program(scene: Scene, directory: Path) -> Iterator[int]:
    """Somebody else's XDP program on a's uplink; its id."""
    a = scene.a
    with ExitStack() as stack:
        guard = Guard.load(a.bpf_dir.parent / "foreign", 8)
        stack.callback(Guard.unload, a.bpf_dir.parent / "foreign")
        stack.callback(guard.close)
        link = a.run(
            libbpf.link_create,
            *(guard.program_fd(), a.index(a.uplink), AttachType.XDP, XdpMode.GENERIC),
        )
        stack.callback(os.close, link)
        stack.callback(libbpf.link_detach, link)
        yield libbpf.prog_info(guard.program_fd()).id


def test_a_foreign_program_stays_and_is_reported(
    scene: Scene, victim: Victim, tmp_path: Path
) -> None:
    with agent_on_a(scene, "off"):
        pass
    with foreign_program(scene, tmp_path) as foreign, agent_on_a(scene, "enforce") as agent:
        said = control.call(agent.run_dir, "status")
        assert said["state"] == "attached", "the fast path works all the same"
        (problem,) = said["problems"]
        assert "XDP program 'guard' of somebody else" in problem
        hook = on_uplink(scene.a)
        assert hook is not None
        assert (hook.program.id, hook.program.ours, hook.native) == (foreign, False, False)
        found = doctor(scene.a)
        assert found["guard hook"]["level"] == "warn"
        assert victim.reached_by()
    hook = on_uplink(scene.a)
    assert hook is None


def test_a_tunnel_that_learns_its_peers_is_only_observed(scene: Scene, victim: Victim) -> None:
    a = scene.a
    a.command(["ip", "link", "set", a.tunnel, "type", "vxlan", "learning"])
    with agent_on_a(scene, "enforce") as agent:
        (problem,) = control.call(agent.run_dir, "status")["problems"]
        assert "guard.peers" in problem
        assert victim.reached_by(from_a_new_mac)
        assert (counted(a)["stranger"], counted(a)["dropped"]) == (1, 0)
        until(lambda: x_is_a_peer(scene), SECONDS, "learned by the tunnel, so by the guard")


def x_is_a_peer(scene: Scene) -> bool:
    with closing(Guard.open(scene.a.bpf_dir)) as guard:
        return scene.x.address in guard.peers()


def test_a_large_mtu_keeps_the_guard_native(lab: Lab) -> None:
    hosts = lab.pair(mtu=9000)
    with accelerated(hosts, guard={"mode": "enforce"}) as nodes:
        assert all(hook and hook.native for hook in map(on_uplink, hosts))
        one, other = (node.pod for node in nodes)
        near, far = sockets.connection(one, other, other.address)
        sockets.exchange(near, far, os.urandom(300_000))
        assert counted(hosts[0])["passed"] > 0


def test_doctor_and_stats_tell(scene: Scene, victim: Victim) -> None:
    def stats(*options: str) -> str:
        argv = python("oncache.cli", "stats", *options, "-c", str(scene.a.config_path))
        return scene.a.command(argv).stdout

    with agent_on_a(scene, "off"):
        assert doctor(scene.a)["guard"]["level"] == "warn"
        assert "guard" not in json.loads(stats("--json"))
    with agent_on_a(scene, "enforce"):
        assert not victim.reached_by()
        assert doctor(scene.a)["guard"]["level"] == "ok"
        assert "guard hook" not in doctor(scene.a)
        told = json.loads(stats("--json"))["guard"]
        assert (told["stranger"], told["dropped"]) == (1, 1)
        assert told["strangers"] == {str(scene.x.address): 1}
        assert f"guard.strangers.{scene.x.address}" in stats()
