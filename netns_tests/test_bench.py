# SPDX-License-Identifier: Apache-2.0
"""The benchmark measures what it says, and says it in the promised words."""

from __future__ import annotations

import json

from bench import lab_bench, programs
from bench.traffic import IPV4_KINDS, Kind
from netns_tests.documented import examples


def test_one_round_without_us() -> None:
    said: list[str] = []
    report = lab_bench.run(rounds=1, modes=("host", "overlay"), progress=said.append)
    assert set(report["kinds"]) == {kind.value for kind in IPV4_KINDS}
    for by_mode in report["kinds"].values():
        assert list(by_mode) == ["host", "overlay"]
        assert by_mode["host"]["share_of_host"] == 1
        assert 0 < by_mode["overlay"]["share_of_host"] < 1
        for figures in by_mode.values():
            assert 0 < figures["best_us"] <= figures["median_us"]
            assert figures["lost"] == 0
            # Pinned to one CPU and saturated: time is CPU time.
            assert figures["cpu_us"] > 0.9 * figures["best_us"]
    assert json.loads(json.dumps(report)) == report
    assert "UDP request-response" in lab_bench.table(report)
    (round_1,) = (line for line in said if line.startswith("round 1 of 1, best so far (host/over"))
    assert "UDP request-response" in round_1


def test_over_ipv6() -> None:
    kinds = (Kind.UDP6_RR, Kind.TCP6_RR)
    report = lab_bench.run(rounds=1, modes=("host", "overlay"), kinds=kinds)
    assert set(report["kinds"]) == {"udp6_rr", "tcp6_rr"}
    for by_mode in report["kinds"].values():
        assert 0 < by_mode["overlay"]["share_of_host"] < 1
        assert by_mode["overlay"]["lost"] == 0
    assert "UDP over IPv6" in lab_bench.table(report)


def test_what_is_gone_of_the_extra_cost() -> None:
    modes = dict(zip(lab_bench.Mode, (10.0, 30.0, 12.0), strict=True))
    measured = {
        Kind.UDP_RR: {mode: lab_bench.Samples([us, us + 1], [us]) for mode, us in modes.items()}
    }
    figures = lab_bench.summary(measured)["udp_rr"]["oncache"]
    assert figures["share_of_host"] == round(10 / 12, 4)
    assert figures["cost_of_overlay"] == 0.4
    assert figures["extra_gone"] == 0.9


def test_what_each_program_costs() -> None:
    found = programs.costs(batches=3)
    assert found.keys() == {"from_pod", "to_wire", "from_wire", "to_pod"}
    for cost in found.values():
        assert cost.keys() == examples()["bench"]["programs"]["from_pod"].keys()
        assert min(cost["verified_insns"], cost["jited_bytes"]) > 0
    # Whatever the machine: a packet that only leaves costs less than one that is looked up.
    for second in ("to_wire", "to_pod"):
        assert found[second]["ns"] < found["from_pod"]["ns"]
        assert found[second]["ns"] < found[second]["ns_miss"]
