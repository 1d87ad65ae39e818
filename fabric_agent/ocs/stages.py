# SPDX-License-Identifier: Apache-2.0
"""An order for the moves of a plan: make before break wherever a dark port allows it.

One spine index after the other, because hosts leave one index at a time. At each: light what has
both ports dark; tear down what is replaced already, and light in the same stage what that makes
room for; when neither is possible, first try to park a link on ports that nothing else needs, and
only then break one, the least wanted first. No pod pair ever has fewer lit links than its floor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Generic, TypeVar

from fabric_agent.ocs.plan import Plan
from fabric_agent.ocs.wiring import Fabric, Layout, Link, Port
from oncache.core.errors import OncacheError

PodPair = tuple[int, int]
Unit = tuple[int, int, int]
Key = TypeVar("Key", Unit, PodPair)


class StageError(OncacheError):
    """No order of moves respects what must be respected; nothing is cut."""


@dataclass(frozen=True)
class Policy:
    """`floor`: share of min(before, after) links that every pod pair keeps at any time, over all
    spine indices. `moves_per_stage` and `moves_per_hour`: links torn down plus links lit.
    `protected` links are never torn down. `settle`: seconds from a command to a link that carries
    packets (mirror, receiver and FEC lock). `weights`: as in the plan, dear links are broken last.
    """

    floor: float = 0.5
    moves_per_stage: int = 64
    moves_per_hour: float = 3600.0
    protected: frozenset[Link] = frozenset()
    settle: float = 1.0
    weights: Mapping[Link, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sensible = (
            0 <= self.floor <= 1
            and self.moves_per_stage >= 2
            and self.moves_per_hour > 0
            and self.settle >= 0
        )
        if not sensible:
            raise StageError(
                "the limits make no sense",
                hint="floor within 0 and 1, at least 2 moves per stage, a positive rate",
            )


@dataclass(frozen=True)
class Stage:
    """Links to tear down, then links to light, at one spine index.

    `starts` and `ends`: seconds after the first stage starts. `dark`: links that drain units lack
    during the stage, of those they had before and have after.
    """

    index: int
    remove: tuple[Link, ...]
    add: tuple[Link, ...]
    starts: float
    ends: float
    dark: int

    @property
    def moves(self) -> int:
        """Links touched."""
        return len(self.remove) + len(self.add)

    @property
    def units(self) -> tuple[Unit, ...]:
        """What hosts must leave before this stage."""
        return tuple(sorted({link.unit for link in self.remove}))


@dataclass(frozen=True)
class Staged:
    """All stages of a plan, from `before` to `after`."""

    before: Layout
    after: Layout
    stages: tuple[Stage, ...]


def sequence(fabric: Fabric, plan: Plan, policy: Policy) -> Staged:
    """Stages that carry out a plan. StageError when protection or a floor forbids it."""
    for link in plan.removed:
        if link in policy.protected:
            raise StageError(
                f"{link} is protected and would be torn down", hint="plan again with it pinned"
            )
    stager = _Stager(fabric, plan, policy)
    stages = tuple(stage for index in range(fabric.indices) for stage in stager.index(index))
    return Staged(plan.lit, plan.target, stages)


class _Stager:
    """Capacity and time over all indices; `_Index` has one index's ports."""

    def __init__(self, fabric: Fabric, plan: Plan, policy: Policy) -> None:
        self._fabric, self._plan, self.policy = fabric, plan, policy
        before, after = _pod_pairs(plan.lit.links()), _pod_pairs(plan.target.links())
        self.capacity = before.copy()
        self._floor = {
            pair: ceil(policy.floor * min(links, after[pair])) for pair, links in before.items()
        }
        self._clock = self._moved = 0.0

    def index(self, index: int) -> Iterator[Stage]:
        work = _Index(self, self._fabric, self._plan, index)
        while work.remove or work.add:
            remove, add = work.step()
            dark = work.apply(remove, add)
            yield self._stage(index, remove, add, dark)

    def may_lose(self, link: Link, lost: Counter[PodPair]) -> bool:
        """Is the pod pair above its floor, with `lost` links fewer than now, without this one?"""
        pair = link.unit[:2]
        return self.capacity[pair] - lost[pair] - 1 >= self._floor.get(pair, 0)

    def _stage(self, index: int, remove: list[Link], add: list[Link], dark: int) -> Stage:
        earliest = self._moved / self.policy.moves_per_hour * 3600
        starts = max(self._clock, earliest)
        self._clock = starts + self.policy.settle
        self._moved += len(remove) + len(add)
        return Stage(index, tuple(remove), tuple(add), starts, self._clock, dark)


