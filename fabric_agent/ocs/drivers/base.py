# SPDX-License-Identifier: Apache-2.0
"""What every optical switch can do for us: tell its table, carry out a batch, report changes.

A table maps an ingress port to an egress port, as the device numbers them; it comes with a *tag*
that changes with every change of the table, so that a batch is refused when the table moved since
it was read. A driver never repeats a batch by itself: after any doubt the caller reads again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import Protocol

from oncache.core.errors import ConfigError, OncacheError


class DeviceError(OncacheError):
    """The device is out of reach, answers nonsense, or failed in a way that leaves doubt."""


class RefusedError(DeviceError):
    """The device said no; nothing of the batch is in force."""


class MovedError(DeviceError):
    """The table is not the one that was read; nothing of the batch is in force."""


class PartialError(DeviceError):
    """Some of the batch is in force, or nobody knows: read the table before anything else."""


@dataclass(frozen=True)
class Capabilities:
    """`atomic`: a batch is in force whole or not at all. `notifies`: changes announce themselves;
    else they are found by polling. `power`: ports have optical monitors."""

    atomic: bool
    notifies: bool
    power: bool


@dataclass(frozen=True)
class Table:
    """Lit cross-connects: ingress port -> egress port."""

    pairs: Mapping[int, int]
    tag: str

    def __post_init__(self) -> None:
        if len(set(self.pairs.values())) < len(self.pairs):
            raise DeviceError(
                "the device reports one egress port in two cross-connects",
                hint="look at its own console; nothing is changed while it says so",
            )


def fingerprint(pairs: Mapping[int, int]) -> str:
    """A tag for devices that have none."""
    return hashlib.sha256(repr(sorted(pairs.items())).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Batch:
    """Cross-connects to take out and to put in; the former first, so that ports may be reused."""

    disconnect: tuple[tuple[int, int], ...] = ()
    connect: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.disconnect or self.connect)

    def after(self, pairs: Mapping[int, int]) -> dict[int, int]:
        """The table with this batch in force."""
        gone = {ingress for ingress, _ in self.disconnect}
        kept = {ingress: egress for ingress, egress in pairs.items() if ingress not in gone}
        return kept | dict(self.connect)


class Status(StrEnum):
    """Of one port (names of the SONiC optical-switch design)."""

    BLOCKED = "blocked"
    TUNING = "tuning"
    TUNED = "tuned"
    FAILED = "failed"


@dataclass(frozen=True)
class PortState:
    """What a device knows of a port: `power` in dBm, None without a monitor."""

    status: Status
    label: str = ""
    peer: str = ""
    power: float | None = None


@dataclass(frozen=True)
class Change:
    """The table after a change, and the longest time it can have gone unseen (seconds)."""

    table: Table
    delay: float


class Driver(Protocol):
    """See the module; every call may raise DeviceError."""

    name: str

    def capabilities(self) -> Capabilities: ...

    def read(self) -> Table: ...

    def apply(self, batch: Batch, tag: str) -> Table:
        """Carry out `batch` on the table with `tag`; returns the table afterwards.

        MovedError or RefusedError: nothing changed. PartialError or any other DeviceError: read.
        """

    def ports(self) -> Mapping[int, PortState]: ...

    def watch(self, stop: Event) -> Iterator[Change]:
        """Every change of the table until `stop`; ends soon after it is set."""


@dataclass(frozen=True)
class Credentials:
    """Of one device; the password shows in no message."""

    user: str
    password: str = field(repr=False)


def credentials(path: Path) -> Credentials:
    """From a file with `user:password` on its first line that nobody else may read."""
    try:
        mode = path.stat().st_mode
        line = path.read_text(encoding="utf-8").partition("\n")[0]
    except OSError as error:
        raise ConfigError(f"credentials: {path}: {error.strerror}", hint="create it") from None
    if mode & 0o077:
        raise ConfigError(f"credentials: others may read {path}", hint=f"chmod 600 {path}")
    user, colon, password = line.partition(":")
    if not (user and colon):
        raise ConfigError(
            f"credentials: {path} is not USER:PASSWORD", hint="one line, with a colon"
        )
    return Credentials(user, password)


def polled(driver: Driver, stop: Event, interval: float) -> Iterator[Change]:
    """Changes of a device that does not announce them, seen at most `interval` seconds late."""
    tag = driver.read().tag
    while not stop.wait(interval):
        table = driver.read()
        if table.tag != tag:
            tag = table.tag
            yield Change(table, interval)
