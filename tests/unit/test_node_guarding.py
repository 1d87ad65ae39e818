# SPDX-License-Identifier: Apache-2.0
"""Keeping a guard in memory in step: what it is told, and that trouble opens it."""

import errno
from collections.abc import Iterable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest

from fabric_agent.node.guarding import Guarding
from fabric_agent.node.plan import Desired
from oncache.core.attach import Program, XdpHook
from oncache.core.config import Config, ExistingOverlay, Guard, GuardMode, Node
from oncache.core.errors import BusyError
from oncache.core.net import IpAddress
from tests.unit.test_node_plan import SETTINGS

PEER, EXTRA = ip_address("192.0.2.2"), ip_address("192.0.2.7")
DESIRED = Desired(SETTINGS, peers=frozenset({PEER}))


class FakeGuard:
    """Keeps what it is told. ``broken``: attaching fails; ``room``: for so many peers."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.broken = False
        self.enabled = 0.0
        self.enforcing = False
        self.port = 0
        self.peers: frozenset[IpAddress] = frozenset()
        self.on: int | None = None
        self.closed = False

    def configure(self, port: int, *, enforce: bool) -> None:
        self.port, self.enforcing = port, enforce

    def set_peers(self, wanted: Iterable[IpAddress]) -> None:
        self.peers = frozenset(wanted)
        if len(self.peers) > self.room:
            raise OSError(errno.E2BIG, "write map entry")

    def attach(self, ifindex: int) -> None:
        if self.broken:
            raise BusyError("taken", hint="free it")
        self.on = ifindex

    def is_attached(self, ifindex: int) -> bool:
        return self.on == ifindex

    def hook(self, ifindex: int) -> XdpHook | None:
        return XdpHook(Program(1, "guard", "", ours=True), native=True)

    def enable(self, deadline_seconds: float) -> None:
        self.enabled = deadline_seconds

    def disable(self) -> None:
        self.enabled = 0.0

    def close(self) -> None:
        self.closed = True


class Bench:
    """A Guarding with the guards it loaded and what it unloaded."""

    def __init__(self, guard: Guard, room: int = 16) -> None:
        config = Config(Node("eth0", "a"), ExistingOverlay("flannel.1"), guard=guard)
        self.loaded: list[FakeGuard] = []
        self.unloaded: list[Path] = []
        self.room = room
        self.guarding = Guarding(config, self._load, self.unloaded.append)

    def _load(self, _bpf_dir: Path, _room: int) -> FakeGuard:
        self.loaded.append(FakeGuard(self.room))
        return self.loaded[-1]

    def settle(self, desired: Desired = DESIRED, *, learning: bool = False) -> FakeGuard:
        self.guarding.settle(desired, learning=learning)
        self.guarding.enable(5.0)
        return self.loaded[-1]


@pytest.mark.parametrize("mode", [GuardMode.OBSERVE, GuardMode.ENFORCE])
def test_it_is_told_what_the_plane_is_told_and_the_configured_peers(mode: GuardMode) -> None:
    bench = Bench(Guard(mode, (EXTRA,)))
    guard = bench.settle()
    assert guard.peers == {PEER, EXTRA}
    assert (guard.port, guard.on) == (SETTINGS.port, SETTINGS.uplink)
    assert guard.enforcing is (mode is GuardMode.ENFORCE)
    assert guard.enabled == 5.0
    assert bench.guarding.problem == ""
    bench.settle(replace(DESIRED, peers=frozenset()))
    assert guard.peers == {EXTRA}
    assert bench.loaded == [guard]


def test_it_follows_the_uplink() -> None:
    bench = Bench(Guard(GuardMode.ENFORCE))
    bench.settle()
    moved = replace(DESIRED, settings=replace(SETTINGS, uplink=99))
    assert bench.settle(moved).on == 99


def test_off_takes_away_what_was_left() -> None:
    bench = Bench(Guard())
    bench.guarding.settle(DESIRED, learning=False)
    bench.guarding.enable(5.0)
    assert bench.loaded == []
    assert bench.unloaded == [Config.bpf_dir]


def test_trouble_lets_everybody_in_until_it_is_over() -> None:
    bench = Bench(Guard(GuardMode.ENFORCE))
    guard = bench.settle()
    guard.on, guard.broken = None, True
    bench.settle()
    assert (bench.guarding.problem, guard.enabled) == ("taken", 0.0)
    guard.broken = False
    bench.settle()
    assert (bench.guarding.problem, guard.enabled) == ("", 5.0)


def test_peers_that_do_not_fit_are_trouble() -> None:
    bench = Bench(Guard(GuardMode.ENFORCE), room=1)
    guard = bench.settle(replace(DESIRED, peers=frozenset({PEER, EXTRA})))
    assert "write map entry" in bench.guarding.problem
    assert guard.enabled == 0.0


def test_a_tunnel_that_learns_shuts_nobody_out_unless_nodes_are_listed() -> None:
    shy = Bench(Guard(GuardMode.ENFORCE))
    assert not shy.settle(learning=True).enforcing
    assert "guard.peers" in shy.guarding.problem
    sure = Bench(Guard(GuardMode.ENFORCE, (EXTRA,)))
    assert sure.settle(learning=True).enforcing
    assert sure.guarding.problem == ""
    watching = Bench(Guard(GuardMode.OBSERVE))
    watching.settle(learning=True)
    assert watching.guarding.problem == ""


def test_letting_go_closes_and_disabling_is_for_a_while() -> None:
    bench = Bench(Guard(GuardMode.ENFORCE))
    guard = bench.settle()
    bench.guarding.disable()
    assert guard.enabled == 0.0
    bench.guarding.enable(3.0)
    assert guard.enabled == 3.0
    bench.guarding.close()
    assert guard.closed
    bench.guarding.disable()
    bench.guarding.close()
