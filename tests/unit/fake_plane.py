# SPDX-License-Identifier: Apache-2.0
"""A plane that lives in memory: what the agent's reconciler and its tests share as an interface."""

import errno
from collections.abc import Iterable, Mapping

from oncache.core.net import IpAddress
from oncache.plane import Attached, PathRow, PodEntry, Settings


class FakePlane:
    """Keeps what it is told; ``done`` lists the calls in order. A device in ``absent`` is gone."""

    def __init__(self, absent: Iterable[int] = ()) -> None:
        self.done: list[str] = []
        self.absent = set(absent)
        self._settings: Settings | None = None
        self._pods: dict[int, PodEntry] = {}
        self._peers: frozenset[IpAddress] = frozenset()
        self._uplinks: set[int] = set()
        self._attached: set[int] = set()
        self._paths: list[PathRow] = []

    def _on(self, ifindex: int) -> None:
        if ifindex in self.absent:
            raise OSError(errno.ENODEV, "No such device")

    def settings(self) -> Settings | None:
        return self._settings

    def configure(self, settings: Settings) -> None:
        self.done.append("configure")
        self._settings = settings

    def enable(self, deadline_seconds: float) -> None:
        self.done.append(f"enable {deadline_seconds:g}")

    def disable(self) -> None:
        self.done.append("disable")

    def pause_learning(self) -> None:
        self.done.append("pause")

    def resume_learning(self) -> None:
        self.done.append("resume")

    def invalidate_all(self) -> None:
        self.done.append("invalidate all")

    def invalidate_pod(self, index: int) -> None:
        self.done.append(f"invalidate pod {index}")

    def invalidate_path(self, index: int) -> None:
        self.done.append(f"invalidate path {index}")

    def pods(self) -> Mapping[int, PodEntry]:
        return dict(self._pods)

    def set_pod(self, index: int, entry: PodEntry) -> None:
        self.done.append(f"set {index}")
        self._pods[index] = entry

    def clear_pod(self, index: int) -> None:
        self.done.append(f"clear {index}")
        del self._pods[index]

    def peers(self) -> frozenset[IpAddress]:
        return self._peers

    def set_peers(self, wanted: Iterable[IpAddress]) -> None:
        self._peers = frozenset(wanted)

    def paths(self) -> list[PathRow]:
        return self._paths

    def attach_uplink(self, ifindex: int) -> None:
        self._on(ifindex)
        self._uplinks.add(ifindex)

    def attach_pod(self, ifindex: int) -> None:
        self._on(ifindex)
        self._attached.add(ifindex)

    def detach(self, ifindex: int) -> None:
        self.done.append(f"detach {ifindex}")
        self._uplinks.discard(ifindex)
        self._attached.discard(ifindex)

    def attached(self) -> Attached:
        return Attached(
            uplinks=frozenset(self._uplinks - self.absent),
            pods=frozenset(self._attached - self.absent),
        )

    def pinned_devices(self) -> frozenset[int]:
        return frozenset(self._uplinks | self._attached)

    def close(self) -> None:
        self.done.append("close")
