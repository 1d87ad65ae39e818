# SPDX-License-Identifier: Apache-2.0
"""What `oncache doctor` looks at: facts about a host in, findings with remedies out; no effects.

The forces behind each check are in docs/architecture.md; the ones that bite hardest are conntrack's
(it does not see fast packets) and the MTU's (a header must fit without anybody noticing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from oncache.core.config import GuardMode

OLDEST_KERNEL = (6, 1)
TUNNELS = ("vxlan",)
# Outer IPv4 20, UDP 8, VXLAN 8, inner Ethernet 14.
TUNNEL_BYTES = 50


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding. `remedy` is empty when there is nothing to do."""

    name: str
    level: Level
    fact: str
    remedy: str = ""


@dataclass(frozen=True)
class Device:
    """A network device as found; `kind` is the kernel's word ("vxlan"), empty for hardware."""

    name: str
    kind: str
    mtu: int
    up: bool
    # A tunnel device may send from another namespace than the one it is seen in.
    elsewhere: bool = False


@dataclass(frozen=True)
class Foreign:
    """Somebody else's program on one of our hooks."""

    device: str
    direction: str
    name: str


@dataclass(frozen=True)
class MarkRule:
    """An `ip rule` that looks at marks."""

    priority: int
    mark: int
    mask: int


@dataclass(frozen=True)
class Facts:
    """Everything the checks look at. None: could not be read, or there is no such thing here."""

    privileged: bool
    kernel: tuple[int, int]
    btf: bool
    bpf_dir: str
    bpffs: bool
    tcx: bool | None
    ct_lookup: bool | None
    configured: bool
    uplink_name: str = ""
    tunnel_name: str = ""
    builtin: bool = False
    uplink: Device | None = None
    tunnel: Device | None = None
    rp_filter: Mapping[str, int] = field(default_factory=dict)
    be_liberal: int | None = None
    ignore_invalid_rst: int | None = None
    ip_forward: int | None = None
    foreign: tuple[Foreign, ...] = ()
    mark_rules: tuple[MarkRule, ...] = ()
    mark_mask: int = 0xFF
    attached: bool = False
    guard: GuardMode = GuardMode.OFF
    # Somebody else's XDP program on the uplink.
    xdp: str | None = None


def examine(facts: Facts) -> list[Check]:
    """All checks that apply, in the order in which one would repair them."""
    return [check for examined in CHECKS for check in examined(facts)]


def passed(checks: Iterable[Check]) -> bool:
    return all(check.level is not Level.FAIL for check in checks)


def verdict(name: str, good: bool, fact: str, remedy: str, *, level: Level = Level.FAIL) -> Check:
    return Check(name, Level.OK, fact) if good else Check(name, level, fact, remedy)


def privileges(facts: Facts) -> Iterator[Check]:
    yield verdict(
        "privileges",
        facts.privileged,
        "may load programs and change devices"
        if facts.privileged
        else "may not load programs (CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN)",
        "run it as root; what follows is incomplete without",
    )


def kernel(facts: Facts) -> Iterator[Check]:
    oldest = ".".join(map(str, OLDEST_KERNEL))
    yield verdict(
        "kernel",
        facts.kernel >= OLDEST_KERNEL,
        "{}.{}".format(*facts.kernel),
        f"use Linux {oldest} or later (Debian 12's own)",
    )
    yield verdict(
        "btf",
        facts.btf,
        "kernel types are described" if facts.btf else "no /sys/kernel/btf/vmlinux",
        "use a kernel built with CONFIG_DEBUG_INFO_BTF=y",
    )
    if facts.ct_lookup is not None:
        yield conntrack_lookup(facts.ct_lookup)


def conntrack_lookup(there: bool) -> Check:
    return verdict(
        "conntrack lookup",
        there,
        "programs can ask conntrack" if there else "programs cannot ask conntrack",
        "load nf_conntrack (modprobe nf_conntrack); without it a flow counts as established when "
        "both directions were seen",
        level=Level.WARN,
    )


def bpffs(facts: Facts) -> Iterator[Check]:
    yield verdict(
        "bpffs",
        facts.bpffs,
        f"{facts.bpf_dir} is on a bpf file system"
        if facts.bpffs
        else f"{facts.bpf_dir} is not on a bpf file system",
        "mount -t bpf bpf /sys/fs/bpf, or set bpf_dir to a directory on one",
    )


def hooks(facts: Facts) -> Iterator[Check]:
    if facts.tcx is not None:
        links = "tcx links: attached atomically, beside other programs"
        filters = "clsact filters: this kernel has no tcx links (6.6 and later do)"
        yield Check("hooks", Level.OK, links if facts.tcx else filters)


def configuration(facts: Facts) -> Iterator[Check]:
    if not facts.configured:
        yield Check(
            "configuration",
            Level.WARN,
            "no configuration: devices were not looked at",
            "write /etc/oncache/config.yaml, or name a file with -c",
        )


def devices(facts: Facts) -> Iterator[Check]:
    if not facts.configured:
        return
    yield device("uplink", facts.uplink_name, facts.uplink)
    if facts.builtin and facts.tunnel is None:
        yield Check("tunnel", Level.OK, "built in: the agent makes it")
        return
    found = facts.tunnel
    yield device("tunnel", facts.tunnel_name, found)
    if found is None:
        return
    yield verdict(
        "tunnel kind",
        found.kind in TUNNELS,
        f"{found.name} is of kind {found.kind or 'hardware'}",
        f"name the overlay's tunnel device in overlay.device ({' or '.join(TUNNELS)})",
    )
    yield verdict(
        "tunnel namespace",
        not found.elsewhere,
        f"{found.name} sends from another network namespace"
        if found.elsewhere
        else f"{found.name} sends from this network namespace",
        "an overlay that hides its tunnel (Docker's swarm networks do) cannot be served",
    )


