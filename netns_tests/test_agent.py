# SPDX-License-Identifier: Apache-2.0
"""The node agent on real hosts: it finds pods, keeps in step, and leaves a host as it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from netns_tests.lab import Agent, AgentError, Host, Lab, Namespace, Pod, ping, until
from oncache.core import control, overlay
from oncache.host import SETTINGS, detach_host
from oncache.plane import Plane

SECONDS = 10.0


def status(agent: Agent) -> dict[str, Any]:
    return control.call(agent.run_dir, "status")


def addresses(agent: Agent) -> set[str]:
    """Addresses of the pods the programs know."""
    return {address for pod in status(agent)["pods"] for address in pod["addresses"]}


def devices(host: Host, agent: Agent) -> set[str]:
    """Devices that have both programs of a pod."""

    def read() -> set[str]:
        with contextlib.closing(Plane.open(agent.bpf_dir)) as plane:
            return {socket.if_indextoname(index) for index in plane.attached().pods}

    return host.run(read)


def traces(host: Host) -> dict[str, Any]:
    """All that an agent could leave behind on a host."""
    programs = host.command(["bpftool", "-j", "net", "show"]).stdout
    links = json.loads(host.command(["ip", "-j", "link", "show"]).stdout)
    pins = sorted(str(path) for path in host.bpf_dir.parent.rglob(f"{host.label}/*"))
    return {
        "settings": [host.sysctl(f"net.{name}") for name in SETTINGS],
        "qdiscs": host.command(["tc", "qdisc", "show"]).stdout,
        "links": [(each["ifname"], each["address"], each["mtu"]) for each in links],
        "routes": host.command(["ip", "route", "show", "table", "all"]).stdout,
        "rules": host.command(["ip", "rule", "show"]).stdout,
        "net": json.loads(programs),
        "pins": pins,
        "directory": host.bpf_dir.exists(),
    }


@pytest.fixture
def host(hosts: tuple[Host, Host]) -> Host:
    return hosts[0]


@pytest.fixture
def agent(host: Host) -> Iterator[Agent]:
    with host.agent() as running:
        yield running


# ------------------------------------------------------------------------------------------ pods


def test_it_is_in_step_when_it_says_so(host: Host, agent: Agent) -> None:
    pod = host.pods["p1"]
    said = status(agent)
    assert (said["state"], said["uplink"], said["tunnel"]) == (
        "attached",
        host.uplink,
        host.tunnel,
    )
    assert (said["pid"], said["problems"]) == (agent.pid, [])
    assert said["pods"] == [
        {"index": 0, "name": pod.name, "device": pod.host_device, "addresses": [str(pod.address)]}
    ]
    assert devices(host, agent) == {pod.host_device}


def test_pods_come_and_go(host: Host, agent: Agent) -> None:
    one, other = host.pod("p2"), host.pod("p3")
    expected = {str(pod.address) for pod in host.pods.values()}
    until(lambda: addresses(agent) == expected, SECONDS, "three pods")
    until(lambda: len(devices(host, agent)) == 3, SECONDS, "three devices")
    one.delete()
    other.delete(abrupt=True)
    left = {str(host.pods["p1"].address)}
    until(lambda: addresses(agent) == left, SECONDS, "one pod")
    until(lambda: devices(host, agent) == {"vp1"}, SECONDS, "one device")


def test_an_address_that_changes_inside_a_pod_is_followed(host: Host, agent: Agent) -> None:
    pod: Pod = host.pods["p1"]
    pod.command(["ip", "addr", "flush", "dev", pod.device])
    until(lambda: addresses(agent) == set(), SECONDS, "no address, no pod")
    pod.command(["ip", "addr", "add", f"{host.pod_range[99]}/24", "dev", pod.device])
    until(lambda: addresses(agent) == {str(host.pod_range[99])}, SECONDS, "the new address")
    pod.command(["ip", "link", "set", pod.device, "address", "02:00:00:00:00:99"])

    def has_new_mac() -> bool:
        with contextlib.closing(Plane.open(agent.bpf_dir)) as plane:
            return [pod.mac.hex() for pod in plane.pods().values()] == ["020000000099"]

    until(has_new_mac, SECONDS, "the new MAC")


def test_a_pair_made_here_and_moved_is_found(host: Host, agent: Agent) -> None:
    """As Docker does it: both ends are made on the host, then one is moved."""
    pod = host.pods["p1"]
    host.command(["ip", "link", "add", "moved", "type", "veth", "peer", "name", "inner"])
    host.command(["ip", "link", "set", "inner", "netns", pod.name])
    pod.command(["ip", "addr", "add", "10.77.0.1/32", "dev", "inner"])
    until(lambda: "10.77.0.1" in addresses(agent), SECONDS, "the pod's second device")


# --------------------------------------------------------------------------------------- changes


def test_a_tunnel_that_vanishes_stops_the_fast_path_until_it_is_back(
    lab: Lab, host: Host, agent: Agent
) -> None:
    before = status(agent)["since"]
    host.command(["ip", "link", "del", host.tunnel])
    waiting = until(lambda: (s := status(agent))["state"] == "waiting" and s, SECONDS, "waiting")
    assert host.tunnel in waiting["problems"][0]
    with contextlib.closing(Plane.open(agent.bpf_dir)) as plane:
        assert plane.deadline_margin() < 0
    host.command(
        ["ip", "link", "add", host.tunnel, "mtu", "1400", "type", "vxlan", "id", "1", "dev",
         host.uplink, "local", str(host.address), "dstport", "8472", "nolearning"]
    )  # fmt: skip
    until(lambda: status(agent)["state"] == "attached", SECONDS, "attached")
    assert status(agent)["since"] >= before
    with contextlib.closing(Plane.open(agent.bpf_dir)) as plane:
        told = plane.settings()
        assert told is not None
        assert (told.tunnel, told.mtu) == (host.index(host.tunnel), 1400)
        assert plane.deadline_margin() > 0


def test_a_neighbour_that_changes_retires_its_paths(
    hosts: tuple[Host, Host], agents: tuple[Agent, Agent]
) -> None:
    one, other = hosts

    def paths() -> list[tuple[int, int]]:
        ping(one.pods["p1"], other.pods["p1"].address)
        with contextlib.closing(Plane.open(agents[0].bpf_dir)) as plane:
            return [(path.index, path.generation) for path in plane.paths()]

    before = until(paths, SECONDS, "a path")
    one.command(
        ["ip", "neigh", "replace", str(other.address), "lladdr", "02:00:00:00:00:77", "dev",
         one.uplink]
    )  # fmt: skip

    def retired() -> bool:
        with contextlib.closing(Plane.open(agents[0].bpf_dir)) as plane:
            return not set(before) & {(p.index, p.generation) for p in plane.paths()}

    until(retired, SECONDS, "the path is gone")


# ---------------------------------------------------------------------------- start, stop, again


def test_the_deadline_is_kept_and_then_not(host: Host, agent: Agent) -> None:
    with contextlib.closing(Plane.open(agent.bpf_dir)) as plane:
        assert plane.deadline_margin() > 3
        assert agent.stop() == 0
        assert devices(host, agent) == {"vp1"}
        until(lambda: plane.deadline_margin() < 0, SECONDS, "the dead-man switch")
        agent.start()
        assert plane.deadline_margin() > 3


def test_detach_on_exit_leaves_nothing(host: Host) -> None:
    before = traces(host)
    with host.agent(options=("--detach-on-exit",)) as agent:
        assert traces(host) != before
        assert agent.stop() == 0
    assert traces(host) == before


def test_detach_and_attach_by_request(host: Host, agent: Agent) -> None:
    pod = str(host.pods["p1"].address)
    control.call(agent.run_dir, "detach")
    assert status(agent)["state"] == "detached"
    assert not host.bpf_dir.exists()
    control.call(agent.run_dir, "detach")
    control.call(agent.run_dir, "attach")
    assert addresses(agent) == {pod}
    assert devices(host, agent) == {"vp1"}
    control.call(agent.run_dir, "flush")


def test_a_dead_agents_host_is_cleaned_without_it(host: Host) -> None:
    before = traces(host)
    with host.agent() as agent:
        agent.kill()
    host.run(detach_host, host.bpf_dir, host.run_dir)
    assert traces(host) == before
    host.run(detach_host, host.bpf_dir, host.run_dir)


def test_a_killed_agents_settings_are_still_undone_by_the_next(host: Host) -> None:
    before = traces(host)
    with host.agent(options=("--detach-on-exit",)) as agent:
        agent.kill()
        agent.start()
        agent.stop()
    assert traces(host) == before


def test_detach_breaks_no_open_connection(
    hosts: tuple[Host, Host], agents: tuple[Agent, Agent]
) -> None:
    one, other = hosts
    rules = """
    table inet t { chain c { type filter hook forward priority 0;
        ct state invalid drop; ct state established accept; }; }"""
    for each in hosts:
        each.command(["nft", "-f", "-"], text=rules)
    server = other.pods["p1"].socket(socket.AF_INET, socket.SOCK_STREAM)
    server.bind((str(other.pods["p1"].address), 7))
    server.listen()
    client = one.pods["p1"].socket(socket.AF_INET, socket.SOCK_STREAM)
    client.settimeout(SECONDS)
    client.connect(server.getsockname())
    answering, _ = server.accept()
    other.own(answering)
    answering.settimeout(SECONDS)

    def exchange(length: int = 4096) -> None:
        for sender, receiver in ((client, answering), (answering, client)):
            sender.sendall(bytes(length))
            assert len(receiver.recv(length, socket.MSG_WAITALL)) == length

    def fast() -> bool:
        exchange()
        with contextlib.closing(Plane.open(agents[0].bpf_dir)) as plane:
            return bool(plane.counters()["hits"]["from_pod"] > 100)

    until(fast, SECONDS, "a fast connection")
    for agent in agents:
        control.call(agent.run_dir, "detach")
    for _ in range(64):
        exchange()
    client.shutdown(socket.SHUT_WR)
    assert answering.recv(1) == b""
    answering.sendall(b"the end")
    assert client.recv(7, socket.MSG_WAITALL) == b"the end"


# ---------------------------------------------------------------------------------------- faults


def refused(host: Host, config: dict[str, Any], code: int, *words: str) -> None:
    """An agent with this configuration ends with two lines, and the host is as it was."""
    before = traces(host)
    with pytest.raises(AgentError) as caught, host.agent(config):
        pass
    assert caught.value.exit_code_seen == code
    lines = caught.value.log.splitlines()
    errors = [line for line in lines if line.startswith(("error: ", "next: "))]
    assert [line.split(":")[0] for line in errors[-2:]] == ["error", "next"]
    assert "Traceback" not in caught.value.log
    for word in words:
        assert word in errors[-2]
    assert traces(host) == before


def test_an_uplink_that_does_not_exist(host: Host) -> None:
    refused(host, host.config(node={"uplink": "eth99"}), 4, "uplink", "eth99")


def test_a_tunnel_that_does_not_exist(host: Host) -> None:
    refused(host, host.config(overlay={"device": "flannel.9"}), 4, "flannel.9")


def test_a_tunnel_of_another_kind(host: Host) -> None:
    refused(host, host.config(overlay={"device": "cni0"}), 2, "cni0", "bridge")


def test_a_tunnel_over_another_uplink(host: Host) -> None:
    host.command(["ip", "link", "add", "other0", "type", "bridge"])
    refused(host, host.config(node={"uplink": "other0"}), 2, host.tunnel, "other0")


def test_an_mtu_that_cannot_hold_the_header(host: Host) -> None:
    host.command(["ip", "link", "set", host.uplink, "mtu", "1499"])
    refused(host, host.config(), 4, "1450", "1499")


def test_an_unknown_key(host: Host) -> None:
    refused(host, host.config(overlay={"devcie": "flannel.1"}), 2, "overlay.devcie")


def test_a_bpf_dir_that_is_not_in_a_bpf_file_system(host: Host, tmp_path: Path) -> None:
    refused(host, host.config(bpf_dir=str(tmp_path / "bpf")), 4, "not in a BPF file system")
    assert not (tmp_path / "bpf").exists()


def test_a_second_agent_on_the_same_directory(host: Host, agent: Agent, tmp_path: Path) -> None:
    second = Agent(host, host.config(run_dir=str(tmp_path)), ())
    second.config_path = tmp_path / "second.yaml"
    with pytest.raises(AgentError) as caught, second:
        pass
    assert caught.value.exit_code_seen == 1
    assert "another process works with" in caught.value.log
    assert status(agent)["state"] == "attached"
    assert devices(host, agent) == {"vp1"}


def test_a_second_agent_in_the_same_run_dir(host: Host, agent: Agent) -> None:
    with pytest.raises(AgentError) as caught, Agent(host, host.config(), ()):
        pass
    assert caught.value.exit_code_seen == 1
    assert status(agent)["pid"] == agent.pid


def test_pods_that_come_and_go_at_once(host: Host, agent: Agent) -> None:
    for turn in range(10):
        host.pod(f"q{turn}").delete(abrupt=turn % 2 == 0)
    last = host.pod("last")
    expected = {str(host.pods["p1"].address), str(last.address)}
    until(lambda: addresses(agent) == expected, SECONDS, "only those that stayed")
    until(lambda: devices(host, agent) == {"vp1", "vlast"}, SECONDS, "their devices")
    assert "Traceback" not in agent.log


def test_an_interrupt_is_an_orderly_end(host: Host, agent: Agent) -> None:
    os.kill(agent.pid, signal.SIGINT)
    assert agent.process.wait(SECONDS) == 0
    assert "Traceback" not in agent.log


# ------------------------------------------------------------------------------ an overlay of ours


def test_the_built_in_overlay_joins_two_hosts(lab: Lab) -> None:
    hosts = lab.host("a"), lab.host("b")
    lab.wire(*hosts)
    pods = [_plug(host) for host in hosts]
    before = [traces(host) for host in hosts]
    with contextlib.ExitStack() as stack:
        agents = [stack.enter_context(_builtin(*pair)) for pair in (hosts, hosts[::-1])]
        assert addresses(agents[0]) == {str(hosts[0].pod_range[9])}
        ping(pods[0], hosts[1].pod_range[9])
        for agent, host in zip(agents, hosts, strict=True):
            assert host.index(overlay.DEVICE)
            control.call(agent.run_dir, "detach")
    assert [traces(host) for host in hosts] == before
    for pod in pods:
        pod.delete()


def _builtin(host: Host, peer: Host) -> Agent:
    return host.agent(
        {
            "node": {"uplink": host.uplink},
            "overlay": {
                "builtin": {
                    "vni": 7,
                    "pod_cidr": str(host.pod_range),
                    "peers": [{"address": str(peer.address), "pod_cidr": str(peer.pod_range)}],
                }
            },
            "run_dir": str(host.run_dir),
            "bpf_dir": str(host.bpf_dir),
        }
    )


def _plug(host: Host) -> Namespace:
    """A pod on a bridge, on a host without an overlay."""
    pod = Namespace(f"{host.name}-p9")
    host.command(["ip", "link", "add", "cni0", "address", "02:00:00:00:00:01", "type", "bridge"])
    host.command(["ip", "addr", "add", f"{host.gateway}/24", "dev", "cni0"])
    host.up("cni0")
    host.command(["ip", "link", "add", "v9", "mtu", "1450", "type", "veth", "peer", "name", "eth0",
                  "mtu", "1450", "netns", pod.name])  # fmt: skip
    host.command(["ip", "link", "set", "v9", "master", "cni0", "up"])
    pod.command(["ip", "addr", "add", f"{host.pod_range[9]}/24", "dev", "eth0"])
    pod.command(["ip", "link", "set", "eth0", "up"])
    pod.command(["ip", "route", "add", "default", "via", str(host.gateway)])
    return pod
