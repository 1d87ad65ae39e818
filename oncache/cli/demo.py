# SPDX-License-Identifier: Apache-2.0
"""`oncache demo`: two hosts with pods in namespaces, without us and with us, in one table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from oncache.cli import checkout
from oncache.cli.caches import CACHES, Row
from oncache.cli.output import say, show
from oncache.cli.stats import render as render_counters
from oncache.plane import Plane

if TYPE_CHECKING:
    from netns_tests.lab import Host

# Building, warming and taking down cost some ten seconds more; the whole stays under a minute.
MEASURE_SECONDS = 22.0
MOST_ROUNDS = 100
ROWS_SHOWN = 6
EXCHANGES = 8
LEGEND = """\
host: between two hosts; overlay: between pods on them, over the kernel's VXLAN;
oncache: the same with our agents running. One CPU does all the work of a mode."""

Report = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    checkout.require("demo")
    from bench import lab_bench

    report = lab_bench.run(
        rounds=MOST_ROUNDS, seconds=MEASURE_SECONDS, progress=say, look=look_inside
    )
    show(report, lambda found: render(found, lab_bench.table), as_json=args.json)
    return 0


def look_inside(one: Host, other: Host) -> Report:
    """Caches and counters of one accelerated host, read as an operator there would.

    The measured flows have ended; a connection and a ping are there to be seen.
    """
    from netns_tests.lab import inside, ping
    from netns_tests.lab.sockets import connection, exchange

    pod, far = one.pods["p1"], other.pods["p1"]
    near, remote = connection(pod, far, far.address)
    for _ in range(EXCHANGES):
        exchange(near, remote)
    ping(pod, far.address, EXCHANGES)
    with inside(one), closing(Plane.open(one.bpf_dir)) as plane:
        return {
            "host": one.label,
            "caches": {name: cache.rows(plane) for name, cache in CACHES.items()},
            "counters": plane.counters(),
        }


def render(report: Report, table: Callable[[Report], str]) -> str:
    host = report["host"]
    parts = [LEGEND, table(report)]
    parts += [
        f"{name.capitalize()} cache of host {host}{more(rows)}:\n{CACHES[name].render(first(rows))}"
        for name, rows in report["caches"].items()
    ]
    parts.append(f"Counters of host {host}:\n{render_counters(report['counters'])}")
    return "\n\n".join(parts)


def first(rows: list[Row]) -> list[Row]:
    """A few rows; of flows the fast ones before those that are not, and the latest first."""
    return sorted(rows, key=lately)[:ROWS_SHOWN]


def lately(row: Row) -> tuple[bool, float]:
    if "egress" not in row:
        return False, 0.0
    out, back = row["egress"], row["ingress"]
    return not (out["fast"] and back["fast"]), out["age_seconds"]


def more(rows: list[Row]) -> str:
    return f" (first {ROWS_SHOWN} of {len(rows)})" if len(rows) > ROWS_SHOWN else ""
