# SPDX-License-Identifier: Apache-2.0
"""Shared state: documents with a version, compare-and-set, watches, leases.

Keys are paths of one or two words (``nodes/host0``); a document is a JSON object. Kept small, so
that a directory and etcd can both stand behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from oncache.core.errors import ConfigError, OncacheError

Value = Mapping[str, Any]


class StoreError(OncacheError):
    """The store cannot be read or written, or holds what this version does not understand."""


class ConflictError(StoreError):
    """Somebody else wrote the document since it was read: read it again and decide anew."""


@dataclass(frozen=True)
class Document:
    """``version`` grows with every write anywhere in the store; 0 stands for "is not there"."""

    key: str
    version: int
    value: Value


class Watch(Protocol):
    """Tells that documents below a prefix were written or removed."""

    def fileno(self) -> int:
        """Readable when there is something to tell."""

    def changes(self, timeout: float | None = 0) -> frozenset[str]:
        """Keys that changed since the last call, waiting up to ``timeout`` seconds (None: as long
        as it takes). After a loss of events: all keys that are there."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class Lease(Protocol):
    """A name that one process holds."""

    def held(self) -> bool:
        """Still ours?"""

    def close(self) -> None:
        """Give it back."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class Store(Protocol):
    """Every method raises StoreError when the store is out of reach."""

    def get(self, key: str) -> Document | None: ...

    def put_if(self, key: str, value: Value | None, version: int) -> Document | None:
        """Write ``value`` (None: remove) if the document is still at ``version`` (0: is not there).
        Returns it as written. Raises ConflictError otherwise."""

    def list(self, prefix: str) -> tuple[Document, ...]:
        """The documents ``prefix/*``, by key."""

    def watch(self, prefix: str) -> Watch:
        """Changes to ``prefix/*`` from now on: watch first, list then, and nothing is missed."""

    def lease(self, name: str) -> Lease | None:
        """The name for this process, or None while another holds it; it ends with the process."""


def open_store(url: str) -> Store:
    """The store that a configuration names: ``dir:/absolute/path``."""
    if url.startswith("dir:/"):
        from fabric_agent.store.directory import DirectoryStore

        return DirectoryStore(url.removeprefix("dir:"))
    raise ConfigError(f"store {url} is not available in this version", hint="use dir:/a/directory")
