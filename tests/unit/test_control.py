# SPDX-License-Identifier: Apache-2.0
"""Both ends of the control socket, and the word to the service manager."""

import asyncio
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fabric_agent.node.control import serve
from fabric_agent.node.notify import notify
from oncache.core import control
from oncache.core.errors import BusyError, HostError, NotLoadedError, OncacheError


async def obey(verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if verb == "status":
        return {"state": "attached", **arguments}
    raise OncacheError(f"unknown verb {verb}", hint="status")


def with_agent(run_dir: Path, ask: Callable[[], Any]) -> Any:
    """What ``ask``, in a thread, gets from an agent that is served meanwhile."""

    async def serving() -> Any:
        async with serve(run_dir, obey):
            return await asyncio.to_thread(ask)

    return asyncio.run(serving())


def test_a_request_and_its_answer(tmp_path: Path) -> None:
    answer = with_agent(tmp_path, lambda: control.call(tmp_path, "status", all=True))
    assert answer == {"ok": True, "state": "attached", "all": True}


def test_a_refusal_keeps_its_words(tmp_path: Path) -> None:
    with pytest.raises(OncacheError) as caught:
        with_agent(tmp_path, lambda: control.call(tmp_path, "dance"))
    assert (caught.value.message, caught.value.hint) == ("unknown verb dance", "status")


@pytest.mark.parametrize("line", [b"\n", b"{}\n", b"[1]\n", b'{"verb": 1}\n', b"\xff\xfe\n"])
def test_what_is_no_request_is_answered(tmp_path: Path, line: bytes) -> None:
    def ask() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / control.SOCKET))
            connection.sendall(line)
            return connection.recv(1000)

    assert b'"ok": false' in with_agent(tmp_path, ask)


def test_the_socket_is_roots_own_and_goes_with_the_agent(tmp_path: Path) -> None:
    path = tmp_path / control.SOCKET
    mode = with_agent(tmp_path, lambda: path.stat().st_mode)
    assert stat.S_IMODE(mode) == 0o600
    assert not path.exists()


def test_no_agent(tmp_path: Path) -> None:
    with pytest.raises(NotLoadedError, match="no agent"):
        control.call(tmp_path, "status")


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(path))


def test_a_dead_agents_socket_is_no_agent_and_is_replaced(tmp_path: Path) -> None:
    dead_socket(tmp_path / control.SOCKET)
    with pytest.raises(NotLoadedError):
        control.call(tmp_path, "status")
    assert with_agent(tmp_path, lambda: control.call(tmp_path, "status"))["ok"]


def test_a_second_agent_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    def ask() -> Any:
        with pytest.raises(BusyError):
            with_agent(tmp_path, lambda: None)
        return control.call(tmp_path, "status")

    assert with_agent(tmp_path, ask)["ok"]


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot listen"):
        with_agent(tmp_path / "file", lambda: None)


def test_an_agent_that_ends_while_asked_is_an_error(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / control.SOCKET))
        listener.listen()
        listener.settimeout(5)

        async def hang_up() -> None:
            asking = asyncio.to_thread(control.call, tmp_path, "status", timeout=5)
            task = asyncio.create_task(asking)
            connection, _ = await asyncio.to_thread(listener.accept)
            connection.recv(1000)
            connection.close()
            await task

        with pytest.raises(OncacheError, match="no complete answer"):
            asyncio.run(hang_up())


def test_the_service_manager_hears_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("where", ["", "/nowhere/notify", "vsock:1:2"])
def test_no_service_manager_is_no_trouble(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", where)
    notify("READY=1")
