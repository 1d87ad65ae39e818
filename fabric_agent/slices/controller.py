# SPDX-License-Identifier: Apache-2.0
"""Serves slice requests from a store and publishes what each node must do.

    requests/ID    a request; the answer is added to it
    slices/table   all slices: the one document that decides
    jobs/SLICE     who is in a slice
    nodes/HOST     what a host must do
    switches/NAME  what a switch must do

Everything but requests and the table follows from the table, so a controller that dies at any point
is made good by the next one. One serves at a time (a lease); should two ever do, the table's
compare-and-set keeps them apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from fabric_agent.slices import hosts, table
from fabric_agent.slices.model import Fabric
from fabric_agent.slices.table import Table
from fabric_agent.store import ConflictError, Document, Store
from fabric_agent.store.readable import readable
from oncache.core.errors import OncacheError

LEASE: Final = "controller"
REQUESTS: Final = "requests"
RETRY_SECONDS: Final = 1.0  # of a controller that stands by

Json = dict[str, Any]


def read_table(store: Store, fabric: Fabric) -> tuple[Table, int]:
    """The table and its version."""
    document = store.get(table.KEY)
    return (table.decode(fabric, document.value), document.version) if document else (Table(), 0)


class Controller:
    """One fabric, one store."""

    def __init__(self, store: Store, fabric: Fabric) -> None:
        self._store = store
        self._fabric = fabric
        self._published: Table | None = None

    def run(self, stop: int, ready: int | None = None) -> None:
        """Serve until file descriptor ``stop`` is readable; a byte goes to ``ready`` when requests
        are being served."""
        with self._store.watch(REQUESTS) as watch:
            while not (lease := self._store.lease(LEASE)):
                if readable([stop], RETRY_SECONDS):
                    return
            with lease:
                self.serve()
                if ready is not None:
                    os.write(ready, b"\n")
                while stop not in readable([stop, watch.fileno()]):
                    watch.changes()
                    self.serve()

    def serve(self) -> None:
        """Answer what is asked and publish what follows."""
        for document in self._store.list(REQUESTS):
            if "answer" not in document.value:
                self._answer(document)
        while True:
            try:
                return self._publish(read_table(self._store, self._fabric)[0])
            except ConflictError:
                continue  # another controller publishes, too: see what is there now

    def _answer(self, request: Document) -> None:
        try:
            answer = {"ok": True, **self._take(request)}
        except OncacheError as error:
            answer = {
                "ok": False,
                "error": error.message,
                "hint": error.hint,
                "exit_code": error.exit_code,
            }
        value = {**request.value, "answer": answer}
        try:
            self._store.put_if(request.key, value, request.version)
        except ConflictError:
            return  # withdrawn, or answered by another controller

    def _take(self, request: Document) -> Json:
        while True:
            before, version = read_table(self._store, self._fabric)
            after, answer = table.apply(self._fabric, before, request.key, request.value)
            if after == before:
                return answer
            try:
                self._store.put_if(table.KEY, table.encode(self._fabric, after), version)
            except ConflictError:
                continue
            return answer

    def _publish(self, now: Table) -> None:
        if now == self._published:
            return
        wanted = dict(_documents(self._fabric, now))
        for folder in ("jobs", "nodes", "switches"):
            there = {document.key: document for document in self._store.list(folder)}
            mine = {key: value for key, value in wanted.items() if key.startswith(f"{folder}/")}
            for key in there.keys() | mine.keys():
                self._put(key, there.get(key), mine.get(key))
        self._published = now

    def _put(self, key: str, there: Document | None, value: Json | None) -> None:
        if (there.value if there else None) != value:
            self._store.put_if(key, value, there.version if there else 0)


def _documents(fabric: Fabric, now: Table) -> Iterator[tuple[str, Json]]:
    broken = now.broken(fabric)
    by_host: dict[int, list[int]] = {}
    leaves: set[int] = set()
    spines: set[int] = set()
    for index, part in enumerate(now.slices):
        yield f"jobs/{part.name}", hosts.job_document(fabric, part)
        for host in {fabric.nics[nic].host for nic in part.ranks}:
            by_host.setdefault(host, []).append(index)
        leaves |= {link.leaf for link in part.all_links}
        spines |= {link.spine for link in part.all_links}
    for host, indices in by_host.items():
        parts = [now.slices[index] for index in indices]
        document = hosts.host_document(fabric, parts, host, broken)
        yield f"nodes/{fabric.hosts[host].name}", document
    for leaf in leaves:
        document = hosts.leaf_document(fabric, now.slices, leaf, broken)
        yield f"switches/{fabric.leaves[leaf].name}", document
    for spine in spines:
        document = hosts.spine_document(fabric, now.slices, spine)
        yield f"switches/{fabric.spines[spine].name}", document
