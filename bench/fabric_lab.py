# SPDX-License-Identifier: Apache-2.0
"""Slices against hashing, on a fabric in namespaces: how long collectives take.

Two jobs of eight ranks share four leaves and four spines, each with two NICs on every leaf. Links
have 100 Mbit/s and NICs 90. A rail-wise ring and a phased all-to-all run alone, together under
slices, together under ECMP by ports, and together under resilient next-hop groups; with hashing
each run has its own source ports. The switches count each five-tuple on each link: a collision is
a directed link with more than one data flow of a phase, or with data of both jobs.

The last line is one JSON object. Run it as root, after ``make traffic``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_agent.slices.check import check
from fabric_agent.slices.model import Fabric as Model
from fabric_agent.slices.model import Slice
from fabric_agent.slices.patterns import Pattern, all_to_all, rail_ring
from netns_tests.fabric import Counted, Fabric, Rates, Tuple, Way, small
from netns_tests.lab.errors import LabError
from netns_tests.lab.processes import end
from oncache.core.errors import HostError, OncacheError

BINARY = Path(__file__).resolve().parents[1] / "build" / "collective"
CONGESTION = "cubic"
BYTES = 1_000_000  # of each flow in each phase
RUNS = 20
REPEATS = 5  # of what does not depend on source ports
SECONDS = 60.0


@dataclass(frozen=True)
class Collective:
    """What the jobs do: a pattern, and how often its phases are gone through."""

    name: str
    pattern: Callable[[Slice], Pattern]
    repeat: int


# A ring all-reduce over four leaves takes 2 (4 - 1) steps.
COLLECTIVES = (Collective("ring", rail_ring, 6), Collective("alltoall", all_to_all, 1))


@dataclass(frozen=True)
class Run:
    """Seconds of each job, collisions, and the data flows that were seen to take exactly one
    uplink and one downlink, of all that cross the fabric."""

    seconds: tuple[float, ...]
    collisions: int
    whole: int
    flows: int


def jobs(model: Model) -> tuple[Slice, ...]:
    """Two slices of four leaves, two NICs and two spines each: one host of every leaf."""
    leaves = range(len(model.leaves))
    made = []
    for number in range(2):
        nics = tuple(
            tuple(nic for nic in model.leaves[leaf].nics if model.nics[nic].host % 2 == number)
            for leaf in leaves
        )
        spines = (2 * number, 2 * number + 1)
        links = tuple(tuple(model.cables[leaf][spine] for spine in spines) for leaf in leaves)
        made.append(Slice(f"job{number}", number + 1, nics, links))
    return tuple(made)


def plan(fabric: Fabric, job: Slice, collective: Collective) -> str:
    """The generator's input. Ranks of one server have no need of the fabric."""
    model = fabric.model
    nics = [model.nics[nic] for nic in job.ranks]
    lines = [
        f"rank {fabric.nodes[model.hosts[nic.host].name].path} {nic.address.ip}" for nic in nics
    ]
    pattern = collective.pattern(job)
    for number in range(pattern.phases):
        flows = [flow for flow in pattern.phase(number) if nics[flow[0]].host != nics[flow[1]].host]
        lines.append("phase " + " ".join(f"{source}>{target}" for source, target in flows))
    return "\n".join(lines) + "\n\n"


