# SPDX-License-Identifier: Apache-2.0
"""Replacement chains: place a link by moving few others, each of which finds a place in turn.

A link whose ends have no pair of switches with both slots free takes a slot that one end has, and
the link in its way is placed next; or it takes both slots, and two links are. Cheap victims first:
what was not lit costs nothing, and a link that returns to where it was lit pays back. (After
FastReChain, 2507.12265, with the orientation of a link chosen at every step.)
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from fabric_agent.ocs.slots import NEVER, Arc, Slots, bits
from fabric_agent.ocs.wiring import DARK

DEPTH = 10
# Steps of the search per spine index; a saturated one of 32 pods needs a tenth of it.
NODES = 4000
LAST_NODES = 150
IMPROVE_DEPTH = 2

Ends = tuple[int, int]


class Search:
    """Places links in `slots`; gives up after `nodes` steps."""

    def __init__(self, slots: Slots, *, nodes: int = NODES) -> None:
        self._slots = slots
        self._nodes = nodes

    def place(self, a: int, b: int, depth: int, budget: int = NEVER - 1) -> bool:
        """Place a link between pods a and b, moving at most `depth` others of weight `budget`."""
        if self._slots.direct(a, b):
            return True
        if depth == 0 or self._nodes <= 0:
            return False
        self._nodes -= 1
        return self._move_one(a, b, depth, budget) or (
            depth > 1 and budget > 0 and self._move_two(a, b, depth, budget)
        )

    def _move_one(self, a: int, b: int, depth: int, budget: int) -> bool:
        slots = self._slots
        for cost, pair, victim, (x, y) in sorted(self._victims(a, b, depth == 1)):
            if cost > budget:
                return False
            mark = slots.mark()
            slots.take(pair, *victim)
            slots.put(pair, x, y)
            if self.place(*victim, depth - 1, budget - cost):
                return True
            slots.undo(mark)
        return False

    def _victims(self, a: int, b: int, last: bool) -> Iterator[tuple[int, int, Ends, Ends]]:
        """(weight, pair, link in the way, orientation) where one end has a free slot.

        `last`: only links that can be placed at once.
        """
        slots = self._slots
        for x, y in ((a, b), (b, a)):
            for pair in bits(slots.free_out[x]):
                other = slots.into[pair][y]
                if other != DARK and (not last or slots.fits(other, y)):
                    yield slots.weight(pair, other, y), pair, (other, y), (x, y)
            for pair in bits(slots.free_in[y]):
                other = slots.out[pair][x]
                if other != DARK and (not last or slots.fits(other, x)):
                    yield slots.weight(pair, x, other), pair, (x, other), (x, y)

    def _move_two(self, a: int, b: int, depth: int, budget: int) -> bool:
        slots = self._slots
        for (x, y), pair in product(((a, b), (b, a)), range(slots.pairs)):
            u, v = slots.out[pair][x], slots.into[pair][y]
            if DARK in (u, v) or u == y:
                continue
            easy, hard = ((x, u), (v, y)) if slots.fits(x, u) else ((v, y), (x, u))
            if not slots.fits(*easy) or (depth == 2 and not slots.fits(*hard)):
                continue
            cost = slots.weight(pair, x, u) + slots.weight(pair, v, y)
            if cost > budget:
                continue
            mark = slots.mark()
            slots.take(pair, x, u)
            slots.take(pair, v, y)
            slots.put(pair, x, y)
            if slots.direct(*easy) and self.place(*hard, depth - 2, budget - cost):
                return True
            slots.undo(mark)
        return False


def place_all(slots: Slots, pool: list[Ends], rng: random.Random, *, depth: int) -> list[Ends]:
    """Place what can be placed, short chains first; returns the links that found no place."""
    search = Search(slots)
    for limit in range(depth + 1):
        rng.shuffle(pool)
        pool = [link for link in pool if not search.place(*link, limit)]
    return [link for link in pool if not _place_last(slots, link)]


def _place_last(slots: Slots, link: Ends) -> bool:
    """Each forced link changes the slots, so the next may find a chain again."""
    return Search(slots, nodes=LAST_NODES).place(*link, DEPTH) or slots.force(*link)


def improve(slots: Slots, rng: random.Random) -> None:
    """Bring links back to where they were lit, if what must give way fits elsewhere for less."""
    away = [
        (pair, a, b)
        for pair, row in enumerate(slots.home)
        for a, b in enumerate(row)
        if b != DARK and slots.out[pair][a] != b
    ]
    rng.shuffle(away)
    for arc in away:
        mark, before = slots.mark(), slots.torn
        if not _bring_home(slots, arc, rng) or slots.torn > before:
            slots.undo(mark)


def _bring_home(slots: Slots, arc: Arc, rng: random.Random) -> bool:
    pair, a, b = arc
    usable = slots.homes[a][b] >> pair & 1 and slots.out[pair][a] != b
    strays = [copy for copy in slots.copies(a, b) if not slots.weight(*copy)]
    if not usable or not strays:
        return False
    before = slots.torn
    slots.take(*rng.choice(strays))
    evicted = [(a, slots.out[pair][a]), (slots.into[pair][b], b)]
    evicted = [ends for ends in evicted if DARK not in ends]
    for x, y in evicted:
        slots.take(pair, x, y)
    slots.put(pair, a, b)
    search = Search(slots)
    return all(search.place(*ends, IMPROVE_DEPTH, before - slots.torn) for ends in evicted)
