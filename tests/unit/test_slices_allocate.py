# SPDX-License-Identifier: Apache-2.0
"""Placement: the stages, the invariants, and the exact solver's verdict."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_agent.slices import ocsvclos
from fabric_agent.slices.allocate import decide
from fabric_agent.slices.invariants import InvariantError, require, violations
from fabric_agent.slices.model import Fabric, Link, Slice
from fabric_agent.slices.occupancy import Placement, Reason, Refusal, occupancy, without
from oncache.core.errors import ConfigError
from tests.unit.slices_fabrics import cabled, optical

FABRIC = cabled()  # 4 leaves, 4 spines, 4 GPUs a leaf in servers of 2
LARGE = cabled(leaves=8, spines=8, hosts=16, nics=4)


def placed(fabric: Fabric, gpus: int, *slices: Slice) -> Slice:
    decision = decide(fabric, occupancy(fabric, slices), gpus)
    assert isinstance(decision, Placement), decision
    return decision.named(f"s{len(slices)}", len(slices) + 1)


def refused(fabric: Fabric, gpus: int, *slices: Slice) -> Refusal:
    decision = decide(fabric, occupancy(fabric, slices), gpus)
    assert isinstance(decision, Refusal), decision
    return decision


def test_one_server_takes_no_link() -> None:
    part = placed(FABRIC, 2)
    assert len({FABRIC.nics[nic].host for nic in part.ranks}) == 1
    assert not part.links


def test_one_leaf_is_the_fullest_with_room() -> None:
    first = placed(FABRIC, 1)
    second = placed(FABRIC, 3, first)
    assert second.leaves(FABRIC) == first.leaves(FABRIC)
    assert not second.links


def test_whole_leaves_come_first() -> None:
    part = placed(FABRIC, 8)
    assert [len(group) for group in part.nics] == [4, 4]
    assert (part.width, len(part.all_links)) == (4, 8)


def test_a_shape_that_is_no_power_of_two() -> None:
    part = placed(LARGE, 18)
    assert sorted(len(group) for group in part.nics) == [6, 6, 6]
    assert part.width == 6


def test_a_prime_is_uneven_and_still_complete() -> None:
    part = placed(LARGE, 13)
    assert sum(len(group) for group in part.nics) == 13
    assert all(len(row) == part.width for row in part.links)
    assert part.width == max(len(group) for group in part.nics)


def test_parallel_links_carry_a_slice_each() -> None:
    fabric = cabled(leaves=2, spines=1, hosts=4, nics=2, parallel=4)
    part = placed(fabric, 8)
    assert len({link.uplink for link in part.links[0]}) == 4
    assert not list(violations(fabric, [part]))


def test_refusals_say_why() -> None:
    assert refused(FABRIC, 17).reason is Reason.TOO_LARGE
    full = placed(FABRIC, 16)
    assert refused(FABRIC, 1, full).reason is Reason.NO_GPUS
    no_links = replace(FABRIC, failed=frozenset(f"spine{n}" for n in range(4)))
    assert refused(no_links, 8).reason is Reason.NO_LINKS
    scattered = replace(
        cabled(leaves=2, spines=4, hosts=4, nics=2),
        failed=frozenset({"leaf0:up0", "leaf0:up1", "leaf1:up2", "leaf1:up3"}),
    )
    assert refused(scattered, 5).reason is Reason.NO_LINKS
    crossed = replace(
        cabled(leaves=2, spines=8, hosts=4, nics=2),
        failed=frozenset(
            {*(f"leaf0:up{n}" for n in range(4)), *(f"leaf1:up{n}" for n in (4, 5, 6, 7))}
        ),
    )
    assert refused(crossed, 8).reason is Reason.FRAGMENTATION


@pytest.mark.parametrize("gpus", [0, -3])
def test_a_request_that_is_none(gpus: int) -> None:
    with pytest.raises(ConfigError):
        decide(FABRIC, occupancy(FABRIC), gpus)


fabrics = st.builds(
    cabled,
    leaves=st.integers(2, 6),
    spines=st.integers(1, 6),
    hosts=st.just(60),
    nics=st.integers(1, 2),
    parallel=st.integers(1, 3),
)
# A positive number asks for so many GPUs, a negative one gives one of the slices back.
requests = st.lists(st.integers(-4, 40).filter(bool), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.one_of(fabrics, st.builds(optical, per_spine=st.integers(1, 2))), requests, st.randoms())
def test_invariants_hold_and_release_restores(
    fabric: Fabric, sequence: list[int], rng: random.Random
) -> None:
    choose = ocsvclos.decide if fabric.optics else decide
    live: list[Slice] = []
    free = occupancy(fabric)
    for number, gpus in enumerate(sequence, 1):
        if gpus < 0 and live:
            live.pop(rng.randrange(len(live)))
            free = occupancy(fabric, live)
        elif gpus > 0:
            decision = choose(fabric, free, gpus)
            if isinstance(decision, Placement):
                live.append(decision.named(str(number), number))
                free = without(fabric, free, decision)
                assert len(live[-1].ranks) == gpus
        assert free == occupancy(fabric, live)
        assert not list(violations(fabric, live))
    assert occupancy(fabric, ()) == occupancy(fabric)


def test_a_decision_is_the_same_every_time() -> None:
    free = occupancy(LARGE, [placed(LARGE, 6)])
    assert decide(LARGE, free, 24) == decide(LARGE, free, 24)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_what_the_exact_solver_places_is_placed(seed: int) -> None:
    pytest.importorskip("ortools")
    from bench.slices import placed as found
    from bench.slices import possible, random_state

    state = random_state(10, 8, random.Random(seed))
    assert found(state) == possible(state)


def broken_slices() -> dict[str, Slice]:
    part = placed(FABRIC, 8)
    (first, *rest), other = part.links
    return {
        "incomplete": replace(part, links=(tuple(rest), other)),
        "does not exist": replace(part, links=((Link(0, 0, 3, 0), *rest), other)),
        "several spines": replace(part, links=((*rest, first), other)),
        "a leaf is listed twice": replace(part, nics=(part.nics[0], part.nics[0])),
        "another leaf": replace(part, nics=((*part.nics[0][:3], part.nics[1][0]), part.nics[1])),
        "no links between": replace(part, links=()),
        "no GPUs": replace(part, nics=()),
        "has not": replace(part, nics=((999,),)),
    }


@pytest.mark.parametrize("words", broken_slices())
def test_a_violation_is_named(words: str) -> None:
    with pytest.raises(InvariantError, match="s0"):
        require(FABRIC, [broken_slices()[words]])
    assert any(words in wrong for wrong in violations(FABRIC, [broken_slices()[words]]))


def test_a_link_has_one_owner() -> None:
    part = placed(FABRIC, 8)
    twice = replace(part, name="twin", number=2)
    wrong = list(violations(FABRIC, [part, twice]))
    assert any("uplink 0 of leaf 0 belongs to s0" in each for each in wrong)
    assert any("host0:eth0 belongs to s0" in each for each in wrong)
