# SPDX-License-Identifier: Apache-2.0
"""The kernel's answers and events, settings that are put back, and conntrack's own words."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from ipaddress import IPv4Address, ip_address, ip_interface, ip_network
from pathlib import Path
from typing import TypeVar

import pytest

from netns_tests.lab import Namespace
from oncache import host
from oncache.core import conntrack, overlay, sysctl
from oncache.core.config import BuiltinOverlay, Peer
from oncache.core.conntrack import TcpState
from oncache.core.errors import HostError, OncacheError
from oncache.core.net import Df, Event, Item, Link, Neighbour, Overrun, Tunnel
from oncache.core.net import Namespace as Number
from oncache.core.netlink import Events, Netlink

T = TypeVar("T")
LIBERAL = host.LIBERAL
TRACKING = """
table inet t { chain c { type filter hook input priority 0; ct state established accept; }; }
"""


@pytest.fixture
def near() -> Iterator[Namespace]:
    made = Namespace(f"onc-{secrets.token_hex(3)}-near")
    yield made
    made.delete()


@pytest.fixture
def far(near: Namespace) -> Iterator[Namespace]:
    """A pod: its eth0 is the far end of near's v0."""
    made = Namespace(f"onc-{secrets.token_hex(3)}-far")
    peer = {"ifname": "eth0", "address": "02:00:00:00:00:11", "net_ns_fd": made.name}
    near.netlink.link("add", ifname="v0", kind="veth", peer=peer)
    yield made
    made.delete()


def asked(namespace: Namespace, question: Callable[[Netlink], Awaitable[T]]) -> T:
    """The answer to a question that is asked from inside a namespace."""

    async def ask() -> T:
        async with Netlink() as netlink:
            return await question(netlink)

    return namespace.run(lambda: asyncio.run(ask()))


def ip(namespace: Namespace, arguments: str) -> None:
    """Another process makes a change: pyroute2's own sockets are bound to threads."""
    namespace.command(["ip", *arguments.split()])


def link(namespace: Namespace, name: str) -> Link:
    links = asked(namespace, lambda netlink: netlink.links())
    return next(each for each in links if each.name == name)


# ------------------------------------------------------------------------------------- questions


def test_a_vxlan_device_with_everything(near: Namespace) -> None:
    near.netlink.link("add", ifname="u0", kind="veth", peer={"ifname": "u1"})
    ip(
        near,
        "link add vx0 type vxlan id 6 dev u0 dstport 4790 local 192.0.2.1 ttl inherit tos inherit"
        " df inherit srcport 100 200 gbp nolearning",
    )
    made = link(near, "vx0")
    assert made.lower == near.index("u0")
    assert made.tunnel == Tunnel(
        vni=6,
        port=4790,
        port_min=100,
        port_max=200,
        tos_inherit=True,
        ttl_inherit=True,
        df=Df.INHERIT,
        udp_csum=True,
        gbp=True,
        local=ip_address("192.0.2.1"),
    )


def test_a_plain_vxlan_device_inherits_no_ttl(near: Namespace) -> None:
    near.netlink.link("add", ifname="vx0", kind="vxlan", vxlan_id=7, vxlan_port=4789)
    assert link(near, "vx0").tunnel == Tunnel(vni=7, port=4789, udp_csum=True, learning=True)


def test_an_external_vxlan_device(near: Namespace) -> None:
    ip(near, "link add vx0 type vxlan external dstport 4789")
    tunnel = link(near, "vx0").tunnel
    assert tunnel is not None
    assert tunnel.collect_metadata


