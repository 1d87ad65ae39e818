# SPDX-License-Identifier: Apache-2.0
"""From state to actions: which pods, which differences, and what becomes doubtful."""

from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric_agent.node import plan
from fabric_agent.node import state as states
from fabric_agent.node.plan import (
    Action,
    Actual,
    AttachPod,
    AttachUplink,
    ClearPod,
    Configure,
    Desired,
    Detach,
    InvalidateAll,
    InvalidatePath,
    InvalidatePod,
    SetPeers,
    SetPod,
)
from fabric_agent.node.reconcile import execute, read
from fabric_agent.node.settings import settings
from fabric_agent.node.state import (
    AddressesChanged,
    Change,
    EventsLost,
    FdbChanged,
    LinkChanged,
    NeighbourChanged,
    RoutingChanged,
)
from oncache.plane import PodEntry
from tests.unit.fake_plane import FakePlane
from tests.unit.node_facts import (
    BRIDGE,
    CONFIG,
    POD_A,
    POD_B,
    REMOTE,
    TUNNEL,
    UPLINK,
    address,
    eth0,
    host,
    link,
    mac,
    path,
)

SETTINGS = settings(CONFIG, host(), (32768, 60999))
ENTRY_A = PodEntry(POD_A, mac(0xA), (ip_address("10.1.0.11"),), "pod-a")
ENTRY_B = PodEntry(POD_B, mac(0xB), (ip_address("10.1.0.12"),), "pod-b")
DESIRED = Desired(SETTINGS, frozenset({REMOTE}), {POD_A: ENTRY_A, POD_B: ENTRY_B})
IN_STEP = Actual(
    settings=SETTINGS,
    peers=frozenset({REMOTE}),
    pods={0: replace(ENTRY_A, name=""), 1: ENTRY_B},
    attached_uplinks=frozenset({UPLINK}),
    attached_pods=frozenset({POD_A, POD_B}),
    pinned=frozenset({UPLINK, POD_A, POD_B}),
)


def test_pods_are_the_far_ends_of_veths() -> None:
    assert plan.pods(host(), UPLINK) == {POD_A: ENTRY_A, POD_B: ENTRY_B}


def test_a_pod_without_a_name_is_called_by_its_device() -> None:
    state = states.with_names(host(), {0: "", 1: "pod-b"})
    assert plan.pods(state, UPLINK)[POD_A].name == "va"


def test_a_pod_without_an_address_is_not_one_yet() -> None:
    for addresses in (
        [],
        [address(2, "10.1.0.11/24", usable=False)],
        [address(2, "169.254.0.1/16", universe=False)],
        [address(3, "10.1.0.11/24")],
    ):
        state = states.with_namespace(host(), 0, [eth0(POD_A, 0xA)], addresses)
        assert plan.pods(state, UPLINK).keys() == {POD_B}


def test_two_pods_with_one_address_are_both_left_alone() -> None:
    state = states.with_namespace(host(), 0, [eth0(POD_A, 0xA)], [address(2, "10.1.0.12/24")])
    assert plan.pods(state, UPLINK) == {}


def test_devices_that_lead_to_a_network_are_not_pods() -> None:
    routed = replace(host(), addresses=frozenset({address(POD_A, "198.51.100.1/24")}))
    assert plan.pods(routed, UPLINK).keys() == {POD_B}
    assert plan.pods(host(), POD_B).keys() == {POD_A}
    # The host side of a routed pod bears its gateway, which is no network.
    gateway = replace(host(), addresses=frozenset({address(POD_A, "169.254.1.1/32")}))
    assert plan.pods(gateway, UPLINK).keys() == {POD_A, POD_B}


def test_one_address_of_each_family() -> None:
    found = plan.one_of_each(
        [
            address(2, "2001:db8::2/64", primary=False),
            address(2, "2001:db8::3/64"),
            address(2, "10.0.0.9/24"),
            address(2, "10.0.0.8/24"),
        ]
    )
    assert found == (ip_address("10.0.0.8"), ip_address("2001:db8::3"))


