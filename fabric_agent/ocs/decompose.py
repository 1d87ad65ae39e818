# SPDX-License-Identifier: Apache-2.0
"""C = A + At, and A as a sum of partial permutations: the two theorems behind cross wiring.

*Symmetric integer matrix decomposition* (2411.01503): every symmetric non-negative integer matrix
with zero diagonal is A + At with A >= 0 integer, each row and column sum of A being half the row
sum of C, rounded up or down. Proof by construction, linear: halve; what is odd is a simple graph;
join its odd vertices to a dummy vertex; walk closed trails and orient along the walk. Walks leave a
vertex as often as they enter it, and dropping the dummy's edges costs a vertex one at most.

*König*: a bipartite multigraph of degree d has a proper colouring with d colours. So row sums of C
up to K (even) give K/2 partial permutations, one per pair of optical switches.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric_agent.ocs.wiring import DARK, Matrix


def decompose(matrix: Matrix) -> list[list[int]]:
    """A with A + At == `matrix` (symmetric, zero diagonal) and balanced row and column sums."""
    size = len(matrix)
    half = [[links // 2 for links in row] for row in matrix]
    odd: list[set[int]] = [{j for j in range(size) if matrix[i][j] % 2} for i in range(size)]
    lonely = {i for i in range(size) if len(odd[i]) % 2}
    odd.append(lonely)
    for i in lonely:
        odd[i].add(size)
    for start in range(size + 1):
        while odd[start]:
            _orient_trail(odd, half, start)
    return half


def _orient_trail(odd: list[set[int]], half: list[list[int]], start: int) -> None:
    """Walk until no edge is left; with even degrees that is back at `start`."""
    dummy = len(odd) - 1
    here = start
    while odd[here]:
        there = odd[here].pop()
        odd[there].discard(here)
        if dummy not in (here, there):
            half[here][there] += 1
        here = there


def colour(
    edges: Sequence[tuple[int, int]], rows: int, columns: int, colours: int
) -> tuple[int, ...]:
    """A colour below `colours` per edge (row, column), none twice at a row or column.

    Works when no row or column has more than `colours` edges; O(edges x (rows + columns)).
    """
    work = _Colouring(edges, rows, columns, colours)
    for edge in range(len(edges)):
        work.place(edge)
    return tuple(work.chosen)


class _Colouring:
    """Edges painted so far. Columns are numbered after the rows, so that both are places."""

    def __init__(
        self, edges: Sequence[tuple[int, int]], rows: int, columns: int, colours: int
    ) -> None:
        self._ends = [(i, rows + j) for i, j in edges]
        self._free = [(1 << colours) - 1] * (rows + columns)
        self._at = [[DARK] * colours for _ in range(rows + columns)]
        self.chosen = [DARK] * len(edges)

    def place(self, edge: int) -> None:
        """Paint one more edge; at most a path of two colours is repainted."""
        row, column = self._ends[edge]
        common = self._free[row] & self._free[column]
        if not common:
            one, other = lowest(self._free[column]), lowest(self._free[row])
            # Bipartite: the path from the row never ends at the column, where `one` is free.
            self._swap(row, one, other)
            common = 1 << one
        self._paint(edge, lowest(common))

    def _paint(self, edge: int, shade: int) -> None:
        self.chosen[edge] = shade
        for place in self._ends[edge]:
            self._at[place][shade] = edge
            self._free[place] &= ~(1 << shade)

    def _clear(self, edge: int) -> None:
        shade = self.chosen[edge]
        for place in self._ends[edge]:
            self._at[place][shade] = DARK
            self._free[place] |= 1 << shade

    def _swap(self, place: int, one: int, other: int) -> None:
        """Exchange two colours along the path from `place`, which has `one` but not `other`."""
        path = []
        shade = one
        while (edge := self._at[place][shade]) != DARK:
            path.append(edge)
            row, column = self._ends[edge]
            place = column if place == row else row
            shade = other if shade == one else one
        for edge in path:
            self._clear(edge)
        for edge in path:
            self._paint(edge, other if self.chosen[edge] == one else one)


def lowest(mask: int) -> int:
    """Number of the lowest bit that is set."""
    return (mask & -mask).bit_length() - 1
