# SPDX-License-Identifier: Apache-2.0
"""`oncache caches`: what was learned (filter, egress) and what the agent told (ingress)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

from oncache.cli.output import show
from oncache.cli.places import places
from oncache.cli.reading import device_name, pinned
from oncache.cli.tables import table
from oncache.plane import FlowRow, HalfRow, PathRow, Plane, PodEntry

Row = dict[str, Any]


class Cache(NamedTuple):
    """How one cache is read, and how it is written for people."""

    rows: Callable[[Plane], list[Row]]
    render: Callable[[Sequence[Row]], str]


def run(args: argparse.Namespace) -> int:
    cache = CACHES[args.cache]
    with pinned(places(args).bpf_dir) as plane:
        if args.cache == "filter" and args.json:
            sys.stdout.writelines(filter_json(plane.flows(), pod_devices(plane)))
            print()
        else:
            show(cache.rows(plane), cache.render, as_json=args.json)
    return 0


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# --- filter


HALF_KEYS = ("fast", *HalfRow._fields)
FLOW_KEYS = (*FlowRow._fields, "device")
PIECE = 256  # rows written at once: the whole text would cost more in memory than in work


def pod_devices(plane: Plane) -> dict[int, str]:
    return {index: device_name(pod.ifindex) for index, pod in plane.pods().items()}


def filter_rows(plane: Plane) -> list[Row]:
    devices = pod_devices(plane)
    return [flow_row(flow, devices) for flow in plane.flows()]


def flow_row(flow: FlowRow, devices: Mapping[int, str]) -> Row:
    """One flow; `fast` of a direction says whether its next packet would be."""
    egress, ingress = half_row(flow.egress), half_row(flow.ingress)
    row = flow._replace(egress=egress, ingress=ingress)  # type: ignore[arg-type]
    return dict(zip(FLOW_KEYS, (*row, device_of(flow, devices)), strict=True))


def half_row(half: HalfRow) -> Row:
    return dict(zip(HALF_KEYS, (not half.reason, *half), strict=True))


def device_of(flow: FlowRow, devices: Mapping[int, str]) -> str | None:
    half = flow.egress if flow.egress.state != "empty" else flow.ingress
    return devices.get(half.pod) if half.state != "empty" else None


class Quoted(dict[str | None, str]):
    """Text -> JSON text; a cache of flows has few different ones."""

    def __missing__(self, text: str | None) -> str:
        self[text] = quoted = json.dumps(text)
        return quoted


class HalfHeads(dict[tuple[Any, ...], str]):
    """All of a HalfRow but its age -> JSON text up to there; few are different."""

    def __missing__(self, shared: tuple[Any, ...]) -> str:
        whole = json.dumps(half_row(HalfRow._make((*shared, 0.0))))
        self[shared] = head = whole.removesuffix("0.0}")
        return head


def filter_json(flows: Iterable[FlowRow], devices: Mapping[int, str]) -> Iterator[str]:
    """What json.dumps says of all `flow_row`s, in pieces and put together from pieces: a full
    cache of 65,536 flows in under a second."""
    quoted, heads = Quoted(), HalfHeads()
    whole = "{" + ", ".join(f'"{key}": %s' for key in FLOW_KEYS) + "}"

    def row(flow: FlowRow) -> str:
        protocol, local, local_port, remote, remote_port, closed, egress, ingress = flow
        return whole % (
            quoted[protocol],
            quoted[local],
            local_port,
            quoted[remote],
            remote_port,
            "true" if closed else "false",
            f"{heads[egress[:-1]]}{egress[-1]}}}",
            f"{heads[ingress[:-1]]}{ingress[-1]}}}",
            quoted[device_of(flow, devices)],
        )

    rows, lead = map(row, flows), "["
    while piece := ", ".join(islice(rows, PIECE)):
        yield lead + piece
        lead = ", "
    yield "[]" if lead == "[" else "]"


def render_filter(rows: Sequence[Row]) -> str:
    columns = ("proto", "pod", "remote", "device", "egress", "ingress", "age s", "path")
    return table(columns, [filter_cells(row) for row in rows])


def filter_cells(row: Row) -> list[object]:
    out, back = row["egress"], row["ingress"]
    known = [half["age_seconds"] for half in (out, back) if half["state"] != "empty"]
    return [
        row["protocol"],
        endpoint(row["local"], row["local_port"]),
        endpoint(row["remote"], row["remote_port"]),
        row["device"],
        out["reason"] or "fast",
        back["reason"] or "fast",
        min(known, default=None),
        out["path"] if out["state"] != "empty" else None,
    ]


# --- egress


def egress_rows(plane: Plane) -> list[Row]:
    return [path_row(path) for path in sorted(plane.paths(), key=lambda path: path.index)]


def path_row(path: PathRow) -> Row:
    return {
        **asdict(path),
        "remote": str(path.remote),
        "local": str(path.local),
        "device": device_name(path.device),
        "ifindex": path.device,
    }


def render_egress(rows: Sequence[Row]) -> str:
    columns = ("path", "remote node", "device", "next hop", "vni", "inner to", "mtu", "generation")
    keys = (
        *("index", "remote", "device", "next_hop_mac"),
        *("vni", "inner_destination_mac", "mtu", "generation"),
    )
    return table(columns, [[row[key] for key in keys] for row in rows])


# --- ingress


def ingress_rows(plane: Plane) -> list[Row]:
    return [pod_row(index, pod) for index, pod in sorted(plane.pods().items())]


def pod_row(index: int, pod: PodEntry) -> Row:
    return {
        "index": index,
        "addresses": [str(address) for address in pod.addresses],
        "device": device_name(pod.ifindex),
        "ifindex": pod.ifindex,
        "mac": pod.mac.hex(":"),
    }


def render_ingress(rows: Sequence[Row]) -> str:
    keys = ("index", "addresses", "device", "mac")
    return table(("pod", *keys[1:]), [[row[key] for key in keys] for row in rows])


CACHES = {
    "filter": Cache(filter_rows, render_filter),
    "egress": Cache(egress_rows, render_egress),
    "ingress": Cache(ingress_rows, render_ingress),
}
