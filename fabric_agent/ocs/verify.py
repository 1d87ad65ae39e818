# SPDX-License-Identifier: Apache-2.0
"""Checks a plan without knowing how it was made: from fibres and single circuits, by counting.

Nothing here is shared with the planners but the cabling list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fabric_agent.ocs.demand import Demand
from fabric_agent.ocs.plan import NO_CONSTRAINTS, Constraints, Plan
from fabric_agent.ocs.wiring import (
    CircuitError,
    Fabric,
    Layout,
    Port,
    cross,
    transceiver_pairs,
)


def verify(
    fabric: Fabric,
    lit: Layout,
    wanted: Demand,
    plan: Plan,
    constraints: Constraints = NO_CONSTRAINTS,
) -> list[str]:
    """What is wrong with a plan from `lit` to `wanted`, one sentence each; empty if nothing is."""
    cabling = cross(fabric)
    try:
        plan.target.require(fabric)
        reached = transceiver_pairs(
            cabling, (circuit for link in plan.target.links() for circuit in link.circuits)
        )
    except CircuitError as error:
        return [error.message]
    return [
        *_steps(lit, plan),
        *_counts(fabric, wanted, plan, reached, constraints),
        *_constraints(plan, reached, constraints),
    ]


def _steps(lit: Layout, plan: Plan) -> Iterator[str]:
    before, after = set(lit.links()), set(plan.target.links())
    if set(plan.removed) != before - after or len(set(plan.removed)) < len(plan.removed):
        yield "the links to tear down are not those that were lit and no longer are"
    if set(plan.added) != after - before or len(set(plan.added)) < len(plan.added):
        yield "the links to light are not those that are new"


def _counts(
    fabric: Fabric,
    wanted: Demand,
    plan: Plan,
    reached: dict[Port, Port],
    constraints: Constraints,
) -> Iterator[str]:
    """Every pair of pods has what it wants, less what the plan says it could not place."""
    lit = Counter((tx.spine, tx.pod, rx.pod) for tx, rx in reached.items())
    missing: Counter[tuple[int, int, int]] = Counter()
    for unplaced in plan.unplaced:
        for a, b in ((unplaced.a, unplaced.b), (unplaced.b, unplaced.a)):
            missing[unplaced.spine, a, b] += unplaced.links
    pinned = Counter(link.unit for link in constraints.pinned)
    for index, matrix in enumerate(wanted.wanted):
        for a in range(fabric.pods):
            for b in range(a):
                here, want = lit[index, a, b], matrix[a][b] - missing[index, a, b]
                extra = constraints.keep_surplus or here == pinned[b, a, index]
                if here < want or (here > want and not extra):
                    yield f"spine index {index}, pods {b} and {a}: {here} links, wanted {want}"


def _constraints(plan: Plan, reached: dict[Port, Port], constraints: Constraints) -> Iterator[str]:
    for port in sorted(constraints.failed & set(reached)):
        yield f"{port} has failed and is lit"
    kept = set(plan.target.links())
    for link in sorted(constraints.pinned - kept):
        yield f"{link} is protected and torn down"
