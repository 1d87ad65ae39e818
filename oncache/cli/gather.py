# SPDX-License-Identifier: Apache-2.0
"""The effects of `oncache doctor`: ask the kernel, conclude nothing."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from oncache.cli.checks import Device, Facts, Foreign, MarkRule
from oncache.cli.places import Places
from oncache.core import attach, bpffs, features, sysctl
from oncache.core.config import BuiltinOverlay, Config, GuardMode
from oncache.core.errors import OncacheError
from oncache.core.netlink import Link, Netlink, Rule
from oncache.guard import link_pin as guard_pin
from oncache.plane import Plane

CONNTRACK = "netfilter.nf_conntrack_tcp"
KERNEL_TYPES = Path("/sys/kernel/btf/vmlinux")
# Bits of CapEff (linux/capability.h): CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_PERFMON, CAP_BPF.
NET_ADMIN, SYS_ADMIN, PERFMON, BPF = (1 << bit for bit in (12, 21, 38, 39))
# A rule that names a mark and no mask looks at all of it.
WHOLE_MARK = 0xFFFFFFFF


def gather(where: Places) -> Facts:
    """Look at this host, in the network namespace of the caller."""
    config = where.config
    links, rules = asyncio.run(ask_netlink())
    by_name = {link.name: link for link in links}
    uplink = by_name.get(config.node.uplink) if config else None
    tunnel = by_name.get(tunnel_name(config))
    kernel = probe()
    return Facts(
        privileged=privileged(),
        kernel=version(os.uname().release),
        btf=KERNEL_TYPES.exists(),
        bpf_dir=str(where.bpf_dir),
        bpffs=on_bpffs(where.bpf_dir),
        tcx=kernel.tcx if kernel else None,
        ct_lookup=kernel.ct_lookup if kernel else None,
        configured=config is not None,
        uplink_name=config.node.uplink if config else "",
        tunnel_name=tunnel_name(config),
        builtin=config is not None and isinstance(config.overlay, BuiltinOverlay),
        uplink=device(uplink),
        tunnel=device(tunnel),
        rp_filter=rp_filter(link.name for link in (uplink, tunnel) if link),
        be_liberal=number(f"{CONNTRACK}_be_liberal"),
        ignore_invalid_rst=number(f"{CONNTRACK}_ignore_invalid_rst"),
        ip_forward=number("ipv4.ip_forward"),
        foreign=tuple(foreign(uplink)) if uplink else (),
        mark_rules=tuple(mark_rules(rules)),
        mark_mask=config.mark_mask if config else Config.mark_mask,
        attached=attached(where),
        guard=config.guard.mode if config else GuardMode.OFF,
        xdp=foreign_xdp(uplink, where.bpf_dir) if uplink else None,
    )


async def ask_netlink() -> tuple[list[Link], list[Rule]]:
    async with Netlink() as netlink:
        return await netlink.links(), await netlink.rules()


def privileged() -> bool:
    """May this process load programs, and put them on devices?"""
    status = Path("/proc/self/status").read_text()
    have = int(status.split("CapEff:")[1].split()[0], 16)
    may_load = have & SYS_ADMIN or (have & BPF and have & PERFMON)
    return bool(have & NET_ADMIN and may_load)


def version(release: str) -> tuple[int, int]:
    """(6, 1) of "6.1.0-28-amd64"."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def probe() -> features.Features | None:
    """The kernel answers only to those who may load programs."""
    try:
        return features.probe()
    except OSError:
        return None


def on_bpffs(path: Path) -> bool:
    # Not Path.exists(): without privileges the lowest directories may not even be looked at.
    return bpffs.is_bpffs(next(p for p in (path, *path.parents) if os.path.exists(p)))


def tunnel_name(config: Config | None) -> str:
    if config is None or isinstance(config.overlay, BuiltinOverlay):
        return ""
    return config.overlay.device


def device(link: Link | None) -> Device | None:
    if link is None:
        return None
    return Device(link.name, link.kind, link.mtu, link.up, elsewhere=link.lower_nsid is not None)


def number(name: str) -> int | None:
    value = sysctl.read(name)
    return None if value is None else int(value)


def rp_filter(devices: Iterable[str]) -> dict[str, int]:
    """Values by device, "all" too; a dot in a name is a separator to sysctl, a slash is not."""
    names = ["all", *(name.replace(".", "/") for name in devices)]
    return {name: number(f"ipv4.conf.{name}.rp_filter") or 0 for name in names}


def mark_rules(rules: Iterable[Rule]) -> Iterable[MarkRule]:
    for rule in rules:
        if rule.fwmark is not None:
            mask = WHOLE_MARK if rule.fwmask is None else rule.fwmask
            yield MarkRule(rule.priority, rule.fwmark, mask)


def foreign(uplink: Link) -> Iterable[Foreign]:
    """Programs of others on the uplink; without privileges nobody tells."""
    for direction in attach.Direction:
        try:
            programs = attach.attached(uplink.index, direction)
        except (OSError, OncacheError):
            return
        yield from (Foreign(uplink.name, str(direction), p.name) for p in programs if not p.ours)


def foreign_xdp(uplink: Link, bpf_dir: Path) -> str | None:
    """The name of somebody else's XDP program on the uplink; without privileges nobody tells."""
    try:
        hook = attach.xdp(uplink.index, guard_pin(bpf_dir))
    except (OSError, OncacheError):
        return None
    return hook.program.name if hook and not hook.program.ours else None


def attached(where: Places) -> bool:
    try:
        with closing(Plane.open(where.bpf_dir)) as plane:
            return bool(plane.attached().uplinks)
    except (OSError, OncacheError):
        return False
