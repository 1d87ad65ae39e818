# SPDX-License-Identifier: Apache-2.0
"""A flow as an operator writes it: `tcp 10.1.0.11:4000 10.2.0.11:80`."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

from oncache.core.errors import ConfigError

Address = IPv4Address | IPv6Address

NUMBERS = {"icmp": 1, "tcp": 6, "udp": 17}
ENDPOINT = re.compile(r"\[(?P<v6>[^\]]+)\](?::(?P<port6>\d+))?|(?P<v4>[^:]+)(?::(?P<port4>\d+))?")
LIKE = "write ADDRESS:PORT, such as 10.1.0.11:4000 or [fd00::11]:4000"


def endpoint(text: str, protocol: str) -> tuple[Address, int]:
    """Address and port of one end; for icmp the port is the echo identifier, 0 if left out.

    Raises ConfigError (the exit code of wrong usage) when it cannot be one.
    """
    found = ENDPOINT.fullmatch(text)
    if found is None:
        # An IPv6 address without brackets has no port in it, which echo does not need.
        address, port = text, None
    else:
        address = found["v6"] or found["v4"]
        port = found["port6"] or found["port4"]
    if port is None and protocol != "icmp":
        raise ConfigError(f"no port in {text!r}", hint=LIKE)
    return parse_address(address), parse_port(port or "0", text)


def parse_address(text: str) -> Address:
    try:
        return ip_address(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not an address", hint=LIKE) from error


def parse_port(text: str, whole: str) -> int:
    if int(text) > 0xFFFF:
        raise ConfigError(f"port out of range in {whole!r}", hint="0 to 65535")
    return int(text)
