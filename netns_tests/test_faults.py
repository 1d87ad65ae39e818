# SPDX-License-Identifier: Apache-2.0
"""Bad input and faults: two lines, an exit code, and the host as it was before."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from netns_tests.footprint import footprint
from netns_tests.lab import Host, processes, until
from netns_tests.lab.processes import python
from oncache.core import control
from oncache.core.errors import NotLoadedError

SECONDS = 30.0
NOBODY = 65534
FAILED, WRONG, NOT_LOADED, CANNOT = 1, 2, 3, 4

# What stands before a command and takes something away from it.
WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
WITHOUT_KERNEL_TYPES = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs none /sys/kernel/btf && exec "$@"',
    "sh",
)


@dataclass(frozen=True)
class Ended:
    """What a command said, and how it ended."""

    code: int
    out: str
    err: str

    def refuses(self, code: int, *words: str) -> None:
        """It ended with `code` and two lines on standard error, the first with these words."""
        lines = self.err.splitlines()
        assert [line.split(": ")[0] for line in lines] == ["error", "next"], self.err
        assert self.code == code, self.err
        for word in words:
            assert word in lines[0]


def run(host: Host | None, argv: Sequence[str], **options: Any) -> Ended:
    """A command to its end, on a host or where we are."""
    spawn = processes.start if host is None else host.spawn
    child = spawn(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        out, err = child.communicate(timeout=SECONDS)
    finally:
        processes.end(child)
    return Ended(child.returncode, out.decode(), err.decode())


def agent(host: Host, config: dict[str, Any], *before: str, **options: Any) -> Ended:
    """A node agent that is expected to give up."""
    host.config_path.write_text(yaml.safe_dump(config))
    command = python("fabric_agent.cli", "node", "-c", str(host.config_path))
    return run(host, [*before, *command], **options)


def oncache(host: Host | None, *arguments: str, **options: Any) -> Ended:
    return run(host, python("oncache.cli", *arguments), **options)


@pytest.fixture
def host(hosts: tuple[Host, Host]) -> Iterator[Host]:
    """A host that must be at the end of the test as it was at its beginning."""
    before = footprint(hosts[0])
    yield hosts[0]
    after = footprint(hosts[0])
    for what, seen in before.items():
        assert after[what] == seen, what


# --- devices


def test_an_uplink_that_does_not_exist(host: Host) -> None:
    agent(host, host.config(node={"uplink": "eth99"})).refuses(CANNOT, "uplink", "eth99")


def test_a_tunnel_that_does_not_exist(host: Host) -> None:
    agent(host, host.config(overlay={"device": "flannel.9"})).refuses(CANNOT, "flannel.9")


def test_a_tunnel_of_another_kind(host: Host) -> None:
    agent(host, host.config(overlay={"device": "cni0"})).refuses(WRONG, "cni0", "bridge")


@pytest.mark.parametrize("mtu", [1499, 1280])
def test_an_mtu_that_cannot_hold_the_header(hosts: tuple[Host, Host], mtu: int) -> None:
    host = hosts[0]
    host.command(["ip", "link", "set", host.uplink, "mtu", str(mtu)])
    before = footprint(host)
    agent(host, host.config()).refuses(CANNOT, "1450", str(mtu), host.tunnel, host.uplink)
    assert footprint(host) == before


# --- the host


def test_a_kernel_without_types(host: Host) -> None:
    """What libbpf looks for is hidden by an empty file system over it."""
    agent(host, host.config(), *WITHOUT_KERNEL_TYPES).refuses(CANNOT, "BTF")


def test_bpffs_is_not_mounted(host: Host, tmp_path: Path) -> None:
    agent(host, host.config(bpf_dir=str(tmp_path / "bpf"))).refuses(CANNOT, "BPF file system")
    assert not list(tmp_path.iterdir())


def test_no_privileges_for_the_agent(host: Host) -> None:
    agent(host, host.config(), *WITHOUT_CAPABILITIES).refuses(CANNOT)


def test_another_user_starts_the_agent(open_host: Host) -> None:
    agent(open_host, open_host.config(), user=NOBODY, group=NOBODY, extra_groups=[]).refuses(CANNOT)


@pytest.fixture
def open_host(host: Host) -> Iterator[Host]:
    """A host whose directories everybody may enter, so that configuration and code can be read."""
    folder = host.config_path.parents[1]
    folder.chmod(0o755)
    yield host
    folder.chmod(0o700)


VERBS = (
    ("status",),
    ("stats",),
    ("caches", "filter"),
    ("explain", "tcp", "10.1.0.11:1", "10.2.0.11:2"),
    ("flush",),
    ("attach",),
    ("detach",),
)


def test_another_user_asks(open_host: Host) -> None:
    config = str(open_host.config_path)
    with open_host.agent(options=("--detach-on-exit",)):
        for verb in VERBS:
            ended = oncache(open_host, *verb, "-c", config, user=NOBODY, group=NOBODY)
            ended.refuses(CANNOT)
        found = oncache(open_host, "doctor", "-c", config, user=NOBODY, group=NOBODY)
        assert (found.code, found.err) == (CANNOT, "")
        assert "FAIL  privileges" in found.out


# --- the configuration


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("node: {uplink: eth0", "line 1"),
        ("node: {uplink: eth0}\noverlay: {devcie: flannel.1}\n", "overlay.devcie"),
        ("- a list", "not a table"),
        ("", "not a table"),
        ("node: {uplink: [1, 2]}\noverlay: {device: a}\n", "node.uplink"),
        ("node: {uplink: eth0}\nnode: {uplink: eth1}\noverlay: {device: a}\n", "node"),
        ("node: {uplink: eth0}\noverlay: {device: a}\nmark_mask: 0x7f\n", "mark_mask"),
        ("node: {uplink: eth0}\noverlay: {device: a}\nplane: xmasq\n", "xmasq"),
        ("\0", "not valid YAML"),
    ],
)
def test_a_configuration_that_is_wrong(tmp_path: Path, text: str, word: str) -> None:
    """Nothing is touched before it is read: no host is needed, and none is looked at."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    run(None, python("fabric_agent.cli", "node", "-c", str(path))).refuses(WRONG, word)
    oncache(None, "status", "-c", str(path)).refuses(WRONG, word)


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    run(None, python("fabric_agent.cli", "node", "-c", missing)).refuses(WRONG, missing)
    oncache(None, "doctor", "-c", missing).refuses(WRONG, missing)


