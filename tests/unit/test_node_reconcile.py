# SPDX-License-Identifier: Apache-2.0
"""Carrying out a plan on a plane in memory."""

import pytest

from fabric_agent.node.plan import AttachPod, AttachUplink, Configure, InvalidateAll, SetPod
from fabric_agent.node.reconcile import execute
from oncache.core.errors import HostError, OncacheError
from oncache.plane import PodEntry
from tests.unit.fake_plane import FakePlane
from tests.unit.test_node_plan import ENTRY_A, ENTRY_B, SETTINGS


def test_learning_is_paused_around_every_change() -> None:
    plane = FakePlane()
    execute(plane, [Configure(SETTINGS), InvalidateAll()])
    assert plane.done == ["pause", "configure", "pause", "invalidate all", "resume"]


def test_a_pod_that_vanishes_concerns_nobody_else() -> None:
    plane = FakePlane(absent=[ENTRY_A.ifindex])
    actions = [AttachPod(ENTRY_A.ifindex), AttachPod(ENTRY_B.ifindex)]
    assert execute(plane, actions) == {ENTRY_A.ifindex: "its device vanished"}
    assert plane.attached().pods == {ENTRY_B.ifindex}
    assert plane.done[-1] == "resume"


def test_a_pod_the_plane_refuses_is_named() -> None:
    class Refusing(FakePlane):
        def set_pod(self, index: int, entry: PodEntry) -> None:
            raise OncacheError("no", hint="never")

    assert execute(Refusing(), [SetPod(0, ENTRY_A)]) == {ENTRY_A.ifindex: "no"}


def test_an_uplink_that_vanishes_is_an_error_and_learning_resumes() -> None:
    plane = FakePlane(absent=[2])
    with pytest.raises(HostError, match="uplink"):
        execute(plane, [AttachUplink(2)])
    assert plane.done[-1] == "resume"
