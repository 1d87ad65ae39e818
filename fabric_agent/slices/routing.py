# SPDX-License-Identifier: Apache-2.0
"""The routing rule: the uplink of a NIC is fixed, and so is its backup.

The i-th NIC of a leaf sends by the slice's i-th virtual spine, whatever the destination. An uplink
then carries one NIC's flows. If that way is broken, the NIC takes its backup, the next virtual
spine; the others stay where they are, so at most two NICs share an uplink.
"""

from __future__ import annotations

from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Slice


def backup(part: Slice, local: int) -> int | None:
    """The backup virtual spine of each leaf's ``local``-th NIC; None when there is only one."""
    return (local + 1) % part.width if part.width > 1 else None


def column(part: Slice, broken: Broken, source: int, local: int, target: int) -> int | None:
    """The virtual spine from leaf ``source``'s ``local``-th NIC to leaf ``target``, both counted
    within the slice; None when neither the way nor its backup works."""
    for choice in (local, backup(part, local)):
        if choice is not None and usable(part, broken, source, target, choice):
            return choice
    return None


def usable(part: Slice, broken: Broken, source: int, target: int, choice: int) -> bool:
    """Do both links of a virtual spine work?"""
    return not (broken.link(part.links[source][choice]) or broken.link(part.links[target][choice]))


def degraded(part: Slice, broken: Broken) -> bool:
    """Is a NIC or a link of the slice broken, so that it is not contention-free as promised?"""
    return any(map(broken.link, part.all_links)) or not broken.nics.isdisjoint(part.ranks)
