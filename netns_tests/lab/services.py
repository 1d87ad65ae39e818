# SPDX-License-Identifier: Apache-2.0
"""What a cluster's own rules do on a host: policy in FORWARD, translation of service addresses.

Loading any of these switches conntrack on in the host's namespace, as kube-proxy does. Where the
sysctl net.bridge.bridge-nf-call-iptables is 1 (many systems' default, each namespace has its own),
frames that only cross the bridge between two pods of one host pass these chains too.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address

from netns_tests.lab.hosts import Host

_POLICY = """
table {family} lab_policy
delete table {family} lab_policy
table {family} lab_policy {{
  chain forward {{
    type filter hook forward priority 0; policy accept;
    ct state invalid counter drop
    ct state established,related counter accept
    {denials}
  }}
}}
"""

_SERVICE = """
table ip lab_services {{
  chain {hook} {{
    type nat hook {hook} priority -100; policy accept;
    ip daddr {address} {protocol} dport {port} counter dnat to {backend}:{backend_port}
  }}
}}
"""


def _load(host: Host, rules: str) -> None:
    host.command(["nft", "-f", "-"], text=rules)


def _families(host: Host) -> tuple[str, ...]:
    return ("ip", "ip6") if host.ip6 else ("ip",)


def policy(host: Host, deny: Sequence[int] = ()) -> None:
    """kube-proxy's FORWARD chain, and a drop of new flows to each port in `deny` (TCP and UDP).

    For each family of IP that the host has, a table of its own. Called again it replaces the rules.
    """
    ports = ", ".join(str(port) for port in deny)
    denials = f"meta l4proto {{ tcp, udp }} th dport {{ {ports} }} counter drop" if deny else ""
    for family in _families(host):
        _load(host, _POLICY.format(family=family, denials=denials))


def no_policy(host: Host) -> None:
    """Take the rules of `policy` away again."""
    for family in _families(host):
        _load(host, f"table {family} lab_policy\ndelete table {family} lab_policy\n")


def cluster_ip(
    host: Host,
    address: IPv4Address | str,
    port: int,
    backend: IPv4Address | str,
    *,
    backend_port: int | None = None,
    protocol: str = "tcp",
) -> None:
    """On `host`, translate a service address to one backend, for pods and for the host itself."""
    for hook in ("prerouting", "output"):
        rules = _SERVICE.format(
            hook=hook,
            address=address,
            protocol=protocol,
            port=port,
            backend=backend,
            backend_port=backend_port or port,
        )
        _load(host, rules)


def no_services(host: Host) -> None:
    """Take the rules of `cluster_ip` away; conntrack keeps what it translated so far."""
    _load(host, "table ip lab_services\ndelete table ip lab_services\n")
