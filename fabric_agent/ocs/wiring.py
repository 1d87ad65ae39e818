# SPDX-License-Identifier: Apache-2.0
"""Pods, spines and optical switches, and where each fibre of a spine's port goes.

Spine `h` of every pod has `uplinks` ports, and each port has one fibre to and one from a switch of
group `h`. A switch of a group is a partial permutation: input pod -> output pod.

*Cross wiring* takes ports in pairs (2q, 2q+1): the even port sends into switch 2q and receives from
switch 2q+1, the odd port the other way round. A circuit i -> j of switch 2q then lights the even
port of pod i towards the odd port of pod j, and the way back is circuit j -> i of switch 2q+1. So
the even switch may hold any partial permutation, and the odd one holds its transpose. *Uniform
wiring* takes both fibres of a port to the same switch, which must then hold a matching.

(LumosCore, "Cross Wiring", 2411.01503.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from oncache.core.errors import ConfigError, OncacheError

DARK = -1


@dataclass(frozen=True)
class Fabric:
    """`pods` pods, each with `indices` spines of `uplinks` ports towards the optical switches."""

    pods: int
    indices: int
    uplinks: int

    def __post_init__(self) -> None:
        for name, least in (("pods", 2), ("indices", 1), ("uplinks", 2)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"fabric.{name}: {getattr(self, name)} is less than {least}",
                    hint=f"give at least {least}",
                )

    @property
    def pairs(self) -> int:
        """Pairs of ports per spine; an odd one out has no partner and stays dark."""
        return self.uplinks // 2


class Port(NamedTuple):
    """A transceiver: port `uplink` of the pod's spine `spine`."""

    pod: int
    spine: int
    uplink: int

    def __str__(self) -> str:
        return f"pod{self.pod}/spine{self.spine}/port{self.uplink}"


class Switch(NamedTuple):
    """A logical optical switch: number `number` of the group of spine index `group`."""

    group: int
    number: int

    def __str__(self) -> str:
        return f"{self.group}/{self.number}"


class Circuit(NamedTuple):
    """One lit cross-connect of a switch, from the input of pod `a` to the output of pod `b`."""

    switch: Switch
    a: int
    b: int

    def __str__(self) -> str:
        return f"ocs {self.switch} {self.a}->{self.b}"


class Link(NamedTuple):
    """A bidirectional link under cross wiring: even port of `a`, odd port of `b`, same pair."""

    spine: int
    pair: int
    a: int
    b: int

    @property
    def ends(self) -> tuple[Port, Port]:
        """The two transceivers."""
        return (
            Port(self.a, self.spine, 2 * self.pair),
            Port(self.b, self.spine, 2 * self.pair + 1),
        )

    @property
    def circuits(self) -> tuple[Circuit, Circuit]:
        """There, and back by the partner switch."""
        return (
            Circuit(Switch(self.spine, 2 * self.pair), self.a, self.b),
            Circuit(Switch(self.spine, 2 * self.pair + 1), self.b, self.a),
        )

    @property
    def unit(self) -> tuple[int, int, int]:
        """The drain unit: lower pod, higher pod, spine index."""
        return min(self.a, self.b), max(self.a, self.b), self.spine

    def __str__(self) -> str:
        return f"{self.ends[0]} - {self.ends[1]}"


Targets = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Layout:
    """All lit links: `targets[index][pair][a]` is `b`, or DARK. Odd switches are implied."""

    targets: Targets

    @staticmethod
    def dark(fabric: Fabric) -> Layout:
        """Nothing lit."""
        row = (DARK,) * fabric.pods
        return Layout(((row,) * fabric.pairs,) * fabric.indices)

    @staticmethod
    def of(fabric: Fabric, links: Iterable[Link]) -> Layout:
        """From links; CircuitError when two of them claim a port, or a port does not exist."""
        rows = [[[DARK] * fabric.pods for _ in range(fabric.pairs)] for _ in range(fabric.indices)]
        taken: set[Port] = set()
        for link in links:
            _require_inside(fabric, link)
            for port in link.ends:
                if port in taken:
                    raise CircuitError(f"{port} is used twice, also by {link}", hint=REREAD)
                taken.add(port)
            rows[link.spine][link.pair][link.a] = link.b
        return Layout(tuple(tuple(map(tuple, index)) for index in rows))

    def links(self) -> Iterator[Link]:
        """Every lit link, in order of index, pair and pod."""
        for index, pairs in enumerate(self.targets):
            for pair, row in enumerate(pairs):
                for a, b in enumerate(row):
                    if b != DARK:
                        yield Link(index, pair, a, b)

    def require(self, fabric: Fabric) -> None:
        """CircuitError unless this is a layout of `fabric`: its shape, and each port used once."""
        shape = (fabric.indices, fabric.pairs, fabric.pods)
        sizes = {(len(pairs), len(row)) for pairs in self.targets for row in pairs}
        if len(self.targets) != fabric.indices or sizes != {shape[1:]}:
            raise CircuitError(
                f"the layout has not the shape {shape} of the fabric",
                hint="read the table of this fabric again",
            )
        for index, pairs in enumerate(self.targets):
            for pair, row in enumerate(pairs):
                lit = [b for b in row if b != DARK]
                if len(set(lit)) < len(lit) or not all(0 <= b < fabric.pods for b in lit):
                    raise CircuitError(f"ocs {index}/{2 * pair} holds no permutation", hint=REREAD)
                if any(a == b for a, b in enumerate(row)):
                    raise CircuitError(f"ocs {index}/{2 * pair}: a pod to itself", hint=REREAD)