def test_a_snapshot(near: Namespace) -> None:
    near.netlink.link("add", ifname="u0", kind="veth", peer={"ifname": "u1"})
    for name in ("u0", "u1"):
        near.up(name)
    index = near.index("u0")
    near.netlink.addr("add", index=index, address="192.0.2.1", prefixlen=24)
    near.netlink.neigh("add", dst="192.0.2.7", lladdr="02:00:00:00:00:07", ifindex=index)
    near.netlink.link("add", ifname="vx0", kind="vxlan", vxlan_id=7, vxlan_port=4789)
    tunnel = near.index("vx0")
    near.netlink.fdb("add", ifindex=tunnel, lladdr="02:00:00:00:00:09", dst="192.0.2.7")
    seen = asked(near, lambda netlink: netlink.snapshot())
    assert {"lo", "u0", "u1", "vx0"} == {each.name for each in seen.links}
    address = next(each for each in seen.addresses if each.index == index)
    assert address.interface == ip_interface("192.0.2.1/24")
    assert (address.universe, address.primary, address.usable) == (True, True, True)
    assert Neighbour(index, ip_address("192.0.2.7"), bytes.fromhex("020000000007")) in (
        seen.neighbours
    )
    entries = [each for each in seen.fdb if each.index == tunnel]
    assert [(each.mac.hex(), each.remote) for each in entries] == [
        ("020000000009", ip_address("192.0.2.7"))
    ]


def test_routes_and_rules(near: Namespace) -> None:
    near.netlink.rule("add", priority=100, table=12, fwmark=3, fwmask=0xFF)
    near.netlink.route("add", dst="10.9.0.0/16", oif=near.index("lo"), table=1200)
    routes = asked(near, lambda netlink: netlink.routes())
    rules = asked(near, lambda netlink: netlink.rules())
    assert [each.table for each in routes if each.destination == ip_network("10.9.0.0/16")] == [
        1200
    ]
    assert [(each.table, each.fwmark, each.fwmask) for each in rules if each.priority == 100] == [
        (12, 3, 0xFF)
    ]


def test_a_pods_inside_is_read_from_outside(near: Namespace, far: Namespace) -> None:
    far.netlink.addr("add", index=far.index("eth0"), address="10.1.1.1", prefixlen=24)
    v0 = link(near, "v0")
    nsid = v0.lower_nsid
    assert nsid is not None
    inside = asked(near, lambda netlink: netlink.links(nsid))
    eth0 = next(each for each in inside if each.name == "eth0")
    assert (eth0.index, eth0.mac.hex(), eth0.lower) == (v0.lower, "020000000011", v0.index)
    addresses = asked(near, lambda netlink: netlink.addresses(nsid))
    assert [a.ip for a in addresses if a.index == eth0.index] == [ip_address("10.1.1.1")]
    assert asked(near, lambda netlink: netlink.names())[nsid] == far.name
    assert asked(near, lambda netlink: netlink.names(frozenset({far.name}))).get(nsid) is None


def test_what_is_not_there_is_no_error(near: Namespace) -> None:
    assert asked(near, lambda netlink: netlink.link(4711)) is None
    assert asked(near, lambda netlink: netlink.link(2, nsid=99)) is None
    assert asked(near, lambda netlink: netlink.links(nsid=99)) == []
    assert asked(near, lambda netlink: netlink.addresses(nsid=99)) == []


# ---------------------------------------------------------------------------------------- events

Heard = list[Event | Overrun]
DEADLINE_SECONDS = 20


async def until(events: Events, wanted: Callable[[Event | Overrun], bool]) -> Heard:
    """Everything that is heard up to the first wanted event."""
    heard: Heard = []
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not any(map(wanted, heard)):
            heard += await events.batch()
    return heard


def heard(
    namespace: Namespace,
    change: Callable[[], object],
    wanted: Callable[[Item, bool], bool],
    followed: frozenset[int] = frozenset(),
) -> Heard:
    """What is told inside ``namespace`` of a change, up to a wanted item (``gone`` or not)."""

    async def listen() -> Heard:
        async with Events() as events:
            events.followed = followed
            await asyncio.to_thread(change)
            return await until(events, lambda e: isinstance(e, Event) and wanted(e.item, e.gone))

    return namespace.run(lambda: asyncio.run(listen()))


def is_device(event: Event | Overrun, name: str) -> bool:
    return isinstance(event, Event) and isinstance(event.item, Link) and event.item.name == name


