# SPDX-License-Identifier: Apache-2.0
"""The configuration file: what is accepted, and how each mistake is named."""

import contextlib
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncache.core import config
from oncache.core.config import (
    BuiltinOverlay,
    Config,
    ExistingOverlay,
    Guard,
    GuardMode,
    Limits,
    Peer,
)
from oncache.core.errors import ConfigError

LEAST = "node: {uplink: eth0}\noverlay: {device: flannel.1}\n"
BUILTIN = """
node: {uplink: eth0, name: a}
overlay:
  builtin:
    vni: 7
    port: 8472
    pod_cidr: 10.1.1.0/24
    peers:
      - {address: 192.0.2.2, pod_cidr: 10.1.2.0/24}
"""


def test_least_file_gets_the_documented_defaults() -> None:
    read = config.parse(LEAST)
    assert read.node.uplink == "eth0"
    assert read.overlay == ExistingOverlay("flannel.1")
    assert read.limits == Limits(pods=1024, peers=4096, flows=65536)
    assert (read.deadline_seconds, read.lease_seconds, read.mark_mask) == (5.0, 10.0, 0xFF)
    assert read.run_dir == Path("/run/oncache")
    assert read.bpf_dir == Path("/sys/fs/bpf/oncache")
    assert read.discover_pods


def test_builtin_overlay() -> None:
    peer = Peer(IPv4Address("192.0.2.2"), IPv4Network("10.1.2.0/24"))
    expected = BuiltinOverlay(7, 8472, IPv4Network("10.1.1.0/24"), (peer,))
    assert config.parse(BUILTIN).overlay == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Guard()),
        ("guard: {}", Guard()),
        ("guard: {mode: off}", Guard(GuardMode.OFF)),
        ("guard: {mode: 'off'}", Guard(GuardMode.OFF)),
        ("guard: {mode: observe}", Guard(GuardMode.OBSERVE)),
        (
            "guard: {mode: enforce, peers: [192.0.2.7, 'fd00::7']}",
            Guard(GuardMode.ENFORCE, (IPv4Address("192.0.2.7"), IPv6Address("fd00::7"))),
        ),
    ],
)
def test_guard(text: str, expected: Guard) -> None:
    assert config.parse(LEAST + text).guard == expected


def test_a_node_takes_part_in_slices_by_its_name_in_the_fabric() -> None:
    assert config.parse(LEAST).slices_node is None
    assert config.parse(LEAST + "slices: {node: host0}").slices_node == "host0"


def test_the_packaged_file_is_valid() -> None:
    packaged = Path(__file__).parents[2] / "packaging" / "config.yaml"
    assert isinstance(config.load(packaged), Config)


