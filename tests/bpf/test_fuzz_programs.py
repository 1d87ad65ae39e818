# SPDX-License-Identifier: Apache-2.0
"""A short run of the fuzzer: no rule broken, and the damage reached every rule."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import rig as lab
from bench.rig import Rig
from netns_tests.nodes import flat
from tests.bpf import fuzz

pytestmark = [pytest.mark.root, pytest.mark.netns]

PACKETS = 200_000
SEED = 1
# Reasons that only time, configuration or a driver's metadata bring about.
ELSEWHERE = {"disabled", "deadline", "vlan", "stale", "lease"}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with lab.rig() as made:
        yield made


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzz.build(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.timeout(300)
def test_damaged_packets_break_no_rule(rig: Rig, driver: Path) -> None:
    """A rule that was broken is printed with the command that shows it again."""
    result = fuzz.fuzz(rig, driver, PACKETS, SEED)
    assert result.violations == 0
    assert result.packets > 0.9 * PACKETS
    assert result.hits > 0.05 * PACKETS
    assert result.learned > 0.005 * PACKETS
    unseen = {
        name
        for name in flat(rig.plane.counters())
        if name.startswith("base_path.") and not result.moved[name]
    }
    assert unseen <= {f"base_path.{name}" for name in ELSEWHERE}


def test_a_packet_can_be_made_again(rig: Rig, driver: Path) -> None:
    """The same seed and number make the same packet, whatever came before."""
    which = {"seed": SEED, "first": 4711, "packets": 1}
    one, again = (fuzz.run(rig, driver, 0, **which) for _ in range(2))
    assert (one.packets, one.refused, one.hits) == (again.packets, again.refused, again.hits)


LIES: list[dict[str, int | str]] = [
    {"mtu": 1000},
    {"mtu": lab.MTU + 1},
    {"port_max": 32769},
    {"mark_mask": 0xFF00},
    {"peer": "00"},
]


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_node_that_is_not_as_the_reference_was_told(
    rig: Rig, driver: Path, lie: dict[str, int | str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The reference judges: what it is wrongly told of the node it takes for a violation."""
    which = {"seed": SEED, "first": 0, "packets": 20_000}
    result = fuzz.run(rig, driver, 0, **which, **lie)
    assert result.violations > 0
    assert "violation: " in capfd.readouterr().err
