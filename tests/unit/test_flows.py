# SPDX-License-Identifier: Apache-2.0
"""From the columns of a filter cache entry to a row, without a kernel."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

import pytest

from oncache.core.addresses import V4_MAPPED
from oncache.flows import ROWS, Columns, FlowRow, Form, Validity, reader

NOW = 100_000_000_000
POD, REMOTE, PEER = "10.1.0.11", "10.2.0.11", "192.0.2.2"
VALID = Validity(NOW, lease=10**10, down="", generation=5, pods=[1, 7], paths=[1, 1, 9])
READY: Mapping[str, Any] = {
    "pod": 1 | 7 << 32,
    "path": 2 | 9 << 32,
    "learned": NOW - 1_500_400_000,
    "generation": 5,
    "sent": 3,
    "left": 3,
    "seen": 1,
    "ready": 1,
    "hops": 2,
    "peer": V4_MAPPED + ip_address(PEER).packed,
}
EMPTY: Columns = (*[0] * 9, bytes(16))


def address(text: str) -> bytes:
    packed = ip_address(text).packed
    return V4_MAPPED + packed if len(packed) == 4 else packed


def half(**changes: Any) -> Columns:
    return tuple({**READY, **changes}.values())


def read(
    egress: Columns = EMPTY,
    ingress: Columns = EMPTY,
    *,
    local: str = POD,
    protocol: int = 6,
    closed: int = 0,
    reset: int = 0,
    valid: Validity = VALID,
) -> FlowRow:
    key = (address(local), address(REMOTE), 4000, 80, protocol)
    return reader(valid, ROWS)(key, (*egress, *ingress, closed, reset))


def test_a_fast_flow() -> None:
    row = read(half(), half(path=0))
    assert row[:6] == ("tcp", POD, 4000, REMOTE, 80, False)
    assert row.egress._asdict() == {
        "state": "ready",
        "reason": "",
        "pod": 1,
        "path": 2,
        "generation": 5,
        "pod_generation": 7,
        "path_generation": 9,
        "hops": 2,
        "peer": "",
        "age_seconds": 1.5,
    }
    assert (row.ingress.reason, row.ingress.path, row.ingress.peer) == ("", 0, PEER)


def test_an_empty_half_says_nothing_it_does_not_know() -> None:
    ingress = read(half()).ingress
    assert (ingress.state, ingress.reason) == ("empty", "unconfirmed")
    assert (ingress.age_seconds, ingress.peer) == (0.0, "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ready": 0}, "unconfirmed"),
        ({"generation": 4}, "stale"),
        ({"pod": 1 | 6 << 32}, "stale"),
        ({"path": 2 | 8 << 32}, "stale"),
        ({"learned": NOW - 10**10 - 1}, "lease"),
        ({"sent": 4}, "order"),
    ],
)
def test_why_a_half_is_not_fast(changes: dict[str, int], reason: str) -> None:
    assert read(half(**changes)).egress.reason == reason


def test_a_path_does_not_matter_on_the_way_in() -> None:
    assert read(ingress=half(path=1 | 99 << 32)).ingress.reason == ""


def test_what_ended_is_closed_in_both_directions() -> None:
    for row in (read(half(), half(), closed=1), read(half(), half(), reset=1)):
        assert row.closed
        assert (row.egress.reason, row.ingress.reason) == ("closed", "closed")


def test_nothing_is_fast_while_the_plane_is_down() -> None:
    assert read(half(), valid=VALID._replace(down="deadline")).egress.reason == "deadline"


def test_ipv6_and_protocols_without_a_name() -> None:
    row = read(local="fd00::11", protocol=132)
    assert (row.local, row.protocol) == ("fd00::11", "132")


def test_what_halves_share_is_made_once() -> None:
    number = itertools.count(1)
    form: Form[int, tuple[int, float], Any] = Form(
        lambda _: next(number), lambda number, age: (number, age), lambda *fields: fields[-2:]
    )
    read_one = reader(VALID, form)
    key = (address(POD), address(REMOTE), 1, 2, 17)
    rows = [
        read_one(key, (*half(learned=NOW - age * 10**9), *EMPTY, 0, 0)) for age in (1, 2, 3, 11)
    ]
    assert [row[0] for row in rows] == [(1, 1.0), (1, 2.0), (1, 3.0), (3, 11.0)]
    assert {row[1] for row in rows} == {(2, 0.0)}
