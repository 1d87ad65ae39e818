# SPDX-License-Identifier: Apache-2.0
"""What one run of each program costs, by program-test-run in a laboratory of its own.

A figure is taken from many single runs: a hit changes its packet, so that no run can be repeated
on it. Of short batches, in turns with those of the other programs, the best median counts, less
that of an empty program. It therefore contains the program and the helpers it calls (the look-ups,
making room for the header or taking it away, the redirect's first half), all with caches that a
system call has just disturbed. It does not contain what a device does before and after, nor the
rest of the redirect. Read the figures against each other; bench.lab_bench says what a packet costs
altogether.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scapy.layers.inet import UDP
from scapy.packet import Packet

from bench import rig as lab
from bench.rig import BASE, REDIRECT, Rig, from_pod, to_pod, udp, udp_back, wrap
from oncache.core import libbpf
from oncache.core.libbpf import Object
from oncache.core.skb import SkbContext

BATCHES, RUNS = 40, 100
EMPTY = """
struct __sk_buff;
__attribute__((section("tc"), used)) int empty(struct __sk_buff *skb) { return -1; }
char _license[] __attribute__((section("license"))) = "GPL";
"""
CLANG = ("clang", "-O2", "-g", "-target", "bpf", "-x", "c", "-c", "-")

OUT, BACK = from_pod(udp()), to_pod(udp_back())
# Two flows that never become fast: each has one direction only.
UNKNOWN_OUT, UNKNOWN_BACK = from_pod(UDP(sport=1, dport=2)), to_pod(UDP(sport=3, dport=4))

Run = Callable[[], libbpf.TestRun]


@dataclass(frozen=True)
class Case:
    """One way through one program."""

    program: str
    figure: str
    run: Run
    verdict: int


def costs(batches: int = BATCHES) -> dict[str, dict[str, Any]]:
    """Per program {"ns", "ns_miss", "verified_insns", "jited_bytes"}.

    `ns`: of a packet on the fast path; to_wire and to_pod let it go at once. `ns_miss`: of one that
    the base path carries and that is learned from, or would be.
    """
    with _empty() as empty, lab.rig() as rig:
        rig.warm(OUT, BACK)
        floor = Case("", "", _runner(empty, OUT, ifindex=rig.pod), BASE)
        cases = _cases(rig)
        best = _best([floor, *cases], batches)
        found: dict[str, dict[str, Any]] = {name: {} for name in rig.programs}
        for case in cases:
            # A few ns are less than the difference of two runs can tell.
            found[case.program][case.figure] = max(0.0, best[case] - best[floor])
        for name, info in rig.plane.programs().items():
            found[name] |= {"verified_insns": info.verified_insns, "jited_bytes": info.jited_len}
    return found


def _best(cases: Sequence[Case], batches: int) -> dict[Case, float]:
    medians: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(batches):
        for case in cases:
            medians[case].append(_median(case))
    return {case: min(seen) for case, seen in medians.items()}


def _median(case: Case) -> float:
    taken = []
    for _ in range(RUNS):
        seen = case.run()
        assert seen.retval == case.verdict, (case, seen)
        taken.append(seen.ns)
    return statistics.median(taken)


def _cases(rig: Rig) -> list[Case]:
    fds, pod, uplink = rig.programs, rig.pod, rig.uplink
    leaves, arrives = lab.encapsulated(UNKNOWN_OUT), lab.delivered(UNKNOWN_BACK)
    pod_miss = _runner(fds["from_pod"], UNKNOWN_OUT, ifindex=pod)
    wire_miss = _runner(fds["from_wire"], wrap(UNKNOWN_BACK), ifindex=uplink)
    learn_out = _second(pod_miss, fds["to_wire"], leaves, uplink)
    learn_back = _second(wire_miss, fds["to_pod"], arrives, pod)
    return [
        Case("from_pod", "ns", _runner(fds["from_pod"], OUT, ifindex=pod), REDIRECT),
        Case("from_pod", "ns_miss", pod_miss, BASE),
        Case("to_wire", "ns", _runner(fds["to_wire"], leaves, ifindex=uplink), BASE),
        Case("to_wire", "ns_miss", learn_out, BASE),
        Case("from_wire", "ns", _runner(fds["from_wire"], wrap(BACK), ifindex=uplink), REDIRECT),
        Case("from_wire", "ns_miss", wire_miss, BASE),
        Case("to_pod", "ns", _runner(fds["to_pod"], arrives, ifindex=pod), BASE),
        Case("to_pod", "ns_miss", learn_back, BASE),
    ]


def _runner(program: int, packet: Packet, **fields: int) -> Run:
    data, context = bytes(packet), SkbContext(**fields)
    return lambda: libbpf.test_run(program, data, context)


def _second(first: Run, program: int, packet: Packet, ifindex: int) -> Run:
    """The second hook of a base path packet, which needs the mark that the first one gave."""
    data = bytes(packet)

    def run() -> libbpf.TestRun:
        seen = first().ctx
        assert seen is not None
        return libbpf.test_run(program, data, SkbContext(ifindex=ifindex, mark=seen.mark))

    return run


@contextmanager
def _empty() -> Iterator[int]:
    """A program that does nothing."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "empty.o"
        subprocess.run([*CLANG, "-o", str(target)], input=EMPTY.encode(), check=True)
        with closing(Object(target)) as made:
            made.load()
            yield made.programs["empty"]
