# SPDX-License-Identifier: Apache-2.0
"""The m x n search: leaves and virtual spines with every link between them free.

In general this is finding a complete bipartite subgraph, which is NP-hard; the sizes here are kind.
Free links are masks, so that a step of the search is one intersection per leaf. What makes it quick
to say *no* is the core: a leaf that lacks n columns, and a column that lacks m leaves, can be in no
answer, and taking it away makes others lack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fabric_agent.slices.model import bits

Item = tuple[int, int]  # its own bit, and the mask of what it goes with on the other side


@dataclass
class Budget:
    """How many intersections a decision may still cost; about 0.15 microseconds each."""

    left: int

    def spend(self, amount: int) -> bool:
        self.left -= amount
        return self.left > 0


@dataclass(frozen=True)
class Core:
    """What is left of both sides when nothing in it is hopeless. ``leaves`` and ``columns`` are
    masks; empty when there is no answer."""

    leaves: int
    columns: int

    def __bool__(self) -> bool:
        return bool(self.leaves)


@dataclass(frozen=True)
class Grid:
    """Free links seen from both sides: ``rows[leaf]`` is a mask of columns, ``across[column]`` a
    mask of leaves."""

    rows: tuple[int, ...]
    across: tuple[int, ...]

    @staticmethod
    def of(rows: Sequence[int], width: int) -> Grid:
        # Transposed as text, which is far quicker than bit by bit.
        lines = [f"{row:0{width}b}" for row in reversed(rows)]
        across = [int("".join(column), 2) for column in zip(*lines, strict=True)]
        return Grid(tuple(rows), tuple(reversed(across)))

    def core(self, leaves: int, m: int, n: int, budget: Budget) -> Core:
        """The (m, n) core among ``leaves``; nothing when the budget is spent."""
        rows = [(1 << leaf, self.rows[leaf]) for leaf in bits(leaves)]
        across = [(1 << column, mask) for column, mask in enumerate(self.across)]
        columns = (1 << len(across)) - 1
        while budget.spend(len(rows) + len(across)):
            kept = [item for item in rows if (item[1] & columns).bit_count() >= n]
            if len(kept) < m:
                return Core(0, 0)
            leaves = mask_of(kept)
            upright = [item for item in across if (item[1] & leaves).bit_count() >= m]
            if len(upright) < n:
                return Core(0, 0)
            if len(upright) == len(across) and len(kept) == len(rows):
                return Core(leaves, columns)
            rows, across, columns = kept, upright, mask_of(upright)
        return Core(0, 0)


def mask_of(items: Sequence[Item]) -> int:
    mask = 0
    for bit, _ in items:
        mask |= bit
    return mask


def biclique(
    grid: Grid, core: Core, m: int, n: int, seeds: int, budget: Budget
) -> tuple[int, int] | None:
    """At least m leaves and n columns of the core that all meet, as two masks.

    Grows from ``seeds`` different beginnings on the side that needs fewer steps. None: not found,
    which proves nothing.
    """
    if m <= n:
        return _grow(grid.rows, grid.across, core.leaves, core.columns, (m, n), seeds, budget)
    found = _grow(grid.across, grid.rows, core.columns, core.leaves, (n, m), seeds, budget)
    return (found[1], found[0]) if found else None


def _grow(
    masks: Sequence[int],
    across: Sequence[int],
    alive: int,
    common: int,
    need: tuple[int, int],
    seeds: int,
    budget: Budget,
) -> tuple[int, int] | None:
    items = [(1 << index, masks[index] & common) for index in bits(alive)]
    begin = sorted(items, key=lambda item: -item[1].bit_count())
    for _, seed in _spread(begin, seeds):
        if found := _dive(items, across, seed, need, budget):
            return found
        if budget.left <= 0:
            return None
    return None


def _spread(items: Sequence[Item], count: int) -> Iterator[Item]:
    """Half of them from the front, the others from the whole length."""
    front = items[: (count + 1) // 2]
    yield from front
    rest = items[len(front) :]
    step = max(1, len(rest) // max(1, count - len(front)))
    yield from rest[::step][: count - len(front)]


def _dive(
    items: list[Item], across: Sequence[int], common: int, need: tuple[int, int], budget: Budget
) -> tuple[int, int] | None:
    """Adds the item that keeps most in common, until ``need[0]`` items share ``need[1]``."""
    count, width = need
    while budget.spend(len(items)):
        items = [
            (bit, shared) for bit, mask in items if (shared := mask & common).bit_count() >= width
        ]
        if len(items) < count:
            return None
        alive = mask_of(items)
        kept = _reached(across, common, alive, count)
        if kept != common:
            if kept.bit_count() < width:
                return None
            common = kept
            continue
        partial = [item for item in items if item[1] != common]
        if len(items) - len(partial) >= count:
            return alive & ~mask_of(partial), common
        common = max(partial, key=lambda item: item[1].bit_count())[1]
    return None


def _reached(across: Sequence[int], common: int, alive: int, count: int) -> int:
    """Those of ``common`` that still have ``count`` items."""
    kept = common
    rest = common
    while rest:
        low = rest & -rest
        if (across[low.bit_length() - 1] & alive).bit_count() < count:
            kept ^= low
        rest ^= low
    return kept