def test_peers_are_where_the_tunnel_sends() -> None:
    assert plan.peers(host(), TUNNEL) == {REMOTE}
    state = host()
    group = ip_address("239.1.1.1")
    fdb = {**state.fdb, (TUNNEL, bytes(6), 0): frozenset({group})}
    assert plan.peers(replace(state, fdb=fdb), TUNNEL) == {REMOTE}


def test_in_step_is_nothing_to_do() -> None:
    assert plan.diff(DESIRED, IN_STEP, limit=8) == []


def test_everything_from_nothing_in_order() -> None:
    assert plan.diff(DESIRED, Actual(), limit=8) == [
        Configure(SETTINGS),
        SetPeers(frozenset({REMOTE})),
        AttachUplink(UPLINK),
        SetPod(0, ENTRY_A),
        SetPod(1, ENTRY_B),
        AttachPod(POD_A),
        AttachPod(POD_B),
    ]


MOVED = replace(ENTRY_A, addresses=(ip_address("10.1.0.77"),))
DIFFERENCES: list[tuple[str, Desired, Actual, list[Action]]] = [
    (
        "a pod is gone",
        replace(DESIRED, pods={POD_B: ENTRY_B}),
        IN_STEP,
        [ClearPod(0), Detach(POD_A)],
    ),
    (
        "a pod has another address",
        replace(DESIRED, pods={POD_A: MOVED, POD_B: ENTRY_B}),
        IN_STEP,
        [SetPod(0, MOVED)],
    ),
    (
        "somebody took our program off a pod",
        DESIRED,
        replace(IN_STEP, attached_pods=frozenset({POD_B})),
        [AttachPod(POD_A)],
    ),
    (
        "a pin of a dead device",
        DESIRED,
        replace(IN_STEP, pinned=IN_STEP.pinned | {99}),
        [Detach(99)],
    ),
    (
        "another uplink",
        replace(DESIRED, settings=replace(SETTINGS, uplink=9)),
        IN_STEP,
        [Configure(replace(SETTINGS, uplink=9)), AttachUplink(9), Detach(UPLINK)],
    ),
    (
        "another node",
        replace(DESIRED, peers=frozenset()),
        IN_STEP,
        [SetPeers(frozenset())],
    ),
    (
        "a slot that two entries hold is given up",
        DESIRED,
        replace(IN_STEP, pods={**IN_STEP.pods, 5: ENTRY_A}),
        [ClearPod(0)],
    ),
    (
        "the programs are another process's",
        DESIRED,
        plan.with_old_programs(IN_STEP),
        [AttachUplink(UPLINK), AttachPod(POD_A), AttachPod(POD_B)],
    ),
]


@pytest.mark.parametrize(
    ("desired", "actual", "actions"), [d[1:] for d in DIFFERENCES], ids=[d[0] for d in DIFFERENCES]
)
def test_a_difference_is_its_actions(
    desired: Desired, actual: Actual, actions: Sequence[Action]
) -> None:
    assert plan.diff(desired, actual, limit=8) == actions


def test_what_is_slow_is_told_apart() -> None:
    actions = plan.diff(DESIRED, Actual(pinned=frozenset({99})), limit=8)
    quick, slow = plan.without_slow(actions)
    assert slow == [Detach(99), AttachPod(POD_A), AttachPod(POD_B)]
    assert [*quick, *slow] == actions


def test_a_pod_without_a_slot_is_left_out() -> None:
    actions = plan.diff(DESIRED, Actual(), limit=1)
    assert SetPod(0, ENTRY_A) in actions
    assert AttachPod(POD_B) not in actions


def test_a_slot_that_came_free_is_used_again() -> None:
    held = replace(IN_STEP, pods={1: ENTRY_B}, attached_pods=frozenset({POD_B}))
    assert SetPod(0, ENTRY_A) in plan.diff(DESIRED, held, limit=2)


DEVICES = st.sets(st.integers(min_value=10, max_value=20), max_size=6)


def entries(devices: set[int]) -> dict[int, PodEntry]:
    return {i: PodEntry(i, mac(i), (ip_address(f"10.0.0.{i}"),), str(i)) for i in devices}


