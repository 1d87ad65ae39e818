# SPDX-License-Identifier: Apache-2.0
"""The oncache command on a host where the plane works, and after its agent died."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from netns_tests.lab import Agent, Host, until
from netns_tests.lab.processes import python
from netns_tests.lab.sockets import connection, exchange

LEARN_SECONDS = 20.0


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def oncache(host: Host, *arguments: str) -> Said:
    """As an operator types it on that host."""
    argv = python("oncache.cli", *arguments, "-c", str(host.config_path))
    done = host.command(argv, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


def asked(host: Host, *arguments: str) -> Any:
    said = oncache(host, *arguments, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_reading_verbs_tell_of_a_fast_flow(
    hosts: tuple[Host, Host], agents: tuple[Agent, Agent]
) -> None:
    one, other = hosts
    pod, far = one.pods["p1"], other.pods["p1"]
    with connection(pod, far, far.address) as (near, remote):
        source = f"{pod.address}:{near.getsockname()[1]}"
        target = f"{far.address}:{remote.getsockname()[1]}"

        def fast() -> Any:
            exchange(near, remote)
            found = asked(one, "explain", "tcp", source, target)
            return found if found["fast"] else None

        found = until(fast, LEARN_SECONDS, "the flow is explained as fast")
        assert (found["source"], found["destination"], found["reason"]) == (source, target, "")

        (flow,) = [
            flow
            for flow in asked(one, "caches", "filter")
            if flow["protocol"] == "tcp" and flow["local_port"] == near.getsockname()[1]
        ]
        assert (flow["local"], flow["remote"]) == (str(pod.address), str(far.address))
        assert flow["device"] == pod.host_device

    (path,) = asked(one, "caches", "egress")
    assert (path["remote"], path["device"]) == (str(other.address), one.uplink)
    (row,) = asked(one, "caches", "ingress")
    assert (row["addresses"], row["device"]) == ([str(pod.address)], pod.host_device)
    assert asked(one, "stats").keys() >= {"hits", "base_path", "learned", "dropped"}

    status = asked(one, "status")
    assert status["agent"]["running"]
    assert status["plane"]["fast"]
    assert status["plane"]["uplinks"] == [one.uplink]
    assert status["plane"]["pod_devices"] == [pod.host_device]
    for arguments in (["status"], ["stats"], ["caches", "filter"], ["caches", "egress"]):
        assert oncache(one, *arguments).code == 0


def test_a_flush_makes_every_flow_stale(
    hosts: tuple[Host, Host], agents: tuple[Agent, Agent]
) -> None:
    one, other = hosts
    pod, far = one.pods["p1"], other.pods["p1"]
    with connection(pod, far, far.address) as (near, remote):
        flow = (
            *("explain", "tcp", f"{pod.address}:{near.getsockname()[1]}"),
            f"{far.address}:{remote.getsockname()[1]}",
        )

        def fast() -> bool:
            exchange(near, remote)
            return bool(asked(one, *flow)["fast"])

        until(fast, LEARN_SECONDS, "the flow is fast")
        assert asked(one, "flush") == {"done": "flush", "by": "agent"}
        assert asked(one, *flow)["reason"] == "stale"


def test_reading_verbs_work_when_the_agent_is_dead(
    hosts: tuple[Host, Host], agents: tuple[Agent, Agent]
) -> None:
    one, _ = hosts
    agents[0].kill()
    said = oncache(one, "status", "--json")
    assert said.code == 0
    assert "agent not running" in said.err
    assert not json.loads(said.out)["agent"]["running"]
    assert asked(one, "caches", "ingress")
    assert oncache(one, "flush").code == 3
    assert asked(one, "detach") == {"done": "detach", "by": "oncache"}
    assert oncache(one, "status").code == 3


def test_the_doctor_finds_a_healthy_host_and_a_broken_one(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    one.config_path.write_text(json.dumps(one.config()))
    checks = asked(one, "doctor")
    assert [check for check in checks if check["level"] == "fail"] == []

    one.config_path.write_text(json.dumps(one.config(node={"uplink": "absent0"})))
    said = oncache(one, "doctor", "--json")
    assert said.code == 4
    failed = {check["name"]: check for check in json.loads(said.out) if check["level"] == "fail"}
    assert failed.keys() == {"uplink"}
    assert "absent0" in failed["uplink"]["fact"]
