# SPDX-License-Identifier: Apache-2.0
"""Pictures as SVG text: the fabric with its slices and loads, and simple bar charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fabric_agent.slices.check import Directed, Way
from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Fabric, Link, Slice

WIDTH = 1200
MARGIN = 60
TOP, BOTTOM = 90, 420
NIC_ROWS = 16
FREE, FAILED, HOT = "#cfd4da", "#b00020", "#e6194b"
COLOURS = (
    *("#3b76af", "#ef8536", "#519e3e", "#8d69b8", "#84584e", "#d57dbe", "#bcbd45", "#57bccc"),
    *("#1f3b73", "#a65628", "#2e6b34", "#5b3a8c"),
)


class Svg:
    """A picture under construction."""

    def __init__(self, width: int, height: int) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">'
        )
        self._parts = [f'<rect width="{width}" height="{height}" fill="white"/>']

    def line(
        self, start: tuple[float, float], end: tuple[float, float], colour: str, width: float,
        title: str = "",
    ) -> None:  # fmt: skip
        self._parts.append(
            f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
            f'stroke="{colour}" stroke-width="{width:.2f}"{_titled("line", title)}'
        )

    def box(
        self, corner: tuple[float, float], size: tuple[float, float], colour: str, title: str = ""
    ) -> None:
        self._parts.append(
            f'<rect x="{corner[0]:.1f}" y="{corner[1]:.1f}" width="{size[0]:.1f}" '
            f'height="{size[1]:.1f}" fill="{colour}"{_titled("rect", title)}'
        )

    def text(self, at: tuple[float, float], words: str, anchor: str = "middle") -> None:
        self._parts.append(
            f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def done(self) -> str:
        return "\n".join([self._head, *self._parts, "</svg>", ""])


def _titled(tag: str, title: str) -> str:
    return f"><title>{escape(title)}</title></{tag}>" if title else "/>"


def fabric_picture(
    fabric: Fabric,
    slices: Sequence[Slice],
    broken: Broken,
    loads: Mapping[Directed, int] | None = None,
) -> str:
    """Spines above, leaves below, a square for each GPU; a colour for each slice. With ``loads``
    the links that carry more than one flow are drawn red and wide."""
    svg = Svg(WIDTH, BOTTOM + 40 + 8 * NIC_ROWS + 20 * (1 + len(slices) // 8))
    colours = {part.name: COLOURS[index % len(COLOURS)] for index, part in enumerate(slices)}
    _links(fabric, svg, slices, colours, broken, loads or {})
    _switches(fabric, svg)
    _nics(fabric, svg, slices, colours, broken)
    for index, part in enumerate(slices):
        corner = (MARGIN + index % 8 * 140.0, BOTTOM + 40 + 8.0 * NIC_ROWS + 20 * (index // 8))
        svg.box(corner, (10, 10), colours[part.name])
        svg.text((corner[0] + 14, corner[1] + 9), f"{part.name} ({len(part.ranks)})", "start")
    return svg.done()


def _place(index: int, count: int) -> float:
    return MARGIN + (WIDTH - 2 * MARGIN) * (index + 0.5) / count


def _links(
    fabric: Fabric,
    svg: Svg,
    slices: Sequence[Slice],
    colours: Mapping[str, str],
    broken: Broken,
    loads: Mapping[Directed, int],
) -> None:
    owners = {link: part.name for part in slices for link in part.all_links}
    worst: dict[Link, int] = {}
    for directed, load in loads.items():
        if directed.way in (Way.UP, Way.DOWN):
            worst[directed.link] = max(worst.get(directed.link, 0), load)
    cables = [] if fabric.optics else [link for row in fabric.cables for link in row]
    for link in sorted({*cables, *owners}, key=lambda link: link in owners):
        owner, load = owners.get(link, ""), worst.get(link, 0)
        colour = colours.get(owner, FREE)
        if broken.link(link) or load > 1:
            colour = FAILED if broken.link(link) else HOT
        svg.line(
            (_place(link.leaf, len(fabric.leaves)), BOTTOM),
            (_place(link.spine, len(fabric.spines)), TOP),
            colour,
            max(load, 1) * (1.2 if owner else 0.3),
            f"{owner or 'free'}{f', load {load}' if load else ''}" if owner else "",
        )


def _switches(fabric: Fabric, svg: Svg) -> None:
    leaves = [leaf.name for leaf in fabric.leaves]
    spines = [spine.name for spine in fabric.spines]
    for names, top, label in ((leaves, BOTTOM, BOTTOM + 28), (spines, TOP - 14, TOP - 20)):
        width = min(40.0, 0.8 * (WIDTH - 2 * MARGIN) / len(names))
        for index, name in enumerate(names):
            place = _place(index, len(names))
            svg.box((place - width / 2, top), (width, 14), "#30363d", name)
            if len(names) <= 24:
                svg.text((place, label), name)


def _nics(
    fabric: Fabric, svg: Svg, slices: Sequence[Slice], colours: Mapping[str, str], broken: Broken
) -> None:
    owners = {nic: part.name for part in slices for nic in part.ranks}
    step = min(8.0, 0.9 * (WIDTH - 2 * MARGIN) / len(fabric.leaves) / 4)
    for index, nic in enumerate(fabric.nics):
        column, row = divmod(nic.position, NIC_ROWS)
        corner = (
            _place(nic.leaf, len(fabric.leaves)) + (column - 2) * step,
            BOTTOM + 34 + row * 7.0,
        )
        colour = FAILED if index in broken.nics else colours.get(owners.get(index, ""), FREE)
        name = f"{fabric.hosts[nic.host].name}:{nic.device} {owners.get(index, 'free')}"
        svg.box(corner, (step * 0.85, 6), colour, name)


def bars(title: str, groups: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A group of bars for each key, a bar for each series."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    top = max(value for group in groups.values() for value in group.values())
    svg = Svg(WIDTH, 460)
    svg.text((WIDTH / 2, 24), title)
    for index, (label, group) in enumerate(groups.items()):
        left = MARGIN + (WIDTH - 2 * MARGIN) * index / len(groups)
        width = 0.8 * (WIDTH - 2 * MARGIN) / len(groups) / len(names)
        for place, name in enumerate(names):
            value = group.get(name, 0.0)
            height = 320 * value / top
            corner = (left + place * width, 390 - height)
            svg.box(corner, (width * 0.9, height), COLOURS[place % len(COLOURS)], name)
            svg.text((corner[0] + width * 0.45, 385 - height), f"{value:,.0f}")
        svg.text((left + width * len(names) / 2, 408), f"{label} ({unit})")
    for place, name in enumerate(names):
        svg.box((MARGIN + place * 160.0, 430), (10, 10), COLOURS[place % len(COLOURS)])
        svg.text((MARGIN + place * 160.0 + 14, 439), name, "start")
    return svg.done()
