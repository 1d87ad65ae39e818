# SPDX-License-Identifier: Apache-2.0
"""What of a fabric is free, as masks; and what a request asks and is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Fabric, Link, Slice


@dataclass(frozen=True)
class Occupancy:
    """Per leaf: free NICs, free uplinks and free columns (empty in a fabric with optics); per
    spine: free downlinks. All are masks."""

    nics: tuple[int, ...]
    uplinks: tuple[int, ...]
    columns: tuple[int, ...]
    downlinks: tuple[int, ...]

    @property
    def gpus(self) -> int:
        return sum(mask.bit_count() for mask in self.nics)


class Reason(StrEnum):
    """Why a request does not fit."""

    TOO_LARGE = "larger than the fabric"
    NO_GPUS = "no GPUs"
    NO_LINKS = "no links"
    FRAGMENTATION = "fragmentation"


@dataclass(frozen=True)
class Placement:
    """NICs and links of a slice that can be had; as in ``Slice``."""

    nics: tuple[tuple[int, ...], ...]
    links: tuple[tuple[Link, ...], ...]
    moved: tuple[tuple[Link, Link], ...] = ()  # circuits of other slices: before and after

    def named(self, name: str, number: int) -> Slice:
        return Slice(name, number, self.nics, self.links)


@dataclass(frozen=True)
class Refusal:
    reason: Reason
    detail: str


def occupancy(
    fabric: Fabric, slices: Iterable[Slice] = (), broken: Broken | None = None
) -> Occupancy:
    """What the slices and the failures leave."""
    broken = broken or Broken.of(fabric, fabric.failed)
    nics = [(1 << len(leaf.nics)) - 1 for leaf in fabric.leaves]
    uplinks = [(1 << len(leaf.uplinks)) - 1 for leaf in fabric.leaves]
    downlinks = [(1 << len(spine.downlinks)) - 1 for spine in fabric.spines]
    for index in broken.nics:
        nic = fabric.nics[index]
        nics[nic.leaf] &= ~(1 << nic.position)
    for leaf, uplink in broken.uplinks:
        uplinks[leaf] &= ~(1 << uplink)
    for spine, downlink in broken.downlinks:
        downlinks[spine] &= ~(1 << downlink)
    columns = (
        ()
        if fabric.optics
        else tuple(fabric.free_columns(leaf, free) for leaf, free in enumerate(uplinks))
    )
    free = Occupancy(tuple(nics), tuple(uplinks), columns, tuple(downlinks))
    for part in slices:
        free = without(fabric, free, part)
    return free


def without(fabric: Fabric, free: Occupancy, part: Slice | Placement) -> Occupancy:
    """What is left when ``part`` is taken."""
    nics, uplinks, downlinks = list(free.nics), list(free.uplinks), list(free.downlinks)
    for group in part.nics:
        for index in group:
            nic = fabric.nics[index]
            nics[nic.leaf] &= ~(1 << nic.position)
    for row in part.links:
        for link in row:
            uplinks[link.leaf] &= ~(1 << link.uplink)
            downlinks[link.spine] &= ~(1 << link.downlink)
    columns = list(free.columns)
    if columns:
        for leaf in {row[0].leaf for row in part.links}:
            columns[leaf] = fabric.free_columns(leaf, uplinks[leaf])
    return Occupancy(tuple(nics), tuple(uplinks), tuple(columns), tuple(downlinks))
