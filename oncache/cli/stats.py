# SPDX-License-Identifier: Apache-2.0
"""`oncache stats`: how many packets were fast, and why the others were not."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from oncache.cli.output import show
from oncache.cli.places import places
from oncache.cli.reading import pinned
from oncache.cli.tables import table
from oncache.guard import report
from oncache.plane import Plane

INTERVAL = 1.0
CLEAR = "\x1b[H\x1b[J"

Counters = Mapping[str, Any]


def run(args: argparse.Namespace) -> int:
    with pinned(places(args).bpf_dir) as plane:
        if args.watch:
            watch(plane, as_json=args.json)
        else:
            show(read(plane), render, as_json=args.json)
    return 0


def read(plane: Plane) -> Counters:
    """The plane's counters, and under "guard" those of the guard if there is one."""
    guard = report(plane.directory)
    return plane.counters() if guard is None else {**plane.counters(), "guard": guard}


def watch(plane: Plane, *, as_json: bool) -> None:
    """Until interrupted: one JSON object, or one table with rates, each interval."""
    before, since = read(plane), time.monotonic()
    while True:
        time.sleep(INTERVAL)
        now, at = read(plane), time.monotonic()
        if as_json:
            print(json.dumps(now), flush=True)
        else:
            lead = CLEAR if sys.stdout.isatty() else ""
            print(lead + render_rates(now, before, at - since), flush=True)
        before, since = now, at


def flat(counters: Counters, prefix: str = "") -> Iterator[tuple[str, int]]:
    """`{"hits": {"local": 3}}` as `("hits.local", 3)`."""
    for name, value in counters.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", int(value)


def share(counters: Counters) -> float | None:
    """Hits among the packets our programs decided about; None when there were none."""
    hits = sum(counters["hits"].values())
    others = sum(counters["base_path"].values()) + sum(counters["dropped"].values())
    return hits / (hits + others) if hits + others else None


def shown(counters: Counters) -> list[tuple[str, int]]:
    """What a person wants to see: all hits and drops, of the reasons only those that occurred."""
    return [
        (name, value)
        for name, value in flat(counters)
        if value or not name.startswith(("base_path.", "not_learned."))
    ]


def summary(counters: Counters) -> str:
    fast = share(counters)
    return "no packets yet" if fast is None else f"{fast:.1%} of packets were fast"


def render(counters: Counters) -> str:
    return f"{table(('counter', 'packets'), shown(counters))}\n\n{summary(counters)}"


def render_rates(now: Counters, before: Counters, seconds: float) -> str:
    """The table with a rate per second; counters that restarted from zero show no rate."""
    old = dict(flat(before))
    rows = [
        (name, value, max(0, round((value - old.get(name, 0)) / seconds)))
        for name, value in shown(now)
    ]
    return f"{table(('counter', 'packets', 'per second'), rows)}\n\n{summary(now)}\n"
