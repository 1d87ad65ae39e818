# SPDX-License-Identifier: Apache-2.0
"""Contention-free is computed: link loads under patterns, on backups, and what spoils them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_agent.slices import patterns
from fabric_agent.slices.allocate import decide
from fabric_agent.slices.check import MOST_PHASES, check, contended, total
from fabric_agent.slices.elements import Broken
from fabric_agent.slices.hosts import job_document, rank_file
from fabric_agent.slices.invariants import violations
from fabric_agent.slices.model import Fabric, Slice
from fabric_agent.slices.occupancy import Placement, occupancy
from fabric_agent.slices.repair import Outcome, repair
from oncache.core.errors import ConfigError
from tests.unit.slices_fabrics import cabled, optical

FABRIC = cabled(leaves=4, spines=4, hosts=16, nics=1)  # 4 GPUs a leaf, each its own server
PROMISED = ("ring", "rail-ring", "halving-doubling", "all-to-all", "pipeline")


def whole(fabric: Fabric, gpus: int, name: str = "job") -> Slice:
    decision = decide(fabric, occupancy(fabric), gpus)
    assert isinstance(decision, Placement)
    return decision.named(name, 1)


@pytest.mark.parametrize("gpus", [8, 16])
@pytest.mark.parametrize("name", PROMISED)
def test_what_is_promised_holds(name: str, gpus: int) -> None:
    part = whole(FABRIC, gpus)
    report = check(FABRIC, part, patterns.named(name, part))
    assert report.contention_free, report.remarks
    assert report.worst == 1


def test_incast_is_named() -> None:
    part = whole(FABRIC, 16)
    report = check(FABRIC, part, patterns.named("incast", part))
    assert not report.contention_free
    assert "incast: rank 0 receives 15 flows at a time" in report.remarks


def test_unequal_local_order_is_named() -> None:
    part = whole(FABRIC, 12)
    # Number 0 of leaves 0 and 1 both send to leaf 2: they meet on the way down.
    swap = list(range(12))
    swap[0], swap[8] = 8, 0
    swap[4], swap[9] = 9, 4
    report = check(FABRIC, part, patterns.permutation(part, swap))
    assert report.worst == 2
    assert any(
        remark.startswith("unequal local order: ranks 0, 4 meet") for remark in report.remarks
    )
    assert next(contended(report))[0].name(FABRIC) == "spine0 -> leaf2:up0"


def test_within_a_server_and_under_a_leaf_nothing_climbs() -> None:
    fabric = cabled(leaves=2, spines=4, hosts=4, nics=2)
    server, leaf = whole(fabric, 2), whole(fabric, 4)
    assert not check(fabric, server, patterns.named("all-to-all", server)).loads
    report = check(fabric, leaf, patterns.named("all-to-all", leaf))
    assert {each.way for each in report.loads} == {"send", "receive"}


def test_a_large_pattern_is_sampled_and_says_so() -> None:
    fabric = cabled(leaves=16, spines=16, hosts=256, nics=1)
    part = whole(fabric, 256)
    report = check(fabric, part, patterns.named("all-to-all", part))
    assert (report.phases, report.of_phases) == (MOST_PHASES, 255)
    assert report.contention_free


uplinks = st.tuples(st.integers(0, 3), st.integers(0, 3))


@settings(max_examples=30, deadline=None)
@given(uplinks, st.sampled_from(PROMISED))
def test_one_lost_uplink_costs_two_at_most(where: tuple[int, int], name: str) -> None:
    part = whole(FABRIC, 16)
    broken = Broken.of(FABRIC, [f"leaf{where[0]}:up{where[1]}"])
    report = check(FABRIC, part, patterns.named(name, part), broken)
    assert report.worst <= 2
    assert not report.unreachable
    assert any("backup" in remark for remark in report.remarks)
    untouched = check(FABRIC, part, patterns.named(name, part))
    others = {d for d in untouched.loads if d.link.spine not in (-1, where[1])}
    assert others <= report.loads.keys()  # nobody else was remapped


def test_no_spine_left_is_said() -> None:
    fabric = cabled(leaves=2, spines=1, hosts=2, nics=1)
    part = whole(fabric, 2)
    broken = Broken.of(fabric, ["spine0"])
    report = check(fabric, part, patterns.named("ring", part), broken)
    assert report.unreachable == 2
    assert not report.contention_free


def test_slices_do_not_add_up() -> None:
    decision = decide(FABRIC, occupancy(FABRIC), 8)
    assert isinstance(decision, Placement)
    first = decision.named("first", 1)
    decision = decide(FABRIC, occupancy(FABRIC, [first]), 8)
    assert isinstance(decision, Placement)
    second = decision.named("second", 2)
    parts = (first, second)
    report = total(check(FABRIC, part, patterns.named("all-to-all", part)) for part in parts)
    assert report.contention_free


def test_a_spare_spine_takes_over() -> None:
    fabric = cabled(leaves=4, spines=5, hosts=16, nics=1)
    part = whole(fabric, 8)
    (done,) = repair(fabric, [part], frozenset({"leaf0:up0"}))
    assert done.outcome is Outcome.REPLACED
    assert not list(violations(fabric, [done.part]))
    changed = [old != new for old, new in zip(part.links[0], done.part.links[0], strict=True)]
    assert changed == [True, False, False, False]
    assert done.part.nics == part.nics


def test_only_who_is_hit_is_planned_anew() -> None:
    first = whole(FABRIC, 8)
    decision = decide(FABRIC, occupancy(FABRIC, [first]), 8)
    assert isinstance(decision, Placement)
    second = decision.named("second", 2)
    (done,) = repair(FABRIC, [first, second], frozenset({"leaf0:up0"}))
    assert (done.part, done.outcome) == (first, Outcome.BACKUP)


@pytest.mark.parametrize(
    ("failed", "outcome"),
    [("host0", Outcome.LOST), ("leaf0", Outcome.LOST), ("spine0", Outcome.BACKUP)],
)
def test_what_a_failure_does(failed: str, outcome: Outcome) -> None:
    (done,) = repair(FABRIC, [whole(FABRIC, 16)], frozenset({failed}))
    assert done.outcome is outcome


def test_two_failures_can_cut() -> None:
    (done,) = repair(FABRIC, [whole(FABRIC, 16)], frozenset({"spine0", "spine1"}))
    assert done.outcome is Outcome.CUT


def test_optics_find_another_circuit() -> None:
    fabric = optical(leaves=4, size=4, spines=8)
    from fabric_agent.slices import ocsvclos

    decision = ocsvclos.decide(fabric, occupancy(fabric), 6)
    assert isinstance(decision, Placement)
    part = decision.named("job", 1)
    link = part.links[0][0]
    spine = fabric.spines[link.spine]
    failed = frozenset({f"{spine.name}:{spine.downlinks[link.downlink].name}"})
    (done,) = repair(fabric, [part], failed)
    assert done.outcome is Outcome.REPLACED
    assert not list(violations(fabric, [done.part]))


def test_a_rank_file_renumbers() -> None:
    part = whole(FABRIC, 8)
    text = rank_file(job_document(FABRIC, part)["peers"])
    assert patterns.read_rank_file(FABRIC, part, text) == list(range(8))
    lines = text.splitlines()
    shuffled = [f"rank {n}={line.split('=', 1)[1]}" for n, line in enumerate(reversed(lines))]
    order = patterns.read_rank_file(FABRIC, part, "\n".join(["# mine", *shuffled]))
    assert order == list(reversed(range(8)))
    ring = patterns.reordered(patterns.named("ring", part), order)
    assert check(FABRIC, part, ring).contention_free


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rank 0=host0 slot=0", "1 ranks, job has 8"),
        ("rank zero", "line 1"),
        ("rank 0=nowhere slot=0", "no host nowhere"),
        ("rank 0=host0 slot=4", "no NIC 4"),
        ("rank 0=host15 slot=0", "not of slice job"),
        ("rank 0=host0 slot=0\nrank 1=host0 slot=0", "line 2: given twice"),
    ],
)
def test_a_rank_file_that_does_not_match(line: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        patterns.read_rank_file(FABRIC, whole(FABRIC, 8), line)
    assert words in caught.value.message


def test_a_permutation_that_is_none() -> None:
    with pytest.raises(ConfigError):
        patterns.permutation(whole(FABRIC, 8), [0] * 8)


def test_halving_doubling_folds_what_exceeds() -> None:
    part = whole(FABRIC, 12)
    pattern = patterns.named("halving-doubling", part)
    assert pattern.phases == 5
    assert pattern.phase(0) == [(8, 0), (9, 1), (10, 2), (11, 3)]
    assert pattern.phase(4) == [(0, 8), (1, 9), (2, 10), (3, 11)]
