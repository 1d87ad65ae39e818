# SPDX-License-Identifier: Apache-2.0
"""Measures host-to-host, plain overlay and ONCache side by side in one laboratory.

Two pairs of hosts are built alike; one of them has our agents. So no mode needs to be switched
on or off, and the modes take turns within seconds of each other: what else the machine does
meets all of them. Both ends of every measurement run on one CPU, which the traffic keeps busy
all the time: the time per transaction then is the CPU time per transaction, packet processing
included (bench/traffic.c says more). Of many short batches the best is the least disturbed one;
the median is given beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import programs, traffic
from bench.traffic import IPV4_KINDS, Kind, Load, Server, SteppedClient
from netns_tests.lab import Host, Lab, Namespace, Pod, services

LEAST_ROUNDS = 3
BATCHES = 8
# About 20 ms each: long against a clock tick's disturbance, short against other people's work.
TRANSACTIONS = {
    Kind.UDP_RR: 1000,
    Kind.TCP_RR: 1000,
    Kind.TCP_CRR: 150,
    Kind.TCP_STREAM: 64,
    Kind.UDP6_RR: 1000,
    Kind.TCP6_RR: 1000,
}
MEGABIT = 8.0  # of a MB, which is what a stream counts as one transaction


class Mode(StrEnum):
    HOST = "host"  # between the two hosts' own addresses
    OVERLAY = "overlay"  # between pods, nothing of ours attached
    ONCACHE = "oncache"  # between pods, with the node agents running


Progress = Callable[[str], None]
Look = Callable[[Host, Host], dict[str, Any]]


@dataclass(frozen=True)
class Way:
    """From where to where a mode is measured."""

    client: Namespace
    server: Host | Pod


@dataclass
class Samples:
    """What the clients of one kind and mode saw so far."""

    batches_us: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    lost: int = 0

    def add(self, seen: traffic.Result) -> None:
        self.batches_us += seen.batches_us
        self.cpu_us.append(seen.cpu_us)
        self.lost += seen.lost


Measured = dict[Kind, dict[Mode, Samples]]


def host_way(one: Host, other: Host) -> Way:
    """Between two hosts' uplinks."""
    return Way(one, other)


def pod_way(one: Host, other: Host, label: str = "p1") -> Way:
    """Between the pods of that label on two hosts."""
    return Way(one.pods[label], other.pods[label])


