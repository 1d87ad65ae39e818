# SPDX-License-Identifier: Apache-2.0
"""What can be known of a host's network, as frozen dataclasses without a library behind them."""

from dataclasses import dataclass
from enum import IntEnum
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)

IpAddress = IPv4Address | IPv6Address
IpInterface = IPv4Interface | IPv6Interface
IpNetwork = IPv4Network | IPv6Network


class Df(IntEnum):
    """The tunnel's rule for the outer Don't Fragment bit (enum ifla_vxlan_df)."""

    UNSET = 0
    SET = 1
    INHERIT = 2


@dataclass(frozen=True)
class Tunnel:
    """Attributes of a VXLAN device; ``local`` and ``remote`` are None where the device has none.

    ``port_min`` and ``port_max`` bound the outer source port, both 0 for the system's own range.
    ``ttl`` 0 means the system's default. ``zero_csum6_*``: no UDP checksum over IPv6 sent/required.
    """

    vni: int
    port: int
    port_min: int = 0
    port_max: int = 0
    tos: int = 0
    tos_inherit: bool = False
    ttl: int = 0
    ttl_inherit: bool = False
    df: Df = Df.UNSET
    udp_csum: bool = False
    zero_csum6_tx: bool = False
    zero_csum6_rx: bool = False
    label_inherit: bool = False
    gbp: bool = False
    gpe: bool = False
    collect_metadata: bool = False
    learning: bool = False
    local: IpAddress | None = None
    remote: IpAddress | None = None


@dataclass(frozen=True)
class Link:
    """A network device. ``lower`` is the device below it or, for a veth, its peer, in the namespace
    ``lower_nsid`` (None: this one); ``kind`` is empty for hardware."""

    index: int
    name: str
    kind: str
    mac: bytes
    mtu: int
    up: bool
    lower: int | None = None
    lower_nsid: int | None = None
    master: int | None = None
    tunnel: Tunnel | None = None


@dataclass(frozen=True)
class Address:
    """An address on a device; ``usable`` once duplicate detection has passed, ``primary`` unless it
    is a secondary of the same network (or an IPv6 temporary address)."""

    index: int
    interface: IpInterface
    universe: bool
    primary: bool
    usable: bool

    @property
    def ip(self) -> IpAddress:
        return self.interface.ip


@dataclass(frozen=True)
class Route:
    """A route; ``gateway`` and ``device`` are None where it has none or several. ``kind`` is the
    RTN_* number (1 unicast), ``protocol`` the RTPROT_* number of who made it; ``next_hop`` is the
    id of a next-hop object, from which gateway and device then come."""

    destination: IpNetwork
    table: int
    kind: int
    protocol: int
    priority: int
    gateway: IpAddress | None
    device: int | None
    next_hop: int | None = None


@dataclass(frozen=True)
class NextHop:
    """A next-hop object. Routes name it by ``id``, so to replace it moves all of them in one step;
    the kernel removes it, and them, when the device loses its carrier."""

    id: int
    gateway: IpAddress
    device: int
    protocol: int


@dataclass(frozen=True)
class Neighbour:
    """Who answers to ``address`` on the device; ``mac`` is empty while unresolved."""

    index: int
    address: IpAddress
    mac: bytes


@dataclass(frozen=True)
class FdbEntry:
    """Where frames to ``mac`` go on a bridge port (``remote`` None) or VXLAN device."""

    index: int
    mac: bytes
    vlan: int
    remote: IpAddress | None


@dataclass(frozen=True)
class Rule:
    """A routing rule; what it does not look at is None. ``device`` is the name of the device that a
    packet came in by, ``source_ports`` and ``ports`` are ranges with both ends, ``protocol`` is the
    RTPROT_* number of who made it."""

    family: int
    priority: int
    table: int
    fwmark: int | None
    fwmask: int | None
    source: IpNetwork | None = None
    device: str | None = None
    ip_protocol: int | None = None
    source_ports: tuple[int, int] | None = None
    ports: tuple[int, int] | None = None
    protocol: int = 0


@dataclass(frozen=True)
class Namespace:
    """Another network namespace by the number it has here. As an event: links or addresses inside
    changed and are worth reading again, or the number (``gone``) is free for another one."""

    nsid: int


Item = Link | Address | Route | Neighbour | FdbEntry | Rule | Namespace


@dataclass(frozen=True)
class Event:
    """``item`` came, changed or (``gone``) went."""

    item: Item
    gone: bool = False


@dataclass(frozen=True)
class Overrun:
    """Events were lost: everything has to be read again."""


@dataclass(frozen=True)
class Snapshot:
    """Our own namespace at one time, but for routes and rules, which may be very many."""

    links: tuple[Link, ...] = ()
    addresses: tuple[Address, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    fdb: tuple[FdbEntry, ...] = ()
