# SPDX-License-Identifier: Apache-2.0
"""Random demands within the port limits, planned from random lit states, and checked.

    python -m bench.ocs_realise --cases N

Sizes reach 64 pods; half of the demands use every port. A case counts as realised when an
independent check follows the light of every circuit and finds all links wanted and no other. The
share of uniform wiring on its smallest counter-example, three pods, is found by trying everything.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from itertools import combinations, product

from fabric_agent.ocs.demand import Demand
from fabric_agent.ocs.plan import plan
from fabric_agent.ocs.verify import verify
from fabric_agent.ocs.wiring import Fabric, Layout

PODS_MAX = 64
UPLINKS = (2, 4, 8, 16, 32)


def random_demand(fabric: Fabric, rng: random.Random) -> Demand:
    """Links between pods with ports left, until none can be added or a share is reached."""
    share = 1.0 if rng.random() < 0.5 else rng.random()
    matrices = []
    for _ in range(fabric.indices):
        limit = max(1, int(fabric.uplinks * share))
        matrices.append(_matrix(fabric.pods, limit, rng))
    return Demand.of(matrices)


def _matrix(pods: int, limit: int, rng: random.Random) -> list[list[int]]:
    matrix = [[0] * pods for _ in range(pods)]
    free = dict.fromkeys(range(pods), limit)
    while len(free) > 1:
        a, b = rng.sample(list(free), 2)
        links = rng.randint(1, min(free[a], free[b]))
        matrix[a][b] += links
        matrix[b][a] += links
        for pod in (a, b):
            free[pod] -= links
            if not free[pod]:
                del free[pod]
    return matrix


def realised(fabric: Fabric, lit: Layout, wanted: Demand) -> Layout | None:
    """The layout that meets a demand, if it does."""
    made = plan(fabric, lit, wanted)
    if made.unplaced or verify(fabric, lit, wanted, made):
        return None
    return made.target


def uniform_three_pods(uplinks: int = 6) -> float:
    """Most links of uniform wiring over links wanted, K/2 between each two of three pods.

    Both fibres of a port are at one switch, so a switch of three pods holds one link at most.
    """
    pairs = list(combinations(range(3), 2))
    wanted = dict.fromkeys(pairs, uplinks // 2)
    best = max(
        sum(min(wanted[pair], choice.count(pair)) for pair in pairs)
        for choice in product(pairs, repeat=uplinks)
    )
    return best / sum(wanted.values())


def main(argv: list[str] | None = None) -> int:
    """Prints one JSON object; fails unless every case is realised."""
    parser = argparse.ArgumentParser(description="Random demands on cross wiring.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    met = 0
    for number in range(args.cases):
        fabric = Fabric(rng.randint(2, PODS_MAX), 1, rng.choice(UPLINKS))
        lit = Layout.dark(fabric)
        if number % 2:
            lit = realised(fabric, lit, random_demand(fabric, rng)) or lit
        met += realised(fabric, lit, random_demand(fabric, rng)) is not None
    share = round(uniform_three_pods(), 4)
    print(json.dumps({"cases": args.cases, "realised": met, "uniform_three_pods": share}))
    return 0 if met == args.cases else 1


if __name__ == "__main__":
    sys.exit(main())
