# SPDX-License-Identifier: Apache-2.0
"""The oncache command on a host where the plane works, and after its agent died."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from netns_tests.documented import examples, shape
from netns_tests.lab import Agent, Host, until
from netns_tests.lab.processes import python
from netns_tests.lab.sockets import connection, exchange
from oncache.cli import trace

LEARN_SECONDS = 20.0
READING = (
    ("doctor",),
    ("status",),
    ("stats",),
    ("caches", "filter"),
    ("caches", "egress"),
    ("caches", "ingress"),
    ("explain", "tcp"),
)


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


class Talk:
    """A TCP connection between the pods "p1" of two hosts, and what `explain` says of it."""

    def __init__(self, one: Host, other: Host) -> None:
        self.host, self.pod, self.far = one, one.pods["p1"], other.pods["p1"]
        self.near, self.remote = connection(self.pod, self.far, self.far.address)
        self.port = self.near.getsockname()[1]
        self.source = f"{self.pod.address}:{self.port}"
        self.target = f"{self.far.address}:{self.remote.getsockname()[1]}"

    def explained(self) -> Any:
        return asked(self.host, "explain", "tcp", self.source, self.target)

    def turned_fast(self) -> Any:
        for _ in range(3):
            exchange(self.near, self.remote)
        found = self.explained()
        return found if found["fast"] else None


def test_reading_verbs_tell_of_a_fast_flow(
    hosts: tuple[Host, Host], agents: tuple[Agent, Agent]
) -> None:
    one, other = hosts
    talk = Talk(one, other)
    found = until(talk.turned_fast, LEARN_SECONDS, "the flow is explained as fast")
    assert (found["source"], found["destination"]) == (talk.source, talk.target)
    assert found["reason"] == ""

    flows = asked(one, "caches", "filter")
    (flow,) = [f for f in flows if (f["protocol"], f["local_port"]) == ("tcp", talk.port)]
    assert (flow["local"], flow["remote"]) == (str(talk.pod.address), str(talk.far.address))
    assert flow["device"] == talk.pod.host_device
    (path,) = asked(one, "caches", "egress")
    assert (path["remote"], path["device"]) == (str(other.address), one.uplink)
    (row,) = asked(one, "caches", "ingress")
    assert row["addresses"] == [str(talk.pod.address)]
    assert row["device"] == talk.pod.host_device
    assert asked(one, "stats").keys() >= {"hits", "base_path", "learned", "dropped"}


def test_status_names_what_is_attached(
    hosts: tuple[Host, Host], agents: tuple[Agent, Agent]
) -> None:
    one, _ = hosts
    status = asked(one, "status")
    assert status["agent"]["running"]
    assert status["plane"]["fast"]
    assert status["plane"]["uplinks"] == [one.uplink]
    assert status["plane"]["pod_devices"] == [one.pods["p1"].host_device]
    for arguments in (["status"], ["stats"], ["caches", "filter"], ["caches", "egress"]):
        assert oncache(one, *arguments).code == 0


def test_a_flush_makes_every_flow_stale(
    hosts: tuple[Host, Host], agents: tuple[Agent, Agent]
) -> None:
    one, other = hosts
    talk = Talk(one, other)
    until(talk.turned_fast, LEARN_SECONDS, "the flow is fast")
    assert asked(one, "flush") == {"done": "flush", "by": "agent"}
    assert talk.explained()["reason"] == "stale"


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


@pytest.mark.parametrize("agents_run", [True, False], ids=["agent", "no agent"])
def test_the_documented_json_is_what_is_said(hosts: tuple[Host, Host], agents_run: bool) -> None:
    one, other = hosts
    with one.agent() as near, other.agent():
        talk = Talk(one, other)
        until(talk.turned_fast, LEARN_SECONDS, "the flow is fast")
        if not agents_run:
            near.kill()
        for words in READING:
            arguments = [talk.source, talk.target] if "explain" in words else []
            wanted = shape(examples()[" ".join(words[:2])])
            if words == ("status",) and not agents_run:
                wanted["agent"] = {"running": None}
            assert shape(asked(one, *words, *arguments)) == wanted, words
        assert shape(asked(one, "detach")) == shape(examples()["attach"])


def test_the_documented_json_of_trace() -> None:
    assert trace.rows({("NO_SOCKET", 1): 3})[0].keys() == examples()["trace"][0].keys()


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
