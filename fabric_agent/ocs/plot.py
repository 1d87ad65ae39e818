# SPDX-License-Identifier: Apache-2.0
"""Before and after as a picture: links between pods, one square per pair, as SVG text."""

from __future__ import annotations

from fabric_agent.ocs.wiring import Fabric, Layout, link_counts

CELL, GAP, TOP = 14, 40, 46
KEPT, GONE, NEW = "#4a6fa5", "#c0504d", "#5b9a54"

Matrix = list[list[int]]


def svg(fabric: Fabric, before: Layout, after: Layout) -> str:
    """Two matrices over all spine indices, and beside them what changes."""
    old, new = _total(fabric, before), _total(fabric, after)
    most = max(1, *(max(row) for row in (*old, *new)))
    side = fabric.pods * CELL
    lost = [
        [max(0, a - b) for a, b in zip(*rows, strict=True)] for rows in zip(old, new, strict=True)
    ]
    won = [
        [max(0, b - a) for a, b in zip(*rows, strict=True)] for rows in zip(old, new, strict=True)
    ]
    panels = [
        _panel(0, "before", [(old, KEPT)], most),
        _panel(side + GAP, "after", [(new, KEPT)], most),
        _panel(2 * (side + GAP), "fewer (red), more (green)", [(lost, GONE), (won, NEW)], most),
    ]
    width, height = 3 * side + 2 * GAP + 20, side + TOP + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="13">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="10" y="18">Links between {fabric.pods} pods, all spine indices; '
            f"darkest: {most}</text>",
            *panels,
            "</svg>\n",
        ]
    )


def _total(fabric: Fabric, layout: Layout) -> Matrix:
    counts = link_counts(fabric, layout)
    return [[sum(c[a][b] for c in counts) for b in range(fabric.pods)] for a in range(fabric.pods)]


def _panel(left: int, title: str, layers: list[tuple[Matrix, str]], most: int) -> str:
    size = len(layers[0][0])
    side = size * CELL
    lines = [
        f'<g transform="translate({left + 10},{TOP})">',
        f'<text y="-8">{title}</text>',
        f'<rect width="{side}" height="{side}" fill="none" stroke="gray"/>',
    ]
    for matrix, colour in layers:
        lines += [
            f'<rect x="{b * CELL}" y="{a * CELL}" width="{CELL - 1}" height="{CELL - 1}" '
            f'fill="{colour}" fill-opacity="{links / most:.2f}"><title>pods {a} and {b}: '
            f"{links}</title></rect>"
            for a, row in enumerate(matrix)
            for b, links in enumerate(row)
            if links
        ]
    return "\n".join([*lines, "</g>"])
