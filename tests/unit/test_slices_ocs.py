# SPDX-License-Identifier: Apache-2.0
"""Slices with optical switches between leaves and spines."""

from __future__ import annotations

import random

from fabric_agent.slices import ocsvclos
from fabric_agent.slices.invariants import violations
from fabric_agent.slices.model import Fabric, Link, Slice
from fabric_agent.slices.occupancy import Placement, Reason, Refusal, occupancy
from fabric_agent.slices.table import Table, apply
from tests.unit.slices_fabrics import optical

FABRIC = optical()  # 8 leaves x 8 GPUs, 8 spines x 8 ports, 8 optical switches


def placed(fabric: Fabric, gpus: int, *slices: Slice) -> Placement:
    decision = ocsvclos.decide(fabric, occupancy(fabric, slices), gpus)
    assert isinstance(decision, Placement), decision
    return decision


def test_the_whole_fabric_is_wired() -> None:
    part = placed(FABRIC, 64).named("all", 1)
    assert len(part.all_links) == 64
    assert not list(violations(FABRIC, [part]))


def test_an_idle_circuit_is_used_as_it_is() -> None:
    lit = [Link(0, 5, 0, 5), Link(1, 2, 0, 2)]
    decision = ocsvclos.decide(FABRIC, occupancy(FABRIC), 16, lit=lit)
    assert isinstance(decision, Placement)
    assert {*lit} <= {link for row in decision.links for link in row}


def test_running_circuits_stay_unless_allowed() -> None:
    rng = random.Random(3)
    moved = 0
    for _ in range(40):
        live: list[Slice] = []
        fabric = optical(leaves=6, size=6, spines=6)
        for number in range(1, 30):
            gpus = rng.choice((2, 4, 6, 8, 9, 12))
            free = occupancy(fabric, live)
            decision = ocsvclos.decide(fabric, free, gpus)
            if isinstance(decision, Refusal) and decision.reason is Reason.FRAGMENTATION:
                moved += moves_what_it_says(fabric, live, gpus)
            if isinstance(decision, Placement):
                assert not decision.moved
                live.append(decision.named(str(number), number))
            elif live:
                live.pop(rng.randrange(len(live)))
    assert moved


def moves_what_it_says(fabric: Fabric, live: list[Slice], gpus: int) -> int:
    table = Table(tuple(live), last=1000)
    decision = ocsvclos.decide(fabric, occupancy(fabric, live), gpus, movable=live)
    if isinstance(decision, Refusal):
        return 0
    after, answer = apply(
        fabric, table, "k", {"verb": "request", "name": "new", "gpus": gpus, "move": True}
    )
    assert not list(violations(fabric, after.slices))
    before = {link for part in live for link in part.all_links}
    kept = {link for part in after.slices[:-1] for link in part.all_links}
    assert len(before - kept) == len(answer["moved"]) == len(decision.moved)
    for old, new in decision.moved:
        assert (old.leaf, old.spine) == (new.leaf, new.spine)
        assert old.uplink != new.uplink
    return 1


def test_refusals_say_why() -> None:
    full = placed(FABRIC, 64).named("all", 1)
    decision = ocsvclos.decide(FABRIC, occupancy(FABRIC, [full]), 2)
    assert isinstance(decision, Refusal)
    assert decision.reason is Reason.NO_GPUS
