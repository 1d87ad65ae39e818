# SPDX-License-Identifier: Apache-2.0
"""Where a job goes: the stages of vClos, from one server to an uneven slice.

    one server     no link is needed
    one leaf       the fullest leaf that has room; traffic turns round at the leaf
    m x n          every shape m * n = GPUs, fewest leaves first (whole leaves are its first shape)
    uneven         m leaves with n or fewer GPUs each, still complete with n virtual spines

A pure function of what is free. Queueing is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fabric_agent.slices.model import Fabric, Link, bits, low_bit
from fabric_agent.slices.occupancy import Occupancy, Placement, Reason, Refusal
from fabric_agent.slices.search import Budget, Core, Grid, biclique
from oncache.core.errors import ConfigError

# Intersections that a decision may cost.
EVEN = 60_000
UNEVEN = 15_000
SEEDS = (1, 16, 64)
UNEVEN_SEEDS = 4

Decision = Placement | Refusal


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
    if gpus > max(len(host.nics) for host in fabric.hosts):
        return None
    best: list[tuple[int, int]] = []
    fewest = len(fabric.nics) + 1
    for places in fabric.places:
        idle = [(leaf, mask & free.nics[leaf]) for leaf, mask in places]
        count = sum(mask.bit_count() for _, mask in idle)
        if gpus <= count < fewest:
            best, fewest = idle, count
    groups = []
    for leaf, mask in best:
        group = [fabric.leaves[leaf].nics[position] for position in bits(mask)]
        groups.append(tuple(group[:gpus]))
        gpus -= len(groups[-1])
    return Placement(tuple(filter(None, groups)), ()) if groups else None


def _one_leaf(fabric: Fabric, free: Occupancy, gpus: int) -> Placement | None:
    room = [(mask.bit_count(), leaf) for leaf, mask in enumerate(free.nics)]
    leaf = min(((count, leaf) for count, leaf in room if count >= gpus), default=None)
    return Placement((pick_nics(fabric, free, leaf[1], gpus),), ()) if leaf else None


def pick_nics(fabric: Fabric, free: Occupancy, leaf: int, count: int) -> tuple[int, ...]:
    """``count`` free NICs of a leaf from few servers: emptiest servers first, and for the last one
    the fullest that is enough."""
    nics = fabric.leaves[leaf].nics
    idle = [mask & free.nics[leaf] for mask in fabric.servers[leaf]]
    groups = sorted(filter(None, idle), key=int.bit_count)
    chosen: list[int] = []
    while missing := count - len(chosen):
        enough = (index for index, mask in enumerate(groups) if mask.bit_count() >= missing)
        chosen += bits(groups.pop(next(enough, -1)))[:missing]
    return tuple(nics[position] for position in sorted(chosen))


def across_leaves(fabric: Fabric, free: Occupancy, gpus: int) -> Decision:
    """m x n, else uneven. The search is bounded; a refusal may be wrong, a placement never is."""
    grid = Grid.of(free.columns, len(fabric.spine_of_column))
    room = tuple(mask.bit_count() for mask in free.nics)
    chosen = even(grid, room, gpus) or _uneven(grid, room, gpus, Budget(UNEVEN))
    if chosen is None:
        return refusal(free, gpus)
    shares = {leaf: pick_nics(fabric, free, leaf, share) for leaf, share in chosen.shares}
    links = tuple(cable(fabric, free, leaf, chosen.columns) for leaf in shares)
    return Placement(tuple(shares.values()), links)


@dataclass(frozen=True)
class Chosen:
    """Leaves with how many GPUs each, lowest leaf first, and exactly the virtual spines needed."""

    shares: tuple[tuple[int, int], ...]
    columns: tuple[int, ...]


def even(grid: Grid, room: Sequence[int], gpus: int) -> Chosen | None:
    """The m x n stage: ``room`` are free GPUs per leaf."""
    budget = Budget(EVEN)
    shapes = list(_open_shapes(grid, room, gpus, budget))
    for seeds in SEEDS:
        for m, n, core in shapes:
            if found := biclique(grid, core, m, n, seeds, budget):
                fullest = sorted(bits(found[0]), key=lambda leaf: room[leaf])[:m]
                shares = tuple((leaf, n) for leaf in sorted(fullest))
                return Chosen(shares, tuple(bits(found[1])[:n]))
    return None


def _open_shapes(
    grid: Grid, room: Sequence[int], gpus: int, budget: Budget
) -> Iterator[tuple[int, int, Core]]:
    """(m, n) with m * n = gpus that the core does not rule out, fewest leaves first."""
    for n in range(min(max(room), gpus // 2), 0, -1):
        if gpus % n == 0:
            m, leaves = gpus // n, leaves_with(room, n)
            if leaves.bit_count() >= m and (core := grid.core(leaves, m, n, budget)):
                yield m, n, core


def leaves_with(room: Sequence[int], gpus: int) -> int:
    """Mask of the leaves with room for so many GPUs."""
    mask = 0
    for leaf, count in enumerate(room):
        if count >= gpus:
            mask |= 1 << leaf
    return mask


def _uneven(grid: Grid, room: Sequence[int], gpus: int, budget: Budget) -> Chosen | None:
    """Leaves that give what they have, n at most, and all reach the same n virtual spines.

    Greedy from the roomiest leaves for each n, those n first that cost fewest links.
    """
    anywhere = leaves_with(room, 1)
    for least, n in _widths(room, gpus):
        core = grid.core(anywhere, least, n, budget)
        seeds = sorted(bits(core.leaves), key=lambda leaf: -room[leaf])[:UNEVEN_SEEDS]
        for seed in seeds:
            if found := _gather(grid, core, room, (gpus, n, seed), budget):
                return found
        if budget.left <= 0:
            return None
    return None


def _widths(room: Sequence[int], gpus: int) -> list[tuple[int, int]]:
    """(leaves that it takes at least, n) for each n that the GPUs allow, fewest links first."""
    widths = []
    roomiest = sorted(room, reverse=True)
    for n in range(1, roomiest[0] + 1):
        share = accumulate(min(count, n) for count in roomiest)
        leaves = next((index for index, sum_ in enumerate(share, 1) if sum_ >= gpus), 0)
        if leaves > 1:
            widths.append((leaves, n))
    return sorted(widths, key=lambda width: width[0] * width[1])


def _gather(
    grid: Grid, core: Core, room: Sequence[int], wanted: tuple[int, int, int], budget: Budget
) -> Chosen | None:
    gpus, n, seed = wanted
    common = grid.rows[seed] & core.columns
    shares = {seed: min(room[seed], n)}
    missing = gpus - shares[seed]
    left = [(leaf, grid.rows[leaf], min(room[leaf], n)) for leaf in bits(core.leaves)]
    left = [item for item in left if item[0] != seed]
    while missing and budget.spend(2 * len(left)):
        fit = [
            (share * width, leaf, row, share)
            for leaf, row, share in left
            if (width := (row & common).bit_count()) >= n
        ]
        if not fit:
            return None
        _, best, row, share = max(fit)
        left = [(leaf, row, share) for _, leaf, row, share in fit if leaf != best]
        common &= row
        shares[best] = min(share, missing)
        missing -= shares[best]
    return None if missing else Chosen(tuple(sorted(shares.items())), tuple(bits(common)[:n]))


def cable(fabric: Fabric, free: Occupancy, leaf: int, columns: Sequence[int]) -> tuple[Link, ...]:
    """A free link of the leaf for each of the virtual spines."""
    bundles, cables, left = fabric.bundles[leaf], fabric.cables[leaf], free.uplinks[leaf]
    links = []
    for column in columns:
        uplink = low_bit(bundles[fabric.spine_of_column[column]] & left)
        left ^= 1 << uplink
        links.append(cables[uplink])
    return tuple(links)


def refusal(free: Occupancy, gpus: int) -> Refusal:
    """There are GPUs enough: what is it then?"""
    room = [mask.bit_count() for mask in free.nics]
    links = [mask.bit_count() for mask in free.uplinks]
    widest = max(
        sum(min(count, n) for count, up in zip(room, links, strict=True) if up >= n)
        for n in range(1, max(room) + 1)
    )
    facts = f"{gpus} GPUs asked, {sum(room)} are free, {sum(links)} links are free"
    if widest < gpus:
        return Refusal(Reason.NO_LINKS, f"{facts}, too few of them at the leaves with free GPUs")
    return Refusal(
        Reason.FRAGMENTATION, f"{facts}, but no set of leaves has enough of them to the same spines"
    )
