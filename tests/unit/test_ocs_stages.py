# SPDX-License-Identifier: Apache-2.0
"""The order of moves: make before break, floors, protection, limits, and darkness on the clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.ocs_realise import random_demand
from fabric_agent.ocs.plan import Constraints, Plan, differences, plan
from fabric_agent.ocs.stages import (
    Policy,
    Staged,
    StageError,
    Transport,
    check,
    dry_run,
    sequence,
)
from fabric_agent.ocs.wiring import Fabric, Layout, Link

FABRIC = Fabric(4, 1, 4)
NO_FLOOR = Policy(floor=0.0)


def moves(before: list[Link], after: list[Link], fabric: Fabric = FABRIC) -> Plan:
    lit, target = Layout.of(fabric, before), Layout.of(fabric, after)
    return Plan(lit, target, *differences(lit, target), (), 0)


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(3, 8), st.sampled_from((2, 8)))
def test_any_plan_is_ordered_within_its_limits(seed: int, pods: int, limit: int) -> None:
    rng = random.Random(seed)
    fabric = Fabric(pods, 2, 6)
    lit = plan(fabric, Layout.dark(fabric), random_demand(fabric, rng)).target
    made = plan(fabric, lit, random_demand(fabric, rng))
    policy = replace(NO_FLOOR, moves_per_stage=limit)
    assert not check(fabric, sequence(fabric, made, policy), policy)


def test_dark_ports_come_first() -> None:
    """A link that moves to dark ports is lit there before it is torn down here."""
    staged = sequence(FABRIC, moves([Link(0, 0, 0, 1)], [Link(0, 1, 0, 1)]), Policy(floor=1.0))
    assert [(len(s.remove), len(s.add), s.dark) for s in staged.stages] == [(0, 1, 0), (1, 0, 0)]
    assert not dry_run(staged, {}).dark_units


def swap() -> Plan:
    """Two links exchange their ports: nothing can be lit before something is broken."""
    return moves(
        [Link(0, 0, 0, 1), Link(0, 1, 1, 0), Link(0, 0, 1, 0), Link(0, 1, 2, 3)],
        [Link(0, 0, 2, 3), Link(0, 1, 1, 0), Link(0, 0, 1, 0), Link(0, 1, 0, 1)],
    )


def test_a_cycle_parks_on_dark_ports() -> None:
    """0-1 and 2-3 change places; pair 0 still has dark ports for a second 2-3."""
    before = [Link(0, 0, 0, 1), Link(0, 1, 0, 2)]
    after = [Link(0, 0, 0, 2), Link(0, 1, 0, 1)]
    staged = sequence(FABRIC, moves(before, after), Policy(floor=1.0))
    assert not check(FABRIC, staged, Policy(floor=1.0))
    assert not dry_run(staged, {}).dark_pairs


def test_without_dark_ports_the_floor_forbids_a_cycle() -> None:
    two = Fabric(3, 1, 2)
    before = [Link(0, 0, 0, 1), Link(0, 0, 1, 2), Link(0, 0, 2, 0)]
    after = [Link(0, 0, 1, 0), Link(0, 0, 2, 1), Link(0, 0, 0, 2)]
    turned = moves(before, after, two)
    with pytest.raises(StageError, match="no next move keeps every pod pair at its floor"):
        sequence(two, turned, Policy(floor=1.0))
    staged = sequence(two, turned, NO_FLOOR)
    assert not check(two, staged, NO_FLOOR)
    assert sum(stage.dark for stage in staged.stages) >= 1
    assert dry_run(staged, {}).dark_units


def test_a_protected_link_is_not_cut() -> None:
    link = Link(0, 0, 0, 1)
    with pytest.raises(StageError, match="protected"):
        sequence(FABRIC, moves([link], []), Policy(protected=frozenset({link})))


def test_the_rate_spreads_the_stages() -> None:
    before = [Link(0, 0, a, b) for a, b in ((0, 1), (1, 2), (2, 3), (3, 0))]
    slow = replace(NO_FLOOR, moves_per_stage=2, moves_per_hour=2.0, settle=1.0)
    staged = sequence(FABRIC, moves(before, []), slow)
    assert [stage.starts for stage in staged.stages] == [0.0, 1800.0, 3600.0, 5400.0]


def test_weights_decide_what_breaks() -> None:
    two = Fabric(3, 1, 2)
    before = [Link(0, 0, 0, 1), Link(0, 0, 1, 2), Link(0, 0, 2, 0)]
    after = [Link(0, 0, 1, 0), Link(0, 0, 2, 1), Link(0, 0, 0, 2)]
    policy = replace(NO_FLOOR, weights={before[0]: 10})
    first = next(s for s in sequence(two, moves(before, after, two), policy).stages if s.remove)
    assert before[0] not in first.remove


@pytest.mark.parametrize("bad", [{"floor": 1.5}, {"moves_per_stage": 1}, {"moves_per_hour": 0.0}])
def test_senseless_limits_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(StageError, match="make no sense"):
        Policy(**bad)  # type: ignore[arg-type]


def turned_ring() -> Staged:
    two = Fabric(3, 1, 2)
    before = [Link(0, 0, 0, 1), Link(0, 0, 1, 2), Link(0, 0, 2, 0)]
    after = [Link(0, 0, 1, 0), Link(0, 0, 2, 1), Link(0, 0, 0, 2)]
    return sequence(two, moves(before, after, two), replace(NO_FLOOR, settle=5.0))


def test_too_long_a_darkness_is_refused() -> None:
    dry = dry_run(turned_ring(), {"llm": frozenset({(0, 1)}), "other": frozenset({(1, 3)})})
    assert dry.jobs == ("llm",)
    assert max(dry.dark_units.values()) >= 5.0
    dry.require(Transport(timeout=20), drained=False)
    with pytest.raises(StageError, match=r"connections give up after 0\.54 s"):
        dry.require(Transport(timeout=14), drained=True)


def test_drained_hosts_mind_only_the_last_way() -> None:
    fabric = Fabric(3, 2, 2)
    ring = [Link(0, 0, 0, 1), Link(0, 0, 1, 2), Link(0, 0, 2, 0)]
    back = [Link(0, 0, 1, 0), Link(0, 0, 2, 1), Link(0, 0, 0, 2)]
    beside = [Link(1, 0, 0, 1), Link(1, 0, 1, 2), Link(1, 0, 2, 0)]
    made = moves(ring + beside, back + beside, fabric)
    dry = dry_run(sequence(fabric, made, Policy(floor=0.5, settle=5.0)), {})
    dry.require(Transport(timeout=14), drained=True)
    with pytest.raises(StageError, match="would be dark"):
        dry.require(Transport(timeout=14), drained=False)


def test_the_check_sees_a_wrong_order() -> None:
    staged = sequence(FABRIC, swap(), NO_FLOOR)
    assert not check(FABRIC, staged, NO_FLOOR)
    cut = replace(staged, stages=staged.stages[:-1])
    assert "the stages do not end where the plan does" in check(FABRIC, cut, NO_FLOOR)
    twice = replace(staged, stages=staged.stages + staged.stages[-1:])
    assert check(FABRIC, twice, NO_FLOOR)


def test_pinned_links_are_never_touched() -> None:
    rng = random.Random(3)
    fabric = Fabric(6, 1, 6)
    lit = plan(fabric, Layout.dark(fabric), random_demand(fabric, rng)).target
    pinned = frozenset(list(lit.links())[:5])
    made = plan(fabric, lit, random_demand(fabric, rng), Constraints(pinned=pinned))
    policy = replace(NO_FLOOR, protected=pinned)
    assert not check(fabric, sequence(fabric, made, policy), policy)