class _Index:
    """Moves of one spine index that are still to be made."""

    def __init__(self, stager: _Stager, fabric: Fabric, plan: Plan, index: int) -> None:
        self._stager = stager
        self._fabric, self._number = fabric, index
        self.remove = {link for link in plan.removed if link.spine == index}
        self.add = {link for link in plan.added if link.spine == index}
        lit = [link for link in plan.lit.links() if link.spine == index]
        self._at = {port: link for link in lit for port in link.ends}
        self._lit = _units(lit)
        self._before = self._lit.copy()
        self._after = _units(link for link in plan.target.links() if link.spine == index)
        self._parked: set[Link] = set()

    def step(self) -> tuple[list[Link], list[Link]]:
        """What to tear down and what to light next."""
        free = self._addable(set())
        if free:
            return [], free[: self._stager.policy.moves_per_stage]
        covered = self._covered()
        if covered:
            room = self._stager.policy.moves_per_stage - len(covered)
            return covered, self._addable(set(covered))[:room]
        return self._break_cycle()

    def apply(self, remove: list[Link], add: list[Link]) -> int:
        """Do it; returns the links that units lack between tearing down and lighting."""
        for link in remove:
            self._change(link, -1)
            self.remove.discard(link)
            for port in link.ends:
                del self._at[port]
        dark = sum(
            max(0, min(self._before[unit], self._after[unit]) - self._lit[unit])
            for unit in {link.unit for link in remove}
        )
        for link in add:
            self._change(link, 1)
            self.add.discard(link)
            for port in link.ends:
                self._at[port] = link
        return dark

    def _change(self, link: Link, links: int) -> None:
        self._lit[link.unit] += links
        self._stager.capacity[link.unit[:2]] += links

    def _addable(self, gone: set[Link]) -> list[Link]:
        """Links whose ports are dark, once `gone` is."""
        return sorted(link for link in self.add if self._blockers(link) <= gone)

    def _blockers(self, link: Link) -> set[Link]:
        return {self._at[port] for port in link.ends if port in self._at}

    def _covered(self) -> list[Link]:
        """Links that can go without a loss: their unit keeps what it shall have afterwards."""
        lost: Counter[PodPair] = Counter()
        spare = {unit: links - self._after[unit] for unit, links in self._lit.items()}
        chosen = []
        for link in sorted(self.remove):
            if spare[link.unit] > 0 and self._stager.may_lose(link, lost):
                spare[link.unit] -= 1
                lost[link.unit[:2]] += 1
                chosen.append(link)
        return chosen[: self._stager.policy.moves_per_stage // 2]

    def _break_cycle(self) -> tuple[list[Link], list[Link]]:
        """Every pending link waits for another one: park one, else break the cheapest."""
        weights = self._stager.policy.weights
        candidates = sorted(
            (sum(weights.get(each, 1) for each in blockers), sorted(blockers), link)
            for link in self.add
            if (blockers := self._blockers(link))
        )
        for link in (each for _, waiting, _ in candidates for each in waiting):
            parked = self._park(link)
            if parked is not None:
                return [], [parked]
        for _, waiting, link in candidates:
            if self._may_break(waiting):
                return waiting, [link][: self._stager.policy.moves_per_stage - len(waiting)]
        raise self._stuck()

    def _may_break(self, blockers: list[Link]) -> bool:
        lost: Counter[PodPair] = Counter()
        for link in blockers:
            if link not in self.remove or not self._stager.may_lose(link, lost):
                return False
            lost[link.unit[:2]] += 1
        return True

    def _park(self, link: Link) -> Link | None:
        """A second link for this one's unit, on dark ports that no pending link waits for."""
        if link in self._parked or link not in self.remove:
            return None
        self._parked.add(link)
        needed = {port for each in self.add for port in each.ends} | set(self._at)
        for pair in range(self._fabric.pairs):
            for a, b in ((link.a, link.b), (link.b, link.a)):
                parked = Link(self._number, pair, a, b)
                if not needed & set(parked.ends):
                    self._parked.add(parked)
                    self.remove.add(parked)
                    return parked
        return None

    def _stuck(self) -> StageError:
        waiting = sorted(self.remove or self.add)[0]
        return StageError(
            f"spine index {self._number}: no next move keeps every pod pair at its floor "
            f"(waiting for {waiting})",
            hint="lower the floor, free some ports, or move fewer links at once",
        )


def _pod_pairs(links: Iterable[Link]) -> Counter[PodPair]:
    return Counter(link.unit[:2] for link in links)


def check(fabric: Fabric, staged: Staged, policy: Policy) -> list[str]:
    """What is wrong with an order of moves, by replaying it; empty if nothing is."""
    links, wrong = set(staged.before.links()), []
    before, after = _pod_pairs(links), _pod_pairs(staged.after.links())
    for number, stage in enumerate(staged.stages):
        if not set(stage.remove) <= links:
            wrong.append(f"stage {number} tears down what is not lit")
        if policy.protected & set(stage.remove):
            wrong.append(f"stage {number} tears down a protected link")
        if stage.moves > policy.moves_per_stage:
            wrong.append(f"stage {number} moves {stage.moves} links")
        links -= set(stage.remove)
        left = _pod_pairs(links)
        for pair in {link.unit[:2] for link in stage.remove}:
            if left[pair] < policy.floor * min(before[pair], after[pair]):
                wrong.append(f"stage {number} leaves pods {pair} with {left[pair]} links")
        links |= set(stage.add)
        if len(_ports(links)) < 2 * len(links):
            wrong.append(f"stage {number} uses a port twice")
    if links != set(staged.after.links()):
        wrong.append("the stages do not end where the plan does")
    return wrong


def _ports(links: Iterable[Link]) -> set[Port]:
    return {port for link in links for port in link.ends}


@dataclass(frozen=True)
class Transport:
    """Retries of a reliable RDMA connection: 4.096 us * 2^timeout, retry + 1 times."""

    timeout: int = 20
    retry: int = 7

    @property
    def budget(self) -> float:
        """Seconds of silence it survives."""
        return 4.096e-6 * 2.0**self.timeout * (self.retry + 1)


@dataclass(frozen=True)
class DryRun:
    """What would happen. `dark_units`: seconds each drain unit is dark, `dark_pairs` the pod pairs
    that are dark at every spine index; `jobs` those with a link of theirs torn down."""

    dark_units: Mapping[Unit, float]
    dark_pairs: Mapping[PodPair, float]
    jobs: tuple[str, ...]

    def require(self, transport: Transport, *, drained: bool) -> None:
        """StageError if connections would not survive the darkness.

        `drained`: hosts are told to leave a unit first, so only pods without any other way count.
        """
        spells = dict(self.dark_pairs) if drained else dict(self.dark_units)
        for where, seconds in sorted(spells.items(), key=lambda each: -each[1]):
            if seconds > transport.budget:
                raise StageError(
                    f"pods {where[0]} and {where[1]} would be dark for {seconds:.2f} s, "
                    f"connections give up after {transport.budget:.2f} s",
                    hint="announce the plan to the nodes, keep more ports dark, or end the job",
                )


Jobs = Mapping[str, frozenset[PodPair]]


def dry_run(staged: Staged, jobs: Jobs) -> DryRun:
    """Replay the stages on the clock. `jobs`: the pod pairs each one talks between."""
    before, after = list(staged.before.links()), list(staged.after.links())
    units = _Darkness[Unit](_units(before), _units(after))
    pairs = _Darkness[PodPair](_pod_pairs(before), _pod_pairs(after))
    touched: set[PodPair] = set()
    for stage in staged.stages:
        for link in stage.remove:
            units.lose(link.unit, stage.starts)
            pairs.lose(link.unit[:2], stage.starts)
            touched.add(link.unit[:2])
        for link in stage.add:
            units.gain(link.unit, stage.ends)
            pairs.gain(link.unit[:2], stage.ends)
    hit = tuple(sorted(name for name, used in jobs.items() if used & touched))
    return DryRun(units.spells, pairs.spells, hit)


def _units(links: Iterable[Link]) -> Counter[Unit]:
    return Counter(link.unit for link in links)


class _Darkness(Generic[Key]):
    """Longest time without a link, of what had one and shall have one."""

    def __init__(self, before: Counter[Key], after: Counter[Key]) -> None:
        self._lit: Counter[Key] = before
        self._counted: set[Key] = set(before) & set(after)
        self._since: dict[Key, float] = {}
        self.spells: dict[Key, float] = {}

    def lose(self, key: Key, when: float) -> None:
        self._lit[key] -= 1
        if not self._lit[key] and key in self._counted:
            self._since[key] = when

    def gain(self, key: Key, when: float) -> None:
        self._lit[key] += 1
        if key in self._since:
            self.spells[key] = max(self.spells.get(key, 0.0), when - self._since.pop(key))
