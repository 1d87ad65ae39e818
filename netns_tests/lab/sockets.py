# SPDX-License-Identifier: Apache-2.0
"""Ordinary sockets in namespaces: a connection, a datagram flow, a ping."""

from __future__ import annotations

import os
import socket
import struct
import time
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from fabric_agent.store.readable import readable
from netns_tests.lab.namespaces import Namespace

SECONDS = 5.0

IpAddress = IPv4Address | IPv6Address

_FAMILY = {4: socket.AF_INET, 6: socket.AF_INET6}
_ECHO_REQUEST = {4: 8, 6: 128}
_ECHO_REPLY = {4: 0, 6: 129}
_ICMP = struct.Struct("!BBHHH")
_IP_TTL_BYTE = 8


def udp(namespace: Namespace, port: int = 0, *, version: int = 4) -> socket.socket:
    """A datagram socket on a port (0: any) of one IP version; reading times out after SECONDS."""
    made = namespace.socket(_FAMILY[version], socket.SOCK_DGRAM)
    made.settimeout(SECONDS)
    made.bind(("", port))
    return made


def listener(namespace: Namespace, port: int = 0, *, version: int = 4) -> socket.socket:
    """A listening TCP socket on a port (0: any); accepting times out after SECONDS."""
    made = namespace.socket(_FAMILY[version], socket.SOCK_STREAM)
    made.settimeout(SECONDS)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("", port))
    made.listen(64)
    return made


def connect(
    namespace: Namespace, address: IpAddress | str, port: int, source_port: int = 0
) -> socket.socket:
    """A connected TCP socket without delays by Nagle; OSError or TimeoutError if it fails."""
    made = namespace.socket(_FAMILY[ip_address(address).version], socket.SOCK_STREAM)
    made.settimeout(SECONDS)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if source_port:
        made.bind(("", source_port))
    made.connect((str(address), port))
    return made


def connection(
    client: Namespace, server: Namespace, address: IpAddress | str, port: int = 0
) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection from `client` to `address` in `server`: (client's, server's).

    The kernel finishes the handshake by itself, so no second thread is needed.
    """
    waiting = listener(server, port, version=ip_address(address).version)
    near = connect(client, address, waiting.getsockname()[1])
    far, _ = waiting.accept()
    server.own(far)
    waiting.close()
    far.settimeout(SECONDS)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def exchange(near: socket.socket, far: socket.socket, data: bytes = b"x") -> None:
    """Send `data` over a connection and back; raises if it does not arrive whole."""
    for sender, receiver in ((near, far), (far, near)):
        sender.sendall(data)
        got = b""
        while len(got) < len(data):
            piece = receiver.recv(len(data) - len(got))
            if not piece:
                raise ConnectionError("the other side closed")
            got += piece
        assert got == data


@dataclass(frozen=True)
class Ping:
    """What came back: one TTL (hop limit) and one round trip in seconds per echo reply."""

    sent: int
    ttls: tuple[int, ...]
    round_trips: tuple[float, ...]

    @property
    def received(self) -> int:
        return len(self.ttls)

    @property
    def lost(self) -> int:
        return self.sent - self.received


def ping(
    namespace: Namespace,
    address: IpAddress | str,
    count: int = 3,
    *,
    size: int = 56,
    ttl: int = 64,
    seconds: float = 1.0,
) -> Ping:
    """Send `count` echo requests, each after the answer to the last or after `seconds`."""
    identity = int.from_bytes(os.urandom(2))
    ttls: list[int] = []
    trips: list[float] = []
    version = ip_address(address).version
    with _icmp(namespace, version, ttl) as raw:
        for sequence in range(count):
            start = time.monotonic()
            raw.sendto(_echo_request(version, identity, sequence, size), (str(address), 0))
            got = _echo_reply(raw, version, identity, sequence, start + seconds)
            if got is not None:
                ttls.append(got)
                trips.append(time.monotonic() - start)
    return Ping(count, tuple(ttls), tuple(trips))


def _icmp(namespace: Namespace, version: int, ttl: int) -> socket.socket:
    if version == 4:
        raw = namespace.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        raw.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
        return raw
    raw = namespace.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
    raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, ttl)
    raw.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)
    return raw


def _echo_request(version: int, identity: int, sequence: int, size: int) -> bytes:
    """Over IPv6 the kernel replaces the checksum, which there covers a pseudo header."""
    payload = bytes(index & 0xFF for index in range(size))
    bare = _ICMP.pack(_ECHO_REQUEST[version], 0, 0, identity, sequence) + payload
    return bare[:2] + checksum(bare).to_bytes(2) + bare[4:]


def _echo_reply(
    raw: socket.socket, version: int, identity: int, sequence: int, deadline: float
) -> int | None:
    """The TTL of the awaited reply, None if it does not come."""
    while (left := deadline - time.monotonic()) > 0:
        if not readable([raw], left):
            break
        icmp, ttl = _received(raw, version)
        kind, _, _, theirs, number = _ICMP.unpack_from(icmp)
        if (kind, theirs, number) == (_ECHO_REPLY[version], identity, sequence):
            return ttl
    return None


def _received(raw: socket.socket, version: int) -> tuple[bytes, int]:
    """The next ICMP message and its TTL: a raw socket shows the IP header of IPv4 alone."""
    packet, notes, _, _ = raw.recvmsg(1 << 16, 64)
    if version == 4:
        return packet[(packet[0] & 0x0F) * 4 :], packet[_IP_TTL_BYTE]
    ((_, _, hop_limit),) = notes
    return packet, struct.unpack("=i", hop_limit)[0]


def checksum(data: bytes) -> int:
    """The Internet checksum of RFC 1071."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
