# SPDX-License-Identifier: Apache-2.0
"""A driver for a simulated switch in this process: for tests, and for a dry laboratory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Event

from fabric_agent.ocs.drivers.base import (
    Batch,
    Capabilities,
    Change,
    DeviceError,
    MovedError,
    PartialError,
    PortState,
    RefusedError,
    Status,
    Table,
)
from fabric_agent.ocs.simulator.switch import Gone, Switch, SwitchError

LOOK = 0.2


class Memory:
    """One cross-connect at a time, as the simplest devices do it."""

    def __init__(self, name: str, switch: Switch) -> None:
        self.name = name
        self.switch = switch

    def capabilities(self) -> Capabilities:
        return Capabilities(atomic=False, notifies=True, power=True)

    def read(self) -> Table:
        with self.switch.changed:
            try:
                self.switch.require_present()
            except Gone as error:
                raise DeviceError(f"{self.name} does not answer", hint="try again") from error
            return Table(dict(self.switch.pairs), self.switch.tag)

    def apply(self, batch: Batch, tag: str) -> Table:
        with self.switch.changed:
            if self.switch.tag != tag:
                raise MovedError(f"{self.name}: its table moved", hint="read it again")
            for done, (gone, made) in enumerate(_steps(batch)):
                self._step(gone, made, done)
        return self.read()

    def _step(self, gone: set[int], made: dict[int, int], done: int) -> None:
        try:
            answered = self.switch.change(gone, made, "memory")
        except SwitchError as error:
            kind = PartialError if done else RefusedError
            raise kind(f"{self.name} refuses: {error}", hint="read its table") from error
        except Gone as error:
            raise PartialError(f"{self.name} does not answer", hint="try again") from error
        if not answered:
            raise PartialError(f"{self.name} gave no answer", hint="read its table")

    def ports(self) -> Mapping[int, PortState]:
        with self.switch.changed:
            return {
                number: PortState(
                    Status(self.switch.state(number)),
                    port.label,
                    port.peer,
                    self.switch.power(number),
                )
                for number, port in self.switch.ports.items()
            }

    def watch(self, stop: Event) -> Iterator[Change]:
        seen = self.switch.version
        while not stop.is_set():
            with self.switch.changed:
                if self.switch.version == seen:
                    self.switch.changed.wait(LOOK)
                    continue
                seen = self.switch.version
            yield Change(self.read(), 0.0)


def _steps(batch: Batch) -> Iterator[tuple[set[int], dict[int, int]]]:
    for ingress, _ in batch.disconnect:
        yield {ingress}, {}
    for ingress, egress in batch.connect:
        yield set(), {ingress: egress}
