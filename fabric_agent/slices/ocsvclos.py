# SPDX-License-Identifier: Apache-2.0
"""OCS-vClos: the same slices with optical switches between leaves and spines.

A leaf has one uplink to each optical switch, a spine has some; any uplink can be joined to any
downlink *of the same optical switch*. So what a slice needs is not free pairs but free ports, and a
choice of the optical switch for each link such that every port is used once.

Only ports that no slice uses are offered. Circuits of running jobs move when the caller names those
jobs, and then along the chain that moves fewest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from fabric_agent.slices.allocate import Decision, impossible, near, pick_nics
from fabric_agent.slices.model import Fabric, Link, Slice, bits, low_bit
from fabric_agent.slices.occupancy import Occupancy, Placement, Reason, Refusal
from fabric_agent.slices.search import Budget

# What a decision may cost, counted in tentative links; a chain of moves that is looked at counts as
# some. Moving running circuits is asked for rarely and may take its time.
LINKS = 4000
CHAIN = 1
MOVES = 200_000

Chain = tuple[int, list[tuple[Link, int]]]  # optical switch made free; circuits and where they go


@dataclass
class Ports:
    """Free ports while a slice is put together. ``leaves[l]`` is a mask of optical switches,
    ``spines[s]`` one of downlinks, which are numbered by optical switch, ``lanes`` for each."""

    leaves: list[int]
    spines: list[int]
    opticals: int
    lanes: int
    lit: dict[tuple[int, int], int] = field(default_factory=dict)  # idle circuits, (leaf, spine)

    @staticmethod
    def of(fabric: Fabric, free: Occupancy, lit: Collection[Link] = ()) -> Ports:
        ports = Ports(
            list(free.uplinks),
            list(free.downlinks),
            len(fabric.optics),
            len(fabric.spines[0].downlinks) // len(fabric.optics),
        )
        for link in lit:
            key = (link.leaf, link.spine)
            ports.lit[key] = ports.lit.get(key, 0) | 1 << link.uplink
        return ports

    def lane_mask(self, optical: int) -> int:
        return (1 << self.lanes) - 1 << optical * self.lanes

    def reach(self, spine: int) -> int:
        """Optical switches at which a spine has a free port."""
        folded = self.spines[spine]
        for lane in range(1, self.lanes):
            folded |= self.spines[spine] >> lane
        return int(f"{folded:b}"[::-1][:: self.lanes][::-1], 2)

    def take(self, leaf: int, spine: int, optical: int) -> Link:
        downlink = low_bit(self.spines[spine] & self.lane_mask(optical))
        self.leaves[leaf] &= ~(1 << optical)
        self.spines[spine] &= ~(1 << downlink)
        return Link(leaf, optical, spine, downlink)

    def give(self, link: Link) -> None:
        self.leaves[link.leaf] |= 1 << link.uplink
        self.spines[link.spine] |= 1 << link.downlink


def decide(
    fabric: Fabric,
    free: Occupancy,
    gpus: int,
    *,
    lit: Collection[Link] = (),
    movable: Sequence[Slice] = (),
) -> Decision:
    """Place a job, or say why not.

    ``lit`` are circuits that are up and belong to no slice: they are used as they are where they
    fit. ``movable`` are slices whose circuits may move; the placement lists what moves.
    """
    if refused := impossible(fabric, free, gpus):
        return refused
    if local := near(fabric, free, gpus):
        return local
    budget = Budget(LINKS)
    for shape in _shapes(free, gpus):
        for order in (1, -1):
            circuits = _Circuits(Ports.of(fabric, free, lit), budget)
            if budget.left > 0 and (placed := _wire(fabric, free, shape, circuits, order)):
                return placed
    if movable and (moved := _with_moves(fabric, free, gpus, movable)):
        return moved
    return _refusal(free, gpus)


def column(fabric: Fabric, free: Occupancy, leaves: Sequence[int]) -> tuple[Link, ...] | None:
    """One virtual spine for these leaves, if free ports give it."""
    circuits = _Circuits(Ports.of(fabric, free), Budget(LINKS))
    if circuits.join_all(leaves, 1, 1) is None:
        return None
    links = {link.leaf: link for link in circuits.origin}
    return tuple(links[leaf] for leaf in leaves)


@dataclass(frozen=True)
class _Shape:
    """GPUs per leaf, lowest leaf first, and the number of virtual spines."""

    shares: tuple[tuple[int, int], ...]
    n: int

    @property
    def leaves(self) -> list[int]:
        return [leaf for leaf, _ in self.shares]


def _shapes(free: Occupancy, gpus: int) -> Iterator[_Shape]:
    """What the counts of free ports allow: m * n = gpus, fewest leaves first, on the fullest leaves
    that have room; then uneven ones, fewest links first."""
    room = [
        (nics.bit_count(), up.bit_count(), leaf)
        for leaf, (nics, up) in enumerate(zip(free.nics, free.uplinks, strict=True))
        if nics
    ]
    down = [mask.bit_count() for mask in free.downlinks]
    widths = range(max(count for count, _, _ in room), 0, -1)
    for find in (_even, _uneven):
        found = [(find([each for each in room if each[1] >= n], n, gpus), n) for n in widths]
        shapes = [_Shape(tuple(sorted(shares)), n) for shares, n in found if len(shares) > 1]
        for shape in sorted(shapes, key=lambda shape: len(shape.shares) * shape.n):
            if sum(count // len(shape.shares) for count in down) >= shape.n:
                yield shape


def _even(room: list[tuple[int, int, int]], n: int, gpus: int) -> list[tuple[int, int]]:
    m = gpus // n
    fullest = sorted((count, leaf) for count, _, leaf in room if count >= n)[:m]
    return [(leaf, n) for _, leaf in fullest] if m * n == gpus and len(fullest) == m else []


def _uneven(room: list[tuple[int, int, int]], n: int, gpus: int) -> list[tuple[int, int]]:
    shares = []
    for count, _, leaf in sorted(room, reverse=True):
        if not gpus:
            break
        shares.append((leaf, min(count, n, gpus)))
        gpus -= shares[-1][1]
    return [] if gpus else shares


def _refusal(free: Occupancy, gpus: int) -> Refusal:
    up, down = (sum(map(int.bit_count, masks)) for masks in (free.uplinks, free.downlinks))
    facts = f"{gpus} GPUs asked, {free.gpus} are free; free ports: {up} of leaves, {down} of spines"
    if min(up, down) < gpus:
        return Refusal(Reason.NO_LINKS, f"{facts}, too few")
    return Refusal(Reason.FRAGMENTATION, f"{facts}, but no choice of optical switches joins them")


@dataclass
class _Circuits:
    """New circuits, and those that may move, by their ports. What is not here stays where it is:
    its ports are simply not free."""

    ports: Ports
    budget: Budget
    origin: dict[Link, Link | None] = field(default_factory=dict)  # before; None for a new one
    at_leaf: dict[tuple[int, int], Link] = field(default_factory=dict)
    at_spine: dict[tuple[int, int], list[Link]] = field(default_factory=dict)

    def add(self, link: Link, origin: Link | None) -> None:
        self.origin[link] = origin
        self.at_leaf[link.leaf, link.uplink] = link
        self.at_spine.setdefault((link.spine, link.uplink), []).append(link)

    def remove(self, link: Link) -> Link | None:
        del self.at_leaf[link.leaf, link.uplink]
        self.at_spine[link.spine, link.uplink].remove(link)
        return self.origin.pop(link)

    def join_all(self, leaves: Sequence[int], n: int, order: int) -> list[int] | None:
        """Joins all leaves to n virtual spines; the spines they are on. Spines that are partly used
        come first (order 1) or last (order -1)."""
        spines: list[int] = []
        counts = [(mask.bit_count(), spine) for spine, mask in enumerate(self.ports.spines)]
        m = len(leaves)
        for count, spine in sorted(counts, key=lambda each: (each[0] % m, order * each[0])):
            for _ in range(min(n - len(spines), count // len(leaves))):
                if not self._column(leaves, spine):
                    break
                spines.append(spine)
            if len(spines) == n:
                return spines
        return None

    def _column(self, leaves: Sequence[int], spine: int) -> bool:
        """One virtual spine, whole or not at all."""
        for place, leaf in enumerate(leaves):
            if not self.join(leaf, spine):
                for joined in leaves[:place]:
                    self._part(joined, spine)
                return False
        return True

    def _part(self, leaf: int, spine: int) -> None:
        mine = (self.at_leaf.get((leaf, optical)) for optical in range(self.ports.opticals))
        link = next(
            link for link in mine if link and link.spine == spine and self.origin[link] is None
        )
        self.remove(link)
        self.ports.give(link)

    def join(self, leaf: int, spine: int) -> bool:
        """A new circuit. If no optical switch is free at both ends, the chain of other circuits
        that moves fewest makes room."""
        reach = self.ports.reach(spine)
        if common := self.ports.leaves[leaf] & reach:
            lit = common & self.ports.lit.get((leaf, spine), 0)
            self.add(self.ports.take(leaf, spine, low_bit(lit or common)), None)
            return self.budget.spend(1)
        chain = self._cheapest(leaf, spine, reach)
        if chain is None:
            return False
        one, moves = chain
        taken = [(link, to, self.remove(link)) for link, to in moves]
        for link, _, _ in taken:
            self.ports.give(link)
        for link, to, origin in taken:
            self.add(self.ports.take(link.leaf, link.spine, to), origin)
        self.add(self.ports.take(leaf, spine, one), None)
        return True

    def _cheapest(self, leaf: int, spine: int, reach: int) -> Chain | None:
        """New circuits move for nothing: they are not up yet."""
        best: tuple[int, Chain] | None = None
        for one in bits(self.ports.leaves[leaf]):
            for other in bits(reach):
                chain = self._chain(spine, one, other)
                if not self.budget.spend(CHAIN):
                    return None
                if chain is None:
                    continue
                cost = sum(self.origin[link] is not None for link, _ in chain[1])
                if not cost:
                    return chain
                if best is None or cost < best[0]:
                    best = cost, chain
        return best[1] if best else None

    def _chain(self, spine: int, one: int, other: int) -> Chain | None:
        """Frees optical switch ``one`` at the spine, where ``other`` is free, by swapping the two
        along the circuits that are in each other's way."""
        moves: list[tuple[Link, int]] = []
        used: set[Link] = set()
        while True:
            links = self.at_spine.get((spine, one), ())
            link = next((link for link in links if link not in used), None)
            if link is None:
                return None
            moves.append((link, other))
            if self.ports.leaves[link.leaf] >> other & 1:
                return one, moves
            blocking = self.at_leaf.get((link.leaf, other))
            if blocking is None or blocking in used:
                return None
            moves.append((blocking, one))
            used |= {link, blocking}
            spine = blocking.spine
            if self.ports.spines[spine] & self.ports.lane_mask(one):
                return one, moves


def _wire(
    fabric: Fabric, free: Occupancy, shape: _Shape, circuits: _Circuits, order: int
) -> Placement | None:
    spines = circuits.join_all(shape.leaves, shape.n, order)
    if spines is None:
        return None
    ours: dict[tuple[int, int], list[Link]] = {}
    moves = []
    for link, before in circuits.origin.items():
        if before is None:
            ours.setdefault((link.leaf, link.spine), []).append(link)
        elif before != link:
            moves.append((before, link))
    return Placement(
        tuple(pick_nics(fabric, free, leaf, share) for leaf, share in shape.shares),
        tuple(tuple(ours[leaf, spine].pop() for spine in spines) for leaf in shape.leaves),
        tuple(sorted(moves)),
    )


def _with_moves(
    fabric: Fabric, free: Occupancy, gpus: int, movable: Sequence[Slice]
) -> Placement | None:
    running = [link for part in movable for link in part.all_links]
    for shape in _shapes(free, gpus):
        circuits = _Circuits(Ports.of(fabric, free), Budget(MOVES))
        for link in running:
            circuits.add(link, link)
        if placed := _wire(fabric, free, shape, circuits, 1):
            return placed
    return None
