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
    full = (1 << colours) - 1
    free_row, free_column = [full] * rows, [full] * columns
    at_row = [[DARK] * colours for _ in range(rows)]
    at_column = [[DARK] * colours for _ in range(columns)]
    result = [DARK] * len(edges)

    def paint(edge: int, shade: int) -> None:
        i, j = edges[edge]
        result[edge] = shade
        at_row[i][shade] = at_column[j][shade] = edge
        free_row[i] &= ~(1 << shade)
        free_column[j] &= ~(1 << shade)

    def swap(start: int, one: int, other: int) -> None:
        """Exchange two colours along the path from row `start`, which has `one` but not `other`."""
        path = []
        at_rows, place, shade = True, start, one
        while True:
            edge = (at_row if at_rows else at_column)[place][shade]
            if edge == DARK:
                break
            path.append(edge)
            place = edges[edge][1] if at_rows else edges[edge][0]
            at_rows, shade = not at_rows, other if shade == one else one
        for edge in path:
            i, j = edges[edge]
            at_row[i][result[edge]] = at_column[j][result[edge]] = DARK
            free_row[i] |= 1 << result[edge]
            free_column[j] |= 1 << result[edge]
        for edge in path:
            paint(edge, other if result[edge] == one else one)

    for number, (i, j) in enumerate(edges):
        common = free_row[i] & free_column[j]
        if common:
            paint(number, lowest(common))
            continue
        one, other = lowest(free_column[j]), lowest(free_row[i])
        # Bipartite: the path from row i never ends at column j, where `one` is free.
        swap(i, one, other)
        paint(number, one)
    return tuple(result)


def lowest(mask: int) -> int:
    """Number of the lowest bit that is set."""
    return (mask & -mask).bit_length() - 1
