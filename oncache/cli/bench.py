# SPDX-License-Identifier: Apache-2.0
"""`oncache bench`: shares of host-to-host, all modes interleaved in one run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oncache.cli import checkout
from oncache.cli.output import say
from oncache.cli.tables import table
from oncache.core.errors import ConfigError

DEFAULT_ROUNDS = 12

Report = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    rounds = DEFAULT_ROUNDS if args.rounds is None else args.rounds
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}", hint="one or more")
    checkout.require("bench")
    from bench import lab_bench

    report = lab_bench.benchmark(rounds=rounds, ip6=args.ip6, progress=say)
    print(json.dumps(report) if args.json == "-" else render(report, lab_bench.table))
    if args.json not in (None, "-"):
        write(Path(args.json), report)
    return 0


def render(report: Report, figures: Callable[[Report], str]) -> str:
    """Traffic by kind and mode, then what a run of each program costs."""
    keys = ("ns", "ns_miss", "verified_insns", "jited_bytes")
    rows = [(name, *(cost[key] for key in keys)) for name, cost in report["programs"].items()]
    columns = ("program", "ns if fast", "ns if not", "verified instructions", "jited bytes")
    programs = table(columns, rows)
    return "\n\n".join([figures(report), *([programs] if rows else [])])


def write(path: Path, report: Report) -> None:
    """One line, so that it can be the last line of something else's output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report) + "\n", encoding="utf-8")
    say(f"written to {path}")
