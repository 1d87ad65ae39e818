# SPDX-License-Identifier: Apache-2.0
"""struct address of the programs: IPv4 is kept IPv4-mapped (bpf/lib/address.h)."""

from ipaddress import ip_address
from typing import Any, TypeVar

from oncache.core.net import IpAddress

T = TypeVar("T")

V4_MAPPED = bytes(10) + b"\xff\xff"


def pack(kind: type[T], address: IpAddress) -> T:
    """An address as an instance of the struct's class."""
    raw = V4_MAPPED + address.packed if address.version == 4 else address.packed
    packed: T = kind.from_buffer_copy(raw)  # type: ignore[attr-defined]
    return packed


def unpack(value: Any) -> IpAddress | None:
    """The address in a struct; None if it is all zero."""
    raw = bytes(value)
    if not any(raw):
        return None
    return ip_address(raw[12:]) if raw.startswith(V4_MAPPED) else ip_address(raw)
