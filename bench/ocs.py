# SPDX-License-Identifier: Apache-2.0
"""Times the circuit planner and counts what it tears down, beside the paper's MDMCF.

    python -m bench.ocs [--seeds N] [--size PODSxINDICESxUPLINKS] [--ports PERCENT]

Per seed a fabric is lit at random up to the port use, then a tenth of its links is changed by
double-edge swaps, which keep the ports of every pod and spine as they were. One process, one core.
The bound is the undirected one: over spine indices and pod pairs, lit links beyond the wanted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from fabric_agent.ocs import mdmcf
from fabric_agent.ocs.demand import Demand
from fabric_agent.ocs.plan import Plan, plan
from fabric_agent.ocs.verify import verify
from fabric_agent.ocs.wiring import Fabric, Layout, Link

SIZES = ("32x16x64", "64x16x32")
PORT_USE = (87, 100)
CHANGED = 0.10


@dataclass(frozen=True)
class Case:
    """A lit fabric and what is wanted next."""

    fabric: Fabric
    lit: Layout
    wanted: Demand


def case(fabric: Fabric, port_use: float, seed: int) -> Case:
    """A random one; `port_use` is the most of a pod's ports per spine, before and after."""
    rng = random.Random(seed)
    links: list[Link] = []
    matrices = []
    for index in range(fabric.indices):
        ends = _lit(fabric, index, port_use, rng)
        links += ends
        matrices.append(_matrix(fabric.pods, _swapped([(k.a, k.b) for k in ends], rng)))
    return Case(fabric, Layout.of(fabric, links), Demand.of(matrices))


def _lit(fabric: Fabric, index: int, port_use: float, rng: random.Random) -> list[Link]:
    pods = range(fabric.pods)
    candidates = [
        Link(index, pair, a, b)
        for pair in range(fabric.pairs)
        for a, b in zip(pods, _derangement(fabric.pods, rng), strict=True)
    ]
    rng.shuffle(candidates)
    limit = int(port_use * 2 * fabric.pairs)
    used = [0] * fabric.pods
    lit = []
    for link in candidates:
        if used[link.a] < limit and used[link.b] < limit:
            lit.append(link)
            used[link.a] += 1
            used[link.b] += 1
    return lit


def _derangement(size: int, rng: random.Random) -> list[int]:
    while True:
        order = list(range(size))
        rng.shuffle(order)
        if all(i != j for i, j in enumerate(order)):
            return order


def _swapped(ends: list[tuple[int, int]], rng: random.Random) -> list[tuple[int, int]]:
    """a-b and c-d become a-d and c-b, each link at most once, until a tenth is changed."""
    changed: set[int] = set()
    while len(changed) < int(CHANGED * len(ends)):
        x, y = rng.sample(range(len(ends)), 2)
        (a, b), (c, d) = ends[x], ends[y] if rng.random() < 0.5 else ends[y][::-1]
        if changed & {x, y} or a == d or c == b:
            continue
        ends[x], ends[y] = (a, d), (c, b)
        changed |= {x, y}
    return ends


def _matrix(pods: int, ends: list[tuple[int, int]]) -> list[list[int]]:
    matrix = [[0] * pods for _ in range(pods)]
    for a, b in ends:
        matrix[a][b] += 1
        matrix[b][a] += 1
    return matrix


Planner = Callable[[Fabric, Layout, Demand], Plan]


@dataclass(frozen=True)
class Measured:
    """A plan, and what it took: on the clock, and of the core (others may share it)."""

    plan: Plan
    seconds: float
    cpu_seconds: float


def measured(planner: Planner, case: Case) -> Measured:
    """Make a plan, which must meet the demand by an independent check."""
    started, cpu = time.perf_counter(), time.process_time()
    made = planner(case.fabric, case.lit, case.wanted)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    wrong = verify(case.fabric, case.lit, case.wanted, made)
    if wrong or made.unplaced:
        raise SystemExit(f"error: not a valid plan: {[*wrong, *made.unplaced][:3]}")
    return Measured(made, seconds, cpu)


def measure(fabric: Fabric, port_use: float, seeds: int) -> dict[str, object]:
    """All seeds of one size and port use."""
    cases = [case(fabric, port_use, seed) for seed in range(seeds)]
    ours = [measured(plan, one) for one in cases]
    theirs = [measured(mdmcf.plan, one) for one in cases]
    bound = sum(each.plan.bound for each in ours)
    return {
        "size": f"{fabric.pods}x{fabric.indices}x{fabric.uplinks}",
        "ports": port_use,
        "seeds": seeds,
        "seconds": round(max(each.seconds for each in ours), 3),
        "cpu_seconds": round(max(each.cpu_seconds for each in ours), 3),
        "torn_over_bound": round(sum(len(each.plan.removed) for each in ours) / bound, 3),
        "mdmcf_seconds": round(max(each.seconds for each in theirs), 3),
        "mdmcf_torn_over_bound": round(sum(len(each.plan.removed) for each in theirs) / bound, 3),
    }


def main(argv: list[str] | None = None) -> int:
    """One JSON object per size and port use; seconds are the slowest seed's."""
    parser = argparse.ArgumentParser(description="Benchmark of the circuit planner.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--size", action="append", metavar="PxHxK", help=f"default {SIZES}")
    parser.add_argument("--ports", action="append", type=int, metavar="PERCENT")
    args = parser.parse_args(argv)
    for size in args.size or SIZES:
        for percent in args.ports or PORT_USE:
            fabric = Fabric(*map(int, size.split("x")))
            print(json.dumps(measure(fabric, percent / 100, args.seeds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
