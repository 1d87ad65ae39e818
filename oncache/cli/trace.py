# SPDX-License-Identifier: Apache-2.0
"""`oncache trace`: where the kernel drops packets of this network namespace, and why."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from oncache.cli.output import say, show
from oncache.cli.reading import device_name
from oncache.cli.tables import table
from oncache.core.diagnose import Drop, drop_reasons
from oncache.core.errors import ConfigError

Row = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    if args.seconds <= 0:
        raise ConfigError(f"--seconds {args.seconds:g}", hint="more than 0")
    say(f"watching for {args.seconds:g} s; Ctrl-C ends it earlier")
    show(rows(collect(drop_reasons(args.seconds))), render, as_json=args.json)
    return 0


def collect(drops: Iterable[Drop]) -> Counter[tuple[str, int]]:
    """Packets by reason and device; what came until an interruption counts."""
    found: Counter[tuple[str, int]] = Counter()
    with suppress(KeyboardInterrupt):
        for drop in drops:
            found[drop.reason, drop.ifindex] += drop.count
    return found


def rows(found: Mapping[tuple[str, int], int]) -> list[Row]:
    """The most frequent first."""
    return [
        {"reason": reason, "device": device_name(ifindex), "ifindex": ifindex, "packets": packets}
        for (reason, ifindex), packets in sorted(found.items(), key=lambda item: -item[1])
    ]


def render(found: Sequence[Row]) -> str:
    if not found:
        return "no packet was dropped"
    return table(
        ("reason", "device", "packets"), [(r["reason"], r["device"], r["packets"]) for r in found]
    )
