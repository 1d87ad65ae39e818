# SPDX-License-Identifier: Apache-2.0
"""`oncache status`: what is loaded, attached and known, from the agent and from the maps."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

from oncache.cli.caches import ingress_rows
from oncache.cli.output import say, show
from oncache.cli.places import Places, places
from oncache.cli.reading import agent_status, device_name
from oncache.cli.stats import share
from oncache.cli.tables import facts, table
from oncache.core.errors import NotLoadedError
from oncache.plane import Plane

Report = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    where = places(args)
    show(read(where), render, as_json=args.json)
    return 0


def read(where: Places) -> Report:
    """Raises NotLoadedError only when neither an agent nor maps are there."""
    agent = agent_status(where.run_dir)
    try:
        plane = read_plane(where.bpf_dir)
    except NotLoadedError:
        if agent is None:
            raise
        plane = None
    if agent is None:
        say("agent not running: this is from the pinned maps")
    return report(agent, plane)


def read_plane(bpf_dir: Path) -> Report:
    with closing(Plane.open(bpf_dir)) as plane:
        settings, on, margin = plane.settings(), plane.attached(), plane.deadline_margin()
        return {
            "bpf_dir": str(bpf_dir),
            "fast": margin > 0,
            "deadline_margin_seconds": round(margin, 3),
            "uplinks": sorted(map(device_name, on.uplinks)),
            "pod_devices": sorted(map(device_name, on.pods)),
            "pods": ingress_rows(plane),
            "peers": sorted(map(str, plane.peers())),
            "paths": len(plane.paths()),
            "flows": plane.flow_count(),
            "hit_share": share(plane.counters()),
            "overlay": settings
            and {
                "local": str(settings.local),
                "tunnel": device_name(settings.tunnel),
                "vni": settings.vni,
                "port": settings.port,
                "mtu": settings.mtu,
            },
        }


def report(agent: Report | None, plane: Report | None) -> Report:
    """`agent` as it answered, less the envelope; names of pods come from it."""
    told = {key: value for key, value in (agent or {}).items() if key != "ok"}
    # Names are the agent's: programs have no use for them.
    names = {pod["index"]: pod["name"] for pod in told.get("pods", ())}
    named = plane and {
        **plane,
        "pods": [{**pod, "name": names.get(pod["index"])} for pod in plane["pods"]],
    }
    return {"agent": {"running": agent is not None, **told}, "plane": named}


def render(found: Report) -> str:
    agent, plane = found["agent"], found["plane"]
    head = {
        "agent": f"running, pid {agent.get('pid')}" if agent["running"] else "not running",
        "state": agent.get("state"),
    }
    if plane is None:
        return "\n".join([facts(head), *problems(agent)])
    margin = plane["deadline_margin_seconds"]
    overlay = plane["overlay"] or {}
    head |= {
        "fast path": f"on, {margin:.1f} s before the deadline" if plane["fast"] else "off",
        "uplink": plane["uplinks"],
        "tunnel": overlay.get("tunnel"),
        "vni": overlay.get("vni"),
        "local": overlay.get("local"),
        "peers": plane["peers"],
        "pods": len(plane["pod_devices"]),
        "paths": plane["paths"],
        "flows": plane["flows"],
        "hits": None if plane["hit_share"] is None else f"{plane['hit_share']:.1%} of packets",
    }
    return "\n".join([facts(head), *problems(agent), "", pod_table(plane["pods"])])


def pod_table(pods: list[Report]) -> str:
    keys = ("index", "name", "addresses", "device", "mac")
    return table(("pod", *keys[1:]), [[pod[key] for key in keys] for pod in pods])


def problems(agent: Report) -> list[str]:
    return [f"problem: {problem}" for problem in agent.get("problems", ())]