def device(role: str, name: str, found: Device | None) -> Check:
    if found is None:
        return Check(role, Level.FAIL, f"{name} does not exist here", "ip link; correct its name")
    return verdict(
        role,
        found.up,
        f"{name} is {'up' if found.up else 'down'}, MTU {found.mtu}",
        f"ip link set {name} up",
    )


def mtu(facts: Facts) -> Iterator[Check]:
    uplink, tunnel = facts.uplink, facts.tunnel
    if uplink is None or tunnel is None:
        return
    room = uplink.mtu - TUNNEL_BYTES
    yield verdict(
        "mtu",
        tunnel.mtu <= room,
        f"{tunnel.name} {tunnel.mtu} + {TUNNEL_BYTES} bytes of headers, {uplink.name} {uplink.mtu}",
        f"ip link set {tunnel.name} mtu {room} (pods too), or raise {uplink.name}'s",
    )


def rp_filter(facts: Facts) -> Iterator[Check]:
    if not facts.configured:
        return
    # The kernel takes the larger of a device's own value and that of "all".
    everywhere = facts.rp_filter.get("all", 0)
    strict = sorted(
        name
        for name, value in facts.rp_filter.items()
        if name not in ("all", "default") and max(value, everywhere) == 1
    )
    yield verdict(
        "rp_filter",
        not strict,
        f"strict on {', '.join(strict)}" if strict else "not strict on uplink and tunnel",
        "set net.ipv4.conf.*.rp_filter to 2 if routes are asymmetric: fast packets are not asked",
        level=Level.WARN,
    )


def conntrack(facts: Facts) -> Iterator[Check]:
    settings = {
        "nf_conntrack_tcp_be_liberal": facts.be_liberal,
        "nf_conntrack_tcp_ignore_invalid_rst": facts.ignore_invalid_rst,
    }
    if facts.be_liberal is None:
        yield Check("conntrack", Level.OK, "not in this network namespace")
        return
    for name, value in settings.items():
        if value is None:
            yield Check(
                "conntrack",
                Level.WARN,
                f"this kernel has no {name}",
                "a connection of more than 2 GB whose end is a RST may linger",
            )
        elif value:
            yield Check("conntrack", Level.OK, f"{name} is {value}")
        elif facts.attached:
            yield Check(
                "conntrack",
                Level.FAIL,
                f"{name} is 0 while we are attached: rules that drop INVALID stop connections",
                f"sysctl -w net.netfilter.{name}=1; find out who set it back",
            )
        else:
            yield Check("conntrack", Level.OK, f"{name} is 0; the agent sets it while attached")


def forwarding(facts: Facts) -> Iterator[Check]:
    if facts.ip_forward is not None:
        yield verdict(
            "ip_forward",
            facts.ip_forward == 1,
            f"net.ipv4.ip_forward is {facts.ip_forward}",
            "sysctl -w net.ipv4.ip_forward=1, unless the overlay only bridges",
            level=Level.WARN,
        )


def foreign(facts: Facts) -> Iterator[Check]:
    if not facts.configured:
        return
    names = [f"{f.name or '(no name)'} on {f.device} {f.direction}" for f in facts.foreign]
    yield verdict(
        "foreign programs",
        not names,
        "; ".join(names) or "none on our devices",
        "a program that runs after ours does not see fast packets: make sure that is meant",
        level=Level.WARN,
    )


def marks(facts: Facts) -> Iterator[Check]:
    overlapping = [rule for rule in facts.mark_rules if rule.mask & facts.mark_mask]
    told = ", ".join(f"rule {r.priority} looks at {r.mark:#x}/{r.mask:#x}" for r in overlapping)
    yield verdict(
        "marks",
        not overlapping,
        f"{told}; ours is {facts.mark_mask:#x}"
        if overlapping
        else f"no rule looks at our bits ({facts.mark_mask:#x})",
        "set mark_mask to 8 to 10 neighbouring bits that nobody else uses",
    )


def guard(facts: Facts) -> Iterator[Check]:
    if not facts.configured:
        return
    told = {
        GuardMode.OFF: "off: the overlay takes tunnel packets from any sender",
        GuardMode.OBSERVE: "observes: strangers' tunnel packets are counted and taken",
        GuardMode.ENFORCE: "drops tunnel packets of senders that are no tunnel peers",
    }
    yield verdict(
        "guard",
        facts.guard is GuardMode.ENFORCE,
        told[facts.guard],
        "set guard.mode to observe, read 'oncache stats', then to enforce (docs/guard.md)",
        level=Level.WARN,
    )
    if facts.guard is not GuardMode.OFF and facts.xdp is not None:
        yield Check(
            "guard hook",
            Level.WARN,
            f"{facts.uplink_name} already has the XDP program {facts.xdp or '(no name)'}",
            "the guard cannot be attached beside it: remove it, or set guard.mode to off",
        )


CHECKS: tuple[Callable[[Facts], Iterator[Check]], ...] = (
    privileges,
    kernel,
    bpffs,
    hooks,
    configuration,
    devices,
    mtu,
    rp_filter,
    conntrack,
    forwarding,
    foreign,
    marks,
    guard,
)
