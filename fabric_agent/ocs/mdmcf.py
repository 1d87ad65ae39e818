# SPDX-License-Identifier: Apache-2.0
"""The paper's planner, MDMCF, kept as the baseline that `plan` is measured against.

The orientation is fixed first (C = A + At), here with lit circuits keeping theirs, which is kinder
to it than the theorem alone. The even switches of a group are then halved again and again; each
time one min-cost flow divides the circuits between the halves, at least cost
(u0 - X)+ + (u1 + X - A)+ for X circuits in half 0, of which u0 and u1 are lit in either half. The
halves are greedy across levels, so more is torn down than need be. (2411.01503, appendix.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from fabric_agent.ocs.demand import Demand
from fabric_agent.ocs.plan import Plan, differences
from fabric_agent.ocs.wiring import DARK, Fabric, Layout, Matrix, link_counts

UNREACHED = 1 << 30

Row = Sequence[int]
Work = list[list[int]]


def plan(fabric: Fabric, lit: Layout, demand: Demand) -> Plan:
    """A plan from `lit` to `demand` by MDMCF, for an even number of uplinks."""
    lit.require(fabric)
    demand.require(fabric)
    targets = tuple(
        _index(rows, wanted) for rows, wanted in zip(lit.targets, demand.wanted, strict=True)
    )
    target = Layout(targets)
    removed, added = differences(lit, target)
    counts = link_counts(fabric, lit)
    bound = sum(
        max(0, counts[index][a][b] - wanted[a][b])
        for index, wanted in enumerate(demand.wanted)
        for a in range(fabric.pods)
        for b in range(a)
    )
    return Plan(lit, target, removed, added, (), bound)


def _index(rows: Sequence[Row], wanted: Matrix) -> tuple[tuple[int, ...], ...]:
    """One spine index: a row and column of slack take up the ports that stay dark."""
    pods, pairs = len(wanted), len(rows)
    slack = [[*row, pairs - sum(row)] for row in _oriented(rows, wanted)]
    columns = [pairs - sum(slack[i][j] for i in range(pods)) for j in range(pods)]
    slack.append([*columns, pairs * (pods + 1) - sum(columns)])
    out = [[DARK] * pods for _ in rows]
    _halve(rows, list(range(pairs)), slack, out)
    return tuple(map(tuple, out))


def _oriented(rows: Sequence[Row], wanted: Matrix) -> Work:
    """A with A + At == `wanted` and no row or column sum beyond the pairs; lit arcs stay."""
    pods, pairs = len(wanted), len(rows)
    arcs = _lit(rows, list(range(pairs)), pods)
    missing = []
    for a in range(pods):
        for b in range(a):
            for _ in range(arcs[a][b] + arcs[b][a] - wanted[a][b]):
                x, y = (a, b) if arcs[a][b] > arcs[b][a] else (b, a)
                arcs[x][y] -= 1
            missing += [(a, b)] * (wanted[a][b] - arcs[a][b] - arcs[b][a])
    free_out = [pairs - sum(row) for row in arcs[:pods]]
    free_in = [pairs - sum(column) for column in zip(*arcs, strict=True)][:pods]
    for a, b in missing:
        if not free_out[a] and free_out[b]:
            a, b = b, a
        if free_out[a]:
            _reverse(arcs, b, free_in, free_out, inwards=True)
        else:
            _reverse(arcs, a, free_out, free_in, inwards=False)
        arcs[a][b] += 1
        free_out[a] -= 1
        free_in[b] -= 1
    return [row[:pods] for row in arcs[:pods]]


def _reverse(arcs: Work, pod: int, free: list[int], other: list[int], *, inwards: bool) -> None:
    """Reverse the shortest path of arcs that turns an `other` slot of `pod` into a `free` one."""
    origin = {pod: pod}
    queue = deque([pod])
    while not free[here := queue.popleft()]:
        for x in range(len(free)):
            if x not in origin and (arcs[x][here] if inwards else arcs[here][x]):
                origin[x] = here
                queue.append(x)
    free[here] -= 1
    other[here] += 1
    free[pod] += 1
    other[pod] -= 1
    while here != pod:
        x, y = (here, origin[here]) if inwards else (origin[here], here)
        arcs[x][y] -= 1
        arcs[y][x] += 1
        here = origin[here]


def _halve(rows: Sequence[Row], pairs: list[int], wanted: Work, out: Work) -> None:
    pods = len(wanted) - 1
    if len(pairs) == 1:
        for a in range(pods):
            for b in range(pods):
                if wanted[a][b]:
                    out[pairs[0]][a] = b
        return
    halves = pairs[::2], pairs[1::2]
    lit = [_lit(rows, half, pods) for half in halves]
    first = _Split(wanted, lit[0], lit[1], len(halves[0])).solve()
    second = [
        [w - x for w, x in zip(*both, strict=True)] for both in zip(wanted, first, strict=True)
    ]
    _halve(rows, halves[0], first, out)
    _halve(rows, halves[1], second, out)


def _lit(rows: Sequence[Row], pairs: list[int], pods: int) -> Work:
    counts = [[0] * (pods + 1) for _ in range(pods + 1)]
    for pair in pairs:
        for a, b in enumerate(rows[pair]):
            if b != DARK:
                counts[a][b] += 1
    return counts


class _Split:
    """Min-cost flow that divides `wanted` in two; the flow is the first half's share.

    Every row and column but the slack's sums to `capacity`. Primal-dual: start where every entry is
    at its cheapest, then, as long as a node has a surplus, find distances and push along arcs on
    shortest paths. Nodes: rows, then columns. Costs are -1, 0 or 1 per unit.
    """

    def __init__(self, wanted: Work, lit: Work, away: Work, capacity: int) -> None:
        size = self._size = len(wanted)
        self._wanted = wanted
        # Between low and high a unit more or less costs nothing.
        self._low = [[0] * size for _ in wanted]
        self._high = [[0] * size for _ in wanted]
        for i, row in enumerate(wanted):
            for j, most in enumerate(row):
                here, there = lit[i][j], most - away[i][j]
                self._low[i][j] = min(most, max(0, min(here, there)))
                self._high[i][j] = min(most, max(0, here, there))
        self._flow = [row[:] for row in self._low]
        sums = [capacity] * (size - 1) + [size * capacity]
        rows = [most - sum(row) for most, row in zip(sums, self._flow, strict=True)]
        columns = [
            most - sum(column)
            for most, column in zip(sums, zip(*self._flow, strict=True), strict=True)
        ]
        self._surplus = rows + [-lack for lack in columns]
        self._potential = [0] * (2 * size)

    def solve(self) -> Work:
        while any(surplus > 0 for surplus in self._surplus):
            self._raise_potentials()
            self._push_all()
        return self._flow

    def _arc(self, node: int, other: int) -> tuple[int, int]:
        """(room, cost of a unit) of the arc to a node of the other side."""
        if node < self._size:
            i, j = node, other - self._size
            flow, low, high = self._flow[i][j], self._low[i][j], self._high[i][j]
            if flow < low:
                return low - flow, -1
            return (high - flow, 0) if flow < high else (self._wanted[i][j] - flow, 1)
        i, j = other, node - self._size
        flow, low, high = self._flow[i][j], self._low[i][j], self._high[i][j]
        if flow > high:
            return flow - high, -1
        return (flow - low, 0) if flow > low else (flow, 1)

    def _others(self, node: int) -> range:
        return range(self._size, 2 * self._size) if node < self._size else range(self._size)

    def _raise_potentials(self) -> None:
        """Shortest distances by reduced cost, from the nodes with a surplus (Dijkstra)."""
        distance = [UNREACHED if surplus <= 0 else 0 for surplus in self._surplus]
        heap = [(0, node) for node, d in enumerate(distance) if d == 0]
        while heap:
            reached, node = heappop(heap)
            if distance[node] == reached:
                self._relax(node, distance, heap)
        far = max(d for d in distance if d < UNREACHED)
        self._potential = [p + min(d, far) for p, d in zip(self._potential, distance, strict=True)]

    def _relax(self, node: int, distance: list[int], heap: list[tuple[int, int]]) -> None:
        base = distance[node] + self._potential[node]
        for other in self._others(node):
            room, cost = self._arc(node, other)
            there = base + cost - self._potential[other]
            if room and there < distance[other]:
                distance[other] = there
                heappush(heap, (there, other))

    def _push_all(self) -> None:
        tired: set[int] = set()
        for node in range(2 * self._size):
            while self._surplus[node] > 0 and (path := self._path(node, tired)):
                self._push(path)

    def _path(self, start: int, tired: set[int]) -> list[int]:
        """Nodes along arcs of reduced cost 0 to a node in want; [] if there is none.

        What a search that failed has seen stays `tired` until distances are found anew.
        """
        path, seen = [start], {start} | tired
        while path:
            node = path[-1]
            if self._surplus[node] < 0:
                return path
            step = next(
                (n for n in self._others(node) if n not in seen and self._tight(node, n)), -1
            )
            if step < 0:
                path.pop()
            else:
                path.append(step)
                seen.add(step)
        tired |= seen
        return path

    def _tight(self, node: int, other: int) -> bool:
        room, cost = self._arc(node, other)
        return room > 0 and self._potential[node] + cost == self._potential[other]

    def _push(self, path: list[int]) -> None:
        steps = list(pairwise(path))
        units = min(self._arc(*step)[0] for step in steps)
        units = min(units, self._surplus[path[0]], -self._surplus[path[-1]])
        for node, other in steps:
            if node < self._size:
                self._flow[node][other - self._size] += units
            else:
                self._flow[other][node - self._size] -= units
        self._surplus[path[0]] -= units
        self._surplus[path[-1]] += units
