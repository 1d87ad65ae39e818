# SPDX-License-Identifier: Apache-2.0
"""Working state of one spine index: which pair of switches holds which link, and what is free.

A link a - c placed in pair q as a -> c takes the *out* slot of a (its even port) and the *in* slot
of c (its odd port); which end is which is free to choose. Everything that changes goes through
`put` and `take`, which are logged and can be undone. `torn` is the weight of all links of the lit
table that are not where they were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from fabric_agent.ocs.decompose import lowest
from fabric_agent.ocs.wiring import DARK

# More than any sum of weights: a link that may not move costs this.
NEVER = 1 << 40

Arc = tuple[int, int, int]  # pair, from pod, to pod


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, from the lowest."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Slots:
    """See the module. `lit[pair][a]` is b or DARK; `dead_out`/`dead_in` are (pair, pod)."""

    def __init__(
        self,
        lit: Sequence[Sequence[int]],
        weights: Mapping[Arc, int],
        dead_out: Collection[tuple[int, int]],
        dead_in: Collection[tuple[int, int]],
    ) -> None:
        self.pairs, self.pods = len(lit), len(lit[0])
        full = (1 << self.pairs) - 1
        self.home = lit
        self.cost = [[0 if b == DARK else 1 for b in row] for row in lit]
        for (pair, a, _), weight in weights.items():
            self.cost[pair][a] = weight
        self.out = [[DARK] * self.pods for _ in lit]
        self.into = [[DARK] * self.pods for _ in lit]
        self.free_out, self.free_in = [full] * self.pods, [full] * self.pods
        self.homes = [[0] * self.pods for _ in range(self.pods)]
        for pair, pod in dead_out:
            self.free_out[pod] &= ~(1 << pair)
        for pair, pod in dead_in:
            self.free_in[pod] &= ~(1 << pair)
        self.torn = sum(map(sum, self.cost))
        self._log: list[tuple[bool, int, int, int]] = []
        self._light()

    def _light(self) -> None:
        """Put every lit link at home, unless one of its ports is dead."""
        for pair, row in enumerate(self.home):
            bit = 1 << pair
            for a, b in enumerate(row):
                if b != DARK and self.free_out[a] & bit and self.free_in[b] & bit:
                    self.homes[a][b] |= bit
                    self.put(pair, a, b)

    def put(self, pair: int, a: int, b: int) -> None:
        """Light a -> b in `pair`; both slots are free."""
        self._log.append((True, pair, a, b))
        self._put(pair, a, b)

    def take(self, pair: int, a: int, b: int) -> None:
        """Darken a -> b in `pair`."""
        self._log.append((False, pair, a, b))
        self._take(pair, a, b)

    def _put(self, pair: int, a: int, b: int) -> None:
        bit = ~(1 << pair)
        self.out[pair][a], self.into[pair][b] = b, a
        self.free_out[a] &= bit
        self.free_in[b] &= bit
        if self.home[pair][a] == b:
            self.torn -= self.cost[pair][a]

    def _take(self, pair: int, a: int, b: int) -> None:
        bit = 1 << pair
        self.out[pair][a] = self.into[pair][b] = DARK
        self.free_out[a] |= bit
        self.free_in[b] |= bit
        if self.home[pair][a] == b:
            self.torn += self.cost[pair][a]

    def mark(self) -> int:
        """A point to come back to."""
        return len(self._log)

    def undo(self, mark: int) -> None:
        """Back to `mark`."""
        while len(self._log) > mark:
            placed, pair, a, b = self._log.pop()
            (self._take if placed else self._put)(pair, a, b)

    def weight(self, pair: int, a: int, b: int) -> int:
        """What it costs to take a -> b out of `pair`: nothing unless it was lit there."""
        return self.cost[pair][a] if self.home[pair][a] == b else 0

    def copies(self, a: int, b: int) -> list[Arc]:
        """Where the links between two pods are now, in both orientations."""
        there = [(pair, a, b) for pair, row in enumerate(self.out) if row[a] == b]
        return there + [(pair, b, a) for pair, row in enumerate(self.out) if row[b] == a]

    def fits(self, a: int, b: int) -> int:
        """Not zero if a link has a pair with both slots free, in either orientation."""
        return self.free_out[a] & self.free_in[b] or self.free_out[b] & self.free_in[a]

    def direct(self, a: int, b: int) -> bool:
        """Place a link where both slots are free: where one was lit before, if possible."""
        there = self.free_out[a] & self.free_in[b]
        back = self.free_out[b] & self.free_in[a]
        if home := there & self.homes[a][b]:
            self.put(lowest(home), a, b)
        elif home := back & self.homes[b][a]:
            self.put(lowest(home), b, a)
        elif there:
            self.put(lowest(there), a, b)
        elif back:
            self.put(lowest(back), b, a)
        else:
            return False
        return True

    def force(self, a: int, b: int) -> bool:
        """Place a link whatever has to move, pinned links excepted.

        Never fails for pods with a free slot each when no port is dead and nothing is pinned. If
        both have free slots of one kind only, reversing a path of arcs gives one of them the other
        kind (without a path, the pods reached would be full one way but not the other), and then
        two pairs exchange an alternating path (König).
        """
        mark = self.mark()
        for tail, head, path in self._orientations(a, b):
            for arc in path:
                self.take(*arc)
            # From the far end: each reversed arc frees what the next one needs.
            arcs = [(y, x) for _, x, y in reversed(path)] + [(tail, head)]
            if all(self._alternate(x, y) for x, y in arcs):
                return True
            self.undo(mark)
        return False

    def orientable(self, a: int, b: int) -> bool:
        """Can one end get a free out slot and the other a free in slot?"""
        return next(self._orientations(a, b), None) is not None

    def _orientations(self, a: int, b: int) -> Iterator[tuple[int, int, list[Arc]]]:
        """(tail, head, arcs to reverse, nearest first): then tail has an out, head an in slot."""
        for tail, head in ((a, b), (b, a)):
            if self.free_out[tail]:
                path = self._path(head, self.into, self.free_in)
            elif self.free_in[head]:
                path = self._path(tail, self.out, self.free_out)
            else:
                continue
            if path is not None:
                yield tail, head, path

    def _path(
        self, pod: int, beside: Sequence[Sequence[int]], free: Sequence[int]
    ) -> list[Arc] | None:
        """Arcs, nearest to `pod` first, that lead to a pod with a `free` slot."""
        origin: dict[int, tuple[Arc, int] | None] = {pod: None}
        queue = deque([pod])
        while queue:
            here = queue.popleft()
            if free[here]:
                return _unwind(origin, here)
            for pair in range(self.pairs):
                x = beside[pair][here]
                arc = (pair, x, here) if beside is self.into else (pair, here, x)
                if x != DARK and x not in origin and self.weight(*arc) < NEVER:
                    origin[x] = (arc, here)
                    queue.append(x)
        return None

    def _alternate(self, a: int, b: int) -> bool:
        """Place a -> b, exchanging two pairs along the cheapest alternating path if need be."""
        common = self.free_out[a] & self.free_in[b]
        if common:
            self.put(lowest(common & self.homes[a][b] or common), a, b)
            return True
        best: list[Arc] = []
        price, at, away = NEVER, DARK, DARK
        for one in bits(self.free_out[a]):
            for other in bits(self.free_in[b]):
                path = self._exchange(b, one, other)
                cost = NEVER if path is None else sum(self.weight(*arc) for arc in path)
                if path is not None and cost < price:
                    best, price, at, away = path, cost, one, other
        if at == DARK:
            return False
        for arc in best:
            self.take(*arc)
        for pair, x, y in best:
            self.put(away if pair == at else at, x, y)
        self.put(at, a, b)
        return True

    def _exchange(self, head: int, one: int, other: int) -> list[Arc] | None:
        """Arcs to move between two pairs so that `head` has its in slot of `one` free."""
        path: list[Arc] = []
        here, at = head, one
        while True:
            to = other if at == one else one
            x = self.into[at][here]
            if x == DARK:
                return path if self.free_in[here] >> at & 1 else None
            path.append((at, x, here))
            y = self.out[to][x]
            if y == DARK:
                return path if self.free_out[x] >> to & 1 else None
            path.append((to, x, y))
            here = y


def _unwind(origin: Mapping[int, tuple[Arc, int] | None], here: int) -> list[Arc]:
    path = []
    while (step := origin[here]) is not None:
        path.append(step[0])
        here = step[1]
    return path[::-1]