WRONG = [
    ("overlay: {devcie: x}\nnode: {uplink: e}", "overlay.devcie", "'overlay.device'"),
    (LEAST + "limit: {}", "limit", "'limits'"),
    (LEAST + "limits: {podss: 1}", "limits.podss", "'limits.pods'"),
    (LEAST + "limits: {pods: many}", "limits.pods", "whole number"),
    (LEAST + "limits: {pods: true}", "limits.pods", "whole number"),
    (LEAST + "limits: {pods: 0}", "limits.pods", "from 1"),
    (LEAST + "limits: [1]", "limits", "table"),
    (LEAST + "pods: {discover: 1}", "pods.discover", "true or false"),
    (LEAST + "plane: xmasq", "plane", "use oncache"),
    (LEAST + "plane: calico", "plane", "oncache"),
    (LEAST + "run_dir: run", "run_dir", "absolute"),
    (LEAST + "run_dir: /sys/fs/bpf/oncache/run", "run_dir", "/run/oncache"),
    (LEAST + "store: redis", "store", "etcd"),
    (LEAST + "slices: {}", "slices.node is missing", "add slices.node"),
    (LEAST + "slices: {name: host0}", "slices.name", "node"),
    (LEAST + "deadline_seconds: .nan", "deadline_seconds", "seconds"),
    (LEAST + "lease_seconds: 3600", "lease_seconds", "to 14"),
    (LEAST + "mark_mask: 0xf", "mark_mask", "8 to 10"),
    (LEAST + "mark_mask: 0x1f7", "mark_mask", "neighbouring"),
    (LEAST + "node: {uplink: eth1}", "node", "YAML"),
    ("node: {uplink: no}\noverlay: {device: x}", "node.uplink", "name of a network device"),
    ("node: {uplink: much-too-long-name}\noverlay: {device: x}", "node.uplink", "15"),
    ("node: {}\noverlay: {device: x}", "node.uplink is missing", "add node.uplink"),
    ("node: {uplink: e}", "overlay needs exactly one", "flannel.1"),
    ("node: {uplink: e}\noverlay: {device: x, builtin: {}}", "exactly one", "device"),
    (BUILTIN.replace("vni: 7", "vni: 16777216"), "overlay.builtin.vni", "16777215"),
    (BUILTIN.replace("10.1.1.0/24", "10.1.1.1/24"), "overlay.builtin.pod_cidr", "host bits"),
    (BUILTIN.replace("10.1.2.0", "10.1.1.0"), "overlap", "its own pod_cidr"),
    (BUILTIN.replace("192.0.2.2", "b"), "overlay.builtin.peers[0].address", "IPv4 address"),
    (BUILTIN.replace("address:", "adress:"), "overlay.builtin.peers[0].adress", "address"),
    (LEAST + "guard: {mod: observe}", "guard.mod", "'guard.mode'"),
    (LEAST + "guard: enforce", "guard", "table"),
    (LEAST + "guard: {mode: on}", "guard.mode", "observe"),
    (LEAST + "guard: {mode: strict}", "guard.mode", "enforce"),
    (LEAST + "guard: {mode: [enforce]}", "guard.mode", "enforce"),
    (LEAST + "guard: {peers: 192.0.2.7}", "guard.peers", "list"),
    (LEAST + "guard: {peers: [192.0.2.0/24]}", "guard.peers[0]", "one node"),
    (LEAST + "guard: {peers: [192.0.2.7, 239.1.1.1]}", "guard.peers[1]", "one node"),
    (LEAST + "guard: {peers: ['::']}", "guard.peers[0]", "one node"),
    (LEAST + "guard: {peers: [127.0.0.1]}", "guard.peers[0]", "one node"),
    (LEAST + "guard: {peers: ['::ffff:192.0.2.7']}", "guard.peers[0]", "one node"),
    (LEAST + "guard: {peers: ['fe80::1%eth0']}", "guard.peers[0]", "one node"),
    (LEAST + "guard: {peers: [7]}", "guard.peers[0]", "word"),
    (LEAST + "guard: {peers: [192.0.2.7, 192.0.2.7]}", "given twice", "once"),
    ("a: [", "line", "YAML"),
    ("? [a]\n: b", "line", "YAML"),
    ("a: 2001-99-99", "not valid", "YAML"),
    ("just words", "not a table", "node:"),
    ("", "not a table", "node:"),
]


@pytest.mark.parametrize(("text", "names", "remedy"), WRONG)
def test_every_mistake_names_its_key_and_a_remedy(text: str, names: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(text)
    assert names in caught.value.message
    assert remedy in caught.value.hint


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere"):
        config.load(tmp_path / "nowhere")


@given(st.binary(max_size=200))
def test_no_file_makes_anything_but_a_config_error(raw: bytes) -> None:
    with contextlib.suppress(ConfigError):
        config.parse(raw.decode("latin-1"))


@given(st.integers(min_value=0, max_value=24), st.integers(min_value=8, max_value=10))
def test_every_run_of_eight_to_ten_bits_is_a_mark_mask(shift: int, bits: int) -> None:
    mask = ((1 << bits) - 1) << shift & 0xFFFFFFFF
    if mask.bit_count() == bits:
        assert config.parse(LEAST + f"mark_mask: {mask}").mark_mask == mask
