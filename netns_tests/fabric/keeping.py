# SPDX-License-Identifier: Apache-2.0
"""A keeper of slices at work in a node's namespace: the node agent without a plane."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from fabric_agent.node.keeper import DOCUMENTS, Keeper
from fabric_agent.store import Store, Watch
from netns_tests.lab.errors import LabError
from netns_tests.lab.namespaces import Namespace, inside
from oncache.core.netlink import Events, Netlink

SECONDS = 10.0


class Keeping(threading.Thread):
    """Settles whenever store or kernel changed; ``keeper`` is there once it runs."""

    def __init__(self, node: Namespace, store: Store, label: str) -> None:
        super().__init__(name=f"keeper of {label}", daemon=True)
        self._node, self._store, self._label = node, store, label
        self._begun = threading.Event()

    def run(self) -> None:
        with inside(self._node):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._over = False
        async with Events() as events, Netlink() as netlink:
            with self._store.watch(DOCUMENTS) as watch:
                self.keeper = Keeper(self._store, self._label, netlink)
                self._loop.add_reader(watch.fileno(), self._hear_store, watch)
                listening = self._loop.create_task(self._hear_kernel(events))
                await self._settle()
                listening.cancel()
                self._loop.remove_reader(watch.fileno())

    def _hear_store(self, watch: Watch) -> None:
        if self.keeper.key in watch.changes():
            self.keeper.stale = True
            self._wake.set()

    async def _hear_kernel(self, events: Events) -> None:
        while True:
            for event in await events.batch():
                self.keeper.hear(event)
            self._wake.set()

    async def _settle(self) -> None:
        while not self._over:
            self._wake.clear()
            if self.keeper.stale:
                await self.keeper.settle()
            self._begun.set()
            if not self.keeper.stale and not self._over:
                await self._wake.wait()

    def begin(self) -> None:
        """Start, and wait until the kernel is in step with the store."""
        self.start()
        if not self._begun.wait(SECONDS):
            raise LabError(f"the {self.name} did not start", hint="see the log")

    def finish(self) -> None:
        """End; what it set stays."""

        def stop() -> None:
            self._over = True
            self._wake.set()

        self._loop.call_soon_threadsafe(stop)
        self.join(SECONDS)


@contextlib.contextmanager
def keeping(nodes: dict[str, Namespace], store: Store) -> Iterator[dict[str, Keeping]]:
    """Keepers in all the nodes for the length of the block, in step when it begins."""
    made = {label: Keeping(node, store, label) for label, node in nodes.items()}
    with contextlib.ExitStack() as stack:
        for each in made.values():
            each.begin()
            stack.callback(each.finish)
        yield made