def measure(
    ways: dict[Mode, Way],
    *,
    kinds: Sequence[Kind] = IPV4_KINDS,
    rounds: int,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Measured:
    """Measure every kind in every mode, in turns.

    Ends after `rounds`, or with the first round after `seconds` (never before LEAST_ROUNDS).
    """
    cpu = max(os.sched_getaffinity(0))
    measured: Measured = {kind: {mode: Samples() for mode in ways} for kind in kinds}
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        servers = {
            (kind, mode): stack.enter_context(
                traffic.server(way.server, way.server.ip(kind.ip_version), kind, cpu=cpu)
            )
            for kind in kinds
            for mode, way in ways.items()
        }
        for number in range(rounds):
            late = seconds is not None and time.monotonic() - start > seconds
            if late and number >= LEAST_ROUNDS:
                break
            for kind in kinds:
                _take_turns(
                    {mode: (ways[mode], servers[kind, mode]) for mode in ways},
                    Load(transactions=TRANSACTIONS[kind], cpu=cpu),
                    measured[kind],
                )
            if progress:
                limit = f"of {rounds}" if seconds is None else f"within {seconds:g} s"
                progress(f"round {number + 1} {limit}, {_brief(measured)}")
    return measured


def _take_turns(
    ends: dict[Mode, tuple[Way, Server]], load: Load, measured: dict[Mode, Samples]
) -> None:
    """One client per mode, batch about: a slow moment of the machine meets all of them."""
    with contextlib.ExitStack() as stack:
        clients = {
            mode: stack.enter_context(SteppedClient(way.client, server, load))
            for mode, (way, server) in ends.items()
        }
        for _ in range(BATCHES):
            for client in clients.values():
                client.step()
        for mode, client in clients.items():
            measured[mode].add(client.result())


def _brief(measured: Measured) -> str:
    """The best batches so far, for who waits."""
    parts = []
    for kind, by_mode in measured.items():
        best = "/".join(f"{min(samples.batches_us):.0f}" for samples in by_mode.values())
        parts.append(f"{_TITLES[kind]} {best} {_unit(kind)}")
    modes = "/".join(next(iter(measured.values())))
    return f"best so far ({modes}): {', '.join(parts)}"


def summary(measured: Measured) -> dict[str, dict[str, dict[str, Any]]]:
    """Per kind and mode the figures of the report; see `run`."""
    return {
        kind.value: {mode.value: _figures(kind, mode, by_mode) for mode in by_mode}
        for kind, by_mode in measured.items()
    }


def _figures(kind: Kind, mode: Mode, by_mode: dict[Mode, Samples]) -> dict[str, Any]:
    samples = by_mode[mode]
    best = min(samples.batches_us)
    made: dict[str, Any] = {
        "best_us": round(best, 3),
        "median_us": round(statistics.median(samples.batches_us), 3),
        "cpu_us": round(statistics.median(samples.cpu_us), 3),
        "lost": samples.lost,
        "batches": len(samples.batches_us),
    }
    if kind is Kind.TCP_STREAM:
        made["gbit_s"] = round(MEGABIT * 1000 / best, 3)
    if Mode.HOST in by_mode:
        made["share_of_host"] = round(min(by_mode[Mode.HOST].batches_us) / best, 4)
        made["share_of_host_median"] = round(_paired_share(by_mode[Mode.HOST], samples), 4)
    if Mode.OVERLAY in by_mode and mode is Mode.ONCACHE:
        made.update(_against_overlay(best, by_mode))
    return made


def _paired_share(host: Samples, samples: Samples) -> float:
    """The median ratio of batches that ran one after the other."""
    pairs = zip(host.batches_us, samples.batches_us, strict=False)
    return statistics.median(reference / own for reference, own in pairs)


def _against_overlay(best: float, by_mode: dict[Mode, Samples]) -> dict[str, float | None]:
    overlay = min(by_mode[Mode.OVERLAY].batches_us)
    made: dict[str, float | None] = {"cost_of_overlay": round(best / overlay, 4)}
    if Mode.HOST in by_mode:
        extra = overlay - min(by_mode[Mode.HOST].batches_us)
        made["extra_gone"] = round((overlay - best) / extra, 4) if extra > 0 else None
    return made


def machine() -> dict[str, Any]:
    """What the figures depend on most."""
    return {"kernel": os.uname().release, "cpus": os.cpu_count()}


def run(
    *,
    rounds: int = 12,
    seconds: float | None = None,
    modes: Sequence[Mode | str] = tuple(Mode),
    kinds: Sequence[Kind | str] = IPV4_KINDS,
    progress: Progress | None = None,
    look: Look | None = None,
) -> dict[str, Any]:
    """Build the laboratory, measure, take it down; returns the report.

    {"kinds": {kind: {mode: {"best_us", "median_us", "cpu_us", "lost", "batches", "share_of_host",
    "share_of_host_median", and for oncache "cost_of_overlay", "extra_gone"}}},
    "machine": {"kernel", "cpus"}}. Microseconds are per transaction, of a stream
    per MB (which also has "gbit_s"). `share_of_host` compares rates, `cost_of_overlay` times;
    `extra_gone` is the share of the overlay's extra cost over host-to-host that is gone. They are
    taken from the best batches; "share_of_host_median" is the median of batches that ran one after
    the other.

    `look` is called with the two accelerated hosts after the last round, while their agents run;
    the dictionary it returns is merged into the report.
    """
    traffic.require()
    wanted, chosen = [Mode(mode) for mode in modes], [Kind(kind) for kind in kinds]
    ip6 = any(kind.ip_version == 6 for kind in chosen)
    say = progress or (lambda _: None)
    report: dict[str, Any] = {"kinds": {}, "machine": machine()}
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab())
        say("building two pairs of hosts with a pod each")
        ways = _plain_ways(lab, wanted, ip6)
        if Mode.ONCACHE in wanted:
            fast = _pair(lab, "c", "d", ip6=ip6)
            say("starting the node agents on the second pair")
            for host in fast:
                stack.enter_context(host.agent())
            ways[Mode.ONCACHE] = pod_way(*fast)
        report["kinds"] = summary(
            measure(ways, kinds=chosen, rounds=rounds, seconds=seconds, progress=progress)
        )
        if look and Mode.ONCACHE in wanted:
            report.update(look(*fast))
        say("taking everything down")
    return report


