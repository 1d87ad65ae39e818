# SPDX-License-Identifier: Apache-2.0
"""Carry out a staged plan on the devices, so that it can stop anywhere and go on from there.

Before each stage the tables are read: they must be what the stage starts from, or nothing is sent.
After each command, answered or not, they are read again; what is true is what the devices say. A
stage that was interrupted is resumed (or rolled back) by the difference between what is there and
what should be, never by repeating a batch; a circuit that neither belongs to the stage's start nor
to its end is somebody else's, and stops it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fabric_agent.ocs.devices import Inventory
from fabric_agent.ocs.drivers.base import Batch, DeviceError, Driver, MovedError, Status, Table
from fabric_agent.ocs.journal import Document, Journal, JournalError
from fabric_agent.ocs.stages import Stage
from fabric_agent.ocs.wiring import Link

# A lit port's optical power, in dBm.
POWER_WINDOW = (-14.0, 4.0)
VERIFY_SECONDS = 10.0
VERIFY_INTERVAL = 0.05
RESUME = "fabric-agent ocs apply --resume goes on from what the devices say; --roll-back undoes"


class Hooks(Protocol):
    """What happens around a stage: hosts leave and come back."""

    def drain(self, plan_id: str, number: int, stage: Stage) -> None:
        """Returns when nothing uses the stage's units any more; raises to stop the plan."""

    def release(self, plan_id: str, number: int, stage: Stage) -> None:
        """The stage is verified."""


class Unannounced:
    """Hooks of a laboratory without hosts."""

    def drain(self, plan_id: str, number: int, stage: Stage) -> None: ...

    def release(self, plan_id: str, number: int, stage: Stage) -> None: ...


