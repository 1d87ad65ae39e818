# SPDX-License-Identifier: Apache-2.0
"""The demo and the benchmark, without the laboratory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import lab_bench
from oncache.cli import bench, checkout, demo, main
from oncache.core.errors import OncacheError

REPORT: dict[str, Any] = {
    "kinds": {"udp_rr": {"host": {"best_us": 10.0}}},
    "programs": {},
    "host": "c",
    "caches": {"filter": [], "egress": [], "ingress": []},
    "counters": {
        "hits": {"from_pod": 1, "from_wire": 0, "local": 0},
        "base_path": {"miss": 1},
        "dropped": {"unfinished": 0},
        "learned": 1,
    },
}


def test_a_wheel_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(OncacheError, match="source checkout") as caught:
        checkout.require("demo", tmp_path)
    assert "make demo" in caught.value.hint


def test_this_is_a_checkout() -> None:
    checkout.require("demo")


def test_the_demo_shows_figures_caches_and_counters() -> None:
    pod = {"addresses": ["10.1.0.11"], "device": "v", "mac": "m", "generation": 1}
    rows = [{"index": n, **pod} for n in range(9)]
    report = {**REPORT, "caches": {**REPORT["caches"], "ingress": rows}}
    told = demo.render(report, lambda _: "THE TABLE")
    assert "\n\nTHE TABLE\n\nFilter cache of host c:\n" in told
    assert "Ingress cache of host c (first 6 of 9):" in told
    assert told.count("10.1.0.11") == demo.ROWS_SHOWN
    assert "50.0% of packets were fast" in told


def test_fast_flows_are_shown_first() -> None:
    def flow(age: float, *, fast: bool) -> dict[str, Any]:
        return {"egress": {"fast": True, "age_seconds": age}, "ingress": {"fast": fast}}

    slow = [flow(float(age), fast=False) for age in range(9)]
    fast = flow(99.0, fast=True)
    assert demo.first([*reversed(slow), fast]) == [fast, *slow[:5]]


def test_bench_prints_a_table_and_writes_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(lab_bench, "benchmark", lambda **options: asked.update(options) or REPORT)
    monkeypatch.setattr(lab_bench, "table", lambda _: "THE TABLE")
    target = tmp_path / "new" / "bench.json"
    assert main(["bench", "--rounds", "3", "--json", str(target)]) == 0
    assert (asked["rounds"], asked["ip6"]) == (3, False)
    assert capsys.readouterr().out == "THE TABLE\n"
    (line,) = target.read_text().splitlines()
    assert json.loads(line) == REPORT
    assert main(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == REPORT


def test_bench_tells_what_programs_cost() -> None:
    cost = {"ns": 41.5, "ns_miss": 80.0, "verified_insns": 912, "jited_bytes": 2310}
    told = bench.render({**REPORT, "programs": {"from_pod": cost}}, lambda _: "THE TABLE")
    assert told.splitlines()[0] == "THE TABLE"
    assert told.splitlines()[-1].split() == ["from_pod", "41.5", "80", "912", "2310"]


def test_no_rounds_is_wrong_usage() -> None:
    assert main(["bench", "--rounds", "0"]) == 2
