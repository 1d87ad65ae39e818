# SPDX-License-Identifier: Apache-2.0
"""`oncache explain`: would the next packet of this flow be fast, and if not, why."""

from __future__ import annotations

import argparse
from typing import Any

from oncache.cli.output import show
from oncache.cli.places import places
from oncache.cli.reading import pinned
from oncache.cli.tuples import endpoint
from oncache.plane import Explanation

Report = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    source, sport = endpoint(args.source, args.protocol)
    destination, dport = endpoint(args.destination, args.protocol)
    with pinned(places(args).bpf_dir) as plane:
        found = plane.explain(args.protocol, source, sport, destination, dport)
    flow = {"protocol": args.protocol, "source": args.source, "destination": args.destination}
    show(report(flow, found), render, as_json=args.json)
    return 0


def report(flow: dict[str, str], found: Explanation) -> Report:
    """`reason` is the counter under base_path that the packet would move; "" when it is fast."""
    return {**flow, "fast": found.fast, "reason": found.reason, "detail": list(found.detail)}


def render(found: Report) -> str:
    flow = f"{found['protocol']} {found['source']} -> {found['destination']}"
    verdict = "fast" if found["fast"] else f"base path, because of: {found['reason']}"
    return "\n".join([f"{flow}: {verdict}", *(f"  {line}" for line in found["detail"])])
