# SPDX-License-Identifier: Apache-2.0
"""A simulated optical switch as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Device:
    """Its address, and its laboratory door."""

    url: str

    def lab(self, **wanted: Any) -> None:
        """Make a fault (see the server)."""
        at = urlsplit(self.url)
        connection = HTTPConnection(str(at.hostname), at.port, timeout=5)
        connection.request("POST", "/lab", json.dumps(wanted))
        assert connection.getresponse().status == 204
        connection.close()


@contextmanager
def device(*options: str, size: int = 16) -> Iterator[Device]:
    """Start one, and end it."""
    command = [sys.executable, "-m", "fabric_agent.ocs.simulator.server", "--size", str(size)]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield Device(json.loads(process.stdout.readline())["url"])
        finally:
            process.terminate()
