# SPDX-License-Identifier: Apache-2.0
"""How long a slice decision takes at 8,192 GPUs, and how much of what is possible is found.

Time: requests and releases keep each fabric nearly full, so that refusals are among the decisions.
A decision computes and waits for nothing, so its time is that of the processor, and one that took
long is repeated and the least time counts: what else the machine does is not part of the answer.

Quality: random states with 40-70 % of the links in use; of the requests that an exact solver (OR-
tools' CP-SAT, all shapes m * n) places, the share that the search places. What the solver cannot
settle in its time is left out and counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fabric_agent.slices import allocate, ocsvclos, read
from fabric_agent.slices.model import Fabric, Slice, bits
from fabric_agent.slices.occupancy import Occupancy, Placement, Refusal, occupancy, without
from fabric_agent.slices.search import Grid

SIZES = (4, 8, 12, 16, 24, 32, 48, 64, 96, 100, 128, 200, 256, 300, 512, 777, 1024)
AGAIN_MS = 8.0  # a decision that took longer is timed twice more
SOLVER_SECONDS = 2.0
STATES = ((24, 24), (32, 32), (48, 32), (32, 64))  # leaves, spines
JUDGE_SECONDS = 60.0

Decide = Callable[[Fabric, Occupancy, int], Placement | Refusal]


@dataclass(frozen=True)
class Times:
    """Of one fabric, in milliseconds."""

    name: str
    all: tuple[float, ...]
    refused: int

    def quantile(self, share: float) -> float:
        return sorted(self.all)[min(len(self.all) - 1, int(share * len(self.all)))]


def fabric(leaves: int, size: int, spines: int, optics: int = 0) -> Fabric:
    """``size`` GPUs a leaf, eight a server; ``optics``: ports of a spine at each optical switch."""
    document: dict[str, Any] = {
        "leaves": [{"name": f"leaf[0-{leaves - 1}]", "prefix": f"10.0.0.0/{31 - _log2(size)}"}],
        "spines": [{"name": f"spine[0-{spines - 1}]"}],
        "hosts": [
            {
                "name": f"host[0-{leaves * size // 8 - 1}]",
                "devices": "eth[0-7]",
                "leaves": f"leaf[0-{leaves - 1}]",
            }
        ],
    }
    if optics:
        document["optics"] = {"name": f"ocs[0-{size - 1}]", "per_spine": optics}
    else:
        document["links"] = [
            {"leaves": f"leaf[0-{leaves - 1}]", "spines": f"spine[0-{spines - 1}]"}
        ]
    return read.fabric(document)


def _log2(size: int) -> int:
    return (size - 1).bit_length()


def measure(name: str, fabric: Fabric, decide: Decide, decisions: int, seed: int) -> Times:
    """Keep the fabric nearly full: when something is refused, something else ends."""
    rng = random.Random(seed)
    free = occupancy(fabric)
    decide(fabric, free, len(fabric.leaves[0].nics) * 2)  # fills what is computed once
    live: list[Slice] = []
    times: list[float] = []
    refused = 0
    for number in range(1, decisions + 1):
        gpus = rng.choice((*SIZES, rng.randint(1, 1024)))
        decision, spent = timed(partial(decide, fabric, free, gpus))
        times.append(spent)
        if isinstance(decision, Placement):
            live.append(decision.named(str(number), number))
            free = without(fabric, free, decision)
        else:
            refused += 1
            live.pop(rng.randrange(len(live)))
            free = occupancy(fabric, live)
    return Times(name, tuple(times), refused)


def timed(call: Callable[[], Placement | Refusal]) -> tuple[Placement | Refusal, float]:
    """The decision and its milliseconds of this thread's processor time."""
    best = float("inf")
    for _ in range(3):
        start = time.thread_time()
        decision = call()
        best = min(best, (time.thread_time() - start) * 1e3)
        if best < AGAIN_MS:
            break
    return decision, best


@dataclass(frozen=True)
class State:
    """Free columns and free GPUs of each leaf, and a request."""

    rows: tuple[int, ...]
    room: tuple[int, ...]
    width: int
    gpus: int


def random_state(leaves: int, width: int, rng: random.Random) -> State:
    """Links taken one by one, or by slices at random places: 40-70 % of them."""
    use = rng.uniform(0.4, 0.7)
    if rng.random() < 0.5:
        rows = [
            _mask(column for column in range(width) if rng.random() > use) for _ in range(leaves)
        ]
        room = [row.bit_count() for row in rows]
    else:
        rows, room = _sliced(leaves, width, use, rng)
    return State(tuple(rows), tuple(room), width, rng.randint(4, 3 * width))


def _mask(columns: Iterator[int]) -> int:
    return sum(1 << column for column in columns)


