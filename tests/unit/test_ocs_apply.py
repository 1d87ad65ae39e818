# SPDX-License-Identifier: Apache-2.0
"""Carrying out a plan while things go wrong: at every step, in every way, and what is left."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.ocs_realise import random_demand
from fabric_agent.ocs.apply import Aborted, Clock, Runner
from fabric_agent.ocs.devices import Device, Inventory
from fabric_agent.ocs.drivers.base import Batch, DeviceError, MovedError, Table
from fabric_agent.ocs.drivers.memory import Memory
from fabric_agent.ocs.journal import Document, FrozenError, Journal, JournalError, decode, encode
from fabric_agent.ocs.plan import plan
from fabric_agent.ocs.simulator.switch import Faults
from fabric_agent.ocs.simulator.switch import Switch as SimulatedSwitch
from fabric_agent.ocs.stages import Policy, Stage, sequence
from fabric_agent.ocs.wiring import Fabric, Layout, Link, Switch, links_of
from oncache.core.errors import BusyError, OncacheError

FABRIC = Fabric(4, 2, 4)
SIZE = 17
# A port beyond ours: 4 logical switches of 4 pods.
FREE = 17


class Time:
    """A clock that jumps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.sleep)


@dataclass
class Recorder:
    """Hooks that note what they were asked, and may refuse."""

    asked: list[str] = field(default_factory=list)
    refuse: int = -1

    def drain(self, plan_id: str, number: int, stage: Stage) -> None:
        self.asked.append(f"drain {number}")
        if number == self.refuse:
            raise DeviceError("a node does not answer", hint="look at it")

    def release(self, plan_id: str, number: int, stage: Stage) -> None:
        self.asked.append(f"release {number}")


class Failing(Memory):
    """A device that fails at its n-th command, before, in the middle of or after it."""

    def __init__(self, name: str, switch: SimulatedSwitch, fault: Fault) -> None:
        super().__init__(name, switch)
        self.fault = fault

    def apply(self, batch: Batch, tag: str) -> Table:
        if self.fault.due():
            match self.fault.kind:
                case "before":
                    raise DeviceError("no route to the device", hint="look")
                case "half":
                    self.switch.faults = Faults(refuse_after=1)
                case "unanswered":
                    self.switch.faults = Faults(vanish_after=0)
                case "reboot":
                    with self.switch.changed:
                        self.switch.reboot(1.0)
        return super().apply(batch, tag)


@dataclass
class Fault:
    """Counts commands over all devices."""

    kind: str
    at: int
    seen: int = 0

    def due(self) -> bool:
        self.seen += 1
        return self.seen == self.at


class Bench:
    """Two devices, a lit state on them, and a plan away from it."""

    def __init__(self, seed: int, directory: Path, fault: Fault | None = None) -> None:
        rng = random.Random(seed)
        self.time = Time()
        self.lit = plan(FABRIC, Layout.dark(FABRIC), random_demand(FABRIC, rng)).target
        made = plan(FABRIC, self.lit, random_demand(FABRIC, rng))
        self.staged = sequence(FABRIC, made, Policy(floor=0.0, moves_per_stage=6))
        # The two fibres of a link are on different devices.
        parts = [
            tuple(Switch(h, k) for h in range(2) for k in range(4) if k % 2 == side)
            for side in (0, 1)
        ]
        self.inventory = Inventory(FABRIC, [Device(f"d{n}", SIZE, p) for n, p in enumerate(parts)])
        tables = self.inventory.tables(c for link in self.lit.links() for c in link.circuits)
        self.switches = {
            name: SimulatedSwitch(SIZE, tuning=0.02, pairs=dict(pairs), clock=lambda: self.time.now)
            for name, pairs in tables.items()
        }
        self.fault = fault or Fault("none", 0)
        self.drivers = {n: Failing(n, s, self.fault) for n, s in self.switches.items()}
        self.journal = Journal(directory)
        self.hooks = Recorder()
        self.runner = Runner(
            self.inventory, self.drivers, self.journal, self.hooks, self.time.clock
        )

    def document(self, why: str = "test") -> Document:
        tags = {name: table.tag for name, table in self.runner.tables().items()}
        return Document(FABRIC, self.staged, tags, why)

    def circuits(self) -> set[tuple[str, int, int]]:
        return {
            (name, ingress, egress)
            for name, switch in self.switches.items()
            for ingress, egress in switch.pairs.items()
        }

    def expected(self, layout: Layout) -> set[tuple[str, int, int]]:
        tables = self.inventory.tables(c for link in layout.links() for c in link.circuits)
        return {(name, i, e) for name, pairs in tables.items() for i, e in pairs.items()}

    def links(self) -> tuple[Link, ...]:
        tables = {name: switch.pairs for name, switch in self.switches.items()}
        return links_of(FABRIC, self.inventory.circuits(tables))

    def require_nothing_unplanned(self) -> None:
        """Whatever is neither torn down nor parked by the plan is lit; nothing else is new."""
        stages = self.staged.stages
        removed = {link for stage in stages for link in stage.remove}
        added = {link for stage in stages for link in stage.add}
        must = self.expected(Layout.of(FABRIC, set(self.lit.links()) - removed))
        may = {
            circuit
            for link in set(self.lit.links()) | added
            for circuit in self.expected(Layout.of(FABRIC, [link]))
        }
        assert must <= self.circuits() <= may
        for switch in self.switches.values():
            assert len(set(switch.pairs.values())) == len(switch.pairs)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(1, tmp_path)


