# SPDX-License-Identifier: Apache-2.0
"""What the reading verbs share: pinned maps, an agent that may be down, names of devices."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from oncache.cli.output import say
from oncache.core.control import call
from oncache.core.errors import NotLoadedError
from oncache.plane import Plane

ANSWER_SECONDS = 5.0


def agent_status(run_dir: Path) -> dict[str, Any] | None:
    """What the agent says of itself; None when there is none."""
    try:
        return call(run_dir, "status", timeout=ANSWER_SECONDS)
    except NotLoadedError:
        return None


@contextmanager
def pinned(bpf_dir: Path) -> Iterator[Plane]:
    """The maps as they are pinned, with a remark when nobody keeps them in step.

    Raises NotLoadedError when there are none.
    """
    plane = Plane.open(bpf_dir)
    try:
        if plane.deadline_margin() < 0:
            say("agent not running, or not in step: everything takes the base path")
        yield plane
    finally:
        plane.close()


@lru_cache(maxsize=4096)
def device_name(ifindex: int) -> str:
    """The name in the caller's network namespace; "if7" for a device that is not there any more."""
    try:
        return socket.if_indextoname(ifindex)
    except OSError:
        return f"if{ifindex}"