def test_a_new_device_is_told(near: Namespace) -> None:
    def change() -> None:
        ip(near, "link add u0 type veth peer u1")

    events = heard(near, change, lambda item, gone: isinstance(item, Link) and item.name == "u0")
    assert all(isinstance(event, Event) and not event.gone for event in events)


def test_a_device_that_leaves_a_bridge_is_not_gone(near: Namespace) -> None:
    near.netlink.link("add", ifname="u0", kind="veth", peer={"ifname": "u1"})
    near.netlink.link("add", ifname="br0", kind="bridge")
    index, bridge = near.index("u0"), near.index("br0")
    near.netlink.link("set", index=index, master=bridge)

    def change() -> None:
        ip(near, "link set u0 nomaster")
        ip(near, "link del br0")

    events = heard(near, change, lambda item, gone: isinstance(item, Link) and gone)
    links = [e for e in events if isinstance(e, Event) and isinstance(e.item, Link)]
    assert [e.item.name for e in links if isinstance(e.item, Link) and e.gone] == ["br0"]
    assert next(e.item for e in reversed(links) if e.item.index == index).master is None  # type: ignore[union-attr]


def test_a_change_inside_a_pod_is_told_outside(near: Namespace, far: Namespace) -> None:
    nsid = link(near, "v0").lower_nsid
    assert nsid is not None

    def change() -> None:
        ip(far, "addr add 10.1.1.1/24 dev eth0")

    followed = frozenset({nsid})
    heard(near, change, lambda item, gone: item == Number(nsid), followed)


def test_a_pod_that_is_not_followed_is_not_heard(near: Namespace, far: Namespace) -> None:
    def change() -> None:
        ip(far, "addr add 10.1.1.1/24 dev eth0")
        ip(near, "link add last type bridge")

    events = heard(near, change, lambda item, gone: isinstance(item, Link) and item.name == "last")
    assert not [e for e in events if isinstance(e, Event) and isinstance(e.item, Number)]


def test_the_end_of_a_pod_is_told(near: Namespace) -> None:
    # Not one of the laboratory's, whose sockets only the thread that opened them can close.
    name = f"onc-{secrets.token_hex(3)}-short"
    ip(near, f"netns add {name}")
    try:
        ip(near, f"link add v0 type veth peer eth0 netns {name}")
        nsid = link(near, "v0").lower_nsid
        assert nsid is not None
        events = heard(
            near,
            lambda: ip(near, f"netns del {name}"),
            lambda i, gone: isinstance(i, Link) and gone,
        )
    finally:
        near.command(["ip", "netns", "del", name], check=False)
    assert Event(Number(nsid), gone=True) in events


def test_a_flood_is_an_overrun_and_not_the_end(near: Namespace) -> None:
    def change() -> None:
        script = "".join(
            f"neigh replace 192.0.2.{i % 250 + 1} lladdr 02:00:00:00:{n:02x}:{i % 250:02x} dev u0\n"
            for n in range(120)
            for i in range(250)
        )
        near.command(["ip", "-batch", "-"], text=script)

    near.netlink.link("add", ifname="u0", kind="veth", peer={"ifname": "u1"})

    async def listen() -> bool:
        async with Events() as events:
            # A small buffer stands in for a long storm.
            for listener in (events._own, events._far):
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.to_thread(change)
            await until(events, lambda event: event == Overrun())
            await asyncio.to_thread(ip, near, "link add z0 type bridge")
            await until(events, lambda event: is_device(event, "z0"))
        return True

    assert near.run(lambda: asyncio.run(listen()))


# -------------------------------------------------------------------------------------- settings


def test_the_journal_restores_the_first_original(near: Namespace, tmp_path: Path) -> None:
    with_journal = sysctl.Journal(tmp_path)

    def twice() -> None:
        for value in ("30", "40"):
            assert sysctl.Journal(tmp_path).set("ipv4.ip_default_ttl", value)

    original = near.run(lambda: sysctl.read("ipv4.ip_default_ttl"))
    near.run(twice)
    assert near.run(lambda: sysctl.read("ipv4.ip_default_ttl")) == "40"
    assert with_journal.changed() == {"ipv4.ip_default_ttl": original}
    near.run(with_journal.restore)
    assert near.run(lambda: sysctl.read("ipv4.ip_default_ttl")) == original
    assert list(tmp_path.iterdir()) == []
    near.run(with_journal.restore)


