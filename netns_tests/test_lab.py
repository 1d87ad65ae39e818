# SPDX-License-Identifier: Apache-2.0
"""The laboratory itself, before anything of ours is attached: it is the reference."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scapy.layers.inet import IP, TCP, UDP
from scapy.layers.l2 import Ether
from scapy.layers.vxlan import VXLAN

from bench import traffic
from bench.traffic import Kind, Load
from netns_tests.lab import (
    AgentError,
    Capture,
    Direction,
    Frame,
    Host,
    Lab,
    LabError,
    Offload,
    Shape,
    Vxlan,
    agent,
    inject,
    inside,
    namespaces,
    ping,
    processes,
    services,
    set_offload,
    sockets,
    until,
)

Hosts = tuple[Host, Host]

both_shapes = pytest.mark.parametrize("shape", list(Shape))


def outgoing_vxlan(frame: Frame, port: int = 8472) -> bool:
    packet = Ether(frame.data)
    return frame.direction is Direction.OUTGOING and UDP in packet and packet[UDP].dport == port


def tunnelled(frame: Frame) -> Ether:
    """The inner frame of a captured tunnel packet."""
    inner: Ether = VXLAN(bytes(Ether(frame.data)[UDP].payload))[Ether]
    return inner


# ---- the base path ----


@both_shapes
def test_pods_reach_each_other_over_two_hops(hosts: Hosts) -> None:
    a, b = hosts
    for near, far in ((a, b), (b, a)):
        answer = ping(near.pods["p1"], far.pods["p1"].address)
        assert answer.ttls == (62, 62, 62)


@both_shapes
@pytest.mark.parametrize(("ttl", "arrives"), [(1, False), (2, False), (3, True)])
def test_short_ttl_ends_on_the_way(hosts: Hosts, ttl: int, arrives: bool) -> None:
    a, b = hosts
    answer = ping(a.pods["p1"], b.pods["p1"].address, 1, ttl=ttl, seconds=1 if arrives else 0.2)
    assert answer.received == arrives


@both_shapes
def test_large_and_fragmented_pings_pass(hosts: Hosts) -> None:
    a, b = hosts
    assert ping(a.pods["p1"], b.pods["p1"].address, 1, size=1422).received == 1
    assert ping(a.pods["p1"], b.pods["p1"].address, 1, size=3000).received == 1


@both_shapes
def test_sockets_talk_across(hosts: Hosts) -> None:
    a, b = (host.pods["p1"] for host in hosts)
    near, far = sockets.connection(a, b, b.address)
    sockets.exchange(near, far, os.urandom(200_000))
    here, there = sockets.udp(a), sockets.udp(b)
    here.sendto(b"question", (str(b.address), there.getsockname()[1]))
    assert there.recvfrom(100) == (b"question", (str(a.address), here.getsockname()[1]))


def test_pods_of_one_host_and_late_pods_talk(hosts: Hosts) -> None:
    a, b = hosts
    late = a.pod("late")
    assert ping(late, a.pods["p1"].address, 1).ttls == (64,)
    assert ping(late, b.pods["p1"].address, 1).ttls == (62,)
    late.delete()
    assert "vlate" not in [name for _, name in a.run(socket.if_nameindex)]
    assert "late" not in a.pods


def test_three_hosts_share_a_switch(lab: Lab) -> None:
    trio = [lab.host(label) for label in "abc"]
    lab.wire(*trio)
    lab.vxlan(*trio)
    pods = [host.pod("p1") for host in trio]
    for near in pods:
        for far in pods:
            if far is not near:
                assert ping(near, far.address, 1).received == 1


@both_shapes
@pytest.mark.parametrize("outer", [4, 6])
def test_dual_stack_pods_reach_each_other(lab: Lab, shape: Shape, outer: int) -> None:
    a, b = lab.pair(device=Vxlan(outer=outer), shape=shape, ip6=True)
    for version in (4, 6):
        near, far = a.pods["p1"], b.pods["p1"].ip(version)
        assert ping(near, far).ttls == (62, 62, 62)
        assert ping(near, far, 1, size=1500).received == 1
        assert ping(near, far, 1, ttl=2, seconds=0.2).received == 0


def test_without_ipv6_there_is_none(hosts: Hosts) -> None:
    for place in (hosts[0], hosts[0].pods["p1"]):
        assert place.command(["ip", "-6", "addr"]).stdout == ""
        with pytest.raises(LabError, match="no IPv6 address"):
            place.ip(6)


# ---- the wire ----


def test_capture_sees_the_tunnel_header(hosts: Hosts) -> None:
    a, b = hosts
    with Capture(a, a.uplink) as capture:
        ping(a.pods["p1"], b.pods["p1"].address, 1)
        frame = capture.wait(1, match=outgoing_vxlan)[0]
    outer = Ether(frame.data)
    assert (outer[IP].src, outer[IP].dst) == (str(a.address), str(b.address))
    assert outer[UDP].chksum == 0
    assert VXLAN(bytes(outer[UDP].payload)).vni == 1
    assert tunnelled(frame)[IP].dst == str(b.pods["p1"].address)
    assert frame.time > 0


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (Vxlan(), {"tos": 0, "ttl": 64, "flags": ""}),
        (Vxlan(tos="inherit", ttl="inherit", df="inherit"), {"tos": 0xB8, "ttl": 63}),
        (Vxlan(tos=0x20, ttl=9, df="set"), {"tos": 0x20, "ttl": 9, "flags": "DF"}),
        (Vxlan(vni=7, port=4789, port_range=(50000, 50001)), {"sport": 50000}),
        (Vxlan(udp_checksum=True), {}),
    ],
    ids=["flannel", "inherit", "fixed", "ports", "checksum"],
)
def test_vxlan_options_reach_the_wire(lab: Lab, device: Vxlan, expected: dict[str, object]) -> None:
    a, b = lab.pair(device=device)
    here = sockets.udp(a.pods["p1"])
    here.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0xB8)
    with Capture(a, a.uplink) as capture:
        here.sendto(b"x", (str(b.pods["p1"].address), 9))
        frame = capture.wait(1, match=lambda frame: outgoing_vxlan(frame, device.port))[0]
    outer = Ether(frame.data)
    ip, udp = outer[IP], outer[UDP]
    seen = {"tos": ip.tos, "ttl": ip.ttl, "flags": str(ip.flags), "sport": udp.sport}
    assert seen | expected == seen
    assert (udp.chksum != 0) == device.udp_checksum
    assert VXLAN(bytes(udp.payload)).vni == device.vni


def test_injected_frame_arrives(hosts: Hosts) -> None:
    a, b = (host.pods["p1"] for host in hosts)
    receiver = sockets.udp(b, 7000)
    ping(a, b.address, 1)
    gateway = a.netlink.get_neighbours(dst=str(hosts[0].gateway))[0].get("lladdr")
    frame = Ether(src=a.mac, dst=gateway) / IP(src=str(a.address), dst=str(b.address))
    inject(a, a.device, bytes(frame / UDP(sport=6000, dport=7000) / b"made up"))
    assert receiver.recvfrom(100) == (b"made up", (str(a.address), 6000))


def test_without_tx_offload_checksums_are_finished(hosts: Hosts) -> None:
    a, b = hosts
    set_offload(a, a.uplink, Offload.TX, False)
    near, far = sockets.connection(a.pods["p1"], b.pods["p1"], b.pods["p1"].address)
    with Capture(a, a.uplink) as capture:
        sockets.exchange(near, far, b"sum me up")
        frames = capture.wait(2, match=outgoing_vxlan)
    for frame in frames:
        inner = tunnelled(frame)[IP]
        claimed = inner[TCP].chksum
        del inner[TCP].chksum
        assert frame.checksum_ready
        assert IP(bytes(inner))[TCP].chksum == claimed


# ---- cluster rules ----


@both_shapes
def test_policy_denies_one_port(hosts: Hosts) -> None:
    a, b = (host.pods["p1"] for host in hosts)
    services.policy(hosts[1], deny=(8081,))
    near, far = sockets.connection(a, b, b.address, 8080)
    sockets.exchange(near, far)
    waiting = sockets.listener(b, 8081)
    refused = a.socket(socket.AF_INET, socket.SOCK_STREAM)
    refused.settimeout(0.3)
    with pytest.raises(TimeoutError):
        refused.connect((str(b.address), 8081))
    services.no_policy(hosts[1])
    sockets.connect(a, b.address, waiting.getsockname()[1])


@both_shapes
def test_service_address_leads_to_its_backend(hosts: Hosts) -> None:
    a, b = (host.pods["p1"] for host in hosts)
    services.policy(hosts[0])
    services.cluster_ip(hosts[0], "10.96.0.10", 80, b.address, backend_port=8080)
    waiting = sockets.listener(b, 8080)
    near = sockets.connect(a, "10.96.0.10", 80)
    far, peer = waiting.accept()
    b.own(far)
    assert peer[0] == str(a.address)
    sockets.exchange(near, far, b"through a service")


# ---- traffic ----


@pytest.mark.parametrize("kind", list(Kind))
def test_traffic_program_measures_every_kind(hosts: Hosts, kind: Kind) -> None:
    a, b = (host.pods["p1"] for host in hosts)
    load = Load(batches=3, transactions=20, warmup=1)
    with traffic.server(b, b.address, kind) as server:
        seen = traffic.measure(a, server, load)
    assert (seen.transactions, seen.lost, seen.stray) == (60, 0, 0)
    assert len(seen.batches_us) == 3
    assert 0 < min(seen.batches_us) <= seen.mean_us
    assert 0 < seen.p50_us <= seen.p99_us


def test_traffic_to_nobody_ends_with_a_message(hosts: Hosts) -> None:
    a, b = (host.pods["p1"] for host in hosts)
    nobody = traffic.Server(Kind.UDP_RR, b.address, 9)
    with pytest.raises(LabError, match="does not answer"):
        traffic.measure(a, nobody, Load())


def test_traffic_counts_what_is_lost(hosts: Hosts) -> None:
    def leaving(frame: Frame) -> bool:
        return frame.direction is Direction.OUTGOING

    a, b = (host.pods["p1"] for host in hosts)
    load = Load(transactions=100, seconds=1.5)
    with (
        traffic.server(b, b.address, Kind.UDP_RR) as server,
        traffic.Client(a, server, load) as client,
        Capture(a, a.device) as capture,
    ):
        capture.wait(300)
        port = hosts[1].index(b.host_device)
        hosts[1].netlink.link("set", index=port, state="down")
        asked = len(capture.packets(leaving))
        capture.wait(asked + 3, match=leaving)
        hosts[1].netlink.link("set", index=port, state="up")
        seen = client.result()
    assert seen.lost > 0
    assert seen.transactions > 0


# ---- the agent's life ----


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MODULE", "netns_tests.stand_in_agent")


@pytest.mark.usefixtures("stand_in")
def test_agent_runs_in_its_host(hosts: Hosts) -> None:
    host = hosts[0]
    with host.agent(host.config(node={"act": "ready"})) as running:
        assert running.running
        assert "ready with cni0 flannel.1 lo und0 vp1" in running.log
        assert os.readlink(f"/proc/{running.pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
        assert running.stop() == 0
    with host.agent(host.config(node={"act": "ready"})) as running:
        running.kill()
        assert not running.running


@pytest.mark.usefixtures("stand_in")
def test_agent_that_fails_says_why(hosts: Hosts) -> None:
    host = hosts[0]
    with pytest.raises(AgentError) as caught, host.agent(host.config(node={"act": "fail"})):
        pass
    assert caught.value.exit_code_seen == 2
    assert "fail with" in caught.value.log


@pytest.mark.usefixtures("stand_in")
def test_agent_that_is_never_ready_is_ended(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "READY_SECONDS", 1.0)
    host = hosts[0]
    with pytest.raises(AgentError, match="not ready"):
        host.agent(host.config(node={"act": "silent"})).start()
    assert children() == []


# ---- order in the house ----


def children() -> list[int]:
    """The process ids of our living children."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[1]) == os.getpid():
            found.append(int(status.parent.name))
    return found


