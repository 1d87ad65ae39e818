# SPDX-License-Identifier: Apache-2.0
"""From jobs to the links wanted between pods, per spine index.

A job's servers stand on leaves. Tensor groups stay inside a server and cost the fabric nothing;
pipeline neighbours, data-parallel rings and expert groups ask for links between leaves. Summed over
jobs that is one symmetric matrix, leaf by leaf, split over the spines so that no leaf is asked for
more links to a spine than it has (`parallel`, called tau in the paper). For even `parallel` every
demand within the leaves' uplinks is split completely; for odd it may fail, and what does not fit is
named. (LumosCore, 2411.01503; the split by equitable edge colouring is de Werra's, 1971.)
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

from fabric_agent.ocs.decompose import colour, decompose
from fabric_agent.ocs.wiring import Fabric, Matrix
from oncache.core.errors import OncacheError


class DemandError(OncacheError):
    """A demand that is not symmetric, or asks for more ports than there are."""


@dataclass(frozen=True)
class Demand:
    """Links wanted: `wanted[index][pod][pod]`, symmetric, zero diagonal."""

    wanted: tuple[tuple[tuple[int, ...], ...], ...]

    @staticmethod
    def of(matrices: Iterable[Matrix]) -> Demand:
        """From nested sequences."""
        return Demand(tuple(tuple(map(tuple, matrix)) for matrix in matrices))

    def require(self, fabric: Fabric) -> None:
        """DemandError, naming the element, unless each spine can be asked for this."""
        if len(self.wanted) != fabric.indices:
            raise DemandError(
                f"the demand has {len(self.wanted)} spine indices, the fabric {fabric.indices}",
                hint="give one matrix per spine index",
            )
        for index, matrix in enumerate(self.wanted):
            _require_symmetric(f"spine index {index}", matrix, fabric.pods)
            for pod, row in enumerate(matrix):
                if sum(row) > fabric.uplinks:
                    raise DemandError(
                        f"pod {pod}, spine index {index}: {sum(row)} links wanted, "
                        f"{fabric.uplinks} ports",
                        hint="ask for fewer links, or spread them over more spine indices",
                    )


def _require_symmetric(where: str, matrix: Matrix, size: int) -> None:
    if len(matrix) != size or any(len(row) != size for row in matrix):
        raise DemandError(f"{where}: the matrix is not {size} by {size}", hint="one row per pod")
    for i, row in enumerate(matrix):
        for j, wanted in enumerate(row):
            if wanted < 0 or (i == j and wanted):
                raise DemandError(
                    f"{where}: {wanted} links from {i} to {j}",
                    hint="counts are not negative, and nobody links to itself",
                )
            if wanted != matrix[j][i]:
                raise DemandError(
                    f"{where}: {wanted} links from {i} to {j}, but {matrix[j][i]} back",
                    hint="a link has both directions; make the demand symmetric",
                )


class Leaf(NamedTuple):
    """Leaf `number` of a pod."""

    pod: int
    number: int


@dataclass(frozen=True)
class Job:
    """`servers[stage][replica]` is the leaf of the server that holds this part of the model.

    `tensor`: GPUs per server that talk to the same GPU of a neighbour; `experts`: how many
    neighbouring replicas of a stage share their experts (1: none).
    """

    name: str
    servers: tuple[tuple[Leaf, ...], ...]
    tensor: int = 8
    experts: int = 1

    def __post_init__(self) -> None:
        replicas = {len(stage) for stage in self.servers}
        if len(replicas) != 1 or 0 in replicas:
            raise DemandError(
                f"job {self.name}: stages of {sorted(replicas)} replicas",
                hint="every pipeline stage needs the same number of replicas, at least one",
            )
        if self.experts < 1 or replicas.pop() % self.experts:
            raise DemandError(
                f"job {self.name}: groups of {self.experts} do not divide the replicas",
                hint="let the expert group's size divide the number of replicas",
            )


Pairs = Counter[tuple[Leaf, Leaf]]


def leaf_demand(job: Job) -> Pairs:
    """Links wanted between leaves of different pods, each unordered pair once (lower first).

    A pipeline pair takes `tensor` links, a data-parallel ring pair half as many per direction, an
    expert group one link per pair of pods: its shifted all-to-all has at most one flow per ordered
    pair of pods and phase, and no more is promised.
    """
    wanted: Pairs = Counter()
    for replicas in zip(*job.servers, strict=True):
        for one, other in pairwise(replicas):
            _want(wanted, one, other, job.tensor)
    for stage in job.servers:
        for one, other in _ring(stage):
            _want(wanted, one, other, max(1, job.tensor // 2))
        for group in _groups(stage, job.experts):
            first = {leaf.pod: leaf for leaf in reversed(group)}
            for one, other in combinations(sorted(first.values()), 2):
                _want(wanted, one, other, 1)
    return wanted


def shifted_destination(pod: int, gpu: int, phase: int, *, pods: int, gpus: int) -> tuple[int, int]:
    """Where GPU `gpu` (of `gpus`) of `pod` sends in `phase` (from 1) of a regular all-to-all.

    The GPUs of a pod address different pods in every phase, so with no more GPUs per pod than pods
    at most one flow runs per ordered pair of pods. Returns (pod, gpu).
    """
    target = (pod * (gpus + 1) + gpus * gpu + phase - 1) % (gpus * pods)
    return target // gpus, target % gpus


def _want(wanted: Pairs, one: Leaf, other: Leaf, links: int) -> None:
    if one.pod != other.pod:
        wanted[min(one, other), max(one, other)] += links


def _ring(stage: Sequence[Leaf]) -> Iterator[tuple[Leaf, Leaf]]:
    yield from pairwise(stage)
    if len(stage) > 2:
        yield stage[-1], stage[0]


def _groups(stage: Sequence[Leaf], size: int) -> Iterator[Sequence[Leaf]]:
    if size > 1:
        for start in range(0, len(stage), size):
            yield stage[start : start + size]


@dataclass(frozen=True)
class Clos:
    """Inside of a pod: `leaves` leaves with `parallel` links to each spine of the fabric."""

    fabric: Fabric
    leaves: int
    parallel: int

    def __post_init__(self) -> None:
        if self.leaves < 1 or self.parallel < 1:
            raise DemandError("a pod without leaves or links", hint="give at least one of each")
        if self.leaves * self.parallel > self.fabric.uplinks:
            raise DemandError(
                f"{self.leaves} leaves by {self.parallel} links exceed "
                f"{self.fabric.uplinks} uplinks of a spine",
                hint="a spine needs as many uplinks as downlinks",
            )

    @property
    def leaf_uplinks(self) -> int:
        """Links of one leaf, over all spines."""
        return self.parallel * self.fabric.indices


class Missing(NamedTuple):
    """Links that found no place, and why."""

    one: Leaf
    other: Leaf
    links: int
    reason: str


@dataclass(frozen=True)
class Split:
    """`demand` per spine index; `by_leaf[index]` tells which leaves; `missing` did not fit."""

    demand: Demand
    by_leaf: tuple[Mapping[tuple[Leaf, Leaf], int], ...]
    missing: tuple[Missing, ...]


def logical_topology(clos: Clos, jobs: Iterable[Job]) -> Split:
    """Demand of all jobs, trimmed to the leaves' uplinks and split over the spines."""
    total: Pairs = Counter()
    for job in jobs:
        _require_leaves(clos, job)
        total.update(leaf_demand(job))
    fitting, trimmed = _trim(total, clos.leaf_uplinks)
    parts, rest = split_over_spines(fitting, clos.fabric.indices, clos.parallel)
    split_reason = f"no spine has a free link at both leaves ({clos.parallel} parallel links)"
    missing = [Missing(*pair, n, "more links wanted than the leaf has") for pair, n in trimmed]
    missing += [Missing(*pair, n, split_reason) for pair, n in sorted(rest.items())]
    matrices = [_by_pod(clos.fabric.pods, part) for part in parts]
    return Split(Demand.of(matrices), tuple(parts), tuple(missing))