def test_a_setting_that_is_right_is_not_noted(near: Namespace, tmp_path: Path) -> None:
    journal = sysctl.Journal(tmp_path)
    value = near.run(lambda: sysctl.read("ipv4.ip_default_ttl")) or ""
    assert near.run(lambda: journal.set("ipv4.ip_default_ttl", value))
    assert not near.run(lambda: journal.set("ipv4.no_such_setting", "1"))
    assert list(tmp_path.iterdir()) == []


def test_a_name_with_a_dot_of_its_own(near: Namespace) -> None:
    near.netlink.link("add", ifname="u0.5", kind="bridge")
    assert near.run(lambda: sysctl.read("ipv4.conf.u0/5.rp_filter")) is not None


def test_a_refused_value_is_an_error(near: Namespace, tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"net\.ipv4\.ip_default_ttl"):
        near.run(lambda: sysctl.Journal(tmp_path).set("ipv4.ip_default_ttl", "many"))


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / sysctl.JOURNAL).write_text("{")
    with pytest.raises(OncacheError, match="damaged"):
        sysctl.Journal(tmp_path).restore()


# ------------------------------------------------------------------------------------- conntrack


def test_whether_conntrack_is_at_work(near: Namespace) -> None:
    assert not near.run(lambda: asyncio.run(conntrack.active()))
    near.command(["nft", "-f", "-"], text=TRACKING)
    assert near.run(lambda: asyncio.run(conntrack.active()))


@contextlib.contextmanager
def connected(namespace: Namespace) -> Iterator[tuple[socket.socket, socket.socket]]:
    def connect() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return socket.create_connection(server.getsockname()), server.accept()[0]

    one, other = namespace.run(connect)
    with one, other:
        one.sendall(b"?")
        other.recv(1)
        other.sendall(b"!")
        one.recv(1)
        yield one, other


def flows(namespace: Namespace, *addresses: str) -> list[conntrack.TcpFlow]:
    wanted = [ip_address(address) for address in addresses]
    return namespace.run(lambda: asyncio.run(conntrack.tcp_flows(wanted)))


def test_a_flow_gets_its_own_forgiveness(near: Namespace) -> None:
    near.command(["nft", "-f", "-"], text=TRACKING)
    with connected(near) as (one, _):
        (flow,) = flows(near, "127.0.0.1")
        assert flow.state == TcpState.ESTABLISHED
        assert flow.source_port == one.getsockname()[1]
        assert not any(flags & conntrack.LIBERAL for flags in flow.flags)
        assert near.run(lambda: asyncio.run(conntrack.liberate([flow]))) == 1
        (after,) = flows(near, "127.0.0.1")
        for flags in after.flags:
            assert flags & conntrack.LIBERAL_MASK == conntrack.LIBERAL
        # What the handshake agreed on stays.
        assert [f & 0x03 for f in after.flags] == [f & 0x03 for f in flow.flags]
        assert flows(near, "127.0.0.2", "2001:db8::1") == []


def test_a_flow_that_is_gone_is_not_counted(near: Namespace) -> None:
    near.command(["nft", "-f", "-"], text=TRACKING)
    with connected(near):
        (flow,) = flows(near, "127.0.0.1")
    near.command(["conntrack", "-F"])
    assert near.run(lambda: asyncio.run(conntrack.liberate([flow]))) == 0


def test_settings_go_back_after_the_flows_were_freed(near: Namespace, tmp_path: Path) -> None:
    near.command(["nft", "-f", "-"], text=TRACKING)
    before = near.run(lambda: [sysctl.read(name) for name in host.SETTINGS])
    near.run(host.prepare, tmp_path)
    assert near.run(lambda: sysctl.read(LIBERAL)) == "1"
    with connected(near):
        near.run(host.restore, tmp_path, [ip_address("127.0.0.1")])
        (flow,) = flows(near, "127.0.0.1")
        assert all(flags & conntrack.LIBERAL for flags in flow.flags)
    assert near.run(lambda: [sysctl.read(name) for name in host.SETTINGS]) == before