def traces(name: str) -> list[str]:
    """What is left of the laboratory `name`: namespaces, mounts, directories."""
    named = [str(path) for path in namespaces.RUN.glob(f"{name}*")]
    mounts = [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line
    ]
    return named + mounts + [str(path) for path in Path(tempfile.gettempdir()).glob(f"{name}*")]


class Broken(Exception):
    pass


def test_everything_is_gone_after_a_failure() -> None:
    before, home = children(), net_namespace()
    with contextlib.suppress(Broken), Lab() as lab:
        a, b = lab.pair()
        (a.bpf_dir / "kept").mkdir(parents=True)
        a.pods["p1"].spawn(["sleep", "1000"])
        sockets.connection(a.pods["p1"], b.pods["p1"], b.pods["p1"].address)
        assert len(traces(lab.name)) > 4
        raise Broken
    assert traces(lab.name) == []
    assert children() == before
    assert net_namespace() == home


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_everything_is_gone_after_a_signal(number: signal.Signals) -> None:
    script = (
        "import signal\n"
        "from netns_tests.lab import Lab\n"
        "with Lab() as lab:\n"
        "    host, _ = lab.pair()\n"
        "    child = host.spawn(['sleep', '1000'])\n"
        "    print(lab.name, child.pid, flush=True)\n"
        "    signal.pause()\n"
    )
    child = processes.start(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert child.stdout is not None
    name, sleeper = child.stdout.readline().decode().split()
    assert traces(name)
    assert processes.end(child, number) != 0
    assert traces(name) == []
    assert not Path(f"/proc/{sleeper}").exists()


def net_namespace() -> str:
    return os.readlink("/proc/thread-self/ns/net")


def test_only_the_entering_thread_changes_namespace(hosts: Hosts) -> None:
    home = net_namespace()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(net_namespace).result() == home
        with inside(hosts[0]):
            outer = net_namespace()
            with inside(hosts[1]):
                assert len({home, outer, net_namespace()}) == 3
            assert net_namespace() == outer
            assert other.submit(net_namespace).result() == home
        with contextlib.suppress(Broken), inside(hosts[0]):
            raise Broken
    assert net_namespace() == home


def test_waiting_in_vain_says_for_what() -> None:
    with pytest.raises(LabError, match="a miracle"):
        until(lambda: False, 0.05, "a miracle")
    assert until(lambda: "there", 0, "nothing") == "there"
