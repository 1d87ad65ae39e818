# SPDX-License-Identifier: Apache-2.0
"""The table of mutants fits the source: each check is there once, and its test exists."""

import shutil
from pathlib import Path

import pytest

from tests.mutation import MUTANTS, ROOT, Mutant, Rotten, mutate, pytest_says, without


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_check_is_in_the_source_once(mutant: Mutant, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "bpf", tmp_path / "bpf")
    mutate(tmp_path / "bpf", mutant)


def test_the_tests_exist() -> None:
    wanted = {mutant.test for mutant in MUTANTS}
    said = pytest_says(ROOT, ["--collect-only", *sorted(wanted)])
    assert wanted <= set(said.splitlines()), said


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("text", ["", "x x"], ids=["absent", "twice"])
def test_a_snippet_that_is_not_there_once_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text(text)
    with pytest.raises(Rotten, match="a name"):
        mutate(tmp_path, without("a name", "a test", "a.h", "x"))