@given(before=DEVICES, after=DEVICES, absent=DEVICES, limit=st.integers(min_value=1, max_value=8))
def test_carrying_out_a_plan_leaves_nothing_to_do(
    before: set[int], after: set[int], absent: set[int], limit: int
) -> None:
    plane = FakePlane()
    for devices in (before, after):
        plane.absent = absent & devices if devices is after else set()
        wanted = Desired(SETTINGS, frozenset(), entries(devices))
        execute(plane, plan.diff(wanted, read(plane), limit))
        left = plan.diff(wanted, read(plane), limit)
        assert {type(action) for action in left} <= {AttachPod}
        assert {a.ifindex for a in left if isinstance(a, AttachPod)} <= plane.absent


PATHS = [path(0, "192.0.2.2", 0x22, 0x33), path(1, "198.51.100.9", 0x22, 0x34),
         path(2, "192.0.2.3", 0x23, 0x35)]  # fmt: skip
NEW = mac(0x77)
DOUBTS: list[tuple[Change, list[Action]]] = [
    (RoutingChanged(), [InvalidateAll()]),
    (EventsLost(), [InvalidateAll()]),
    (LinkChanged(UPLINK), [InvalidateAll()]),
    (LinkChanged(TUNNEL), [InvalidateAll()]),
    (LinkChanged(BRIDGE), [InvalidateAll()]),
    (AddressesChanged(UPLINK), [InvalidateAll()]),
    (LinkChanged(POD_B), [InvalidatePod(1)]),
    (LinkChanged(99), []),
    # The next hop of paths 0 and 1 has another MAC; for 1 it is a gateway.
    (
        NeighbourChanged(UPLINK, REMOTE, mac(0x22), NEW),
        [InvalidatePath(0), InvalidatePath(1)],
    ),
    (NeighbourChanged(UPLINK, REMOTE, mac(0x22), b""), [InvalidatePath(0), InvalidatePath(1)]),
    # The gateway behind the tunnel: an inner MAC.
    (NeighbourChanged(TUNNEL, ip_address("10.2.0.0"), mac(0x33), NEW), [InvalidatePath(0)]),
    # Resolved as the paths have it already.
    (NeighbourChanged(UPLINK, REMOTE, b"", mac(0x22)), []),
    (NeighbourChanged(BRIDGE, ip_address("10.1.0.12"), mac(0xB), NEW), [InvalidatePod(1)]),
    (FdbChanged(mac(0x35), frozenset({REMOTE}), True), [InvalidatePath(0), InvalidatePath(2)]),
    (FdbChanged(mac(0xA), frozenset(), moved=True), [InvalidatePod(0)]),
    # A bridge forgets a MAC that was not heard for minutes; the pod is where it was.
    (FdbChanged(mac(0xA), frozenset(), moved=False), []),
]


@pytest.mark.parametrize(("change", "actions"), DOUBTS, ids=repr)
def test_a_change_makes_its_entries_doubtful(change: Change, actions: list[Action]) -> None:
    state = replace(host(), changes=frozenset({change}))
    assert plan.invalidations(state, SETTINGS, IN_STEP.pods, PATHS) == actions


def test_all_is_enough() -> None:
    state = replace(host(), changes=frozenset({LinkChanged(POD_A), RoutingChanged()}))
    assert plan.invalidations(state, SETTINGS, IN_STEP.pods, PATHS) == [InvalidateAll()]


def test_paths_are_read_only_when_they_matter() -> None:
    assert not plan.needs_paths([RoutingChanged(), LinkChanged(UPLINK)])
    assert plan.needs_paths([NeighbourChanged(UPLINK, REMOTE, b"", NEW)])


def test_a_peer_link_in_our_own_namespace_is_no_pod() -> None:
    near, far = (link(i, f"v{i}", "veth", lower=o) for i, o in ((8, 9), (9, 8)))
    state = host()
    state = replace(state, links={**state.links, 8: near, 9: far})
    assert plan.pods(state, UPLINK).keys() == {POD_A, POD_B}