@dataclass(frozen=True)
class Clock:
    """Time, so that tests need none."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


Tables = dict[str, dict[int, int]]


class Aborted(DeviceError):
    """Stopped on request, between two stages."""


class Runner:
    """See the module. One at a time per journal."""

    def __init__(
        self,
        inventory: Inventory,
        drivers: Mapping[str, Driver],
        journal: Journal,
        hooks: Hooks | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._inventory, self._drivers, self._journal = inventory, drivers, journal
        self._hooks: Hooks = hooks or Unannounced()
        self._clock = clock or Clock()

    def run(self, document: Document) -> None:
        """Start a plan. Refused if another one is unfinished, or the tables moved since it."""
        self._journal.require_thawed()
        with self._journal.exclusive():
            other = self._journal.unfinished()
            if other is not None:
                raise JournalError(f"plan {other} is unfinished", hint=RESUME)
            if self._journal.progress(document.id).ended:
                raise JournalError(f"plan {document.id} has ended", hint="plan anew")
            self._require_tags(document)
            self._journal.take_abort()
            self._journal.save(document)
            self._go(document, 0)

    def resume(self, plan_id: str) -> None:
        """Go on from what the devices say: complete the stage that was begun, then the rest."""
        self._journal.require_thawed()
        with self._journal.exclusive():
            document = self._journal.plan(plan_id)
            progress = self._journal.progress(plan_id)
            if progress.ended:
                raise JournalError(f"plan {plan_id} is {progress.ended}", hint="plan anew")
            self._journal.take_abort()
            self._go(document, progress.done, repair=progress.begun is not None)

    def roll_back(self, plan_id: str) -> None:
        """Undo a plan that has not ended, stage by stage, the interrupted one first."""
        self._journal.require_thawed()
        with self._journal.exclusive():
            document = self._journal.plan(plan_id)
            progress = self._journal.progress(plan_id)
            if progress.ended:
                raise JournalError(f"plan {plan_id} is {progress.ended}", hint="plan anew")
            last = progress.done - 1 if progress.begun is None else progress.begun
            for number in range(last, -1, -1):
                stage = document.staged.stages[number]
                undone = Stage(stage.index, stage.add, stage.remove, 0, 0, 0)
                self._hooks.drain(plan_id, number, undone)
                self._journal.step(plan_id, "begun", number)
                self._switch(document, number, undone, self._after(document, number), repair=True)
                self._journal.step(plan_id, "undone", number)
                self._hooks.release(plan_id, number, undone)
            self._journal.step(plan_id, "rolled-back")

    def tables(self) -> dict[str, Table]:
        """What all devices say now."""
        return {name: driver.read() for name, driver in self._drivers.items()}

    def _require_tags(self, document: Document) -> None:
        for name, table in self.tables().items():
            if table.tag != document.tags.get(name):
                raise MovedError(
                    f"{name}: its table moved since the plan was made",
                    hint="fabric-agent ocs plan again",
                )

    def _go(self, document: Document, first: int, *, repair: bool = False) -> None:
        plan_id, started = document.id, self._clock.now()
        stages = document.staged.stages
        begins = stages[first].starts if first < len(stages) else 0.0
        for number in range(first, len(stages)):
            self._require_wanted(plan_id, number)
            stage = stages[number]
            self._wait_until(started + stage.starts - begins)
            self._hooks.drain(plan_id, number, stage)
            self._journal.step(plan_id, "begun", number)
            before = self._after(document, number - 1)
            try:
                self._switch(document, number, stage, before, repair=repair and number == first)
            except DeviceError as error:
                self._journal.step(plan_id, "failed", number, why=error.message)
                raise
            self._journal.step(plan_id, "done", number)
            self._hooks.release(plan_id, number, stage)
        self._journal.step(plan_id, "finished")

    def _require_wanted(self, plan_id: str, number: int) -> None:
        self._journal.require_thawed()
        if self._journal.take_abort():
            self._journal.step(plan_id, "aborted", number)
            raise Aborted(f"aborted before stage {number}", hint="fabric-agent ocs plan anew")

    def _wait_until(self, moment: float) -> None:
        left = moment - self._clock.now()
        if left > 0:
            self._clock.sleep(left)

    def _after(self, document: Document, number: int) -> set[Link]:
        """Links lit after a stage; -1 is the beginning."""
        links = set(document.staged.before.links())
        for stage in document.staged.stages[: number + 1]:
            links = links.difference(stage.remove).union(stage.add)
        return links

    def _switch(
        self, document: Document, number: int, stage: Stage, before: set[Link], *, repair: bool
    ) -> None:
        """Bring every device from the stage's start (or anything between) to its end, verified."""
        start = self._wanted(before)
        end = self._wanted(before.difference(stage.remove).union(stage.add))
        concerned = [name for name in self._drivers if start[name] != end[name]]
        tables = {name: self._drivers[name].read() for name in concerned}
        for name, table in tables.items():
            self._require_between(name, table, start[name], end[name], repair=repair)
        batches = {name: self._batch(name, tables[name], end[name]) for name in concerned}
        # Darken everywhere first: a link's two fibres may be on two devices.
        for name in concerned:
            tables[name] = self._send(
                document, number, name, Batch(disconnect=batches[name].disconnect), tables[name]
            )
        for name in concerned:
            self._send(document, number, name, Batch(connect=batches[name].connect), tables[name])
        for name in concerned:
            self._verify(name, end[name], batches[name])

    def _wanted(self, links: Iterable[Link]) -> Tables:
        return self._inventory.tables(circuit for link in links for circuit in link.circuits)

    def _require_between(
        self,
        name: str,
        table: Table,
        start: Mapping[int, int],
        end: Mapping[int, int],
        *,
        repair: bool,
    ) -> None:
        """Only what the stage starts from, or, after an interruption, anything on its way."""
        ours = self._inventory.ours(name, table.pairs)
        for ingress in sorted(set(ours) | set(start) | set(end)):
            there = ours.get(ingress)
            allowed = {start.get(ingress)}
            if repair and start.get(ingress) != end.get(ingress):
                allowed |= {end.get(ingress), None}
            if there not in allowed:
                raise MovedError(
                    f"{name}: ingress {ingress} goes to {there or 'nothing'}, "
                    f"expected {start.get(ingress) or 'nothing'}",
                    hint="find out who changed it, then fabric-agent ocs plan anew",
                )

    def _batch(self, name: str, table: Table, end: Mapping[int, int]) -> Batch:
        ours = self._inventory.ours(name, table.pairs)
        return Batch(
            tuple((i, e) for i, e in sorted(ours.items()) if end.get(i) != e),
            tuple((i, e) for i, e in sorted(end.items()) if ours.get(i) != e),
        )

    def _send(
        self, document: Document, number: int, name: str, batch: Batch, table: Table
    ) -> Table:
        if not batch:
            return table
        answer = "no answer"
        after: Table | None = None
        try:
            after = self._drivers[name].apply(batch, table.tag)
            answer = "done"
        except DeviceError as error:
            answer = error.message
            raise
        finally:
            self._journal.audit(
                plan=document.id,
                why=document.why,
                stage=number,
                device=name,
                disconnect=batch.disconnect,
                connect=batch.connect,
                before=table.tag,
                after=after and after.tag,
                answer=answer,
            )
        return after

    def _verify(self, name: str, end: Mapping[int, int], batch: Batch) -> None:
        """Table as wanted, new ports tuned, light within its window."""
        driver = self._drivers[name]
        ours = self._inventory.ours(name, driver.read().pairs)
        if ours != dict(end):
            raise MovedError(f"{name}: its table is not what was commanded", hint=RESUME)
        fresh = {port for pair in batch.connect for port in pair}
        deadline = self._clock.now() + VERIFY_SECONDS
        while wrong := self._not_ready(driver, fresh):
            if self._clock.now() > deadline:
                raise DeviceError(f"{name}: {'; '.join(wrong[:3])}", hint=RESUME)
            self._clock.sleep(VERIFY_INTERVAL)

    def _not_ready(self, driver: Driver, ports: set[int]) -> list[str]:
        if not ports:
            return []
        states = driver.ports()
        wrong = []
        for port in sorted(ports & set(states)):
            state = states[port]
            if state.status is not Status.TUNED:
                wrong.append(f"port {port} is {state.status}")
            elif state.power is not None and not inside(state.power):
                wrong.append(f"port {port} has {state.power} dBm")
        return wrong


def inside(power: float) -> bool:
    """Is a lit port's power where it should be?"""
    return POWER_WINDOW[0] <= power <= POWER_WINDOW[1]
