# SPDX-License-Identifier: Apache-2.0
"""Frames in and out of a device by AF_PACKET: bytes, as the device has them.

packet(7). A capture sees a received frame before the device's ingress programs run, and a sent
frame after its egress programs.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType

from netns_tests.lab.namespaces import Namespace
from netns_tests.lab.waiting import until

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_ADD_MEMBERSHIP = 1
_PACKET_AUXDATA = 8
_PACKET_MR_PROMISC = 1
_SO_TIMESTAMPNS = 35
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 64 << 20
_AUXDATA = struct.Struct("=IIIHHHH")  # struct tpacket_auxdata
_TIMESPEC = struct.Struct("=qq")
_STATUS_CHECKSUM_NOT_READY = 1 << 3
_STATUS_VLAN_VALID = 1 << 4


class Direction(IntEnum):
    """A frame's pkt_type (linux/if_packet.h)."""

    HOST = 0
    BROADCAST = 1
    MULTICAST = 2
    OTHERHOST = 3
    OUTGOING = 4


@dataclass(frozen=True)
class Frame:
    """One captured frame, from its Ethernet header on."""

    data: bytes
    time: float  # seconds since the epoch, by the kernel
    direction: Direction
    checksum_ready: bool  # False: the L4 checksum is left to a device (CHECKSUM_PARTIAL)
    vlan: int | None  # the tag control field, which the kernel takes out of the frame


class Capture:
    """Everything that passes a device from the construction on; nothing is filtered.

    A context manager. Frames wait in the socket's buffer until `packets` or `wait` looks.
    """

    def __init__(self, namespace: Namespace, device: str, *, promiscuous: bool = False) -> None:
        self._frames: list[Frame] = []
        self._socket = namespace.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
        if promiscuous:
            request = struct.pack("=iHH8x", namespace.index(device), _PACKET_MR_PROMISC, 0)
            self._socket.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, request)
        self._socket.setblocking(False)
        self._socket.bind((device, _ETH_P_ALL))

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._drain()
        self._socket.close()

    def packets(self, match: Callable[[Frame], bool] | None = None) -> list[Frame]:
        """All frames seen so far, oldest first, or those that `match`."""
        self._drain()
        return [frame for frame in self._frames if match is None or match(frame)]

    def wait(
        self, count: int = 1, seconds: float = 5.0, match: Callable[[Frame], bool] | None = None
    ) -> list[Frame]:
        """Wait until `count` frames (that `match`) have been seen; LabError after `seconds`."""

        def enough() -> list[Frame]:
            seen = self.packets(match)
            return seen if len(seen) >= count else []

        return until(enough, seconds, f"{count} captured frames")

    def _drain(self) -> None:
        if self._socket.fileno() < 0:
            return
        while True:
            try:
                data, notes, _, sender = self._socket.recvmsg(1 << 18, 256)
            except BlockingIOError:
                return
            self._frames.append(_frame(data, notes, sender[2]))


def _frame(data: bytes, notes: list[tuple[int, int, bytes]], direction: int) -> Frame:
    time, ready, vlan = 0.0, True, None
    for level, kind, value in notes:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            time = seconds + nanoseconds / 1e9
        elif (level, kind) == (_SOL_PACKET, _PACKET_AUXDATA):
            status, _, _, _, _, tag, _ = _AUXDATA.unpack(value)
            ready = not status & _STATUS_CHECKSUM_NOT_READY
            vlan = tag if status & _STATUS_VLAN_VALID else None
    return Frame(data, time, Direction(direction), ready, vlan)


class Injector:
    """Sends frames out of one device; build them once and send the bytes."""

    def __init__(self, namespace: Namespace, device: str) -> None:
        self._socket = namespace.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self._socket.bind((device, 0))

    def send(self, frame: bytes) -> None:
        """Send one frame, Ethernet header included; OSError if it exceeds the MTU."""
        self._socket.send(frame)

    def close(self) -> None:
        self._socket.close()


def inject(namespace: Namespace, device: str, *frames: bytes) -> None:
    """Send frames out of a device: a pod's eth0 towards its host, an uplink towards the wire."""
    injector = Injector(namespace, device)
    try:
        for frame in frames:
            injector.send(frame)
    finally:
        injector.close()
