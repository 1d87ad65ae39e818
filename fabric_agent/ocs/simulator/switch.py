# SPDX-License-Identifier: Apache-2.0
"""The state of a simulated N x N optical switch: table, tuning, power, failures, reboots.

Ingress ports are 1..N, egress ports N+1..2N. Every change of the table gives it a new tag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition
from time import monotonic

LIT_DBM, DARK_DBM = -2.5, -60.0


class SwitchError(Exception):
    """A request that the switch refuses; its table is unchanged."""


class Gone(Exception):
    """The switch does not answer."""


@dataclass
class Faults:
    """What shall go wrong, for tests: counts go down to 0 as they are used up, -1 is never.

    `refuse_after`: changes accepted before one is refused. `vanish_after`: changes carried out
    before one is carried out without an answer. `nonsense`: answers that are not what was asked.
    """

    refuse_after: int = -1
    vanish_after: int = -1
    nonsense: int = 0


@dataclass
class Port:
    """`failed` ports carry no light."""

    label: str = ""
    peer: str = ""
    failed: bool = False


@dataclass
class Switch:
    """See the module. `tuning` is how long a mirror moves (seconds); `preserve`: circuits survive
    a reboot. Callers hold `changed`, which is notified at every activity."""

    size: int
    tuning: float = 0.0
    preserve: bool = True
    clock: Callable[[], float] = monotonic
    pairs: dict[int, int] = field(default_factory=dict)
    ports: dict[int, Port] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    changed: Condition = field(default_factory=Condition)
    activity: list[str] = field(default_factory=list)
    version: int = 1
    away_until: float = 0.0
    _tuned_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in range(1, 2 * self.size + 1):
            self.ports.setdefault(number, Port())

    @property
    def tag(self) -> str:
        """Of the table, as an HTTP entity tag."""
        return f'"{self.version}"'

    def require_present(self) -> None:
        """Gone while it reboots."""
        if self.clock() < self.away_until:
            raise Gone("rebooting")

    def change(self, disconnect: set[int], connect: dict[int, int], user: str) -> bool:
        """Delete and add cross-connects, whole or not at all. False: nobody gets an answer."""
        self.require_present()
        if self._use("refuse_after"):
            raise SwitchError("mirror controller busy")
        table = {i: e for i, e in self.pairs.items() if i not in disconnect} | connect
        self._check(disconnect, connect, table)
        now = self.clock()
        for ingress, egress in connect.items():
            self._tuned_at[ingress] = self._tuned_at[egress] = now + self.tuning
        self.pairs = table
        self._announce(f"{user} changed {len(disconnect)} + {len(connect)} cross-connects")
        return not self._use("vanish_after")

    def _check(self, disconnect: set[int], connect: dict[int, int], table: dict[int, int]) -> None:
        for ingress in disconnect - set(self.pairs):
            raise SwitchError(f"no cross-connect at ingress {ingress}")
        for ingress, egress in connect.items():
            if not (1 <= ingress <= self.size < egress <= 2 * self.size):
                raise SwitchError(f"{ingress} to {egress}: no such ports")
            if self.ports[ingress].failed or self.ports[egress].failed:
                raise SwitchError(f"{ingress} to {egress}: a port has failed")
        if len(set(table.values())) < len(table):
            raise SwitchError("an egress port would be in two cross-connects")

    def _use(self, fault: str) -> bool:
        left: int = getattr(self.faults, fault)
        setattr(self.faults, fault, max(-1, left - 1))
        return left == 0

    def _announce(self, text: str) -> None:
        self.version += 1
        self.activity.append(text)
        self.changed.notify_all()

    def state(self, port: int) -> str:
        """blocked, tuning, tuned or failed."""
        if self.ports[port].failed:
            return "failed"
        if port not in self.pairs and port not in self.pairs.values():
            return "blocked"
        return "tuning" if self.clock() < self._tuned_at.get(port, 0.0) else "tuned"

    def power(self, port: int) -> float:
        """dBm at the port's monitor."""
        return LIT_DBM if self.state(port) == "tuned" else DARK_DBM

    def fail(self, port: int) -> None:
        """A port goes dark for good; its cross-connect stays in the table."""
        self.ports[port].failed = True
        self._announce(f"port {port} failed")

    def reboot(self, seconds: float) -> None:
        """Silent for a while; circuits are kept or lost, as set up."""
        self.away_until = self.clock() + seconds
        if not self.preserve:
            self.pairs = {}
        self._announce("system started")
