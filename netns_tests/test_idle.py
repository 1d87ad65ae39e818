# SPDX-License-Identifier: Apache-2.0
"""What the agent costs a host on which nothing happens."""

from __future__ import annotations

import os
import time
from pathlib import Path

from netns_tests.lab import Host, until
from oncache.core import control

PODS = 200
SECONDS = 12.0
ATTACH_SECONDS = 30.0
SHARE = 0.01  # of one core


def processor_seconds(pid: int) -> float:
    """User and system time so far of all threads (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_agent_idles_below_one_percent_of_a_core(hosts: tuple[Host, Host]) -> None:
    host = hosts[0]
    for number in range(PODS - len(host.pods)):
        host.pod(f"i{number}")
    with host.agent(options=("--detach-on-exit",)) as agent:
        until(
            lambda: len(control.call(agent.run_dir, "status")["pods"]) == PODS,
            ATTACH_SECONDS,
            "all pods are attached",
        )
        before, since = processor_seconds(agent.pid), time.monotonic()
        until(lambda: time.monotonic() - since > SECONDS, SECONDS + 1, "time passes")
        spent = processor_seconds(agent.pid) - before
        assert spent / (time.monotonic() - since) < SHARE
        assert control.call(agent.run_dir, "status")["problems"] == []
