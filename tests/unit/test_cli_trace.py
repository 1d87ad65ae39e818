# SPDX-License-Identifier: Apache-2.0
"""Drops as they are summed up and told."""

from __future__ import annotations

from collections.abc import Iterator

from oncache.cli import main, trace
from oncache.core.diagnose import Drop


def interrupted() -> Iterator[Drop]:
    yield Drop("NO_SOCKET", 4_000_001, 2)
    yield Drop("NETFILTER_DROP", 4_000_001, 9)
    yield Drop("NO_SOCKET", 4_000_001, 3)
    raise KeyboardInterrupt


def test_reports_add_up_until_interrupted() -> None:
    found = trace.rows(trace.collect(interrupted()))
    assert [(row["reason"], row["packets"]) for row in found] == [
        ("NETFILTER_DROP", 9),
        ("NO_SOCKET", 5),
    ]
    assert trace.render(found).splitlines()[1].split() == ["NETFILTER_DROP", "if4000001", "9"]


def test_nothing_dropped_is_said() -> None:
    assert trace.render([]) == "no packet was dropped"


def test_no_time_is_wrong_usage() -> None:
    assert main(["trace", "--seconds", "0"]) == 2
