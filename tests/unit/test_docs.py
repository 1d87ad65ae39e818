# SPDX-License-Identifier: Apache-2.0
"""What the documents tell people to type exists, and what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oncache.cli.verbs import VERBS
from oncache.core import config

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

VERB_NAMES = {verb.name for verb in VERBS}
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))

CODE_BLOCK = re.compile(r"```(?:console|sh|bash)\n(.*?)```", re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
YAML_BLOCK = re.compile(r"```yaml\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def commands(text: str, program: str) -> set[str]:
    """The word after `program` wherever it is given as a command."""
    code = "\n".join([*CODE_BLOCK.findall(text), *CODE_SPAN.findall(text)])
    return set(re.findall(rf"^(?:\$ |# )?{program} +([a-z][a-z-]*)", code, re.MULTILINE))


def anchors(path: Path) -> set[str]:
    """Headings as a web view of the repository links to them."""
    headings = re.findall(r"^#+ +(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert commands(text, "make") <= TARGETS
    assert commands(text, "oncache") <= VERB_NAMES


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(path: Path) -> None:
    assert not broken_links(path)


def test_configurations_in_the_readme_are_accepted() -> None:
    blocks = YAML_BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        config.parse(block)


def test_every_verb_is_described() -> None:
    described = {verb for path in DOCUMENTS for verb in commands(path.read_text(), "oncache")}
    assert described >= VERB_NAMES


def test_the_readme_promises_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"demo", "test"} <= commands(readme, "make")
    assert readme.count("<!-- bench:begin -->") == readme.count("<!-- bench:end -->") == 1


@pytest.mark.parametrize(
    ("program", "text"),
    [("oncache", "`oncache frobnicate`"), ("make", "```console\nmake frobnicate\n```")],
)
def test_a_command_in_prose_is_found(program: str, text: str) -> None:
    assert commands(text, program) == {"frobnicate"}
