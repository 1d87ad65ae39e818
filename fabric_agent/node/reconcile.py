# SPDX-License-Identifier: Apache-2.0
"""Read what the kernel has, and carry out a plan. Blocking: the agent calls it in a thread."""

import contextlib
import errno
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


Troubles = dict[int, str]


def execute(plane: DataPath, actions: Iterable[Action]) -> Troubles:
    """Carry out the actions with learning paused, so that nothing learned half-way stays.

    A pod's device may vanish at any time and then concerns nobody else: returns the trouble met, by
    the index of the device. Trouble with the uplink or the settings is raised.
    """
    troubles: Troubles = {}
    plane.pause_learning()
    try:
        for action in actions:
            log.debug("action %s", action)
            _perform(plane, action, troubles)
    finally:
        plane.resume_learning()
    return troubles


def _perform(plane: DataPath, action: Action, troubles: Troubles) -> None:
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
        case SetPod(index, entry):
            with _troubles_of(entry.ifindex, troubles):
                plane.set_pod(index, entry)
        case Detach() | AttachPod():
            troubles |= attach_or_detach(plane, action)


def attach_or_detach(plane: DataPath, action: Detach | AttachPod) -> Troubles:
    """Put our programs on a pod's device or take them off; returns the trouble if there was any.

    A device that vanishes while we leave it is none.
    """
    troubles: Troubles = {}
    with _troubles_of(action.ifindex, troubles):
        if isinstance(action, AttachPod):
            plane.attach_pod(action.ifindex)
        else:
            with _unless_gone():
                plane.detach(action.ifindex)
    return troubles


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


@contextlib.contextmanager
def _troubles_of(ifindex: int, troubles: Troubles) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        gone = error.errno == errno.ENODEV
        troubles[ifindex] = "its device vanished" if gone else error.strerror or str(error)
    except OncacheError as error:
        troubles[ifindex] = error.message


def _attach_uplink(plane: DataPath, ifindex: int) -> None:
    try:
        plane.attach_uplink(ifindex)
    except OSError as error:
        raise HostError(
            f"cannot attach to the uplink (device {ifindex}): {error.strerror or error}",
            hint="run 'oncache doctor'",
        ) from error
