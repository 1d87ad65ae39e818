# SPDX-License-Identifier: Apache-2.0
"""Where a job goes: the stages of vClos, from one server to an uneven slice.

    one server     no link is needed
    one leaf       the fullest leaf that has room; traffic turns round at the leaf
    m x n          every shape m * n = GPUs, fewest leaves first (whole leaves are its first shape)
    uneven         m leaves with n or fewer GPUs each, still complete with n virtual spines

A pure function of what is free. Queueing is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from fabric_agent.slices.model import Fabric, Link, bits, low_bit
from fabric_agent.slices.occupancy import Occupancy, Placement, Reason, Refusal
from fabric_agent.slices.search import Budget, Core, Grid, biclique
from oncache.core.errors import ConfigError

INTERSECTIONS = 90_000  # of one decision: about 15 ms in the worst case
SEEDS = 16

Decision = Placement | Refusal


@dataclass(frozen=True)
class Shape:
    """m leaves, n virtual spines; ``least`` GPUs must be free on each leaf (n, unless uneven)."""

    m: int
    n: int
    least: int


@dataclass(frozen=True)
class Open:
    """A shape that the core does not rule out."""

    shape: Shape
    core: Core


def decide(fabric: Fabric, free: Occupancy, gpus: int) -> Decision:
    """Place a job of ``gpus`` ranks, or say why not. ConfigError for a request that is none."""
    if refused := impossible(fabric, free, gpus):
        return refused
    if local := near(fabric, free, gpus):
        return local
    return across_leaves(fabric, free, gpus)


def impossible(fabric: Fabric, free: Occupancy, gpus: int) -> Refusal | None:
    """A count says no already."""
    if gpus < 1:
        raise ConfigError(f"a slice of {gpus} GPUs", hint="ask for one or more")
    if gpus > len(fabric.nics):
        return Refusal(Reason.TOO_LARGE, f"{gpus} GPUs asked, the fabric has {len(fabric.nics)}")
    if gpus > free.gpus:
        return Refusal(Reason.NO_GPUS, f"{gpus} GPUs asked, {free.gpus} are free")
    return None


def near(fabric: Fabric, free: Occupancy, gpus: int) -> Placement | None:
    """One server, else one leaf: the fullest that has room."""
    return _one_server(fabric, free, gpus) or _one_leaf(fabric, free, gpus)


def _one_server(fabric: Fabric, free: Occupancy, gpus: int) -> Placement | None:
    best: list[int] | None = None
    for host in fabric.hosts:
        if len(host.nics) < gpus:
            continue
        idle = [nic for nic in host.nics if is_free(fabric, free, nic)]
        if len(idle) >= gpus and (best is None or len(idle) < len(best)):
            best = idle
            if len(best) == gpus:
                break
    if best is None:
        return None
    groups: dict[int, list[int]] = {}
    for nic in best[:gpus]:
        groups.setdefault(fabric.nics[nic].leaf, []).append(nic)
    return Placement(tuple(tuple(group) for _, group in sorted(groups.items())), ())


def is_free(fabric: Fabric, free: Occupancy, index: int) -> bool:
    nic = fabric.nics[index]
    return bool(free.nics[nic.leaf] >> nic.position & 1)


def _one_leaf(fabric: Fabric, free: Occupancy, gpus: int) -> Placement | None:
    room = [(mask.bit_count(), leaf) for leaf, mask in enumerate(free.nics)]
    leaf = min(((count, leaf) for count, leaf in room if count >= gpus), default=None)
    return Placement((pick_nics(fabric, free, leaf[1], gpus),), ()) if leaf else None


def pick_nics(fabric: Fabric, free: Occupancy, leaf: int, count: int) -> tuple[int, ...]:
    """``count`` free NICs of a leaf from few servers: emptiest servers first, and for the last one
    the fullest that is enough."""
    nics = fabric.leaves[leaf].nics
    servers: dict[int, list[int]] = {}
    for position in bits(free.nics[leaf]):
        servers.setdefault(fabric.nics[nics[position]].host, []).append(nics[position])
    groups = sorted(servers.values(), key=len)
    chosen: list[int] = []
    while len(chosen) < count:
        missing = count - len(chosen)
        last = next((group for group in groups if len(group) >= missing), groups[-1])
        groups.remove(last)
        chosen += last[:missing]
    return tuple(sorted(chosen))


def across_leaves(fabric: Fabric, free: Occupancy, gpus: int) -> Decision:
    """m x n, else uneven. The search is bounded; a refusal says what it stands on."""
    grid = Grid.of(free.columns, len(fabric.spine_of_column))
    budget = Budget(INTERSECTIONS)
    for shapes in (even_shapes, uneven_shapes):
        open_shapes = list(_open(grid, free, shapes(free, gpus)))
        for seeds in (1, SEEDS):
            for each in open_shapes:
                found = biclique(grid, each.core, each.shape.m, each.shape.n, seeds, budget)
                if found:
                    return _placement(fabric, free, gpus, each.shape, found)
    return refusal(free, gpus, partial(_links_free, free))


def even_shapes(free: Occupancy, gpus: int) -> Iterator[Shape]:
    """All m * n = gpus on two leaves or more, fewest leaves first."""
    widest = max(mask.bit_count() for mask in free.nics)
    for n in range(min(widest, gpus // 2), 0, -1):
        if gpus % n == 0:
            yield Shape(gpus // n, n, n)


def uneven_shapes(free: Occupancy, gpus: int) -> Iterator[Shape]:
    """Shapes a little larger than the job, least links first."""
    widest = max(mask.bit_count() for mask in free.nics)
    shapes = {
        Shape(m, -(-gpus // m), gpus // m)
        for m in range(2, min(gpus, len(free.nics)) + 1)
        if gpus % m and -(-gpus // m) <= widest
    }
    # Of the numbers of leaves with equal n only the least: others waste links.
    narrow = {n: min(s.m for s in shapes if s.n == n) for n in {s.n for s in shapes}}
    yield from sorted(
        (shape for shape in shapes if shape.m == narrow[shape.n]),
        key=lambda shape: (shape.m * shape.n, shape.m),
    )


def _open(grid: Grid, free: Occupancy, shapes: Iterator[Shape]) -> Iterator[Open]:
    roomy: dict[int, int] = {}
    for shape in shapes:
        if shape.least not in roomy:
            roomy[shape.least] = leaves_with(free, shape.least)
        leaves = roomy[shape.least]
        if leaves.bit_count() >= shape.m and (core := grid.core(leaves, shape.m, shape.n)):
            yield Open(shape, core)


def leaves_with(free: Occupancy, gpus: int) -> int:
    """Mask of the leaves with so many free GPUs."""
    mask = 0
    for leaf, nics in enumerate(free.nics):
        if nics.bit_count() >= gpus:
            mask |= 1 << leaf
    return mask


def _placement(
    fabric: Fabric, free: Occupancy, gpus: int, shape: Shape, found: tuple[int, int]
) -> Decision:
    leaves = sorted(best_fit(free, bits(found[0]), shape, gpus))
    ...
