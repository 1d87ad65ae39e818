# SPDX-License-Identifier: Apache-2.0
"""Offloads of a device, by the ethtool ioctl.

A veth passes unfinished checksums on as they are, so that a wrong one is never seen. With `tx`
off the kernel finishes them before the device, as it would for a NIC without offloads.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from enum import IntEnum

from netns_tests.lab.namespaces import Namespace

_SIOCETHTOOL = 0x8946


class Offload(IntEnum):
    """The ETHTOOL_S* command that sets it (linux/ethtool.h)."""

    RX = 0x15
    TX = 0x17
    TSO = 0x1F
    GSO = 0x24
    GRO = 0x2C


def set_offload(namespace: Namespace, device: str, offload: Offload, on: bool) -> None:
    """Switch one offload; OSError if the device refuses. TX off takes TSO with it."""
    value = array.array("I", [offload, int(on)])
    address, _ = value.buffer_info()
    request = struct.pack("16sQ16x", device.encode(), address)
    with namespace.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCETHTOOL, request)
