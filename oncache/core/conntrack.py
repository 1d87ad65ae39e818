# SPDX-License-Identifier: Apache-2.0
"""The base path's connection tracking: is it at work, and how to leave its flows in peace.

Conntrack does not see what the fast path carries, so its TCP windows fall behind. While attached,
``net.netfilter.nf_conntrack_tcp_be_liberal`` makes it forgive that; before the setting goes back,
every flow that may have been fast gets the same forgiveness of its own (``liberate``), or its next
packet would be INVALID for ever. Kernel: net/netfilter/nf_conntrack_proto_tcp.c.

The functions work in the network namespace of the calling thread.
"""

import errno
import socket
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from pyroute2.netlink import (
    NETLINK_NETFILTER,
    NLM_F_DUMP,
    NLM_F_REQUEST,
)
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink import nfgen_msg
from pyroute2.netlink.nfnetlink.nfctsocket import (
    IP_CT_TCP_FLAG_BE_LIBERAL,
    IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED,
    IP_CT_TCP_FLAG_MAXACK_SET,
    AsyncNFCTSocket,
    NFCTAttrTuple,
)
from pyroute2.netlink.nlsocket import AsyncNetlinkSocket

from oncache.core import sysctl

Address = IPv4Address | IPv6Address

FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
LIBERAL = IP_CT_TCP_FLAG_BE_LIBERAL
LIBERAL_MASK = LIBERAL | IP_CT_TCP_FLAG_DATA_UNACKNOWLEDGED | IP_CT_TCP_FLAG_MAXACK_SET


class TcpState(IntEnum):
    """States of a tracked TCP connection (enum tcp_conntrack)."""

    SYN_SENT = 1
    SYN_RECV = 2
    ESTABLISHED = 3
    FIN_WAIT = 4
    CLOSE_WAIT = 5
    LAST_ACK = 6
    TIME_WAIT = 7
    CLOSE = 8


# Fast at some time, and still with something to say.
OPEN = frozenset({TcpState.ESTABLISHED, TcpState.FIN_WAIT, TcpState.CLOSE_WAIT, TcpState.LAST_ACK})


@dataclass(frozen=True)
class TcpFlow:
    """One tracked TCP connection by its original tuple; ``ends`` are all addresses it shows,
    also those behind a translation."""

    source: Address
    destination: Address
    source_port: int
    destination_port: int
    zone: int
    state: int
    flags: tuple[int, int]
    ends: frozenset[Address]


# ------------------------------------------------------------------------------------ is it at work


async def active() -> bool:
    """Whether conntrack looks at packets in this namespace.

    The kernel's list of netfilter hooks (5.14 and later) knows exactly. Where it is not built in,
    entries in the table say yes, and so does an entry for a datagram sent to ourselves; if even
    that cannot be sent, the careful answer is yes.
    """
    if sysctl.read("netfilter.nf_conntrack_count") is None:
        return False
    try:
        return await _hooked()
    except NetlinkError:
        return sysctl.read("netfilter.nf_conntrack_count") != "0" or await _probe()


class _HookMessage(nfgen_msg):  # type: ignore[misc]
    """struct nfgenmsg with NFNLA_HOOK_*, which pyroute2 lacks."""

    nla_map = (
        ("NFNLA_HOOK_UNSPEC", "none"),
        ("NFNLA_HOOK_HOOKNUM", "be32"),
        ("NFNLA_HOOK_PRIORITY", "be32"),
        ("NFNLA_HOOK_DEV", "asciiz"),
        ("NFNLA_HOOK_FUNCTION_NAME", "asciiz"),
        ("NFNLA_HOOK_MODULE_NAME", "asciiz"),
    )


NFNL_MSG_HOOK_GET = 12 << 8
NF_INET_PRE_ROUTING = 0


async def _hooked() -> bool:
    async with AsyncNetlinkSocket(family=NETLINK_NETFILTER) as netlink:
        netlink.register_policy({NFNL_MSG_HOOK_GET: _HookMessage})
        for family in FAMILIES.values():
            request = _HookMessage()
            request["nfgen_family"] = family
            request["attrs"] = [("NFNLA_HOOK_HOOKNUM", NF_INET_PRE_ROUTING)]
            flags = NLM_F_REQUEST | NLM_F_DUMP
            async for hook in await netlink.nlm_request(request, NFNL_MSG_HOOK_GET, flags):
                if "conntrack_in" in (hook.get_attr("NFNLA_HOOK_FUNCTION_NAME") or ""):
                    return True
    return False


