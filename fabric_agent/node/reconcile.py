# SPDX-License-Identifier: Apache-2.0
"""Read what the kernel has, and carry out a plan. Blocking: the agent calls it in a thread."""

import errno
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from fabric_agent.node.plan import (
    Action,
    Actual,
    AttachPod,
    AttachUplink,
    ClearPod,
    Configure,
    Detach,
    InvalidateAll,
    InvalidatePath,
    InvalidatePod,
    SetPeers,
    SetPod,
)
from oncache.core.errors import HostError, OncacheError
from oncache.core.net import IpAddress
from oncache.plane import Attached, PathRow, PodEntry, Settings

log = logging.getLogger(__name__)


class DataPath(Protocol):
    """What the agent uses of a plane; ``oncache.plane.Plane`` is one."""

    def settings(self) -> Settings | None: ...
    def configure(self, settings: Settings) -> None: ...
    def enable(self, deadline_seconds: float) -> None: ...
    def disable(self) -> None: ...
    def pause_learning(self) -> None: ...
    def resume_learning(self) -> None: ...
    def invalidate_all(self) -> None: ...
    def invalidate_pod(self, index: int) -> None: ...
    def invalidate_path(self, index: int) -> None: ...
    def pods(self) -> Mapping[int, PodEntry]: ...
    def set_pod(self, index: int, entry: PodEntry) -> None: ...
    def clear_pod(self, index: int) -> None: ...
    def peers(self) -> frozenset[IpAddress]: ...
    def set_peers(self, wanted: Iterable[IpAddress]) -> None: ...
    def paths(self) -> Sequence[PathRow]: ...
    def attach_uplink(self, ifindex: int) -> None: ...
    def attach_pod(self, ifindex: int) -> None: ...
    def detach(self, ifindex: int) -> None: ...
    def attached(self) -> Attached: ...
    def pinned_devices(self) -> frozenset[int]: ...
    def close(self) -> None: ...


def read(plane: DataPath) -> Actual:
    """What the plane's maps and hooks hold now."""
    attached = plane.attached()
    return Actual(
        settings=plane.settings(),
        peers=plane.peers(),
        pods=plane.pods(),
        attached_uplinks=attached.uplinks,
        attached_pods=attached.pods,
        pinned=plane.pinned_devices(),
    )


def execute(plane: DataPath, actions: Iterable[Action]) -> dict[int, str]:
    """Carry out the actions with learning paused, so that nothing learned half-way stays.

    A pod's device may vanish at any time and then concerns nobody else: returns the trouble met, by
    the index of the device. Trouble with the uplink or the settings is raised.
    """
    troubles: dict[int, str] = {}
    plane.pause_learning()
    try:
        for action in actions:
            log.debug("action %s", action)
            trouble = _perform(plane, action)
            if trouble is not None:
                troubles[trouble[0]] = trouble[1]
    finally:
        plane.resume_learning()
    return troubles


def _perform(plane: DataPath, action: Action) -> tuple[int, str] | None:
    match action:
        case Configure(settings):
            plane.configure(settings)
            plane.pause_learning()
        case SetPeers(peers):
            plane.set_peers(peers)
        case AttachUplink(ifindex):
            _attach_uplink(plane, ifindex)
        case InvalidateAll():
            plane.invalidate_all()
        case InvalidatePod(index):
            plane.invalidate_pod(index)
        case InvalidatePath(index):
            plane.invalidate_path(index)
        case ClearPod(index):
            plane.clear_pod(index)
        case _:
            return _for_a_pod(plane, action)
    return None


def _attach_uplink(plane: DataPath, ifindex: int) -> None:
    try:
        plane.attach_uplink(ifindex)
    except OSError as error:
        raise HostError(
            f"cannot attach to the uplink (device {ifindex}): {error.strerror or error}",
            hint="run 'oncache doctor'",
        ) from error


def _for_a_pod(plane: DataPath, action: Detach | SetPod | AttachPod) -> tuple[int, str] | None:
    ifindex = action.entry.ifindex if isinstance(action, SetPod) else action.ifindex
    try:
        match action:
            case Detach():
                plane.detach(ifindex)
            case SetPod(index, entry):
                plane.set_pod(index, entry)
            case AttachPod():
                plane.attach_pod(ifindex)
    except OSError as error:
        gone = error.errno == errno.ENODEV
        return ifindex, "its device vanished" if gone else error.strerror or str(error)
    except OncacheError as error:
        return ifindex, error.message
    return None