REREAD = "read the devices again (fabric-agent ocs show) and plan from what they say"


class CircuitError(OncacheError):
    """Circuits that cannot be: a port used twice, fibres that end at different transceivers."""


def _require_inside(fabric: Fabric, link: Link) -> None:
    inside = (
        0 <= link.spine < fabric.indices
        and 0 <= link.pair < fabric.pairs
        and 0 <= link.a < fabric.pods
        and 0 <= link.b < fabric.pods
        and link.a != link.b
    )
    if not inside:
        raise CircuitError(f"{tuple(link)} is no link of this fabric", hint=REREAD)


class Fibre(NamedTuple):
    """Where the two strands of a port end: inputs and outputs of a switch count by pod."""

    port: Port
    into: Switch
    out_of: Switch


Cabling = tuple[Fibre, ...]


def cross(fabric: Fabric) -> Cabling:
    """Who plugs where under cross wiring. A port without a partner plugs nowhere."""
    return tuple(
        Fibre(port, Switch(port.spine, port.uplink), Switch(port.spine, port.uplink ^ 1))
        for port in _ports(fabric, 2 * fabric.pairs)
    )


def uniform(fabric: Fabric) -> Cabling:
    """Who plugs where under uniform wiring: both strands of a port at one switch."""
    return tuple(
        Fibre(port, Switch(port.spine, port.uplink), Switch(port.spine, port.uplink))
        for port in _ports(fabric, fabric.uplinks)
    )


GENERATORS: Mapping[str, Callable[[Fabric], Cabling]] = {"cross": cross, "uniform": uniform}


def _ports(fabric: Fabric, uplinks: int) -> Iterator[Port]:
    for pod, index, uplink in product(range(fabric.pods), range(fabric.indices), range(uplinks)):
        yield Port(pod, index, uplink)


def transceiver_pairs(cabling: Cabling, circuits: Iterable[Circuit]) -> dict[Port, Port]:
    """Follow the light of every circuit: sending port -> receiving port.

    CircuitError when a port sends or receives twice, when a circuit ends where no port is plugged,
    or when the two fibres of a port end at different transceivers: then no Ethernet link comes up.
    """
    sender = {(fibre.into, fibre.port.pod): fibre.port for fibre in cabling}
    receiver = {(fibre.out_of, fibre.port.pod): fibre.port for fibre in cabling}
    reached: dict[Port, Port] = {}
    lit: set[Port] = set()
    for circuit in circuits:
        tx = sender.get((circuit.switch, circuit.a))
        rx = receiver.get((circuit.switch, circuit.b))
        if tx is None or rx is None:
            raise CircuitError(f"{circuit}: no port is plugged there", hint=REREAD)
        if tx in reached or rx in lit:
            raise CircuitError(f"{circuit}: an end is in another circuit already", hint=REREAD)
        reached[tx] = rx
        lit.add(rx)
    for tx, rx in reached.items():
        if reached.get(rx) != tx:
            raise CircuitError(
                f"{tx} sends to {rx}, which sends to {reached.get(rx) or 'nowhere'}",
                hint="both fibres of a link must end at the same far transceiver",
            )
    return reached


def links_of(fabric: Fabric, circuits: Iterable[Circuit]) -> tuple[Link, ...]:
    """Links from the tables of the switches, under cross wiring. CircuitError as above."""
    reached = transceiver_pairs(cross(fabric), circuits)
    return tuple(
        sorted(
            Link(tx.spine, tx.uplink // 2, tx.pod, rx.pod)
            for tx, rx in reached.items()
            if tx.uplink % 2 == 0
        )
    )


Matrix = Sequence[Sequence[int]]


def link_counts(fabric: Fabric, layout: Layout) -> list[list[list[int]]]:
    """Lit links by [index][pod][pod], symmetric."""
    counts = [[[0] * fabric.pods for _ in range(fabric.pods)] for _ in range(fabric.indices)]
    for index, pairs in enumerate(layout.targets):
        table = counts[index]
        for row in pairs:
            for a, b in enumerate(row):
                if b != DARK:
                    table[a][b] += 1
                    table[b][a] += 1
    return counts
