# SPDX-License-Identifier: Apache-2.0
"""From uplink and tunnel device to what the programs are told. Pure.

What the fast path could not imitate is refused here, with both facts in the message.
"""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from fabric_agent.node.state import State
from oncache.core import overlay
from oncache.core.config import BuiltinOverlay, Config
from oncache.core.errors import ConfigError, HostError
from oncache.core.net import Address, Df, Link, Tunnel
from oncache.plane import Settings

# Outer IP, UDP and VXLAN header and the inner Ethernet header, by the outer IP's version.
OVERHEAD: Final = {4: overlay.OVERHEAD, 6: overlay.OVERHEAD + 20}
SWARM: Final = "an overlay whose tunnel is in another namespace (Docker swarm) cannot be used"


def settings(config: Config, state: State, port_range: tuple[int, int]) -> Settings:
    """What the plane must know. ``port_range``: net.ipv4.ip_local_port_range, low and high.

    Raises ConfigError where another configuration is the remedy, HostError where the host is not
    (or not yet) as needed.
    """
    uplink = find_uplink(config, state)
    device = _device(config, state)
    tunnel = _vxlan(device)
    _refuse_unsupported(device, tunnel)
    _same_way(device, uplink)
    local = _local(tunnel, uplink, state.addresses)
    _fits(device, uplink, OVERHEAD[local.version])
    port_min, port_max = _ports(tunnel, port_range)
    return Settings(
        uplink=uplink.index,
        tunnel=device.index,
        local=local,
        vni=tunnel.vni,
        port=tunnel.port,
        port_min=port_min,
        port_max=port_max,
        tos_inherit=tunnel.tos_inherit,
        ttl_inherit=tunnel.ttl_inherit,
        df_inherit=tunnel.df is Df.INHERIT,
        mtu=device.mtu,
        lease_seconds=config.lease_seconds,
        mark_mask=config.mark_mask,
        zero_sum6_tx=tunnel.zero_csum6_tx,
        zero_sum6_rx=tunnel.zero_csum6_rx,
    )


def find_uplink(config: Config, state: State) -> Link:
    """The configured uplink, or HostError."""
    uplink = state.link(config.node.uplink)
    if uplink is None:
        raise HostError(
            f"uplink {config.node.uplink} does not exist here",
            hint=f"set node.uplink to one of: {_names(state)}",
        )
    return uplink


def uplink_address(uplink: Link, addresses: Iterable[Address]) -> IPv4Address:
    """The uplink's first usable global IPv4 address, or HostError."""
    own = [a for a in addresses if a.index == uplink.index and a.universe and a.usable]
    found = sorted((not a.primary, a.ip) for a in own if isinstance(a.ip, IPv4Address))
    if not found:
        raise HostError(
            f"uplink {uplink.name} has no global IPv4 address", hint="give it one, then start again"
        )
    return found[0][1]


def _names(state: State) -> str:
    kinds = ("", "veth", "bond", "vlan", "macvlan")
    return ", ".join(sorted(k.name for k in state.links.values() if k.kind in kinds)) or "none"


def _device(config: Config, state: State) -> Link:
    if isinstance(config.overlay, BuiltinOverlay):
        name, remedy = overlay.DEVICE, "something removed it; restart the agent"
    else:
        name, remedy = config.overlay.device, f"start the overlay, or set overlay.device; {SWARM}"
    device = state.link(name)
    if device is None:
        raise HostError(f"tunnel device {name} does not exist here", hint=remedy)
    return device


def _vxlan(device: Link) -> Tunnel:
    if device.tunnel is None:
        raise ConfigError(
            f"{device.name} is a {device.kind or 'hardware'} device, not a vxlan one",
            hint="set overlay.device to the overlay's vxlan device",
        )
    return device.tunnel


def _refuse_unsupported(device: Link, tunnel: Tunnel) -> None:
    modes = {
        "collect metadata ('external')": tunnel.collect_metadata,
        "group policy (gbp)": tunnel.gbp,
        "protocol extension (gpe)": tunnel.gpe,
        "an inherited flow label": tunnel.label_inherit,
    }
    for mode, used in modes.items():
        if used:
            raise HostError(
                f"tunnel device {device.name} uses {mode}, which the fast path cannot imitate",
                hint="use an overlay with a plain vxlan device",
            )


def _same_way(device: Link, uplink: Link) -> None:
    if device.lower_nsid is not None:
        raise HostError(
            f"tunnel device {device.name} sends through another network namespace", hint=SWARM
        )
    if device.lower not in (None, uplink.index):
        raise ConfigError(
            f"tunnel device {device.name} does not send through uplink {uplink.name}",
            hint=f"set node.uplink to the device below {device.name}",
        )


def _fits(device: Link, uplink: Link, overhead: int) -> None:
    if device.mtu + overhead > uplink.mtu:
        raise HostError(
            f"{device.name} has MTU {device.mtu}; with {overhead} bytes of outer headers that is"
            f" more than the MTU {uplink.mtu} of {uplink.name}",
            hint=f"set the MTU of {device.name} and of the pods to {uplink.mtu - overhead}",
        )


def _ports(tunnel: Tunnel, port_range: tuple[int, int]) -> tuple[int, int]:
    """Lowest outer source port, and the bound above the highest (include/net/udp_tunnel.h)."""
    if tunnel.port_min < tunnel.port_max:
        return tunnel.port_min, tunnel.port_max
    return port_range


def _local(tunnel: Tunnel, uplink: Link, addresses: Iterable[Address]) -> IPv4Address | IPv6Address:
    """The tunnel's own address, else the uplink's first one, which the kernel would choose."""
    if tunnel.local is not None:
        return tunnel.local
    if isinstance(tunnel.remote, IPv6Address):
        raise HostError(
            "the tunnel runs over IPv6 and has no local address", hint="set one on the device"
        )
    return uplink_address(uplink, addresses)
