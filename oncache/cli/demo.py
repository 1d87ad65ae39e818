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


def look_inside(one: Host, _: Host) -> Report:
    """Caches and counters of one accelerated host, read as an operator there would."""
    from netns_tests.lab import inside

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
    """A few rows; flows that are fast before those that ended."""
    return sorted(rows, key=is_slow)[:ROWS_SHOWN]


def is_slow(row: Row) -> bool:
    return "egress" in row and not (row["egress"]["fast"] and row["ingress"]["fast"])


def more(rows: list[Row]) -> str:
    return f" (first {ROWS_SHOWN} of {len(rows)})" if len(rows) > ROWS_SHOWN else ""
