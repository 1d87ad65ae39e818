# SPDX-License-Identifier: Apache-2.0
"""Tables for people."""

from __future__ import annotations

import pytest

from oncache.cli.tables import facts, table, text


def test_numbers_stand_at_the_right_and_words_at_the_left() -> None:
    rows = [("p1", 7), ("a-long-name", 1234567)]
    assert table(("pod", "packets"), rows).splitlines() == [
        "POD            PACKETS",
        "p1                   7",
        "a-long-name  1,234,567",
    ]


def test_an_empty_table_has_its_head() -> None:
    assert table(("pod", "address"), [], title="pods") == "pods\nPOD  ADDRESS"


def test_facts_are_aligned() -> None:
    assert facts({"a": 1, "long": None}) == "a     1\nlong  -"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        ("", "-"),
        ([], "-"),
        (["a", None], "a, -"),
        (True, "yes"),
        (0, "0"),
        (9999, "9999"),
        (10_000, "10,000"),
        (0.12345, "0.123"),
        (12345.6, "12,346"),
    ],
)
def test_cells(value: object, expected: str) -> None:
    assert text(value) == expected