async def _probe() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1", 0))
            probe.sendto(b"", probe.getsockname())
        except OSError:
            return True
        port = probe.getsockname()[1]
        own = NFCTAttrTuple(
            saddr="127.0.0.1", daddr="127.0.0.1", proto=socket.IPPROTO_UDP, sport=port, dport=port
        )
        async with AsyncNFCTSocket(socket.AF_INET) as table:
            try:
                return bool(await table.entry("get", tuple_orig=own))
            except NetlinkError:
                return False


# -------------------------------------------------------------------------------------- TCP entries


async def tcp_flows(addresses: Collection[Address] | None) -> list[TcpFlow]:
    """Open TCP connections that show one of ``addresses`` on either side; all of them if None."""
    wanted = None if addresses is None else frozenset(addresses)
    versions = FAMILIES if wanted is None else {address.version for address in wanted}
    return [
        flow
        for version in sorted(versions)
        async for flow in _dump(FAMILIES[version])
        if flow.state in OPEN and (wanted is None or not wanted.isdisjoint(flow.ends))
    ]


async def _dump(family: int) -> AsyncIterator[TcpFlow]:
    async with AsyncNFCTSocket(family) as table:
        async for entry in await table.dump():
            info = entry.get_nested("CTA_PROTOINFO", "CTA_PROTOINFO_TCP")
            if info is not None:
                yield _flow(entry, info)


def _flow(entry: Any, info: Any) -> TcpFlow:
    original, reply = (_tuple(entry.get_attr(f"CTA_TUPLE_{way}")) for way in ("ORIG", "REPLY"))
    ports = entry.get_attr("CTA_TUPLE_ORIG").get_attr("CTA_TUPLE_PROTO")
    flags = [info.get_attr(f"CTA_PROTOINFO_TCP_FLAGS_{way}") for way in ("ORIGINAL", "REPLY")]
    return TcpFlow(
        *original,
        source_port=ports.get_attr("CTA_PROTO_SRC_PORT"),
        destination_port=ports.get_attr("CTA_PROTO_DST_PORT"),
        zone=entry.get_attr("CTA_ZONE") or 0,
        state=info.get_attr("CTA_PROTOINFO_TCP_STATE"),
        flags=(flags[0][0], flags[1][0]),
        ends=frozenset((*original, *reply)),
    )


def _tuple(attributes: Any) -> tuple[Address, Address]:
    addresses = attributes.get_attr("CTA_TUPLE_IP")
    found: Mapping[str, str] = dict(attribute[:2] for attribute in addresses["attrs"])
    ends = {name.rpartition("_")[2]: ip_address(value) for name, value in found.items()}
    return ends["SRC"], ends["DST"]


async def liberate(flows: Collection[TcpFlow]) -> int:
    """Give every flow BE_LIBERAL and clear MAXACK_SET and DATA_UNACKNOWLEDGED, both directions.

    Returns how many still existed. The rest of a flow's state stays as it is.
    """
    done = 0
    for version, family in FAMILIES.items():
        ours = [flow for flow in flows if flow.source.version == version]
        if ours:
            async with AsyncNFCTSocket(family) as table:
                done += sum([await _set_liberal(table, family, flow) for flow in ours])
    return done


async def _set_liberal(table: Any, family: int, flow: TcpFlow) -> bool:
    flags = {"value": (LIBERAL, LIBERAL_MASK)}
    info = [[f"CTA_PROTOINFO_TCP_FLAGS_{way}", flags] for way in ("ORIGINAL", "REPLY")]
    original = NFCTAttrTuple(
        family=family,
        saddr=str(flow.source),
        daddr=str(flow.destination),
        proto=socket.IPPROTO_TCP,
        sport=flow.source_port,
        dport=flow.destination_port,
    )
    try:
        await table.entry(
            "set",
            tuple_orig=original,
            zone=flow.zone or None,
            protoinfo={"attrs": [["CTA_PROTOINFO_TCP", {"attrs": info}]]},
        )
    except NetlinkError as error:
        if error.code == errno.ENOENT:  # closed meanwhile
            return False
        raise
    return True
