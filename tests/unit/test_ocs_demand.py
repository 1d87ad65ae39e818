# SPDX-License-Identifier: Apache-2.0
"""From jobs to links per spine index."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_agent.ocs.demand import (
    Clos,
    DemandError,
    Job,
    Leaf,
    leaf_demand,
    logical_topology,
    shifted_destination,
    split_over_spines,
)
from fabric_agent.ocs.wiring import Fabric

A, B, C = Leaf(0, 0), Leaf(1, 0), Leaf(2, 0)
Pairs = Counter[tuple[Leaf, Leaf]]


@st.composite
def wanted(draw: st.DrawFn, parallel: int) -> tuple[Pairs, int]:
    """A demand in which no leaf has more links than uplinks, and the number of spines."""
    spines = draw(st.integers(1, 4))
    leaves = [Leaf(pod, 0) for pod in range(draw(st.integers(2, 6)))]
    left = dict.fromkeys(leaves, spines * parallel)
    pairs: Pairs = Counter()
    for number, one in enumerate(leaves):
        for other in leaves[number + 1 :]:
            links = draw(st.integers(0, min(left[one], left[other])))
            pairs[one, other] = links
            left[one] -= links
            left[other] -= links
    return +pairs, spines


def loads(part: Pairs) -> Counter[Leaf]:
    load: Counter[Leaf] = Counter()
    for (one, other), links in part.items():
        load[one] += links
        load[other] += links
    return load


@settings(deadline=None)
@given(st.sampled_from((2, 4)).flatmap(lambda p: st.tuples(st.just(p), wanted(p))))
def test_even_parallel_links_carry_everything(drawn: tuple[int, tuple[Pairs, int]]) -> None:
    parallel, (pairs, spines) = drawn
    parts, rest = split_over_spines(pairs, spines, parallel)
    assert not rest
    assert sum(parts, Counter()) == pairs
    assert all(max(loads(part).values(), default=0) <= parallel for part in parts)


@settings(deadline=None)
@given(st.sampled_from((1, 3)).flatmap(lambda p: st.tuples(st.just(p), wanted(p))))
def test_odd_parallel_links_overload_nobody_and_name_the_rest(
    drawn: tuple[int, tuple[Pairs, int]],
) -> None:
    parallel, (pairs, spines) = drawn
    parts, rest = split_over_spines(pairs, spines, parallel)
    assert sum(parts, rest) == pairs
    assert all(max(loads(part).values(), default=0) <= parallel for part in parts)


@pytest.mark.parametrize(("parallel", "placed", "of"), [(3, 8, 9), (5, 14, 15)])
def test_three_leaves_and_an_odd_number(parallel: int, placed: int, of: int) -> None:
    pairs: Pairs = Counter(dict.fromkeys(((A, B), (A, C), (B, C)), parallel))
    parts, rest = split_over_spines(pairs, 2, parallel)
    assert (sum(map(sum, (part.values() for part in parts))), pairs.total()) == (placed, of)
    assert rest.total() == of - placed


def test_a_job_asks_for_pipeline_ring_and_experts() -> None:
    job = Job("llm", ((A, B), (B, C)), tensor=8, experts=2)
    assert leaf_demand(job) == {(A, B): 8 + 4 + 1, (B, C): 8 + 4 + 1}


def test_a_ring_of_three_closes() -> None:
    assert leaf_demand(Job("ring", ((A, B, C),), tensor=2)) == {
        (A, B): 1,
        (B, C): 1,
        (A, C): 1,
    }


def test_inside_a_pod_nothing_is_asked() -> None:
    assert not leaf_demand(Job("small", ((Leaf(0, 0), Leaf(0, 1)),)))


@pytest.mark.parametrize(("pods", "gpus"), [(4, 4), (5, 3), (8, 8)])
def test_the_shifted_all_to_all_loads_a_pod_pair_once(pods: int, gpus: int) -> None:
    for phase in range(1, pods * gpus + 1):
        flows = Counter(
            (pod, shifted_destination(pod, gpu, phase, pods=pods, gpus=gpus)[0])
            for pod in range(pods)
            for gpu in range(gpus)
        )
        assert max(flows.values()) == 1


def test_too_much_is_trimmed_and_named() -> None:
    clos = Clos(Fabric(3, 2, 4), leaves=2, parallel=2)
    split = logical_topology(clos, [Job("big", ((A, B), (C, C)), tensor=8)])
    split.demand.require(clos.fabric)
    assert any(each.reason.startswith("more links wanted") for each in split.missing)
    missing = sum(each.links for each in split.missing)
    placed = sum(part.total() for part in map(Counter, split.by_leaf))
    assert placed + missing == leaf_demand(Job("big", ((A, B), (C, C)))).total()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Job("j", ((A, B), (A,))), r"stages of \[1, 2\] replicas"),
        (lambda: Job("j", ((A, B, C),), experts=2), "do not divide"),
        (lambda: Clos(Fabric(2, 1, 2), 2, 2), "exceed 2 uplinks"),
        (
            lambda: logical_topology(Clos(Fabric(2, 1, 4), 1, 2), [Job("j", ((C, A),))]),
            "no leaf 0 in pod 2",
        ),
    ],
)
def test_impossible_jobs_are_named(make: object, complaint: str) -> None:
    with pytest.raises(DemandError, match=complaint):
        make()  # type: ignore[operator]
