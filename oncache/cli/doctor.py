# SPDX-License-Identifier: Apache-2.0
"""`oncache doctor`: can this host carry the plane, and what to do if not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from oncache.cli.checks import Check, Level, examine, passed
from oncache.cli.gather import gather
from oncache.cli.output import show
from oncache.cli.places import places
from oncache.core.errors import HostError

SIGNS = {Level.OK: "ok  ", Level.WARN: "warn", Level.FAIL: "FAIL"}


def run(args: argparse.Namespace) -> int:
    checks = examine(gather(places(args)))
    show(rows(checks), lambda _: render(checks), as_json=args.json)
    return 0 if passed(checks) else HostError.exit_code


def rows(checks: Sequence[Check]) -> list[dict[str, str]]:
    return [
        {"name": c.name, "level": str(c.level), "fact": c.fact, "remedy": c.remedy} for c in checks
    ]


def render(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{SIGNS[check.level]}  {check.name.ljust(width)}  {check.fact}")
        if check.remedy:
            lines.append(f"      {' ' * width}  -> {check.remedy}")
    return "\n".join([*lines, "", summary(checks)])


def summary(checks: Sequence[Check]) -> str:
    failed = sum(check.level is Level.FAIL for check in checks)
    warned = sum(check.level is Level.WARN for check in checks)
    if failed:
        return f"{failed} to repair before this host can carry the plane, {warned} to consider"
    return f"this host can carry the plane, {warned} to consider"