KINDS = ("before", "half", "unanswered", "reboot")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1 << 30), st.sampled_from(KINDS), st.integers(1, 12), st.booleans())
def test_a_fault_at_any_step_is_repaired(seed: int, kind: str, at: int, undo: bool) -> None:
    with TemporaryDirectory() as directory:
        bench = Bench(seed, Path(directory), Fault(kind, at))
        document = bench.document()
        try:
            bench.runner.run(document)
        except DeviceError:
            bench.require_nothing_unplanned()
            bench.time.sleep(2.0)
            for switch in bench.switches.values():
                switch.faults = Faults()
            if undo:
                bench.runner.roll_back(document.id)
                assert bench.circuits() == bench.expected(bench.lit)
                return
            bench.runner.resume(document.id)
        assert bench.circuits() == bench.expected(bench.staged.after)
        assert bench.links() == tuple(sorted(bench.staged.after.links()))
        assert bench.journal.progress(document.id).ended == "finished"


def every_command(tmp_path: Path) -> int:
    """How many commands the plan takes without a fault."""
    bench = Bench(1, tmp_path / "count")
    bench.runner.run(bench.document())
    return bench.fault.seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_each_step_of_one_plan(kind: str, tmp_path: Path) -> None:
    for at in range(1, every_command(tmp_path) + 1):
        bench = Bench(1, tmp_path / str(at), Fault(kind, at))
        document = bench.document()
        try:
            bench.runner.run(document)
        except DeviceError:
            bench.require_nothing_unplanned()
            bench.time.sleep(2.0)
            for switch in bench.switches.values():
                switch.faults = Faults()
            bench.runner.resume(document.id)
        assert bench.circuits() == bench.expected(bench.staged.after)


def test_hooks_surround_every_stage(bench: Bench) -> None:
    bench.runner.run(bench.document())
    wanted = [
        f"{what} {n}" for n in range(len(bench.staged.stages)) for what in ("drain", "release")
    ]
    assert bench.hooks.asked == wanted


def test_a_node_that_does_not_answer_stops_before_anything_is_cut(bench: Bench) -> None:
    bench.hooks.refuse = 0
    with pytest.raises(DeviceError, match="does not answer"):
        bench.runner.run(bench.document())
    assert bench.circuits() == bench.expected(bench.lit)


def test_a_table_that_moved_since_the_plan_is_refused(bench: Bench) -> None:
    document = bench.document()
    with bench.switches["d0"].changed:
        bench.switches["d0"].change(set(), {FREE: SIZE + FREE}, "somebody")
    with pytest.raises(MovedError, match="moved since the plan"):
        bench.runner.run(document)


