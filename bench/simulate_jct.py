# SPDX-License-Identifier: Apache-2.0
"""Job completion times under five ways to share a fabric, at several loads.

The last line holds the mean completion time in seconds of each policy at the heaviest load; the
table before it has the rest, and the picture all loads. Seeded: the same numbers every time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.slices import fabric
from fabric_agent.slices.jobs import Job, draw, read_trace
from fabric_agent.slices.plot import bars
from fabric_agent.slices.simulate import Outcome, Policy, Simulation
from oncache.core.errors import OncacheError

LEAVES, SIZE = 64, 32  # 2,048 GPUs: each policy runs in seconds
LOADS = (0.6, 0.7, 0.8)
JOBS = 500


def simulate(jobs: Sequence[Job], seed: int) -> dict[Policy, Outcome]:
    """Every policy on the same jobs."""
    cabled = fabric(LEAVES, SIZE, SIZE)
    optical = fabric(LEAVES, SIZE, SIZE, LEAVES // SIZE)
    return {
        policy: Simulation(
            optical if policy is Policy.OCS_VCLOS else cabled, policy, jobs, seed
        ).run()
        for policy in Policy
    }


def table(load: str, outcomes: dict[Policy, Outcome]) -> str:
    ecmp = outcomes[Policy.ECMP].mean
    return "\n".join(
        f"{load:>6}  {policy:15} {each.mean:9.0f} {each.tail(0.99):9.0f} "
        f"{sum(each.queueing) / len(each.queueing):9.0f} {each.fragmented:7.1%} "
        f"{each.mean / ecmp - 1:+7.1%}"
        for policy, each in outcomes.items()
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="arrival,gpus,seconds,share")
    parser.add_argument("--plot", type=Path, default=Path("build/jct.svg"), metavar="FILE")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except OncacheError as error:
        print(error.lines(), file=sys.stderr)
        return error.exit_code


def run(args: argparse.Namespace) -> int:
    print("  load  policy            mean s     p99 s   queued s  frag.  vs ECMP")
    everything: dict[str, dict[Policy, Outcome]] = {}
    for name, jobs in workloads(args):
        everything[name] = simulate(jobs, args.seed)
        print(table(name, everything[name]), flush=True)
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    means = {
        name: {str(policy): each.mean for policy, each in outcomes.items()}
        for name, outcomes in everything.items()
    }
    args.plot.write_text(bars("Mean job completion time", means, "seconds"))
    heaviest = list(means.values())[-1]
    print(json.dumps({policy: round(mean) for policy, mean in heaviest.items()}))
    return 0


def workloads(args: argparse.Namespace) -> list[tuple[str, list[Job]]]:
    if args.trace:
        return [("trace", read_trace(args.trace.read_text()))]
    gpus = LEAVES * SIZE
    return [
        (f"{load:.0%}", draw(args.jobs, gpus, load, random.Random(args.seed))) for load in LOADS
    ]


if __name__ == "__main__":
    sys.exit(main())
