# SPDX-License-Identifier: Apache-2.0
"""What a failure does to the slices that it hits; nobody else is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fabric_agent.slices import ocsvclos
from fabric_agent.slices.allocate import cable
from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Fabric, Link, Slice, bits
from fabric_agent.slices.occupancy import Occupancy, occupancy
from fabric_agent.slices.routing import column as way
from fabric_agent.slices.routing import degraded


class Outcome(StrEnum):
    """How a slice goes on."""

    REPLACED = "other links, contention-free again"
    BACKUP = "on backup uplinks, load 2 at most"
    CUT = "parts cannot reach each other"
    LOST = "has lost GPUs"


@dataclass(frozen=True)
class Repair:
    """The slice as it goes on; equal to what it was unless REPLACED."""

    part: Slice
    outcome: Outcome


def repair(fabric: Fabric, slices: Sequence[Slice], failed: frozenset[str]) -> list[Repair]:
    """Re-plan the slices that ``failed`` hits, in their order, with the links that are free.

    A running job's GPUs stay where they are: what moves is a whole virtual spine of the slice, and
    with it the flows of one NIC per leaf.
    """
    broken = Broken.of(fabric, failed | fabric.failed)
    repairs: list[Repair] = []
    current = list(slices)
    for index, part in enumerate(slices):
        if degraded(part, broken):
            done = _repair(fabric, current, part, broken)
            current[index] = done.part
            repairs.append(done)
    return repairs


def _repair(fabric: Fabric, slices: Sequence[Slice], part: Slice, broken: Broken) -> Repair:
    if not broken.nics.isdisjoint(part.ranks):
        return Repair(part, Outcome.LOST)
    others = [each for each in slices if each is not part]
    for column in _broken_columns(part, broken):
        if (spare := _spare(fabric, others, part, column, broken)) is None:
            return Repair(part, _left(part, broken))
        part = spare
    return Repair(part, Outcome.REPLACED)


def _broken_columns(part: Slice, broken: Broken) -> list[int]:
    columns = zip(*part.links, strict=True)
    return [index for index, links in enumerate(columns) if any(map(broken.link, links))]


def _spare(
    fabric: Fabric, others: Sequence[Slice], part: Slice, column: int, broken: Broken
) -> Slice | None:
    """The slice with another virtual spine in the place of one."""
    kept = tuple(row[:column] + row[column + 1 :] for row in part.links)
    free = occupancy(fabric, [*others, replace(part, links=kept)], broken)
    find = ocsvclos.column if fabric.optics else _column
    links = find(fabric, free, part.leaves(fabric))
    if links is None:
        return None
    rows = tuple(
        (*row[:column], link, *row[column:]) for row, link in zip(kept, links, strict=True)
    )
    return replace(part, links=rows)


def _column(fabric: Fabric, free: Occupancy, leaves: Sequence[int]) -> tuple[Link, ...] | None:
    common = -1
    for leaf in leaves:
        common &= free.columns[leaf]
    if not common:
        return None
    return tuple(cable(fabric, free, leaf, bits(common)[:1])[0] for leaf in leaves)


def _left(part: Slice, broken: Broken) -> Outcome:
    """With fixed backups: does each NIC still reach each leaf?"""
    leaves = range(len(part.nics))
    reached = all(
        way(part, broken, source, local, target) is not None
        for source in leaves
        for local in range(len(part.nics[source]))
        for target in leaves
        if target != source
    )
    return Outcome.BACKUP if reached else Outcome.CUT
