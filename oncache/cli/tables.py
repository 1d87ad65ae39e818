# SPDX-License-Identifier: Apache-2.0
"""Text for people: aligned columns, and values as one writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GAP = "  "


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> str:
    """Columns as wide as their widest cell; a column of numbers stands at the right."""
    cells = [[text(value) for value in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    right = [bool(rows) and all(is_number(row[i]) for row in rows) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        )
        return GAP.join(padded).rstrip()

    head = [title] if title else []
    return "\n".join([*head, line([name.upper() for name in columns]), *map(line, cells)])


def facts(pairs: Mapping[str, object]) -> str:
    """Name and value, one a line."""
    width = max(map(len, pairs), default=0)
    return "\n".join(f"{name.ljust(width)}{GAP}{text(value)}" for name, value in pairs.items())


def is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def text(value: object) -> str:
    """One cell: nothing is a dash, a float has three digits that matter, a list has commas."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}" if abs(value) >= 10_000 else str(value)
        case float():
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        case list() | tuple():
            return ", ".join(map(text, value)) or "-"
        case _:
            return str(value)
