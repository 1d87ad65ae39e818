# SPDX-License-Identifier: Apache-2.0
"""BPF filters on a clsact qdisc, by rtnetlink: the fallback for kernels without tcx links.

Every function acts in the calling thread's network namespace over a socket of its own, so none may
run inside an event loop: an asyncio caller wraps it in ``asyncio.to_thread``. Failures are OSError
with the kernel's errno. A direction is "ingress" or "egress".
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENODEV, ENOENT
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl.tcmsg import sched_bpf


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter of a device. Of BPF: its owner's name for it, the program's id and tag (hex).

    Of another kind: the kind's name, program id 0 and tag "".
    """

    name: str
    prog_id: int
    tag: str
    priority: int
    handle: int


_PARENTS = {"ingress": 0xFFFFFFF2, "egress": 0xFFFFFFF3}  # TC_H_CLSACT and its two minors
_ETH_P_ALL = 3

# pyroute2's table ends before the attributes that name the program (TCA_BPF_*, pkt_cls.h).
_TABLE = sched_bpf.options.nla_map
_LATER = (("TCA_BPF_FLAGS_GEN", "uint32"), ("TCA_BPF_TAG", "cdata"), ("TCA_BPF_ID", "uint32"))
if "TCA_BPF_TAG" not in dict(_TABLE):
    sched_bpf.options.nla_map = (*_TABLE, *_LATER)


def clsact_add(ifindex: int) -> bool:
    """Give a device a clsact qdisc; False if it had one."""
    try:
        with _netlink(f"add clsact to device {ifindex}") as netlink:
            netlink.tc("add", "clsact", index=ifindex)
    except FileExistsError:
        return False
    return True


def clsact_delete(ifindex: int) -> None:
    """Remove a device's clsact qdisc, if it has one, and with it every filter, whoever made it."""
    try:
        with _netlink(f"delete clsact of device {ifindex}") as netlink:
            netlink.tc("del", "clsact", index=ifindex)
    except OSError as error:
        if error.errno not in (ENOENT, ENODEV):
            raise


def tc_filter_replace(
    ifindex: int, direction: str, fd: int, name: str, priority: int, handle: int
) -> None:
    """Put a program on a hook, or swap it in place if priority and handle are taken already.

    No packet passes between the old and the new one.
    """
    with _netlink(f"set filter {name} on device {ifindex}") as netlink:
        netlink.tc(
            "replace-filter",
            "bpf",
            index=ifindex,
            parent=_PARENTS[direction],
            prio=priority,
            handle=handle,
            protocol=_ETH_P_ALL,
            fd=fd,
            name=name,
            direct_action=True,
        )


def tc_filter_delete(ifindex: int, direction: str, priority: int, handle: int) -> None:
    """Remove one BPF filter."""
    with _netlink(f"delete filter of device {ifindex}") as netlink:
        netlink.tc(
            "del-filter",
            "bpf",
            index=ifindex,
            parent=_PARENTS[direction],
            prio=priority,
            handle=handle,
            protocol=_ETH_P_ALL,
        )


def tc_filters(ifindex: int, direction: str) -> list[Filter]:
    """The filters of a hook in the order they run; none where there is no clsact qdisc."""
    with _netlink(f"list filters of device {ifindex}") as netlink:
        messages = netlink.get_filters(index=ifindex, parent=_PARENTS[direction])
        # Each priority is also listed once as a whole, without options.
        return [_filter(message) for message in messages if message.get_attr("TCA_OPTIONS")]


@contextmanager
def _netlink(doing: str) -> Iterator[Any]:
    try:
        with IPRoute() as netlink:
            yield netlink
    except NetlinkError as error:
        raise OSError(error.code, f"{doing}: {os.strerror(error.code)}") from error


def _filter(message: Any) -> Filter:
    kind, options = message.get_attr("TCA_KIND"), message.get_attr("TCA_OPTIONS")
    program = dict(options["attrs"]) if kind == "bpf" else {}
    return Filter(
        name=program.get("TCA_BPF_NAME", kind),
        prog_id=program.get("TCA_BPF_ID", 0),
        tag=bytes(program.get("TCA_BPF_TAG", b"")).hex(),
        priority=message["info"] >> 16,
        handle=message["handle"],
    )
