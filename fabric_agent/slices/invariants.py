# SPDX-License-Identifier: Apache-2.0
"""What must hold of every set of slices, whoever made it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fabric_agent.slices.model import Fabric, Link, Slice
from oncache.core.errors import OncacheError


class InvariantError(OncacheError):
    """A set of slices contradicts the fabric or itself."""


def require(fabric: Fabric, slices: Iterable[Slice]) -> None:
    """Raise InvariantError with the first violation."""
    if wrong := next(violations(fabric, slices), None):
        raise InvariantError(wrong, hint="nothing was changed; release the slice that is named")


def violations(fabric: Fabric, slices: Iterable[Slice]) -> Iterator[str]:
    """Every violation, in words."""
    owner: dict[object, str] = {}
    for part in slices:
        yield from _shape(fabric, part)
        yield from _links(fabric, part)
        for what, key in _holdings(fabric, part):
            if key in owner:
                yield f"{part.name}: {what} belongs to {owner[key]} already"
            owner[key] = part.name


def _shape(fabric: Fabric, part: Slice) -> Iterator[str]:
    if not part.ranks:
        yield f"{part.name}: no GPUs"
        return
    if any(not 0 <= nic < len(fabric.nics) for nic in part.ranks):
        yield f"{part.name}: a NIC that the fabric has not"
        return
    leaves = part.leaves(fabric)
    if len(set(leaves)) != len(leaves):
        yield f"{part.name}: a leaf is listed twice"
    for leaf, group in zip(leaves, part.nics, strict=True):
        if any(fabric.nics[nic].leaf != leaf for nic in group):
            yield f"{part.name}: a NIC is listed under another leaf than its own"
    one_server = len({fabric.nics[nic].host for nic in part.ranks}) == 1
    if part.links and len(part.links) != len(leaves):
        yield f"{part.name}: {len(leaves)} leaves, links of {len(part.links)}"
    if not part.links and len(leaves) > 1 and not one_server:
        yield f"{part.name}: {len(leaves)} leaves and no links between them"


def _links(fabric: Fabric, part: Slice) -> Iterator[str]:
    """Complete: every leaf to every virtual spine, by links that exist."""
    for group, row in zip(part.nics, part.links, strict=False):
        if len(row) != part.width:
            yield f"{part.name}: incomplete, {len(row)} links on a leaf instead of {part.width}"
        if len(group) > len(row):
            yield f"{part.name}: {len(group)} GPUs share {len(row)} uplinks on a leaf"
        if any(link.leaf != fabric.nics[group[0]].leaf for link in row):
            yield f"{part.name}: a link of another leaf"
        yield from (
            f"{part.name}: {link} does not exist" for link in row if not exists(fabric, link)
        )
    for column in zip(*part.links, strict=False):
        if len({link.spine for link in column}) > 1:
            yield f"{part.name}: incomplete, one virtual spine on several spines"


def exists(fabric: Fabric, link: Link) -> bool:
    """Does a cable, or one optical switch, join the two ports?"""
    if not (0 <= link.leaf < len(fabric.leaves) and 0 <= link.spine < len(fabric.spines)):
        return False
    up, down = fabric.leaves[link.leaf].uplinks, fabric.spines[link.spine].downlinks
    if not (0 <= link.uplink < len(up) and 0 <= link.downlink < len(down)):
        return False
    if fabric.optics:
        return up[link.uplink].peer == down[link.downlink].peer
    return fabric.cables[link.leaf][link.uplink] == link


def _holdings(fabric: Fabric, part: Slice) -> Iterator[tuple[str, object]]:
    for nic in part.ranks:
        if 0 <= nic < len(fabric.nics):
            device = fabric.nics[nic]
            yield f"{fabric.hosts[device.host].name}:{device.device}", ("nic", nic)
    for link in part.all_links:
        yield f"uplink {link.uplink} of leaf {link.leaf}", ("uplink", link.leaf, link.uplink)
        yield (
            f"downlink {link.downlink} of spine {link.spine}",
            ("downlink", link.spine, link.downlink),
        )
    yield f"number {part.number}", ("number", part.number)
    yield f"name {part.name}", ("name", part.name)
