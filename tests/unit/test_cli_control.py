# SPDX-License-Identifier: Apache-2.0
"""Verbs that change something go through the agent; only a detach can do without one."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from oncache.cli import control, main
from oncache.core.errors import NotLoadedError

NO_AGENT = NotLoadedError("no agent", hint="start it")


class Agent:
    """Stands in for the control socket."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[tuple[Path, str]] = []

    def __call__(self, run_dir: Path, verb: str, **_: Any) -> dict[str, Any]:
        self.asked.append((run_dir, verb))
        if self.error:
            raise self.error
        return {"ok": True}


def run(*arguments: str) -> int:
    return main([*arguments, "--bpf-dir", "/b", "--run-dir", "/r"])


@pytest.mark.parametrize("verb", sorted(control.DONE))
def test_the_agent_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    agent = Agent()
    monkeypatch.setattr(control, "call", agent)
    assert run(verb, "--json") == 0
    assert agent.asked == [(Path("/r"), verb)]
    assert json.loads(capsys.readouterr().out) == {"done": verb, "by": "agent"}


@pytest.mark.parametrize("verb", ["attach", "flush"])
def test_without_an_agent_nothing_can_be_changed(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(control, "call", Agent(NO_AGENT))
    assert run(verb) == NotLoadedError.exit_code


def test_a_detach_needs_no_agent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[tuple[Path, Path]] = []
    host = types.ModuleType("oncache.host")
    vars(host)["detach_host"] = lambda *places: done.append(places)
    monkeypatch.setitem(sys.modules, "oncache.host", host)
    monkeypatch.setattr(control, "call", Agent(NO_AGENT))
    assert run("detach") == 0
    assert done == [(Path("/b"), Path("/r"))]
    out, err = capsys.readouterr()
    assert out.startswith("detached")
    assert "agent not running" in err
