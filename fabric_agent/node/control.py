# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the control socket; ``oncache.core.control`` is the other."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from oncache.core import control
from oncache.core.errors import BusyError, HostError, OncacheError

Answer = dict[str, Any]
Obey = Callable[[str, Answer], Awaitable[Answer]]


@contextlib.asynccontextmanager
async def serve(run_dir: Path, obey: Obey) -> AsyncIterator[None]:
    """Answer requests by ``obey(verb, arguments)`` until the block ends.

    The socket is for root only. BusyError if another agent answers there; a socket that a dead one
    left is replaced. A directory made for it goes with it, unless something else is there by then.
    """
    path = run_dir / control.SOCKET
    made = not run_dir.exists()
    listener = _bind(path)
    server = await asyncio.start_unix_server(lambda r, w: _client(r, w, obey), sock=listener)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):
                run_dir.rmdir()


def _bind(path: Path) -> socket.socket:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _refuse_living(path)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        raise HostError(
            f"cannot listen at {path}: {error.strerror or error}",
            hint="run as root, and set run_dir to a short path in a writable place",
        ) from error
    listener.setblocking(False)
    return listener


def _refuse_living(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
    raise BusyError(
        f"another agent answers at {path}", hint="stop it, or give this one its own run_dir"
    )


async def _client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, obey: Obey) -> None:
    with contextlib.suppress(ConnectionError):
        try:
            while line := await reader.readline():
                writer.write(json.dumps(await _answer(line, obey)).encode() + b"\n")
                await writer.drain()
        except ValueError:
            pass  # a line longer than any request
        finally:
            writer.close()


async def _answer(line: bytes, obey: Obey) -> Answer:
    try:
        request = json.loads(line)
    except ValueError:
        request = None
    if not isinstance(request, dict) or not isinstance(request.get("verb"), str):
        return refusal("not a request", "send one JSON object with a verb per line")
    try:
        return {"ok": True, **await obey(request.pop("verb"), request)}
    except OncacheError as error:
        return refusal(error.message, error.hint)


def refusal(error: str, hint: str) -> Answer:
    """The answer to a request that was not carried out."""
    return {"ok": False, "error": error, "hint": hint}
