# SPDX-License-Identifier: Apache-2.0
"""Circuit plans: the theorems, the planner and its baseline, and what the verifier sees."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.ocs import case
from bench.ocs_realise import random_demand, uniform_three_pods
from fabric_agent.ocs import mdmcf
from fabric_agent.ocs.decompose import colour, decompose
from fabric_agent.ocs.demand import Demand, DemandError
from fabric_agent.ocs.plan import Constraints, Plan, plan
from fabric_agent.ocs.verify import verify
from fabric_agent.ocs.wiring import CircuitError, Fabric, Layout, Link, Port

SMALL = Fabric(4, 1, 4)
Matrix = list[list[int]]


@st.composite
def symmetric(draw: st.DrawFn) -> Matrix:
    size = draw(st.integers(2, 9))
    matrix = [[0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i):
            matrix[i][j] = matrix[j][i] = draw(st.integers(0, 5))
    return matrix


@st.composite
def fabrics(draw: st.DrawFn) -> tuple[Fabric, random.Random]:
    fabric = Fabric(
        draw(st.integers(2, 10)), draw(st.integers(1, 2)), draw(st.sampled_from((2, 4, 6, 8)))
    )
    return fabric, random.Random(draw(st.integers(0, 1 << 30)))


def lit_at_random(fabric: Fabric, rng: random.Random) -> Layout:
    return plan(fabric, Layout.dark(fabric), random_demand(fabric, rng)).target


def demand(*links: tuple[int, int, int], fabric: Fabric = SMALL) -> Demand:
    matrix = [[0] * fabric.pods for _ in range(fabric.pods)]
    for a, b, count in links:
        matrix[a][b] = matrix[b][a] = count
    return Demand.of([matrix])


@settings(deadline=None)
@given(symmetric())
def test_a_symmetric_matrix_is_a_sum_of_both_directions(matrix: Matrix) -> None:
    half = decompose(matrix)
    for i, row in enumerate(matrix):
        assert [half[i][j] + half[j][i] for j in range(len(row))] == row
        for direction in (half[i], [other[i] for other in half]):
            assert sum(direction) in (sum(row) // 2, -(-sum(row) // 2))


@settings(deadline=None)
@given(symmetric())
def test_colours_meet_at_no_row_or_column(matrix: Matrix) -> None:
    edges = [(i, j) for i, row in enumerate(matrix) for j, n in enumerate(row) for _ in range(n)]
    most = max(map(sum, matrix))
    chosen = colour(edges, len(matrix), len(matrix), most)
    assert len({(i, shade) for (i, _), shade in zip(edges, chosen, strict=True)}) == len(edges)
    assert len({(j, shade) for (_, j), shade in zip(edges, chosen, strict=True)}) == len(edges)
    assert all(0 <= shade < most for shade in chosen)


@settings(deadline=None)
@given(fabrics())
def test_every_demand_within_the_ports_is_met(drawn: tuple[Fabric, random.Random]) -> None:
    fabric, rng = drawn
    lit, wanted = lit_at_random(fabric, rng), random_demand(fabric, rng)
    made = plan(fabric, lit, wanted)
    assert not made.unplaced
    assert not verify(fabric, lit, wanted, made)
    assert len(made.removed) >= made.bound


@settings(deadline=None)
@given(fabrics())
def test_the_baseline_meets_it_too(drawn: tuple[Fabric, random.Random]) -> None:
    fabric, rng = drawn
    lit, wanted = lit_at_random(fabric, rng), random_demand(fabric, rng)
    made = mdmcf.plan(fabric, lit, wanted)
    assert not verify(fabric, lit, wanted, made)
    assert made.bound == plan(fabric, lit, wanted).bound


@settings(deadline=None)
@given(fabrics())
def test_nothing_moves_when_nothing_is_wanted_anew(drawn: tuple[Fabric, random.Random]) -> None:
    fabric, rng = drawn
    wanted = random_demand(fabric, rng)
    lit = plan(fabric, Layout.dark(fabric), wanted).target
    assert plan(fabric, lit, wanted).removed == ()


@settings(deadline=None)
@given(fabrics())
def test_failed_ports_and_pinned_links_are_respected(
    drawn: tuple[Fabric, random.Random],
) -> None:
    fabric, rng = drawn
    lit, wanted = lit_at_random(fabric, rng), random_demand(fabric, rng)
    links = list(lit.links())
    pinned = frozenset(rng.sample(links, len(links) // 4))
    used = {port for link in pinned for port in link.ends}
    ports = [
        Port(pod, spine, uplink)
        for pod in range(fabric.pods)
        for spine in range(fabric.indices)
        for uplink in range(fabric.uplinks)
    ]
    failed = frozenset(rng.sample(ports, 2)) - used
    constraints = Constraints(failed=failed, pinned=pinned)
    made = plan(fabric, lit, wanted, constraints)
    assert not verify(fabric, lit, wanted, made, constraints)
    assert all(each.links > 0 and each.reason for each in made.unplaced)


def test_an_unrealisable_link_is_named() -> None:
    failed = frozenset(Port(0, 0, uplink) for uplink in range(4))
    wanted = demand((0, 1, 1), (2, 3, 4))
    made = plan(SMALL, Layout.dark(SMALL), wanted, Constraints(failed=failed))
    assert [each[:4] for each in made.unplaced] == [(0, 1, 0, 1)]
    assert "pod 0 has no usable port" in made.unplaced[0].reason


def test_two_even_ports_make_no_link() -> None:
    failed = frozenset(Port(pod, 0, uplink) for pod in (0, 1) for uplink in (1, 3))
    made = plan(SMALL, Layout.dark(SMALL), demand((0, 1, 1)), Constraints(failed=failed))
    assert "no orientation" in made.unplaced[0].reason


def test_the_odd_port_out_stays_dark() -> None:
    fabric = Fabric(2, 1, 3)
    made = plan(fabric, Layout.dark(fabric), demand((0, 1, 3), fabric=fabric))
    assert len(made.added) == 2
    assert made.unplaced[0].links == 1


def test_a_dear_link_is_spared() -> None:
    dear, cheap = Link(0, 0, 0, 1), Link(0, 1, 0, 1)
    lit = Layout.of(SMALL, [dear, cheap])
    made = plan(SMALL, lit, demand((0, 1, 1)), Constraints(weights={dear: 10}))
    assert made.removed == (cheap,)


def test_surplus_stays_while_nobody_needs_its_ports() -> None:
    surplus = [Link(0, 0, 0, 1), Link(0, 1, 0, 1)]
    lit = Layout.of(SMALL, surplus)
    wanted = demand((0, 2, 3))
    made = plan(SMALL, lit, wanted, Constraints(keep_surplus=True))
    assert len(made.removed) == 1
    assert not verify(SMALL, lit, wanted, made, Constraints(keep_surplus=True))


@pytest.mark.parametrize(
    ("matrix", "complaint"),
    [
        ([[0, 1], [0, 0]], "1 links from 0 to 1, but 0 back"),
        ([[1, 0], [0, 0]], "1 links from 0 to 0"),
        ([[0, -1], [-1, 0]], "-1 links"),
        ([[0, 3], [3, 0]], "3 links wanted, 2 ports"),
        ([[0]], "not 2 by 2"),
    ],
)
def test_an_impossible_demand_is_named(matrix: Matrix, complaint: str) -> None:
    fabric = Fabric(2, 1, 2)
    with pytest.raises(DemandError, match=complaint):
        plan(fabric, Layout.dark(fabric), Demand.of([matrix]))


def test_a_pinned_link_must_be_lit() -> None:
    with pytest.raises(CircuitError, match="protected but not lit"):
        plan(
            SMALL,
            Layout.dark(SMALL),
            demand(),
            Constraints(pinned=frozenset({Link(0, 0, 0, 1)})),
        )


def tampered(made: Plan, links: list[Link]) -> Plan:
    return replace(made, target=Layout.of(SMALL, links))


def test_the_verifier_sees_a_wrong_plan() -> None:
    lit, wanted = Layout.of(SMALL, [Link(0, 0, 0, 1)]), demand((0, 1, 1), (2, 3, 1))
    made = plan(SMALL, lit, wanted)
    assert not verify(SMALL, lit, wanted, made)
    missing = tampered(made, [Link(0, 0, 0, 1)])
    assert any("0 links, wanted 1" in line for line in verify(SMALL, lit, wanted, missing))
    moved = tampered(made, [Link(0, 1, 0, 1), Link(0, 0, 2, 3)])
    assert any("tear down" in line for line in verify(SMALL, lit, wanted, moved))
    constraints = Constraints(failed=frozenset({Port(0, 0, 0)}))
    assert any("has failed" in line for line in verify(SMALL, lit, wanted, made, constraints))


@pytest.mark.parametrize(("port_use", "limit"), [(0.87, 1.10), (1.0, 2.2)])
def test_few_links_are_torn_down(port_use: float, limit: float) -> None:
    one = case(Fabric(24, 1, 32), port_use, seed=1)
    made = plan(one.fabric, one.lit, one.wanted)
    baseline = mdmcf.plan(one.fabric, one.lit, one.wanted)
    assert len(made.removed) <= limit * made.bound
    assert len(made.removed) < len(baseline.removed)


def test_uniform_wiring_reaches_two_thirds() -> None:
    assert uniform_three_pods() == pytest.approx(2 / 3)
    three = Fabric(3, 1, 6)
    wanted = demand((0, 1, 3), (0, 2, 3), (1, 2, 3), fabric=three)
    assert not plan(three, Layout.dark(three), wanted).unplaced
