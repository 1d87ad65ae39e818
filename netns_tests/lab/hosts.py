# SPDX-License-Identifier: Apache-2.0
"""Hosts and pods: namespaces with the addresses, devices and duties of each."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any

from netns_tests.lab import agent
from netns_tests.lab.errors import LabError
from netns_tests.lab.namespaces import Namespace
from netns_tests.lab.signals import undisturbed

UPLINK = "und0"
BRIDGE = "cni0"
POD_DEVICE = "eth0"
FIRST_POD = 11
LINK_LOCAL_GATEWAY = IPv4Address("169.254.1.1")
LINK_LOCAL_GATEWAY6 = IPv6Address("fe80::1")
DEFAULT6 = "::/0"


class Shape(StrEnum):
    """How pods hang on their host. Both are routed: two hops from pod to pod across hosts."""

    BRIDGE = "bridge"  # Flannel: bridge cni0 holds the pods' gateway
    ROUTED = "routed"  # one /32 (/128) route per pod, gateway 169.254.1.1 (fe80::1)


class Kind(StrEnum):
    """The third byte of a MAC: which kind of device it belongs to."""

    UPLINK = "00"
    TUNNEL = "01"
    BRIDGE = "02"
    POD = "03"
    POD_HOST_SIDE = "04"


def mac(kind: Kind, host: int, device: int = 1) -> str:
    """A fixed, locally administered MAC, readable in a capture: 02:00:00:<kind>:<host>:<device>."""
    return f"02:00:00:{kind}:{host:02x}:{device:02x}"


@dataclass(frozen=True)
class Attachment:
    """A host's end of the overlay, as far as its pods care."""

    tunnel: str
    shape: Shape
    mtu: int


class Pod(Namespace):
    """A container's network namespace; its `device` is a veth whose other end is on the host.

    `address6` is its second address where the host has IPv6.
    """

    def __init__(self, host: Host, label: str, number: int, overlay: Attachment) -> None:
        super().__init__(f"{host.name}-{label}", ip6=host.ip6)
        self.host = host
        self.label = label
        self.device = POD_DEVICE
        self.host_device = f"v{label}"
        self.address = host.pod_range[number]
        self.address6 = host.pod_range6[number] if host.ip6 else None
        self.mac = mac(Kind.POD, host.number, number)
        try:
            self._plug(number, overlay.mtu)
            if overlay.shape is Shape.BRIDGE:
                self._join_bridge()
            else:
                self._join_routes()
            if self.address6:
                self._join6(self.address6, overlay.shape)
        except BaseException:
            super().delete()
            raise

    def _plug(self, number: int, mtu: int) -> None:
        self.host.netlink.link(
            "add",
            ifname=self.host_device,
            kind="veth",
            address=mac(Kind.POD_HOST_SIDE, self.host.number, number),
            mtu=mtu,
            peer={
                "ifname": self.device,
                "address": self.mac,
                "mtu": mtu,
                "net_ns_fd": self.name,
            },
        )
        self.host.up(self.host_device)
        self.up(self.device)

    def _join_bridge(self) -> None:
        index = self.index(self.device)
        bridge = self.host.index(BRIDGE)
        self.host.netlink.link("set", index=self.host.index(self.host_device), master=bridge)
        prefix = self.host.pod_range.prefixlen
        self.netlink.addr("add", index=index, address=str(self.address), prefixlen=prefix)
        self.netlink.route("add", dst="default", gateway=str(self.host.gateway), oif=index)

    def _join_routes(self) -> None:
        index, outside = self.index(self.device), self.host.index(self.host_device)
        gateway = str(LINK_LOCAL_GATEWAY)
        self.netlink.addr("add", index=index, address=str(self.address), prefixlen=32)
        self.netlink.route("add", dst=f"{gateway}/32", oif=index, scope="link")
        self.netlink.route("add", dst="default", gateway=gateway, oif=index)
        self.host.netlink.addr("add", index=outside, address=gateway, prefixlen=32)
        self.host.netlink.route("add", dst=f"{self.address}/32", oif=outside, scope="link")

    def _join6(self, address: IPv6Address, shape: Shape) -> None:
        index, outside = self.index(self.device), self.host.index(self.host_device)
        bridged = shape is Shape.BRIDGE
        gateway = str(self.host.gateway6 if bridged else LINK_LOCAL_GATEWAY6)
        prefix = self.host.pod_range6.prefixlen if bridged else address.max_prefixlen
        self.netlink.addr("add", index=index, address=str(address), prefixlen=prefix)
        if not bridged:
            self.host.netlink.addr("add", index=outside, address=gateway, prefixlen=64)
            self.host.netlink.route("add", dst=f"{address}/128", oif=outside)
        self.netlink.route("add", dst=DEFAULT6, gateway=gateway, oif=index)

    def ip(self, version: int) -> IPv4Address | IPv6Address:
        """Its address of IP version 4 or 6; LabError if it has none."""
        return _of_version(self.name, version, self.address, self.address6)

    def delete(self, *, abrupt: bool = False) -> None:
        """End the pod as a CNI does: first its link, then its namespace.

        `abrupt` leaves the link to the kernel, which removes it some time after the namespace.
        """
        self.host.pods.pop(self.label, None)
        if not abrupt:
            with contextlib.suppress(OSError):
                self.host.netlink.link("del", index=self.host.index(self.host_device))
        super().delete()


