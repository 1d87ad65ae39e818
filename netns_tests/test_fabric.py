# SPDX-License-Identifier: Apache-2.0
"""The fabric in namespaces and its traffic: what slices promise is what the switches count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench import fabric_lab
from bench.fabric_lab import COLLECTIVES, Collective
from netns_tests.fabric import Fabric, Rates, Way, small


@pytest.fixture(scope="module")
def fabric() -> Iterator[Fabric]:
    with Fabric(small(), Rates()) as made:
        yield made


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.name)
def test_under_slices_each_link_carries_one_flow_a_phase(
    fabric: Fabric, collective: Collective
) -> None:
    pair = fabric_lab.jobs(fabric.model)
    with fabric.sliced(pair):
        seen = fabric_lab.run(fabric, pair, collective, seed=1)
    assert (seen.collisions, seen.whole) == (0, seen.flows)


@pytest.mark.parametrize("way", Way)
def test_hashing_makes_flows_collide(fabric: Fabric, way: Way) -> None:
    fabric.route(way)
    seen = fabric_lab.run(fabric, fabric_lab.jobs(fabric.model), COLLECTIVES[0], seed=1)
    assert seen.collisions > 0
    assert seen.whole == seen.flows
