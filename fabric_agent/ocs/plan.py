# SPDX-License-Identifier: Apache-2.0
"""Which links to light and which to tear down so that a demand is met with few of the latter.

Per spine index, independently: keep everything lit that is still wanted; place the missing links by
replacement chains, choosing the orientation of each when it is placed; then bring home what was
displaced needlessly. With cross wiring, an even number of uplinks, no failed port and no pinned
link, every demand within the port limits is met. Otherwise a link that finds no place is named.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fabric_agent.ocs import chains
from fabric_agent.ocs.demand import Demand
from fabric_agent.ocs.slots import NEVER, Arc, Slots
from fabric_agent.ocs.wiring import DARK, CircuitError, Fabric, Layout, Link, Matrix, Port


@dataclass(frozen=True)
class Constraints:
    """What a plan must respect.

    `failed` ports carry nothing; `pinned` links stay where they are, wanted or not; `weights` is
    what it costs to tear down a lit link (1 unless given), for links of jobs to be spared.
    `keep_surplus`: lit links that nobody wants stay while nothing needs their ports.
    """

    failed: frozenset[Port] = frozenset()
    pinned: frozenset[Link] = frozenset()
    weights: Mapping[Link, int] = field(default_factory=dict)
    keep_surplus: bool = False


class Unplaced(NamedTuple):
    """Links between two pods that a spine index cannot carry, and why."""

    spine: int
    a: int
    b: int
    links: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """`target` is what shall be lit; `bound` is the least number of links any plan tears down."""

    lit: Layout
    target: Layout
    removed: tuple[Link, ...]
    added: tuple[Link, ...]
    unplaced: tuple[Unplaced, ...]
    bound: int


NO_CONSTRAINTS = Constraints()


def plan(
    fabric: Fabric, lit: Layout, demand: Demand, constraints: Constraints = NO_CONSTRAINTS
) -> Plan:
    """Plan from `lit` to `demand`. DemandError or CircuitError for input that cannot be."""
    lit.require(fabric)
    demand.require(fabric)
    _require_pinned(lit, constraints)
    targets, unplaced, bound = [], [], 0
    for index in range(fabric.indices):
        work = _Index(fabric, index, lit.targets[index], demand.wanted[index], constraints)
        work.solve()
        targets.append(tuple(map(tuple, work.slots.out)))
        unplaced += work.unplaced
        bound += work.bound
    target = Layout(tuple(targets))
    removed, added = differences(lit, target)
    return Plan(lit, target, removed, added, tuple(unplaced), bound)


def differences(lit: Layout, target: Layout) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Links to tear down and links to light."""
    removed: list[Link] = []
    added: list[Link] = []
    for index, (before, after) in enumerate(zip(lit.targets, target.targets, strict=True)):
        for pair, (old, new) in enumerate(zip(before, after, strict=True)):
            if old == new:
                continue
            for a, (was, now) in enumerate(zip(old, new, strict=True)):
                if was != now:
                    if was != DARK:
                        removed.append(Link(index, pair, a, was))
                    if now != DARK:
                        added.append(Link(index, pair, a, now))
    return tuple(removed), tuple(added)


def _require_pinned(lit: Layout, constraints: Constraints) -> None:
    missing = constraints.pinned - set(lit.links()) if constraints.pinned else ()
    for link in missing:
        raise CircuitError(f"{link} is protected but not lit", hint="protect links that are lit")
    for link in constraints.pinned:
        if constraints.failed & set(link.ends):
            raise CircuitError(
                f"{link} is protected and has a failed port",
                hint="repair the port or give up the protection",
            )


class _Index:
    """The work on one spine index."""

    def __init__(
        self,
        fabric: Fabric,
        index: int,
        lit: Sequence[Sequence[int]],
        wanted: Matrix,
        constraints: Constraints,
    ) -> None:
        self._index = index
        self._wanted = wanted
        self._keep_surplus = constraints.keep_surplus
        self._rng = random.Random(index)
        failed = [port for port in constraints.failed if port.spine == index]
        dead = [
            {(port.uplink // 2, port.pod) for port in failed if port.uplink % 2 == side}
            for side in (0, 1)
        ]
        self.slots = Slots(lit, _weights(index, constraints), *dead)
        self._lit_before = any(b != DARK for row in lit for b in row)
        self.bound = 0
        self.unplaced: list[Unplaced] = []

    def solve(self) -> None:
        pool = self._drop_surplus()
        left = chains.place_all(
            self.slots, pool, self._rng, depth=chains.DEPTH if self._lit_before else 1
        )
        if self._lit_before:
            chains.improve(self.slots, self._rng)
        if self._keep_surplus:
            self._relight()
        self.unplaced = [
            Unplaced(self._index, a, b, links, self._reason(a, b))
            for (a, b), links in sorted(Counter(left).items())
        ]

    def _drop_surplus(self) -> list[tuple[int, int]]:
        """Darken what nobody wants, cheapest first; returns the links that are missing."""
        slots = self.slots
        pool: list[tuple[int, int]] = []
        lit, placed = _counts(slots.home), _counts(slots.out)
        for a, row in enumerate(self._wanted):
            for b, wanted in enumerate(row[:a]):
                self.bound += max(0, lit[a][b] - wanted)
                if placed[a][b] < wanted:
                    pool += [(a, b)] * (wanted - placed[a][b])
                elif placed[a][b] > wanted:
                    self._darken(a, b, placed[a][b] - wanted)
        return pool

    def _darken(self, a: int, b: int, links: int) -> None:
        slots = self.slots
        copies = sorted(slots.copies(a, b), key=lambda arc: slots.weight(*arc))
        for arc in copies[:links]:
            if slots.weight(*arc) < NEVER:
                slots.take(*arc)

    def _relight(self) -> None:
        """What was lit and is in nobody's way stays."""
        slots = self.slots
        for pair, row in enumerate(slots.home):
            for a, b in enumerate(row):
                if (
                    b != DARK
                    and slots.free_out[a] & slots.free_in[b] & slots.homes[a][b] & 1 << pair
                ):
                    slots.put(pair, a, b)

    def _reason(self, a: int, b: int) -> str:
        for pod in (a, b):
            if not (self.slots.free_out[pod] or self.slots.free_in[pod]):
                return f"pod {pod} has no usable port left"
        if not self.slots.orientable(a, b):
            return "no orientation of the links leaves an even and an odd port for it"
        return "every place is blocked by failed ports or protected links"


def _weights(index: int, constraints: Constraints) -> dict[Arc, int]:
    weights = {
        (link.pair, link.a, link.b): weight
        for link, weight in constraints.weights.items()
        if link.spine == index
    }
    weights.update({(k.pair, k.a, k.b): NEVER for k in constraints.pinned if k.spine == index})
    return weights


def _counts(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    pods = len(rows[0])
    counts = [[0] * pods for _ in range(pods)]
    for row in rows:
        for a, b in enumerate(row):
            if b != DARK:
                counts[a][b] += 1
                counts[b][a] += 1
    return counts