def test_foreign_hands_in_the_middle_stop_the_plan(bench: Bench) -> None:
    document = bench.document()
    bench.fault.kind, bench.fault.at = "before", 2
    with pytest.raises(DeviceError):
        bench.runner.run(document)
    switch = bench.switches["d0"]
    with switch.changed:
        switch.change({next(iter(switch.pairs))}, {}, "somebody")
    held = bench.circuits()
    with pytest.raises(MovedError, match=r"ingress .* expected"):
        bench.runner.resume(document.id)
    assert bench.circuits() == held


def test_two_controllers_exclude_each_other(bench: Bench) -> None:
    with bench.journal.exclusive(), pytest.raises(BusyError):
        bench.runner.run(bench.document())


def test_frozen_circuits_stay(bench: Bench) -> None:
    bench.journal.freeze("maintenance")
    with pytest.raises(FrozenError, match="maintenance"):
        bench.runner.run(bench.document())
    bench.journal.thaw()
    bench.runner.run(bench.document())


def test_abort_stops_between_stages(bench: Bench) -> None:
    bench.runner = Runner(
        bench.inventory, bench.drivers, bench.journal, Aborting(bench.journal), bench.time.clock
    )
    document = bench.document()
    with pytest.raises(Aborted, match="before stage 1"):
        bench.runner.run(document)
    assert bench.journal.progress(document.id).ended == "aborted"
    assert bench.journal.unfinished() is None
    bench.require_nothing_unplanned()


@dataclass
class Aborting(Recorder):
    """Asks for the end after the first stage."""

    journal: Journal | None = None

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal

    def release(self, plan_id: str, number: int, stage: Stage) -> None:
        assert self.journal is not None
        assert "before its next stage" in self.journal.abort()


def test_a_second_plan_waits_until_the_first_is_given_up(bench: Bench) -> None:
    bench.fault.kind, bench.fault.at = "before", 1
    with pytest.raises(DeviceError):
        bench.runner.run(bench.document())
    with pytest.raises(JournalError, match="unfinished"):
        bench.runner.run(bench.document("another"))
    assert "given up" in bench.journal.abort()
    assert "nothing runs" in bench.journal.abort()
    bench.runner.run(bench.document("another"))


def test_a_port_that_does_not_tune_is_reported(bench: Bench) -> None:
    for switch in bench.switches.values():
        switch.tuning = 60.0
    with pytest.raises(DeviceError, match="is tuning"):
        bench.runner.run(bench.document())


def test_the_audit_log_tells_who_when_why_and_what(bench: Bench) -> None:
    document = bench.document("more bandwidth")
    bench.runner.run(document)
    entries = bench.journal.history()
    assert len(entries) == bench.fault.seen
    for entry in entries:
        assert entry["who"] and entry["when"] and entry["why"] == "more bandwidth"
        assert entry["before"] != entry["after"] and entry["answer"] == "done"


def test_a_plan_survives_the_disk(bench: Bench) -> None:
    document = bench.document()
    assert decode(encode(document)) == document
    bench.journal.save(document)
    assert bench.journal.plan(document.id) == document
    with pytest.raises(JournalError, match="format 2"):
        decode(encode(document) | {"format": 2})
    with pytest.raises(JournalError, match="damaged"):
        decode({"format": 1})
    with pytest.raises(JournalError, match="no plan"):
        bench.journal.plan("nothing")


def test_half_a_line_is_no_step(bench: Bench, tmp_path: Path) -> None:
    """The machine stopped while a line was written."""
    document = bench.document()
    bench.runner.run(document)
    log = tmp_path / "runs" / f"{document.id}.jsonl"
    log.write_text(log.read_text().splitlines(keepends=True)[0] + '{"event": "do')
    assert bench.journal.progress(document.id).begun == 0
    with pytest.raises(JournalError, match="no plan"):
        bench.journal.plan("../../etc/passwd")


def test_stages_keep_their_times() -> None:
    with TemporaryDirectory() as directory:
        bench = Bench(2, Path(directory))
        slow = tuple(replace(s, starts=100.0 * n) for n, s in enumerate(bench.staged.stages))
        bench.staged = replace(bench.staged, stages=slow)
        bench.runner.run(bench.document())
        assert bench.time.now >= slow[-1].starts


def test_errors_say_what_next(bench: Bench) -> None:
    bench.journal.freeze("x")
    with pytest.raises(OncacheError) as caught:
        bench.runner.resume("abc")
    assert caught.value.hint
