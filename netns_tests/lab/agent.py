# SPDX-License-Identifier: Apache-2.0
"""A node agent, run the way an operator's service manager runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml

from fabric_agent.store.readable import readable
from netns_tests.lab import processes
from netns_tests.lab.errors import AgentError

if TYPE_CHECKING:
    from netns_tests.lab.hosts import Host

MODULE = "fabric_agent.cli"
READY_SECONDS = 30.0
_POLL_SECONDS = 0.05


class Agent:
    """`fabric-agent node` in a host's namespace; a context manager.

    Entering starts it and waits until it is attached and in step; AgentError if it ends before or
    takes longer than READY_SECONDS. Leaving stops it by SIGTERM if it still runs; what it leaves
    on its bpf_dir stays, as in life.
    """

    def __init__(self, host: Host, config: dict[str, Any], options: tuple[str, ...]) -> None:
        self.config_path = host.config_path
        self.run_dir = Path(config["run_dir"])
        self.bpf_dir = Path(config["bpf_dir"])
        self._host = host
        self._config = config
        self._options = options
        self._log_path = host.config_path.with_name("agent.log")
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Agent:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise AgentError("the agent was not started", exit_code_seen=None, log="")
        return self._child

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def log(self) -> str:
        """All that this and earlier agents of the host wrote on standard output and error."""
        return self._log_path.read_text() if self._log_path.exists() else ""

    def start(self) -> None:
        """Write the configuration, start, wait for the ready byte."""
        self.config_path.write_text(yaml.safe_dump(self._config, sort_keys=False))
        ready, theirs = os.pipe()
        try:
            with self._log_path.open("ab") as log:
                self._child = self._host.spawn(
                    self._command(theirs), stdout=log, stderr=log, pass_fds=(theirs,)
                )
        finally:
            os.close(theirs)
        try:
            self._wait_ready(ready)
        finally:
            os.close(ready)

    def _command(self, ready: int) -> list[str]:
        config = str(self.config_path)
        return processes.python(
            MODULE, "node", "-c", config, "--ready-fd", str(ready), *self._options
        )

    def _wait_ready(self, ready: int) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if not readable([ready], _POLL_SECONDS):
                continue
            if os.read(ready, 1):
                return
            # End of file: the agent let go of the pipe without a word.
            status = processes.end(self.process)
            message = f"the agent ended with {status} before it was ready"
            raise AgentError(message, exit_code_seen=status, log=self.log)
        processes.end(self.process)
        message = f"the agent was not ready after {READY_SECONDS:g} s"
        raise AgentError(message, exit_code_seen=None, log=self.log)

    def stop(self) -> int:
        """SIGTERM, then wait; returns the exit status (negative: the signal)."""
        return processes.end(self.process)

    def kill(self) -> None:
        """SIGKILL: the agent gets no chance to say anything."""
        processes.end(self.process, signal.SIGKILL)