def _require_leaves(clos: Clos, job: Job) -> None:
    for leaf in (leaf for stage in job.servers for leaf in stage):
        if not (0 <= leaf.pod < clos.fabric.pods and 0 <= leaf.number < clos.leaves):
            raise DemandError(
                f"job {job.name}: no leaf {leaf.number} in pod {leaf.pod}",
                hint=f"{clos.fabric.pods} pods of {clos.leaves} leaves, counted from 0",
            )


def _trim(total: Pairs, limit: int) -> tuple[Pairs, list[tuple[tuple[Leaf, Leaf], int]]]:
    """Scale an overloaded leaf's pairs down in proportion, one link at least, then cut."""
    load = _loads(total)
    kept: Pairs = Counter()
    for (one, other), links in total.items():
        worst = max(load[one], load[other], limit)
        kept[one, other] = max(1, links * limit // worst)
    load = _loads(kept)
    for pair in sorted(kept, key=lambda pair: (-kept[pair], pair)):
        excess = max(load[pair[0]], load[pair[1]]) - limit
        cut = min(kept[pair], max(0, excess))
        kept[pair] -= cut
        load[pair[0]] -= cut
        load[pair[1]] -= cut
    return +kept, [(pair, n - kept[pair]) for pair, n in sorted(total.items()) if n > kept[pair]]


def _loads(pairs: Pairs) -> Counter[Leaf]:
    load: Counter[Leaf] = Counter()
    for (one, other), links in pairs.items():
        load[one] += links
        load[other] += links
    return load


def split_over_spines(wanted: Pairs, spines: int, parallel: int) -> tuple[list[Pairs], Pairs]:
    """Parts per spine in which no leaf has more than `parallel` links, and what is left over.

    T = B + Bt, and B is coloured so that every leaf has its fair share of each colour, rounded up
    at most: the sum of both directions is within an even `parallel`. For an odd one the excess is
    taken out and put back by alternating trails between two spines.
    """
    leaves = sorted({leaf for pair in wanted for leaf in pair})
    number = {leaf: i for i, leaf in enumerate(leaves)}
    matrix = [[0] * len(leaves) for _ in leaves]
    for (one, other), links in wanted.items():
        matrix[number[one]][number[other]] = matrix[number[other]][number[one]] = links
    parts: list[Pairs] = [Counter() for _ in range(spines)]
    for spine, i, j in _equitable(decompose(matrix), spines):
        parts[spine][leaves[min(i, j)], leaves[max(i, j)]] += 1
    spread = _Spread(parts, parallel)
    return spread.parts, spread.repair()


def _equitable(matrix: Matrix, colours: int) -> Iterator[tuple[int, int, int]]:
    """(colour, row, column) per unit, each row and column with its fair share of every colour.

    Rows and columns are cut into pieces of degree `colours`; a proper colouring of the pieces uses
    every colour at most once in each.
    """
    rows: dict[tuple[int, int], int] = {}
    columns: dict[tuple[int, int], int] = {}
    edges, units = [], []
    used_in = [0] * len(matrix)
    for i, row in enumerate(matrix):
        out = 0
        for j, links in enumerate(row):
            for _ in range(links):
                piece = rows.setdefault((i, out // colours), len(rows))
                other = columns.setdefault((j, used_in[j] // colours), len(columns))
                edges.append((piece, other))
                units.append((i, j))
                out += 1
                used_in[j] += 1
    chosen = colour(edges, len(rows), len(columns), colours)
    for shade, (i, j) in zip(chosen, units, strict=True):
        yield shade, i, j


class _Spread:
    """Links per spine, undirected, with a limit per leaf and spine."""

    def __init__(self, parts: list[Pairs], limit: int) -> None:
        self.parts = parts
        self._limit = limit
        self._load = [_loads(part) for part in parts]

    def repair(self) -> Pairs:
        """Take out what overloads a leaf, put it back elsewhere; returns what found no place."""
        loose = [pair for spine in range(len(self.parts)) for pair in self._excess(spine)]
        rest: Pairs = Counter()
        for one, other in loose:
            if not self._insert(one, other):
                rest[one, other] += 1
        return rest

    def _excess(self, spine: int) -> Iterator[tuple[Leaf, Leaf]]:
        load = self._load[spine]
        while over := {leaf for leaf, links in load.items() if links > self._limit}:
            # A link between two overloaded leaves relieves both.
            pair = max(
                (pair for pair, links in self.parts[spine].items() if links),
                key=lambda pair: (len(over & set(pair)), pair),
            )
            self._add(spine, pair, -1)
            yield pair

    def _add(self, spine: int, pair: tuple[Leaf, Leaf], links: int) -> None:
        self.parts[spine][pair] += links
        for leaf in pair:
            self._load[spine][leaf] += links

    def _free(self, leaf: Leaf) -> list[int]:
        return [s for s, load in enumerate(self._load) if load[leaf] < self._limit]

    def _insert(self, one: Leaf, other: Leaf) -> bool:
        pair = (min(one, other), max(one, other))
        here, there = self._free(one), self._free(other)
        for spine in here:
            if spine in there:
                self._add(spine, pair, 1)
                return True
        for spine in here:
            for away in there:
                trail = self._trail(other, one, spine, away)
                if trail is not None:
                    self._swap(trail)
                    self._add(spine, pair, 1)
                    return True
        return False

    def _trail(
        self, start: Leaf, end: Leaf, spine: int, away: int
    ) -> list[tuple[int, int, tuple[Leaf, Leaf]]] | None:
        """Moves (from, to, pair) that free a link of `start` at `spine` and overload nobody.

        Links alternate between the two spines along the trail. `end` needs its free link at
        `spine`, so the trail may not bring one there.
        """
        Step = tuple[Leaf, int]
        # Nothing may come back to `start`: that would use up what the trail frees.
        origin: dict[Step, tuple[Step, tuple[Leaf, Leaf]] | None] = {
            (start, spine): None,
            (start, away): None,
        }
        queue: deque[Step] = deque([(start, spine)])
        while queue:
            step = queue.popleft()
            leaf, source = step
            target = away if source == spine else spine
            for pair, links in self.parts[source].items():
                if not links or leaf not in pair:
                    continue
                far = pair[0] if pair[1] == leaf else pair[1]
                following = (far, target)
                if following in origin:
                    continue
                origin[following] = (step, pair)
                room = self._load[target][far] < self._limit and (far, target) != (end, spine)
                if room:
                    trail = self._unwind(origin, following, spine, away)
                    if self._is_simple(trail):
                        return trail
                else:
                    queue.append(following)
        return None

    @staticmethod
    def _unwind(
        origin: Mapping[tuple[Leaf, int], tuple[tuple[Leaf, int], tuple[Leaf, Leaf]] | None],
        last: tuple[Leaf, int],
        spine: int,
        away: int,
    ) -> list[tuple[int, int, tuple[Leaf, Leaf]]]:
        trail: list[tuple[int, int, tuple[Leaf, Leaf]]] = []
        step = last
        while (before := origin[step]) is not None:
            step, pair = before
            trail.append((step[1], away if step[1] == spine else spine, pair))
        return trail

    def _is_simple(self, trail: list[tuple[int, int, tuple[Leaf, Leaf]]]) -> bool:
        """Each move has a link of its own (a pair may have several)."""
        moves = Counter((source, pair) for source, _, pair in trail)
        return all(self.parts[source][pair] >= n for (source, pair), n in moves.items())

    def _swap(self, trail: list[tuple[int, int, tuple[Leaf, Leaf]]]) -> None:
        for source, target, pair in trail:
            self._add(source, pair, -1)
            self._add(target, pair, 1)


def _by_pod(pods: int, part: Pairs) -> list[list[int]]:
    matrix = [[0] * pods for _ in range(pods)]
    for (one, other), links in part.items():
        matrix[one.pod][other.pod] += links
        matrix[other.pod][one.pod] += links
    return matrix
