# SPDX-License-Identifier: Apache-2.0
"""The command's shell: parsing, errors, exit codes, and a light start."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from oncache.cli import app, main
from oncache.cli.verbs import VERBS, Verb
from oncache.core.errors import ConfigError, HostError, NotLoadedError

ROOT = Path(__file__).parents[2]
NEVER_FOR_HELP = ("pyroute2", "scapy", "yaml", "bcc", "ctypes", "asyncio")
NEVER_FOR_READING = ("pyroute2", "scapy", "bcc", "asyncio", "subprocess")
READING = ("status", "stats", "caches", "explain")

EXAMPLES = {
    "caches": ["filter"],
    "explain": ["tcp", "10.1.0.11:4000", "10.2.0.11:80"],
}


def parse(*arguments: str) -> argparse.Namespace:
    args = app.parser().parse_args(arguments)
    app.with_defaults(args)
    return args


def fake_verb(monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
    """Every verb returns, or raises, `outcome`."""

    def run(_: argparse.Namespace) -> object:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = types.SimpleNamespace(run=run)
    real = importlib.import_module
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: module if name.startswith("oncache.cli.") else real(name),
    )


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_parses_and_takes_json(verb: Verb) -> None:
    args = parse(verb.name, *EXAMPLES.get(verb.name, []), "--json")
    assert args.verb == verb.name
    assert args.json


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_has_a_module(verb: Verb) -> None:
    assert (ROOT / Path(*verb.module.split("."))).with_suffix(".py").exists()


def test_common_options_stand_before_or_after_the_verb() -> None:
    before = parse("-c", "a.yaml", "--bpf-dir", "/b", "status")
    after = parse("status", "--bpf-dir", "/b", "-c", "a.yaml")
    assert before == after
    assert (before.config, before.bpf_dir, before.run_dir) == ("a.yaml", "/b", None)


@pytest.mark.parametrize(
    "arguments",
    [[], ["frobnicate"], ["caches"], ["caches", "other"], ["explain", "sctp", "a", "b"]],
    ids=" ".join,
)
def test_wrong_usage_is_two_lines_and_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "next"]
    assert "--help" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("what", hint="what next"), 2),
        (NotLoadedError("what", hint="what next"), 3),
        (HostError("what", hint="what next"), 4),
    ],
)
def test_an_error_is_two_lines_and_its_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    fake_verb(monkeypatch, error)
    assert main(["status"]) == code
    assert capsys.readouterr().err == "error: what\nnext: what next\n"


def test_an_unexpected_error_has_no_traceback_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verb(monkeypatch, RuntimeError("odd"))
    assert main(["status"]) == 1
    quiet = capsys.readouterr().err
    assert quiet.startswith("error: RuntimeError: odd\nnext: ")
    assert len(quiet.splitlines()) == 2
    for flags in (["-vv"], ["-v", "--verbose"]):
        assert main(["status", *flags]) == 1
        told = capsys.readouterr().err
        assert "Traceback" in told
        assert told.endswith(quiet)


def test_no_privileges_is_a_host_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verb(monkeypatch, PermissionError(1, "Operation not permitted"))
    assert main(["status"]) == 4
    assert "next: run it as root" in capsys.readouterr().err


def test_interruption_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verb(monkeypatch, KeyboardInterrupt())
    assert main(["status"]) == 130
    assert capsys.readouterr().err == ""


def test_a_named_configuration_must_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "-c", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    code = (
        "import sys, types; from oncache.cli import app\n"
        "app.importlib = types.SimpleNamespace(import_module=lambda name:"
        " types.SimpleNamespace(run=lambda args: print('x' * 100_000) or 0))\n"
        "sys.exit(app.main(['status']))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def loaded_by(statement: str) -> list[str]:
    """Modules in a fresh process. They are counted and not timed: the machine may be busy."""
    code = f"import json, sys; sys.path.insert(0, {str(ROOT)!r})\n{statement}\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code + "print('\\n' + json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def heavy(loaded: list[str], never: tuple[str, ...]) -> list[str]:
    return [name for name in loaded if name.split(".")[0] in never]


def test_help_loads_nothing_heavy() -> None:
    loaded = loaded_by(
        "from oncache.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    )
    assert heavy(loaded, NEVER_FOR_HELP) == []
    assert [name for name in loaded if name.startswith("oncache")] == [
        "oncache",
        "oncache.cli",
        "oncache.cli.app",
        "oncache.cli.verbs",
        "oncache.core",
        "oncache.core.errors",
    ]


def test_reading_verbs_do_not_load_what_only_changes_need() -> None:
    verbs = ", ".join(f"oncache.cli.{verb}" for verb in READING)
    assert heavy(loaded_by(f"import {verbs}"), NEVER_FOR_READING) == []
