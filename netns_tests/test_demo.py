# SPDX-License-Identifier: Apache-2.0
"""The demo as a newcomer meets it: to its end, and interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.traffic import IPV4_KINDS
from netns_tests.documented import examples
from netns_tests.lab import namespaces, processes, until

SECONDS = 90.0


class Demo:
    """A demo at work; its laboratory's directory, and so its name, is found in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: set[str] = set()
        self.child = processes.start(
            processes.python("oncache.cli", "demo", "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**processes.environment(), "TMPDIR": str(folder)},
        )

    def wait_for(self, word: str) -> None:
        """Read its progress up to a line with this word."""
        assert self.child.stderr is not None
        for line in self.child.stderr:
            self.names |= {path.name.rsplit("-", 1)[0] for path in self._folder.iterdir()}
            if word in line.decode():
                return
        raise AssertionError(f"the demo ended before it said {word!r}")

    def leftovers(self) -> list[str]:
        """What still bears the name of its laboratory: files, namespaces, mounts, processes."""
        assert self.names
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        spaces = map(str, namespaces.RUN.glob("*")) if namespaces.RUN.exists() else ()
        found = [*map(str, self._folder.iterdir()), *mounts, *spaces, *command_lines()]
        return [each for each in found if any(name in each for name in self.names)]


def command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended meanwhile


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("building", signal.SIGINT),
        ("starting", signal.SIGTERM),
        ("starting", signal.SIGINT),
        ("round 1 ", signal.SIGINT),
    ],
)
def test_a_demo_that_is_stopped_leaves_nothing(
    tmp_path: Path, word: str, number: signal.Signals
) -> None:
    demo = Demo(tmp_path)
    demo.wait_for(word)
    demo.child.send_signal(number)
    out, err = demo.child.communicate(timeout=SECONDS)
    assert (demo.child.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    until(lambda: not demo.leftovers(), 5.0, "everything is gone")


INTERRUPTED_FORK = """
import os, signal, subprocess, sys
from netns_tests.lab import processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # as if never ignored by a parent
children = []
real = subprocess.Popen
subprocess.Popen = lambda *a, **k: children.append(real(*a, **k)) or children[-1]
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    processes.start(["sleep", "60"])
except KeyboardInterrupt:
    sys.exit(10 if children[0].returncode is not None else 11)
"""


def test_an_interrupt_in_the_middle_of_a_fork_is_not_lost() -> None:
    """Nor is the child that had just been started."""
    done = processes.finish([sys.executable, "-c", INTERRUPTED_FORK], check=False)
    assert done.returncode == 10, done.stderr


def test_a_demo_to_its_end(tmp_path: Path) -> None:
    demo = Demo(tmp_path)
    demo.wait_for("round 1 ")
    out, err = demo.child.communicate(timeout=SECONDS)
    assert demo.child.returncode == 0, err
    assert demo.leftovers() == []
    report = json.loads(out)
    assert set(report["kinds"]) == {kind.value for kind in IPV4_KINDS}
    assert all(set(modes) == {"host", "overlay", "oncache"} for modes in report["kinds"].values())
    documented = examples()["bench"]["kinds"]["udp_rr"]["oncache"]
    assert report["kinds"]["udp_rr"]["oncache"].keys() == documented.keys()
    assert report["counters"]["hits"]["from_pod"] > 0
    assert report["caches"]["egress"] and report["caches"]["ingress"]
    fast = [
        flow["protocol"]
        for flow in report["caches"]["filter"]
        if flow["egress"]["fast"] and flow["ingress"]["fast"]
    ]
    assert {"tcp", "icmp"} <= set(fast)
