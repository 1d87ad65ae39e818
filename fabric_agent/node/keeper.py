# SPDX-License-Identifier: Apache-2.0
"""Keeps a node's slices in the kernel as its document in the store says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Final

from fabric_agent.node import slices
from fabric_agent.node.slices import Act, Desired, Kernel, Setting, Step
from fabric_agent.slices.hosts import PROTOCOL
from fabric_agent.store import Store
from oncache.core import sysctl
from oncache.core.errors import OncacheError
from oncache.core.net import Event, Link, NextHop, Overrun, Route, Rule
from oncache.core.netlink import Netlink

log = logging.getLogger(__name__)

DOCUMENTS: Final = "nodes"
AUDIT_SECONDS: Final = 30.0  # how often the kernel is compared although nothing was heard


class Keeper:
    """One node's slices, in the network namespace that ``netlink`` speaks to.

    ``stale``: store or kernel may have changed since the last ``settle``. ``problems`` are for the
    operator. What is wrong here never keeps the data path from its work.
    """

    def __init__(self, store: Store, node: str, netlink: Netlink) -> None:
        self.stale = True
        self.problems: list[str] = []
        self.key = f"{DOCUMENTS}/{node}"
        self._store = store
        self._settled = 0.0
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

    @property
    def due(self) -> bool:
        """Is it time for ``settle``?"""
        return self.stale or time.monotonic() - self._settled > AUDIT_SECONDS

    async def settle(self) -> bool:
        """Bring the kernel in step; True if packets may take other ways than before."""
        self.stale, self._settled = False, time.monotonic()
        try:
            desired = await asyncio.to_thread(self._document)
            ready = await self._netlink.ready_devices()
            self._report([*_unmet(desired.settings), *_down(desired, ready)])
            return await self._bring_about(slices.wanted(desired, ready))
        except OncacheError as error:
            self._report([f"slices: {error.message}"])
            return False

    async def remove(self) -> None:
        """Have nothing of ours in the kernel."""
        await self._bring_about(Kernel())

    def _document(self) -> Desired:
        document = self._store.get(self.key)
        return slices.read(document.value) if document else Desired()

    async def _bring_about(self, want: Kernel) -> bool:
        moved = want != self._last
        # To read the kernel takes longer than to tell it, and traffic may be waiting.
        if moved and self._last is not None:
            await self._take_all(slices.steps(want, self._last))
        self._last = want
        todo = slices.steps(want, await self._read())
        await self._take_all(todo)
        if moved or todo:
            log.info("slices: %d routes, %d rules in force", len(want.routes), len(want.rules))
        return moved or bool(todo)

    async def _read(self) -> Kernel:
        return slices.ours(
            await self._netlink.next_hops(),
            await self._netlink.routes_of(PROTOCOL),
            await self._netlink.rules(),
        )

    async def _take_all(self, todo: list[Step]) -> None:
        for step in todo:
            await self._take(step)

    async def _take(self, step: Step) -> None:
        netlink, setting = self._netlink, step.act is Act.SET
        match step.item:
            case NextHop() as hop:
                await (netlink.replace_next_hop if setting else netlink.delete_next_hop)(hop)
            case Route() as route:
                await (netlink.replace_route if setting else netlink.delete_route)(route)
            case Rule() as rule:
                await (netlink.add_rule if setting else netlink.delete_rule)(rule)

    def _report(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self.problems:
                log.warning("%s", problem)
        self.problems = problems


def _unmet(settings: tuple[Setting, ...]) -> Iterator[str]:
    for setting in settings:
        mine, everywhere = (
            int(sysctl.read(f"ipv4.conf.{device}.{setting.name}") or 0)
            for device in (setting.device.replace(".", "/"), "all")
        )
        if not setting.held_by(mine, everywhere):
            yield (
                f"slices: net.ipv4.conf.{setting.device}.{setting.name} must be {setting.value}, "
                f"answers may leave by another NIC"
            )


def _down(desired: Desired, ready: Mapping[str, int]) -> Iterator[str]:
    for device in dict.fromkeys(way.device for way in desired.ways):
        if device not in ready:
            yield f"slices: {device} is down or missing, its flows take the backup if there is one"
