# SPDX-License-Identifier: Apache-2.0
"""Job completion times under different ways to share a fabric: event-driven, flow-level.

A job computes and communicates in turn. When it communicates, each of its GPUs sends one flow to
the next leaf of the job. A flow on a link of load L has 1/L of the link, and the slowest flow
sets the pace, so an iteration takes ``1 - share + share * L``. The load that a job sees is its own
flows, which are in step, plus those of each other job times that job's share, which are not.
Queueing is first come, first served. docs/slices.md lists the assumptions beside the numbers.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fabric_agent.slices import allocate, ocsvclos
from fabric_agent.slices.jobs import Job
from fabric_agent.slices.model import Fabric, Slice
from fabric_agent.slices.occupancy import (
    Occupancy,
    Placement,
    Reason,
    Refusal,
    occupancy,
    without,
)
from oncache.core.errors import ConfigError

Directed = tuple[bool, int, int]  # upwards; leaf, spine


class Policy(StrEnum):
    ECMP = "ecmp"  # any free GPUs; each flow hashed to an uplink
    SOURCE_ROUTING = "source_routing"  # any free GPUs; the uplink fixed by the NIC
    VCLOS = "vclos"
    OCS_VCLOS = "ocs_vclos"
    IDEAL = "ideal"  # any free GPUs; no contention


@dataclass
class Running:
    job: Job
    part: Slice
    remaining: float  # seconds of work without contention
    own: Counter[Directed] = field(default_factory=Counter)
    rate: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """Seconds per job in order of arrival. ``fragmented`` is the share of the time in which the
    first job in the queue had GPUs enough but no links, or GPUs in the wrong places."""

    completion: tuple[float, ...]
    queueing: tuple[float, ...]
    fragmented: float

    @property
    def mean(self) -> float:
        return sum(self.completion) / len(self.completion)

    def tail(self, share: float) -> float:
        """E.g. the 0.99 quantile of the completion time."""
        ordered = sorted(self.completion)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Simulation:
    """One run of one policy."""

    def __init__(self, fabric: Fabric, policy: Policy, jobs: Sequence[Job], seed: int) -> None:
        self._fabric = fabric
        self._policy = policy
        self._rng = random.Random(seed)
        self._queue = list(enumerate(jobs))
        self._all_links = occupancy(fabric)
        self._free = self._all_links
        self._running: dict[int, Running] = {}
        self._load: defaultdict[Directed, float] = defaultdict(float)
        self._completion = [0.0] * len(jobs)
        self._queueing = [0.0] * len(jobs)
        self._now = 0.0
        self._blocked: Reason | None = None
        self._fragmented = 0.0

    def run(self) -> Outcome:
        while self._queue or self._running:
            self._advance(self._next_event())
            for number in [n for n, each in self._running.items() if each.remaining <= 1e-6]:
                self._finish(number)
            self._start_what_fits()
            self._set_rates()
        return Outcome(
            tuple(self._completion),
            tuple(self._queueing),
            self._fragmented / self._now if self._now else 0.0,
        )

    def _next_event(self) -> float:
        ends = [self._now + each.remaining / each.rate for each in self._running.values()]
        if self._queue and self._queue[0][1].arrival > self._now:
            ends.append(self._queue[0][1].arrival)
        return min(ends, default=self._now)

    def _advance(self, until: float) -> None:
        passed = until - self._now
        for each in self._running.values():
            each.remaining -= passed * each.rate
        if self._blocked in (Reason.NO_LINKS, Reason.FRAGMENTATION):
            self._fragmented += passed
        self._now = until

    def _finish(self, number: int) -> None:
        done = self._running.pop(number)
        self._completion[number] = self._now - done.job.arrival
        self._weigh(done, -done.job.share)
        self._free = occupancy(self._fabric, (each.part for each in self._running.values()))

    def _start_what_fits(self) -> None:
        self._blocked = None
        while self._queue and self._queue[0][1].arrival <= self._now:
            number, job = self._queue[0]
            decision = self._decide(job.gpus)
            if isinstance(decision, Refusal):
                self._blocked = decision.reason
                if not self._running:
                    raise ConfigError(
                        f"job {number} of {job.gpus} GPUs never fits: {decision.detail}",
                        hint="simulate a larger fabric or smaller jobs",
                    )
                return
            del self._queue[0]
            self._start(number, job, decision)

    def _decide(self, gpus: int) -> Placement | Refusal:
        match self._policy:
            case Policy.VCLOS:
                return allocate.decide(self._fabric, self._free, gpus)
            case Policy.OCS_VCLOS:
                return ocsvclos.decide(self._fabric, self._free, gpus)
        links = self._all_links
        shared = Occupancy(self._free.nics, links.uplinks, links.columns, links.downlinks)
        return allocate.decide(self._fabric, shared, gpus)

    def _start(self, number: int, job: Job, placement: Placement) -> None:
        self._queueing[number] = self._now - job.arrival
        started = Running(job, placement.named(str(number), number + 1), job.seconds)
        self._running[number] = started
        self._free = without(self._fabric, self._free, placement)
        if self._policy in (Policy.ECMP, Policy.SOURCE_ROUTING):
            started.own = self._flows(started.part)
            self._weigh(started, job.share)

    def _flows(self, part: Slice) -> Counter[Directed]:
        """Each GPU to the next leaf of its job."""
        flows: Counter[Directed] = Counter()
        leaves = part.leaves(self._fabric)
        if len(leaves) < 2:
            return flows
        for leaf, target, group in zip(leaves, leaves[1:] + leaves[:1], part.nics, strict=True):
            uplinks = self._fabric.leaves[leaf].uplinks
            for nic in group:
                hashed = self._policy is Policy.ECMP
                choice = (
                    self._rng.randrange(len(uplinks))
                    if hashed
                    else self._fabric.nics[nic].position % len(uplinks)
                )
                spine = uplinks[choice].peer
                flows[True, leaf, spine] += 1
                flows[False, target, spine] += 1
        return flows

    def _weigh(self, each: Running, share: float) -> None:
        for link, count in each.own.items():
            self._load[link] += share * count

    def _set_rates(self) -> None:
        for each in self._running.values():
            if each.own:
                load, mine = self._load, 1 - each.job.share
                worst = max(load[link] + mine * count for link, count in each.own.items())
                each.rate = 1 / (1 - each.job.share + each.job.share * max(1.0, worst))