@contextlib.contextmanager
def generator(
    fabric: Fabric, job: Slice, collective: Collective, seed: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The generator of one job, connected and waiting for a line."""
    child = next(iter(fabric.nodes.values())).spawn(
        [
            *(str(BINARY), "--bytes", str(BYTES), "--repeat", str(collective.repeat)),
            *("--seed", str(seed), "--congestion", CONGESTION),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(plan(fabric, job, collective).encode())
        child.stdin.flush()
        if child.stdout.readline() != b"ready\n":
            raise _broken(child.communicate(timeout=SECONDS)[1])
        yield child
    finally:
        end(child)


def _broken(said: bytes) -> LabError:
    return LabError(f"the generator failed: {said.decode().strip()}", hint="run it by hand")


def run(fabric: Fabric, running: Sequence[Slice], collective: Collective, seed: int) -> Run:
    """Run the jobs together, once."""
    fabric.count()
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(generator(fabric, job, collective, 1000 * seed + job.number))
            for job in running
        ]
        for child in children:
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
        reports = [_report(child) for child in children]
    return _judged(reports, fabric.counted(), collective.repeat)


def _report(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    out, said = child.communicate(timeout=SECONDS)
    if child.returncode != 0:
        raise _broken(said)
    report: dict[str, Any] = json.loads(out)
    return report


def _judged(reports: list[dict[str, Any]], counted: list[Counted], repeat: int) -> Run:
    """Compare what the generators sent with what the switches counted."""
    jobs_of: dict[Tuple, int] = {}
    phases_of: dict[Tuple, list[int]] = defaultdict(list)
    for job, report in enumerate(reports):
        for flow in report["flows"]:
            key = Tuple(
                *("tcp", flow["source"], flow["source_port"], flow["destination"], flow["port"])
            )
            jobs_of[key] = job
            phases_of[key].append(flow["phase"])
    data = [row for row in counted if row.flow in jobs_of]
    links_of: Counter[Tuple] = Counter()
    loads: Counter[tuple[str, str, int, int]] = Counter()
    users: dict[tuple[str, str], set[int]] = defaultdict(set)
    for row in data:
        phases = phases_of[row.flow]
        links_of[row.flow] += row.bytes >= BYTES * repeat * len(phases)
        users[row.switch, row.port].add(jobs_of[row.flow])
        for phase in phases:
            loads[row.switch, row.port, jobs_of[row.flow], phase] += 1
    collisions = sum(load > 1 for load in loads.values()) + sum(map(_shared, users.values()))
    whole = sum(count == 2 for count in links_of.values()) if len(data) == 2 * len(jobs_of) else 0
    return Run(tuple(report["seconds"] for report in reports), collisions, whole, len(jobs_of))


def _shared(users: set[int]) -> bool:
    return len(users) > 1


def measure(fabric: Fabric, collective: Collective, runs: int) -> dict[str, Any]:
    """All ways for one collective."""
    pair = jobs(fabric.model)
    for job in pair:
        promise = check(fabric.model, job, collective.pattern(job))
        assert promise.contention_free, promise.remarks
    with fabric.sliced(pair):
        alone = [
            statistics.median(
                run(fabric, [job], collective, seed).seconds[0] for seed in range(REPEATS)
            )
            for job in pair
        ]
        sliced = [run(fabric, pair, collective, seed) for seed in range(REPEATS)]
    hashed: dict[Way, list[Run]] = {}
    for way in Way:
        fabric.route(way)
        hashed[way] = [run(fabric, pair, collective, seed) for seed in range(runs)]
    together = [statistics.median(each.seconds[job] for each in sliced) for job in range(len(pair))]
    medians = {way: _median(each) for way, each in hashed.items()}
    worst = max(one / other for one, other in zip(together, alone, strict=True))
    result = {
        "slices_over_alone": round(worst, 3),
        **{f"{way}_median_over_slices": round(medians[way] / _median(sliced), 3) for way in Way},
        "alone_seconds": round(statistics.median(alone), 3),
        "slices_seconds": round(_median(sliced), 3),
        **{f"{way}_seconds": round(medians[way], 3) for way in Way},
        "ecmp_runs": runs,
        "collisions": sum(each.collisions for each in sliced),
        **{
            f"{way}_collisions_median": statistics.median(each.collisions for each in hashed[way])
            for way in Way
        },
        "flows_seen_on_one_way": f"{sliced[0].whole} of {sliced[0].flows}",
    }
    assert all(each.whole == each.flows for each in sliced), "a flow took more than one way"
    _show(collective.name, result)
    return result


def _median(runs: Sequence[Run]) -> float:
    """Of the jobs' times, each job of each run by itself."""
    return statistics.median(seconds for each in runs for seconds in each.seconds)


def _show(name: str, result: dict[str, Any]) -> None:
    print(f"{name}: {BYTES} bytes a flow and phase, {CONGESTION}")
    for key, value in result.items():
        print(f"  {key:<32} {value}")


def main() -> int:
    """Measure, print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, prog="fabric_lab")
    parser.add_argument("--runs", type=int, default=RUNS, help="with hashing, of each kind")
    arguments = parser.parse_args()
    if not BINARY.exists():
        raise HostError(f"the generator {BINARY} is missing", hint="run make traffic")
    with Fabric(small(), Rates()) as fabric:
        results = {each.name: measure(fabric, each, arguments.runs) for each in COLLECTIVES}
    collisions = sum(result["collisions"] for result in results.values())
    print(json.dumps({**results, "collisions": collisions, "congestion": CONGESTION}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OncacheError as error:
        print(error.lines(), file=sys.stderr)
        sys.exit(error.exit_code)
