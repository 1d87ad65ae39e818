# SPDX-License-Identifier: Apache-2.0
"""The load of every link under a communication pattern: "contention-free" is computed here.

The load of a directed link is the number of flows on it in one phase. Of a pattern's phases the
highest counts; of different slices, whose phases are not in step, loads add up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Fabric, Link, Slice
from fabric_agent.slices.patterns import Flow, Pattern
from fabric_agent.slices.routing import column, degraded

MOST_PHASES = 64
NO_LINK = Link(-1, -1, -1, -1)


class Way(StrEnum):
    """Of a directed link: from NIC to leaf, leaf to spine, spine to leaf, leaf to NIC."""

    SEND = "send"
    UP = "up"
    DOWN = "down"
    RECEIVE = "receive"


class Directed(NamedTuple):
    way: Way
    nic: int  # -1 between switches
    link: Link  # NO_LINK at a NIC

    def name(self, fabric: Fabric) -> str:
        if self.nic >= 0:
            nic = fabric.nics[self.nic]
            ends = [f"{fabric.hosts[nic.host].name}:{nic.device}", fabric.leaves[nic.leaf].name]
        else:
            leaf, spine = fabric.leaves[self.link.leaf], fabric.spines[self.link.spine]
            ends = [f"{leaf.name}:{leaf.uplinks[self.link.uplink].name}", spine.name]
        return " -> ".join(ends if self.way in (Way.SEND, Way.UP) else reversed(ends))


@dataclass(frozen=True)
class Report:
    """``loads`` of the directed links that carry anything; ``remarks`` say in words what breaks
    the promise. ``phases`` of ``of_phases`` were computed, evenly spread."""

    loads: dict[Directed, int]
    remarks: tuple[str, ...] = ()
    unreachable: int = 0
    phases: int = 0
    of_phases: int = 0

    @property
    def worst(self) -> int:
        return max(self.loads.values(), default=0)

    @property
    def contention_free(self) -> bool:
        return self.worst <= 1 and not self.unreachable


@dataclass
class Phase:
    """Flows of one phase on each directed link."""

    flows: dict[Directed, list[Flow]] = field(default_factory=lambda: defaultdict(list))
    unreachable: list[Flow] = field(default_factory=list)


def check(fabric: Fabric, part: Slice, pattern: Pattern, broken: Broken | None = None) -> Report:
    """One slice under one pattern."""
    broken = broken or Broken()
    where = [(leaf, local) for leaf, group in enumerate(part.nics) for local in range(len(group))]
    loads: dict[Directed, int] = {}
    remarks: dict[str, None] = {}
    if degraded(part, broken):
        remarks["a part of the slice has failed: NICs on a backup share an uplink"] = None
    unreachable = 0
    numbers = _spread(pattern.phases)
    for number in numbers:
        phase = Phase()
        for flow in pattern.phase(number):
            _route(fabric, part, broken, where, phase, flow)
        unreachable += len(phase.unreachable)
        for directed, flows in phase.flows.items():
            loads[directed] = max(loads.get(directed, 0), len(flows))
            if len(flows) > 1:
                remarks[_remark(fabric, part, where, directed, flows)] = None
    if unreachable:
        remarks[f"{unreachable} flows have no way left"] = None
    return Report(loads, tuple(remarks), unreachable, len(numbers), pattern.phases)


def _spread(phases: int) -> list[int]:
    count = min(phases, MOST_PHASES)
    return [number * phases // count for number in range(count)] if count else []


def _route(
    fabric: Fabric,
    part: Slice,
    broken: Broken,
    where: list[tuple[int, int]],
    phase: Phase,
    flow: Flow,
) -> None:
    source, target = (part.ranks[rank] for rank in flow)
    if fabric.nics[source].host == fabric.nics[target].host:
        return  # within a server
    if source in broken.nics or target in broken.nics:
        phase.unreachable.append(flow)
        return
    (from_leaf, local), (to_leaf, _) = (where[rank] for rank in flow)
    if from_leaf != to_leaf:
        choice = column(part, broken, from_leaf, local, to_leaf) if part.links else None
        if choice is None:
            phase.unreachable.append(flow)
            return
        phase.flows[Directed(Way.UP, -1, part.links[from_leaf][choice])].append(flow)
        phase.flows[Directed(Way.DOWN, -1, part.links[to_leaf][choice])].append(flow)
    phase.flows[Directed(Way.SEND, source, NO_LINK)].append(flow)
    phase.flows[Directed(Way.RECEIVE, target, NO_LINK)].append(flow)


def _remark(
    fabric: Fabric,
    part: Slice,
    where: list[tuple[int, int]],
    directed: Directed,
    flows: list[Flow],
) -> str:
    """What makes this link's flows meet, named as the user knows it."""
    sources = sorted({source for source, _ in flows})
    match directed.way:
        case Way.SEND:
            return f"fan-out: rank {sources[0]} sends {len(flows)} flows at a time"
        case Way.RECEIVE:
            return f"incast: rank {flows[0][1]} receives {len(flows)} flows at a time"
        case Way.UP if len(sources) > 1:
            return f"on a backup: ranks {_few(sources)} share {directed.name(fabric)}"
        case Way.UP:
            return f"fan-out: rank {sources[0]} sends {len(flows)} flows at a time"
        case Way.DOWN:
            leaf = fabric.leaves[directed.link.leaf].name
            same = len({where[rank][1] for rank in sources}) == 1
            why = "unequal local order" if same else "on a backup"
            return f"{why}: ranks {_few(sources)} meet on the way down to {leaf}"


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")


def total(reports: Iterable[Report]) -> Report:
    """Several slices at once."""
    loads: Counter[Directed] = Counter()
    for report in (reports := list(reports)):
        loads.update(report.loads)
    return Report(
        dict(loads),
        tuple(dict.fromkeys(remark for report in reports for remark in report.remarks)),
        sum(report.unreachable for report in reports),
        sum(report.phases for report in reports),
        sum(report.of_phases for report in reports),
    )


def contended(report: Report) -> Iterator[tuple[Directed, int]]:
    """The links with more than one flow, worst first."""
    busy = [(directed, load) for directed, load in report.loads.items() if load > 1]
    yield from sorted(busy, key=lambda item: -item[1])
