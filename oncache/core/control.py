# SPDX-License-Identifier: Apache-2.0
"""Ask the node agent: one JSON object per line over the unix socket in its run directory.

Only the standard library, and nothing heavy of it: a thin client has to start fast.
"""

import json
import socket
from pathlib import Path
from typing import Any

from oncache.core.errors import HostError, NotLoadedError, OncacheError

SOCKET = "agent.sock"
LONGEST_ANSWER = 16 << 20


def call(run_dir: Path, verb: str, *, timeout: float = 30.0, **args: Any) -> dict[str, Any]:
    """Send ``verb`` to the agent of ``run_dir`` and return its answer.

    ``timeout`` (seconds) covers a detach under load. Raises NotLoadedError if no agent listens,
    HostError without the right to ask, OncacheError with the agent's own words if it refused.
    """
    path = run_dir / SOCKET
    try:
        line = _exchange(path, json.dumps({"verb": verb, **args}), timeout)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotLoadedError(
            f"no agent listens at {path}", hint="start it with 'fabric-agent node -c FILE'"
        ) from error
    except PermissionError as error:
        raise HostError(f"not allowed to use {path}", hint="run it as root") from error
    except OSError as error:
        raise OncacheError(
            f"the agent at {path} did not answer: {error}", hint="look at the agent's log"
        ) from error
    return _answer(path, line)


def _exchange(path: Path, request: str, timeout: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        connection.sendall(request.encode() + b"\n")
        with connection.makefile("rb") as stream:
            return stream.readline(LONGEST_ANSWER)


def _answer(path: Path, line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not line.endswith(b"\n"):
        raise OncacheError(f"no complete answer at {path}", hint="look at the agent's log")
    if not answer.get("ok"):
        raise OncacheError(
            str(answer.get("error", "the agent refused")),
            hint=str(answer.get("hint", "look at the agent's log")),
        )
    return answer