def benchmark(*, rounds: int, progress: Progress, ip6: bool = False) -> dict[str, Any]:
    """The whole benchmark: the report of `run`, with `ip6` of kinds over IPv6 too, and under
    "programs" what bench.programs.costs has to say: {program: {"ns", "ns_miss", "verified_insns",
    "jited_bytes"}}."""
    report = run(rounds=rounds, kinds=tuple(Kind) if ip6 else IPV4_KINDS, progress=progress)
    progress("running each program by itself")
    return {**report, "programs": programs.costs()}


def _pair(lab: Lab, one: str, other: str, *, ip6: bool) -> tuple[Host, Host]:
    """Two hosts as a cluster has them: Flannel's bridge, and kube-proxy's chain in FORWARD.

    The chain switches conntrack on for all traffic of the host, host-to-host included.
    """
    hosts = lab.pair((one, other), ip6=ip6)
    for host in hosts:
        services.policy(host)
    return hosts


def _plain_ways(lab: Lab, wanted: Sequence[Mode], ip6: bool) -> dict[Mode, Way]:
    plain = _pair(lab, "a", "b", ip6=ip6)
    ways = {Mode.HOST: host_way(*plain), Mode.OVERLAY: pod_way(*plain)}
    return {mode: way for mode, way in ways.items() if mode in wanted}


_TITLES = {
    Kind.UDP_RR: "UDP request-response",
    Kind.TCP_RR: "TCP request-response",
    Kind.TCP_CRR: "connection per request",
    Kind.TCP_STREAM: "TCP stream",
    Kind.UDP6_RR: "UDP over IPv6",
    Kind.TCP6_RR: "TCP over IPv6",
}


def table(report: dict[str, Any]) -> str:
    """The report's figures for people, one line per kind and mode."""
    lines = [
        f"{'':24}{'':9}{'rate':>14}{'CPU, best':>14}{'median':>10}{'of host':>9}"
        f"{'of overlay':>12}{'extra cost':>12}",
        f"{'':24}{'':9}{'':>14}{'':>14}{'':>10}{'(rate)':>9}{'(CPU)':>12}{'gone':>12}",
    ]
    for kind, by_mode in report["kinds"].items():
        title = _TITLES[Kind(kind)]
        for mode, figures in by_mode.items():
            lines.append(f"{title:24}{mode:9}{_row(Kind(kind), figures)}".rstrip())
            title = ""
    return "\n".join(lines)


def _row(kind: Kind, figures: dict[str, Any]) -> str:
    rate = f"{figures['gbit_s']:.1f} Gbit/s" if "gbit_s" in figures else _per_second(figures)
    cost = figures.get("cost_of_overlay")
    return (
        f"{rate:>14}{figures['best_us']:>8.1f} {_unit(kind):<5}{figures['median_us']:>10.1f}"
        f"{_ratio(figures.get('share_of_host')):>9}{_ratio(cost):>12}"
        f"{_percent(figures.get('extra_gone')):>12}"
    )


def _unit(kind: Kind) -> str:
    return "µs/MB" if kind is Kind.TCP_STREAM else "µs"


def _per_second(figures: dict[str, Any]) -> str:
    return f"{1e6 / figures['best_us']:,.0f} /s"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lab_bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--modes", nargs="+", choices=list(Mode), default=list(Mode))
    parser.add_argument("--kinds", nargs="+", choices=list(Kind), default=IPV4_KINDS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args(arguments)
    report = run(
        rounds=chosen.rounds,
        modes=chosen.modes,
        kinds=chosen.kinds,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(table(report))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
