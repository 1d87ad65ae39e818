# SPDX-License-Identifier: Apache-2.0
"""Keeps a node's slices in the kernel as its document in the store says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from fabric_agent.node import slices
from fabric_agent.node.slices import Act, Desired, Kernel, Setting, Step
from fabric_agent.slices.hosts import PROTOCOL
from fabric_agent.store import Store
from oncache.core import sysctl
from oncache.core.errors import OncacheError
from oncache.core.net import Event, Link, NextHop, Overrun, Route, Rule
from oncache.core.netlink import Netlink

log = logging.getLogger(__name__)

DOCUMENTS = "nodes"


class Keeper:
    """One node's slices, in the network namespace that ``netlink`` speaks to.

    ``stale`` says that store or kernel may have changed since the last ``settle``; ``problems``
    are for the operator. What is wrong here never keeps the data path from its work.
    """

    def __init__(self, store: Store, node: str, netlink: Netlink) -> None:
        self.stale = True
        self.problems: list[str] = []
        self._store = store
        self._key = f"{DOCUMENTS}/{node}"
        self._netlink = netlink
        self._last: Kernel | None = None

    def hear(self, event: Event | Overrun) -> None:
        """Take note of what may concern our routes. The kernel removes them in silence when a
        device loses its carrier, so every link message counts."""
        match event:
            case Overrun() | Event(Link()):
                self.stale = True
            case Event((Route() | Rule()) as item):
                self.stale = self.stale or item.protocol == PROTOCOL
            case _:
                pass

    async def settle(self) -> bool:
        """Bring the kernel in step; True if packets may take other ways than before."""
        self.stale = False
        try:
            desired = await asyncio.to_thread(self._document)
            self.problems = list(_unmet(desired.settings))
            return await self._bring_about(desired)
        except OncacheError as error:
            self._complain(f"slices: {error.message}")
            return False

    async def remove(self) -> None:
        """Have nothing of ours in the kernel."""
        await self._bring_about(Desired())

    def _document(self) -> Desired:
        document = self._store.get(self._key)
        return slices.read(document.value) if document else Desired()

    async def _bring_about(self, desired: Desired) -> bool:
        want = slices.wanted(desired, await self._netlink.ready_devices())
        todo = slices.steps(want, await self._read())
        for step in todo:
            await self._take(step)
        moved = bool(todo) or want != self._last
        self._last = want
        if todo:
            log.info("slices: %d changes, %d rules in force", len(todo), len(want.rules))
        return moved

    async def _read(self) -> Kernel:
        return slices.ours(
            await self._netlink.next_hops(),
            await self._netlink.routes_of(PROTOCOL),
            await self._netlink.rules(),
        )

    async def _take(self, step: Step) -> None:
        netlink, setting = self._netlink, step.act is Act.SET
        match step.item:
            case NextHop() as hop:
                await (netlink.replace_next_hop if setting else netlink.delete_next_hop)(hop)
            case Route() as route:
                await (netlink.replace_route if setting else netlink.delete_route)(route)
            case Rule() as rule:
                await (netlink.add_rule if setting else netlink.delete_rule)(rule)

    def _complain(self, problem: str) -> None:
        if problem not in self.problems:
            log.warning("%s", problem)
        self.problems = [problem]


def _unmet(settings: tuple[Setting, ...]) -> Iterator[str]:
    for setting in settings:
        values = [
            int(sysctl.read(f"ipv4.conf.{device}.{setting.name}") or 0)
            for device in (setting.device, "all")
        ]
        if not setting.held_by(*values):
            yield (
                f"slices: net.ipv4.conf.{setting.device}.{setting.name} must be {setting.value}, "
                f"answers may leave by another NIC"
            )
