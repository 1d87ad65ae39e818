# SPDX-License-Identifier: Apache-2.0
"""The simulator: what is known without simulating must come out."""

from __future__ import annotations

import random

import pytest

from fabric_agent.slices.jobs import Job, draw, read_trace
from fabric_agent.slices.simulate import Outcome, Policy, Simulation
from oncache.core.errors import ConfigError
from tests.unit.slices_fabrics import cabled, optical

FABRIC = cabled(leaves=8, spines=8, hosts=32, nics=2)


def run(policy: Policy, jobs: list[Job], seed: int = 1) -> Outcome:
    fabric = optical() if policy is Policy.OCS_VCLOS else FABRIC
    return Simulation(fabric, policy, jobs, seed).run()


@pytest.mark.parametrize("policy", [Policy.IDEAL, Policy.VCLOS, Policy.OCS_VCLOS])
def test_without_contention_a_job_takes_its_time(policy: Policy) -> None:
    outcome = run(policy, [Job(5.0, 32, 1000.0, 0.5)])
    assert outcome.completion == pytest.approx((1000.0,))
    assert outcome.queueing == (0.0,)


def test_hashing_slows_by_the_worst_link() -> None:
    (alone,) = run(Policy.ECMP, [Job(0.0, 32, 1000.0, 0.5)]).completion
    load = (alone / 1000.0 - 0.5) / 0.5
    assert load == pytest.approx(round(load))
    assert load >= 2


def test_the_queue_is_first_come_first_served() -> None:
    jobs = [Job(0.0, 64, 100.0, 0.0), Job(1.0, 64, 100.0, 0.0), Job(2.0, 1, 10.0, 0.0)]
    outcome = run(Policy.IDEAL, jobs)
    assert outcome.queueing == pytest.approx((0.0, 99.0, 198.0))
    assert outcome.fragmented == 0


def test_policies_are_in_the_expected_order() -> None:
    jobs = [Job(300.0 * number, 16 + 8 * (number % 4), 1000.0, 0.3) for number in range(40)]
    mean = {policy: run(policy, jobs).mean for policy in Policy}
    assert mean[Policy.ECMP] > 1.3 * mean[Policy.VCLOS]
    assert mean[Policy.IDEAL] <= mean[Policy.SOURCE_ROUTING] * 1.01
    assert run(Policy.ECMP, jobs) == run(Policy.ECMP, jobs)


def test_a_job_that_never_fits_is_said() -> None:
    with pytest.raises(ConfigError, match="never fits"):
        run(Policy.VCLOS, [Job(0.0, 65, 1.0, 0.0)])


def test_drawn_jobs_ask_for_the_load() -> None:
    jobs = draw(4000, 2048, 0.7, random.Random(1))
    work = sum(job.gpus * job.seconds for job in jobs)
    assert work / (2048 * jobs[-1].arrival) == pytest.approx(0.7, rel=0.1)


def test_a_trace_is_read_in_order() -> None:
    jobs = read_trace("# arrival,gpus,seconds,share\n9,4,10,0.1\n\n2,8,20,0.5\n")
    assert [job.arrival for job in jobs] == [2.0, 9.0]


@pytest.mark.parametrize("text", ["", "1,2,3", "a,b,c,d", "0,0,1,0", "0,1,1,2"])
def test_a_trace_that_is_wrong(text: str) -> None:
    with pytest.raises(ConfigError, match="trace"):
        read_trace(text)