@pytest.mark.parametrize("arguments", [["node", "--frobnicate"], ["frobnicate"], []])
def test_wrong_usage_of_the_agent(arguments: list[str]) -> None:
    run(None, python("fabric_agent.cli", *arguments)).refuses(WRONG)


# --- somebody was here before


def test_pins_of_another_layout(host: Host) -> None:
    foreign = host.bpf_dir / "maps-0123456789abcdef"
    foreign.mkdir(parents=True)
    before = footprint(host)
    agent(host, host.config()).refuses(FAILED, "another build", foreign.name)
    oncache(host, "status", "-c", str(host.config_path)).refuses(FAILED, "another build")
    assert footprint(host) == before
    # The way out that the error names.
    assert oncache(host, "detach", "-c", str(host.config_path)).code == 0


def test_pins_of_other_sizes(host: Host) -> None:
    with host.agent() as running:
        assert running.stop() == 0
    before = footprint(host)
    agent(host, host.config(limits={"flows": 1024})).refuses(FAILED, "filter_cache", "1024")
    assert footprint(host) == before
    assert oncache(host, "detach", "-c", str(host.config_path)).code == 0
    host.run_dir.rmdir()  # which a service manager may have made


def test_a_second_agent_on_the_same_directory(host: Host, tmp_path: Path) -> None:
    with host.agent(options=("--detach-on-exit",)) as running:
        before = footprint(host)
        agent(host, host.config(run_dir=str(tmp_path))).refuses(FAILED, str(host.bpf_dir))
        agent(host, host.config(bpf_dir=f"{host.bpf_dir}2")).refuses(FAILED, str(host.run_dir))
        assert footprint(host) == before
        assert control.call(running.run_dir, "status")["state"] == "attached"


def test_nothing_is_loaded(host: Host) -> None:
    host.config_path.write_text(yaml.safe_dump(host.config()))
    for verb in ("status", "stats", "flush", "attach"):
        oncache(host, verb, "-c", str(host.config_path)).refuses(NOT_LOADED)
    oncache(host, "caches", "egress", "-c", str(host.config_path)).refuses(NOT_LOADED)


# --- pods that vanish


def test_pods_that_vanish_while_we_attach(host: Host) -> None:
    """They come and go as fast as we can; the one that stays is served."""
    with host.agent(options=("--detach-on-exit",)) as running:
        for number in range(40):
            host.pod(f"q{number}").delete(abrupt=number % 2 == 0)
        stays = host.pod("stays")
        wanted = {str(host.pods["p1"].address), str(stays.address)}
        until(lambda: known(host) == wanted, SECONDS, "only the pods that are there")
        assert "Traceback" not in running.log
        assert "error:" not in running.log
        del host.pods["stays"]
        stays.delete()
        until(lambda: len(known(host)) == 1, SECONDS, "the last one is gone, too")
        assert running.stop() == 0


def known(host: Host) -> set[str]:
    """Addresses of the pods the agent serves; none before it answers."""
    try:
        pods = control.call(host.run_dir, "status")["pods"]
    except NotLoadedError:
        return set()
    return {address for pod in pods for address in pod["addresses"]}


def test_pods_that_vanish_while_an_agent_starts(host: Host) -> None:
    """It was told of twenty pods and finds fewer and fewer of them."""
    doomed = [host.pod(f"d{number}") for number in range(20)]
    host.config_path.write_text(yaml.safe_dump(host.config()))
    command = ["node", "--detach-on-exit", "-c", str(host.config_path)]
    child = host.spawn(python("fabric_agent.cli", *command), stderr=subprocess.PIPE)
    for pod in doomed:
        pod.delete()
    wanted = {str(host.pods["p1"].address)}
    until(lambda: known(host) == wanted, SECONDS, "only the pod that is there")
    child.terminate()
    _, log = child.communicate(timeout=SECONDS)
    assert child.returncode == 0
    assert b"Traceback" not in log
