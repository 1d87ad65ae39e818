# SPDX-License-Identifier: Apache-2.0
"""All that we could leave behind on a host, for a comparison of before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from netns_tests.lab import Host

SETTINGS = ("net/netfilter", "net/ipv4", "net/core")


def footprint(host: Host) -> dict[str, Any]:
    """Programs on devices (tcx and clsact), qdiscs, links, routes, rules, settings, pins, files."""
    return {
        "programs": json.loads(host.command(["bpftool", "-j", "net", "show"]).stdout),
        "qdiscs": host.command(["tc", "qdisc", "show"]).stdout,
        "filters": [_filters(host, device) for device in _devices(host)],
        "links": _devices(host),
        "routes": host.command(["ip", "route", "show", "table", "all"]).stdout,
        "rules": host.command(["ip", "rule", "show"]).stdout,
        "nftables": host.command(["nft", "list", "ruleset"]).stdout,
        "settings": host.run(_settings),
        "pins": _tree(host.bpf_dir.parent),
        "files": _tree(host.run_dir),
    }


def _devices(host: Host) -> list[tuple[str, str, int]]:
    links = json.loads(host.command(["ip", "-j", "link", "show"]).stdout)
    return [(link["ifname"], link["address"], link["mtu"]) for link in links]


def _filters(host: Host, device: tuple[str, str, int]) -> str:
    name = device[0]
    hooks = ("ingress", "egress")
    return "".join(host.command(["tc", "filter", "show", "dev", name, h]).stdout for h in hooks)


def _settings() -> dict[str, str]:
    """Every network setting of the namespace the calling thread is in that can be read."""
    found = {}
    for folder in SETTINGS:
        for path in sorted(Path("/proc/sys", folder).rglob("*")):
            # Of the others, some are write-only and some count.
            if path.is_file() and path.stat().st_mode & 0o200 and path.stat().st_mode & 0o400:
                found[str(path)] = path.read_text()
    return found


def _tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*")) if folder.exists() else ["absent"]