def test_a_host_that_is_liberal_already_is_left_alone(near: Namespace, tmp_path: Path) -> None:
    near.command(["nft", "-f", "-"], text=TRACKING)
    near.run(sysctl.write, LIBERAL, "1")
    near.run(host.prepare, tmp_path)
    with connected(near):
        before = flows(near, "127.0.0.1")
        near.run(host.restore, tmp_path, None)
        assert flows(near, "127.0.0.1") == before
    assert near.run(lambda: sysctl.read(LIBERAL)) == "1"


# --------------------------------------------------------------------------- the overlay we make

OWN = BuiltinOverlay(
    vni=7,
    port=4789,
    pod_cidr=ip_network("10.1.1.0/24"),  # type: ignore[arg-type]
    peers=(
        Peer(ip_address("192.0.2.2"), ip_network("10.1.2.0/24")),  # type: ignore[arg-type]
        Peer(ip_address("192.0.2.3"), ip_network("10.1.3.0/24")),  # type: ignore[arg-type]
    ),
)
LOCAL = IPv4Address("192.0.2.1")


@pytest.fixture
def uplink(near: Namespace) -> Link:
    near.netlink.link("add", ifname="u0", kind="veth", peer={"ifname": "u1"})
    for name in ("u0", "u1"):
        near.up(name)
    near.netlink.addr("add", index=near.index("u0"), address=str(LOCAL), prefixlen=24)
    return link(near, "u0")


def ensure(namespace: Namespace, wanted: BuiltinOverlay, uplink: Link) -> bool:
    return asked(namespace, lambda netlink: overlay.ensure(netlink, wanted, uplink, LOCAL))


def present(namespace: Namespace) -> overlay.Entries:
    index = namespace.index(overlay.DEVICE)
    return asked(namespace, lambda netlink: overlay._present(netlink, index))


def test_the_overlay_is_made_once_and_removed(near: Namespace, uplink: Link) -> None:
    assert ensure(near, OWN, uplink)
    made = link(near, overlay.DEVICE)
    assert made.mac == bytes.fromhex("02acc0000201")
    assert (made.mtu, made.up, made.lower) == (1450, True, uplink.index)
    assert made.tunnel is not None
    assert (made.tunnel.vni, made.tunnel.port, made.tunnel.local) == (7, 4789, LOCAL)
    assert not made.tunnel.learning
    assert present(near) == overlay.entries(OWN, made.index)
    assert not ensure(near, OWN, uplink)
    assert link(near, overlay.DEVICE) == made
    assert asked(near, overlay.remove)
    assert not asked(near, overlay.remove)
    assert overlay.DEVICE not in [each.name for each in asked(near, lambda n: n.links())]
    routes = asked(near, lambda netlink: netlink.routes())
    assert not [route for route in routes if route.protocol == overlay.PROTOCOL]


def test_a_node_that_left_is_forgotten(near: Namespace, uplink: Link) -> None:
    ensure(near, OWN, uplink)
    fewer = replace(OWN, peers=OWN.peers[:1])
    assert not ensure(near, fewer, uplink)
    assert present(near) == overlay.entries(fewer, near.index(overlay.DEVICE))


def test_other_parameters_make_another_device(near: Namespace, uplink: Link) -> None:
    ensure(near, OWN, uplink)
    assert ensure(near, replace(OWN, vni=8), uplink)
    tunnel = link(near, overlay.DEVICE).tunnel
    assert tunnel is not None
    assert tunnel.vni == 8


def test_a_foreign_device_of_our_name_is_left_alone(near: Namespace, uplink: Link) -> None:
    near.netlink.link("add", ifname=overlay.DEVICE, kind="bridge")
    with pytest.raises(HostError, match="not ours"):
        ensure(near, OWN, uplink)
    assert not asked(near, overlay.remove)
    assert link(near, overlay.DEVICE).kind == "bridge"
