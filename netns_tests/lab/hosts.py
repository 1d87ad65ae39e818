# SPDX-License-Identifier: Apache-2.0
"""Hosts and pods: namespaces with the addresses, devices and duties of each."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network
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


class Shape(StrEnum):
    """How pods hang on their host. Both are routed: two hops from pod to pod across hosts."""

    BRIDGE = "bridge"  # Flannel: bridge cni0 holds the pods' gateway
    ROUTED = "routed"  # one /32 route per pod, gateway 169.254.1.1


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
    """A container's network namespace; its `device` is a veth whose other end is on the host."""

    def __init__(self, host: Host, label: str, number: int, overlay: Attachment) -> None:
        super().__init__(f"{host.name}-{label}")
        self.host = host
        self.label = label
        self.device = POD_DEVICE
        self.host_device = f"v{label}"
        self.address = host.pod_range[number]
        self.mac = mac(Kind.POD, host.number, number)
        try:
            self._plug(number, overlay.mtu)
            if overlay.shape is Shape.BRIDGE:
                self._join_bridge()
            else:
                self._join_routes()
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

    def delete(self, *, abrupt: bool = False) -> None:
        """End the pod as a CNI does: first its link, then its namespace.

        `abrupt` leaves the link to the kernel, which removes it some time after the namespace.
        """
        self.host.pods.pop(self.label, None)
        if not abrupt:
            with contextlib.suppress(OSError):
                self.host.netlink.link("del", index=self.host.index(self.host_device))
        super().delete()


class Host(Namespace):
    """A machine: forwards, holds pods, and reaches other hosts by its uplink."""

    def __init__(self, prefix: str, label: str, number: int, work: Path, bpffs: Path) -> None:
        """`work` is a directory of the host's own; `bpffs` a mounted bpffs it shares."""
        super().__init__(f"{prefix}-{label}")
        self.label = label
        self.number = number
        self.uplink = UPLINK
        self.address: IPv4Address | None = None
        self.overlay: Attachment | None = None
        self.pod_range = IPv4Network(f"10.{number}.0.0/24")
        self.gateway = self.pod_range[1]
        self.pods: dict[str, Pod] = {}
        self.run_dir = work / "run"
        self.bpf_dir = bpffs / label
        self.config_path = work / "config.yaml"
        self._next_pod = FIRST_POD
        self.sysctl("net.ipv4.ip_forward", 1)

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
