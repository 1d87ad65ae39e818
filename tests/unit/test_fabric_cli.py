# SPDX-License-Identifier: Apache-2.0
"""The fabric-agent command: two lines and an exit code for everything that can be wrong."""

from pathlib import Path

import pytest

from fabric_agent import cli

GOOD = "{node: {uplink: eth0, name: a}, overlay: {device: flannel.1}}"


def run(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as done:
        return int(done.code or 0)


def test_a_good_configuration_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    assert run("check-config", "-c", str(file)) == 0
    said = capsys.readouterr()
    assert "overlay.device: flannel.1" in said.out
    assert said.err == ""


def test_a_bad_configuration_is_two_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD.replace("device", "devcie"))
    for verb in ("check-config", "node"):
        assert run(verb, "-c", str(file)) == 2
        lines = capsys.readouterr().err.splitlines()
        assert [line.split(":")[0] for line in lines] == ["error", "next"]
        assert "overlay.devcie" in lines[0]
        assert "overlay.device" in lines[1]


@pytest.mark.parametrize(
    "arguments", [[], ["dance"], ["node", "--ready-fd", "x"], ["node", "--whatever"]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_traceback_only_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check-config", "-v", "-c", "/nowhere") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert run("check-config", "-vv", "-c", "/nowhere") == 2
    assert "Traceback" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "check-config" in capsys.readouterr().out
