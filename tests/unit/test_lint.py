# SPDX-License-Identifier: Apache-2.0
"""The whole tree is in the house style: one test per tool, and two of our own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Licence texts are other people's words; JSON has no comments.
NO_SPDX = {"LICENSE", "LICENSES"}
NO_SPDX_SUFFIXES = {".json", ".typed", ".svg", ".png", ".pcap"}

# What may not be said: the project speaks of itself, not of how or where it was written.
# Written in pieces so that this file passes its own test.
FORBIDDEN = {
    "a word of the workshop": r"(?<!scope=\")\bses" + r"sions?\b(?!\.\w|: pytest)",
    "an item of a tracker": r"\biss" + r"ues?[ #]+\d|(?<![&\w])#\d+\b(?!\))",
    "a path of a workshop": r"/wo" + r"rk/|/sha" + r"red/|facts/\w+\.md",
    "a home directory": r"/(?:home|Users)/\w|/ro" + r"ot/",
    "a package registry": r"\b(?:py"
    + r"pi\.org|python"
    + r"hosted\.org|npm"
    + r"js\.org|(?:deb|security)\.deb"
    + r"ian\.org)",
}


def missing(tool: str) -> None:
    """A person may lack a tool; the integration machine may not."""
    reason = f"{tool} is not installed: run make setup"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def python_tool(name: str, *arguments: str) -> None:
    if find_spec(name) is None:
        missing(name)
    check(sys.executable, "-m", name, *arguments)


def check(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command[:6])}\n{done.stdout}{done.stderr}"


def tracked() -> list[Path]:
    """Files of the repository, new ones included, relative to its root."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        missing("git, or the repository,")
    listed = subprocess.run(
        [str(git), "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


def text_files() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        if path.parts[0] in NO_SPDX or path.suffix in NO_SPDX_SUFFIXES:
            continue
        yield path, (ROOT / path).read_text(encoding="utf-8")


def test_python_has_no_lint() -> None:
    python_tool("ruff", "check", "--quiet", ".")


def test_python_is_formatted() -> None:
    python_tool("ruff", "format", "--check", "--quiet", "--diff", ".")


@pytest.mark.timeout(300)
def test_python_is_typed() -> None:
    python_tool("mypy", "--strict")


def test_c_is_formatted() -> None:
    if shutil.which("clang-format") is None:
        missing("clang-format")
    sources = [str(path) for path in tracked() if path.suffix in {".c", ".h"}]
    if sources:
        check("clang-format", "--dry-run", "-Werror", *sources)


def test_every_file_names_its_licence() -> None:
    bare = [
        str(path)
        for path, text in text_files()
        if not any("SPDX-License-Identifier:" in line for line in text.splitlines()[:4])
    ]
    assert not bare, f"no SPDX line at the head of {bare}"


def test_bpf_is_dual_licensed_and_nothing_else_is() -> None:
    wrong = [
        str(path)
        for path, text in text_files()
        if path.suffix in {".c", ".h", ".py"}
        and ("GPL-2.0-only OR BSD-2-Clause" in text.splitlines()[0]) != (path.parts[0] == "bpf")
    ]
    assert not wrong, f"another licence than the folder's: {wrong}"


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_nothing_forbidden_is_said(kind: str) -> None:
    pattern = re.compile(FORBIDDEN[kind], re.IGNORECASE)
    said = [
        f"{path}:{number}: {line.strip()}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not said, f"{kind}:\n" + "\n".join(said)
