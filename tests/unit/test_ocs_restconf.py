# SPDX-License-Identifier: Apache-2.0
"""The RESTCONF driver and the commands against a simulated switch that is a real HTTP server."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import yaml

from fabric_agent.ocs import commands
from fabric_agent.ocs.cabling import plugs
from fabric_agent.ocs.devices import Device as Placed
from fabric_agent.ocs.devices import Inventory
from fabric_agent.ocs.drivers.base import (
    Batch,
    Change,
    Credentials,
    DeviceError,
    MovedError,
    PartialError,
    RefusedError,
    Status,
    credentials,
)
from fabric_agent.ocs.drivers.restconf import Endpoint, Restconf
from fabric_agent.ocs.wiring import Fabric, Switch, cross
from oncache.core.errors import ConfigError, OncacheError
from tests.unit.ocs_device import Device, device

CONNECT = Batch(connect=((1, 18), (2, 17)))


@pytest.fixture
def switch() -> Iterator[Device]:
    with device("--tuning", "0.05") as running:
        yield running


def driver(switch: Device, **more: Any) -> Restconf:
    return Restconf("ocs-a", Endpoint(switch.url, timeout=5.0, **more))


def test_a_batch_is_in_force_and_gives_a_new_tag(switch: Device) -> None:
    one = driver(switch)
    empty = one.read()
    made = one.apply(CONNECT, empty.tag)
    assert made.pairs == {1: 18, 2: 17} and made.tag != empty.tag
    left = one.apply(Batch(disconnect=((1, 18),), connect=((3, 18),)), made.tag)
    assert left.pairs == {3: 18, 2: 17} == one.read().pairs


def test_another_tables_tag_changes_nothing(switch: Device) -> None:
    one = driver(switch)
    old = one.read().tag
    switch.lab(tamper={5: 20})
    with pytest.raises(MovedError):
        one.apply(CONNECT, old)
    assert one.read().pairs == {5: 20}


def test_a_refusal_before_anything_is_clean(switch: Device) -> None:
    one = driver(switch)
    with pytest.raises(RefusedError, match="no such ports"):
        one.apply(Batch(connect=((1, 2),)), one.read().tag)
    assert one.read().pairs == {}


def test_half_a_batch_says_so(switch: Device) -> None:
    one = driver(switch)
    made = one.apply(CONNECT, one.read().tag)
    switch.lab(faults={"refuse_after": 1})
    with pytest.raises(PartialError, match="after 1 steps"):
        one.apply(Batch(disconnect=((1, 18),), connect=((3, 18),)), made.tag)
    assert one.read().pairs == {2: 17}


def test_a_missing_answer_is_not_taken_for_a_failure(switch: Device) -> None:
    one = driver(switch)
    switch.lab(faults={"vanish_after": 0})
    with pytest.raises(PartialError, match="no answer"):
        one.apply(CONNECT, one.read().tag)
    assert one.read().pairs == {1: 18, 2: 17}


def test_nonsense_and_silence_are_named(switch: Device) -> None:
    one = driver(switch)
    switch.lab(faults={"nonsense": 1})
    with pytest.raises(DeviceError, match="nonsense"):
        one.read()
    switch.lab(reboot=60)
    with pytest.raises(DeviceError, match="no answer"):
        one.read()


def test_ports_tell_light_and_failure(switch: Device) -> None:
    one = driver(switch)
    one.apply(CONNECT, one.read().tag)
    switch.lab(fail=2)
    ports = one.ports()
    assert ports[1].status in (Status.TUNING, Status.TUNED)
    assert ports[2].status is Status.FAILED and ports[2].power == -60.0
    assert ports[3].status is Status.BLOCKED


def changes(one: Restconf, act: Any, count: int = 1) -> list[Change]:
    """What `watch` sees while `act` runs."""
    seen: list[Change] = []
    stop, begun = Event(), Event()

    def watch() -> None:
        begun.set()
        for change in one.watch(stop):
            seen.append(change)
            if len(seen) == count:
                stop.set()

    watcher = Thread(target=watch)
    watcher.start()
    begun.wait(5)
    while watcher.is_alive():
        act()
        watcher.join(0.2)
    return seen


def numbered(switch: Device) -> Any:
    """Another change at every call: the watcher may not have begun at the first."""
    ports = iter(range(1, 16))

    def act() -> None:
        port = next(ports)
        switch.lab(tamper={port: 16 + port})

    return act


def test_changes_are_announced(switch: Device) -> None:
    assert driver(switch).capabilities().notifies
    seen = changes(driver(switch), numbered(switch))
    assert seen[0].delay == 0.0 and seen[0].table.pairs


def test_a_silent_device_is_polled_and_the_delay_is_told() -> None:
    with device("--silent") as silent:
        one = driver(silent, poll=0.05)
        assert not one.capabilities().notifies
        seen = changes(one, numbered(silent))
    assert seen[0].delay == 0.05


def test_the_password_is_asked_for(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("admin:root\n")
    secret.chmod(0o600)
    with device("--login", "admin:root") as guarded:
        with pytest.raises(RefusedError, match="access denied"):
            driver(guarded).read()
        assert driver(guarded, credentials=credentials(secret)).read().pairs == {}


def test_credentials_are_kept_from_others(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("admin:root")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        credentials(secret)
    secret.chmod(0o600)
    assert "root" not in repr(credentials(secret))
    assert credentials(secret) == Credentials("admin", "root")


def certificate(directory: Path) -> Path:
    """Of 127.0.0.1, signed by itself."""
    made = directory / "device.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=ocs -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", str(made), "-out", str(directory / "ca.pem")]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    made.write_text(made.read_text() + (directory / "ca.pem").read_text())
    return made


def test_tls_is_verified(tmp_path: Path) -> None:
    with device("--certificate", str(certificate(tmp_path))) as secure:
        with pytest.raises(DeviceError, match="certificate verify failed"):
            driver(secure).read()
        assert driver(secure, ca=tmp_path / "ca.pem").read().pairs == {}


CONFIG: dict[str, Any] = {
    "fabric": {"pods": 4, "spine_indices": 1, "uplinks": 4},
    "policy": {"settle": 0.0},
}
DEMAND = {"links": {0: [[0, 1, 2], [2, 3, 3], [0, 2, 1]]}}


class Command:
    """`fabric-agent ocs` on one device."""

    def __init__(self, directory: Path, switch: Device, capsys: Any) -> None:
        self.directory, self._capsys = directory, capsys
        listed = [{"name": "ocs-a", "driver": "restconf", "url": switch.url, "size": 16}]
        self.write("config", CONFIG | {"devices": listed, "state_dir": str(directory / "state")})
        self.write("demand", DEMAND)

    def write(self, name: str, values: object) -> Path:
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def text(self, *arguments: str) -> str:
        common = argparse.ArgumentParser(add_help=False)
        common.add_argument("-c", dest="config", type=Path)
        parser = argparse.ArgumentParser()
        commands.mount(parser, [common])
        args = parser.parse_args(
            [arguments[0], "-c", str(self.directory / "config.yaml"), *arguments[1:]]
        )
        args.run(args)
        return str(self._capsys.readouterr().out)

    def __call__(self, *arguments: str) -> Any:
        return json.loads(self.text(*arguments, "--json"))

    def plan(self, *arguments: str) -> Any:
        return self("plan", str(self.directory / "demand.yaml"), *arguments)


@pytest.fixture
def ocs(tmp_path: Path, switch: Device, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, switch, capsys)


def test_from_demand_to_light_and_history(ocs: Command) -> None:
    planned = ocs.plan("--why", "test")
    assert planned["lit"] == 6 and planned["torn_down"] == 0 and not planned["unplaced"]
    assert ocs("apply", planned["plan"]) == {
        "plan": planned["plan"],
        "ended": "finished",
        "stages": len(planned["stages"]),
    }
    shown = ocs("show")
    assert {(*each["pods"], each["links"]) for each in shown["links"]} == {
        (0, 1, 2),
        (2, 3, 3),
        (0, 2, 1),
    }
    assert shown["devices"][0]["circuits"] == 12
    told = ocs("history")
    assert told["plans"][0]["state"] == "finished" and told["metrics"]["circuits_lit"] == 12
    assert ocs.plan()["stages"] == []


def test_the_tables_are_for_people(ocs: Command, tmp_path: Path) -> None:
    text = ocs.text("plan", str(tmp_path / "demand.yaml"))
    assert "stage 0: spine index 0" in text and "jobs touched: none" in text
    plan_id = text.split()[-1]
    assert "finished" in ocs.text("apply", plan_id)
    assert "0-1" in ocs.text("show")
    assert "announced" in ocs.text("show")
    assert plan_id in ocs.text("history")
    ocs("plot", plan_id, "-o", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_a_moved_table_is_refused(ocs: Command, switch: Device) -> None:
    planned = ocs.plan()
    switch.lab(tamper={1: 18})
    with pytest.raises(MovedError, match="moved since the plan"):
        ocs("apply", planned["plan"])


def test_a_half_refused_batch_is_resumed(ocs: Command, switch: Device) -> None:
    ocs("apply", ocs.plan()["plan"])
    ocs.write("demand", {"links": {0: [[0, 3, 4], [1, 2, 4]]}})
    ocs.write(
        "config",
        yaml.safe_load((ocs.directory / "config.yaml").read_text())
        | {"policy": {"settle": 0.0, "floor": 0.0}},
    )
    planned = ocs.plan()
    switch.lab(faults={"refuse_after": 3})
    with pytest.raises(DeviceError):
        ocs("apply", planned["plan"])
    switch.lab(faults={})
    assert ocs("apply", planned["plan"], "--resume")["ended"] == "finished"
    assert {tuple(each["pods"]) for each in ocs("show")["links"]} == {(0, 3), (1, 2)}


def test_a_device_that_forgot_its_circuits_stops_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with device("--volatile") as forgetful:
        ocs = Command(tmp_path, forgetful, capsys)
        ocs("apply", ocs.plan()["plan"])
        ocs.write("demand", {"links": {0: [[0, 1, 2], [2, 3, 3]]}})
        planned = ocs.plan()
        forgetful.lab(faults={"refuse_after": 0})
        with pytest.raises(DeviceError):
            ocs("apply", planned["plan"])
        forgetful.lab(faults={}, reboot=0)
        with pytest.raises(MovedError, match="goes to nothing, expected"):
            ocs("apply", planned["plan"], "--resume")
        assert "given up" in ocs("abort")["abort"]
        assert ocs.plan()["lit"] == 5


def test_freeze_and_abort(ocs: Command) -> None:
    planned = ocs.plan()
    assert "maintenance" in ocs("freeze", "maintenance")["frozen"]
    with pytest.raises(OncacheError, match="frozen"):
        ocs("apply", planned["plan"])
    assert ocs("freeze", "--off") == {"frozen": ""}
    assert "nothing runs" in ocs("abort")["abort"]


def test_the_audit_names_crossed_fibres_and_dead_ports(ocs: Command, switch: Device) -> None:
    fabric = Fabric(4, 1, 4)
    placed = Inventory(fabric, [Placed("ocs-a", 16, tuple(Switch(0, k) for k in range(4)))])
    labels = {plug.number: [plug.strand, ""] for plug in plugs(placed, cross(fabric))}
    switch.lab(labels=labels)
    assert ocs("audit")["findings"] == []
    assert "as it should be" in ocs.text("audit")
    switch.lab(labels={1: labels[2], 2: labels[1], 3: ["", ""]})
    ocs("apply", ocs.plan()["plan"])
    table = driver(switch).read().pairs
    dead = next(iter(table))
    switch.lab(fail=dead)
    found = ocs("audit")["findings"]
    assert {each["kind"] for each in found} == {"crossed", "missing", "port"}
    assert any(f"port {dead} is failed" in each["finding"] for each in found)


JOBS: dict[str, Any] = {
    "clos": {"leaves": 2, "parallel": 2},
    "jobs": [{"name": "llm", "stages": [[[0, 0]], [[1, 0]]], "tensor": 2, "protected": True}],
}


def test_jobs_make_the_demand_and_are_protected(ocs: Command) -> None:
    ocs.write("demand", JOBS)
    ocs("apply", ocs.plan()["plan"])
    assert ocs("show")["links"] == [{"spine": 0, "pods": [0, 1], "links": 2}]
    ocs.write(
        "demand", JOBS | {"jobs": [*JOBS["jobs"], {"name": "b", "stages": [[[2, 0], [3, 0]]]}]}
    )
    planned = ocs.plan()
    assert planned["torn_down"] == 0 and planned["jobs"] == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"fabirc": {}}, "unknown key fabirc"),
        ({"fabric": {"pods": 4, "spine_indices": 1}}, r"fabric\.uplinks is missing"),
        ({"fabric": CONFIG["fabric"] | {"pods": "x"}}, r"fabric\.pods: 'x' is not a whole number"),
        ({"policy": {"flor": 1}}, r"unknown key policy\.flor"),
        ({"devices": [{"name": "a", "size": 16, "driver": "tl1"}]}, "no driver tl1"),
        (
            {"devices": [{"name": "a", "size": 4, "driver": "restconf", "url": "http://x"}]},
            "more than",
        ),
        ({"devices": [{"name": "a", "size": 16, "driver": "restconf"}]}, r"url is missing"),
        ({"devices": {}}, "devices: not a list"),
        ({"failed_ports": [1]}, "failed_ports"),
    ],
)
def test_a_wrong_configuration_is_named(ocs: Command, change: Any, complaint: str) -> None:
    known = yaml.safe_load((ocs.directory / "config.yaml").read_text())
    ocs.write("config", known | change)
    with pytest.raises(ConfigError, match=complaint):
        ocs("show")


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"links": {0: [[0, 9, 1]]}}, r"links\.0"),
        ({"links": {0: [[0, 1]]}}, r"links\.0"),
        ({"links": {0: [[0, 1, 5]]}}, "5 links wanted, 4 ports"),
        ({"jobs": [], "clos": {"leaves": 2, "parallel": 9}}, "exceed"),
        ({"links": {}, "more": 1}, "unknown key more"),
    ],
)
def test_a_wrong_demand_is_named(ocs: Command, wanted: Any, complaint: str) -> None:
    ocs.write("demand", wanted)
    with pytest.raises(OncacheError, match=complaint):
        ocs.plan()