def _sliced(leaves: int, width: int, use: float, rng: random.Random) -> tuple[list[int], list[int]]:
    rows, room = [(1 << width) - 1] * leaves, [width] * leaves
    used, tries = 0, 0
    while used < use * leaves * width and (tries := tries + 1) < 3000:
        m, n = rng.choice((2, 2, 3, 4, 6, 8, 12)), rng.choice((1, 2, 3, 4, 6, 8, 12))
        common = (1 << width) - 1
        chosen: list[int] = []
        for leaf in rng.sample(range(leaves), leaves):
            if len(chosen) < m and (common & rows[leaf]).bit_count() >= n <= room[leaf]:
                common &= rows[leaf]
                chosen.append(leaf)
        if len(chosen) < m:
            continue
        taken = _mask(iter(rng.sample(bits(common), n)))
        for leaf in chosen:
            rows[leaf] &= ~taken
            room[leaf] -= n
        used += m * n
    return rows, room


def placed(state: State) -> bool:
    """What the product's search says."""
    grid = Grid.of(state.rows, state.width)
    return allocate.even(grid, state.room, state.gpus) is not None


def possible(state: State) -> bool | None:
    """What the exact solver says; None when it does not know in time."""
    unsure = False
    for n in range(min(state.width, state.gpus // 2), 0, -1):
        if state.gpus % n == 0 and state.gpus // n <= len(state.rows):
            verdict = solve(state, state.gpus // n, n)
            if verdict:
                return True
            unsure |= verdict is None
    return None if unsure else False


def solve(state: State, m: int, n: int) -> bool | None:
    """One shape: no chosen leaf and chosen column without a free link between them."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    columns = [model.new_bool_var("") for _ in range(state.width)]
    leaves = []
    for row, room in zip(state.rows, state.room, strict=True):
        if room < n:
            continue
        leaf = model.new_bool_var("")
        leaves.append(leaf)
        for column, variable in enumerate(columns):
            if not row >> column & 1:
                model.add_bool_or(leaf.negated(), variable.negated())
    if len(leaves) < m:
        return False
    model.add(sum(leaves) == m)
    model.add(sum(columns) == n)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = SOLVER_SECONDS
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return True
    return False if status == cp_model.INFEASIBLE else None


def judge(seconds: float, seed: int) -> Counter[str]:
    """Counts of states: placed, missed, impossible, unsettled, wrong."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = random_state(*rng.choice(STATES), rng)
        found, truth = placed(state), possible(state)
        if found and truth is False:
            counts["wrong"] += 1
        elif found:
            counts["placed"] += 1
        else:
            counts[{True: "missed", False: "impossible", None: "unsettled"}[truth]] += 1
    return counts


def run(decisions: int, judge_seconds: float, seed: int) -> dict[str, Any]:
    """All of it; the keys of the last line."""
    cabled = [
        measure("128 leaves x 64", fabric(128, 64, 64), allocate.decide, decisions, seed),
        measure("256 leaves x 32", fabric(256, 32, 32), allocate.decide, decisions, seed),
    ]
    optical = [
        measure("128 x 64, optics", fabric(128, 64, 128, 1), ocsvclos.decide, decisions // 4, seed),
        measure("256 x 32, optics", fabric(256, 32, 128, 2), ocsvclos.decide, decisions // 4, seed),
    ]
    for times in (*cabled, *optical):
        say(times)
    counts = judge(judge_seconds, seed)
    print(f"random states: {dict(counts)}", file=sys.stderr)
    settled = counts["placed"] + counts["missed"]
    both = Times("", sum((each.all for each in cabled), ()), 0)
    lit = Times("", sum((each.all for each in optical), ()), 0)
    return {
        "gpus": 8192,
        "decisions": len(both.all),
        "p99_ms": round(both.quantile(0.99), 2),
        "worst_ms": round(max(both.all), 2),
        "placed_of_exact": round(counts["placed"] / settled, 4) if settled else None,
        "refusals": sum(each.refused for each in cabled),
        "ocs_p99_ms": round(lit.quantile(0.99), 2),
        "ocs_worst_ms": round(max(lit.all), 2),
        "states": dict(counts),
    }


def say(times: Times) -> None:
    print(
        f"{times.name:18} {len(times.all):5} decisions, {times.refused:4} refused: median "
        f"{times.quantile(0.5):.2f} ms, p99 {times.quantile(0.99):.2f}, worst {max(times.all):.2f}",
        file=sys.stderr,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--decisions", type=int, default=1500, metavar="N", help="per fabric")
    parser.add_argument("--judge-seconds", type=float, default=JUDGE_SECONDS, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="nothing but the last line")
    args = parser.parse_args(argv)
    gc.freeze()  # what is imported is not looked through again
    print(json.dumps(run(args.decisions, args.judge_seconds, args.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