def _of_version(
    name: str, version: int, address: IPv4Address | None, address6: IPv6Address | None
) -> IPv4Address | IPv6Address:
    found = {4: address, 6: address6}[version]
    if found is None:
        raise LabError(f"{name} has no IPv{version} address", hint="build it wired, with ip6=True")
    return found


class Host(Namespace):
    """A machine: forwards, holds pods, and reaches other hosts by its uplink.

    With `ip6` it, its wire and its pods have an IPv6 address each besides the IPv4 one.
    """

    def __init__(
        self, prefix: str, label: str, number: int, work: Path, bpffs: Path, *, ip6: bool = False
    ) -> None:
        """`work` is a directory of the host's own; `bpffs` a mounted bpffs it shares."""
        super().__init__(f"{prefix}-{label}", ip6=ip6)
        self.label = label
        self.number = number
        self.uplink = UPLINK
        self.ip6 = ip6
        self.address: IPv4Address | None = None
        self.address6: IPv6Address | None = None
        self.overlay: Attachment | None = None
        self.pod_range = IPv4Network(f"10.{number}.0.0/24")
        self.gateway = self.pod_range[1]
        self.pod_range6 = IPv6Network(f"fd00:{number:x}::/64")
        self.gateway6 = self.pod_range6[1]
        self.pods: dict[str, Pod] = {}
        self.run_dir = work / "run"
        self.bpf_dir = bpffs / label
        self.config_path = work / "config.yaml"
        self._next_pod = FIRST_POD
        self.sysctl("net.ipv4.ip_forward", 1)
        if ip6:
            self.sysctl("net.ipv6.conf.all.forwarding", 1)

    def ip(self, version: int) -> IPv4Address | IPv6Address:
        """Its uplink's address of IP version 4 or 6; LabError if it has none."""
        return _of_version(self.name, version, self.address, self.address6)

    @property
    def tunnel(self) -> str:
        """The overlay's device; LabError while there is none."""
        return self._attachment().tunnel

    def _attachment(self) -> Attachment:
        if self.overlay is None:
            raise LabError(f"host {self.label} has no overlay", hint="call lab.vxlan(...) first")
        return self.overlay

    def pod(self, label: str) -> Pod:
        """Add a pod; its address is the next of the host's range, from .11 on."""
        with undisturbed():
            made = Pod(self, label, self._next_pod, self._attachment())
            self.pods[label] = made
        self._next_pod += 1
        return made

    def config(self, **changes: Any) -> dict[str, Any]:
        """The node agent's configuration for this host; `changes` replace whole top-level keys."""
        return {
            "node": {"uplink": self.uplink},
            "overlay": {"device": self.tunnel},
            "plane": "oncache",
            "pods": {"discover": True},
            "run_dir": str(self.run_dir),
            "bpf_dir": str(self.bpf_dir),
            **changes,
        }

    def agent(
        self, config: dict[str, Any] | None = None, *, options: tuple[str, ...] = ()
    ) -> agent.Agent:
        """A node agent for this host, as a context manager: started and in step inside it."""
        return agent.Agent(self, self.config() if config is None else config, options)

    def delete(self) -> None:
        """End the host and its pods; what fails for one does not keep the others."""
        with contextlib.ExitStack() as stack:
            stack.callback(super().delete)
            for pod in self.pods.values():
                stack.callback(pod.delete)
