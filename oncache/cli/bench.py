# SPDX-License-Identifier: Apache-2.0
"""`oncache bench`: shares of host-to-host, all modes interleaved in one run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from oncache.cli import checkout
from oncache.cli.output import say
from oncache.core.errors import ConfigError

DEFAULT_ROUNDS = 12


def run(args: argparse.Namespace) -> int:
    rounds = DEFAULT_ROUNDS if args.rounds is None else args.rounds
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}", hint="one or more")
    checkout.require("bench")
    from bench import lab_bench

    report = lab_bench.run(rounds=rounds, progress=say)
    print(json.dumps(report) if args.json == "-" else lab_bench.table(report))
    if args.json not in (None, "-"):
        write(Path(args.json), report)
    return 0


def write(path: Path, report: dict[str, Any]) -> None:
    """One line, so that it can be the last line of something else's output."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report) + "\n", encoding="utf-8")
    say(f"written to {path}")
