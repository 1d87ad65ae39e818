# SPDX-License-Identifier: Apache-2.0
"""`oncache caches`: what was learned (filter, egress) and what the agent told (ingress)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, NamedTuple

from oncache.cli.output import show
from oncache.cli.places import places
from oncache.cli.reading import device_name, pinned
from oncache.cli.tables import table
from oncache.flows import FlowRow, Form, HalfRow
from oncache.plane import PathRow, Plane, PodEntry

Row = dict[str, Any]


class Cache(NamedTuple):
    """How one cache is read, and how it is written for people."""

    rows: Callable[[Plane], list[Row]]
    render: Callable[[Sequence[Row]], str]


def run(args: argparse.Namespace) -> int:
    cache = CACHES[args.cache]
    with pinned(places(args).bpf_dir) as plane:
        if args.cache == "filter" and args.json:
            # A full cache of 65,536 flows in under a second: no rows on the way.
            sys.stdout.writelines(array(plane.flows_as(text_form(pod_devices(plane)))))
            print()
        else:
            show(cache.rows(plane), cache.render, as_json=args.json)
    return 0


def endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


# --- filter


HALF_KEYS = ("fast", *HalfRow._fields)
FLOW_KEYS = (*FlowRow._fields, "device")
PIECE = 256  # rows


def pod_devices(plane: Plane) -> dict[str, str]:
    """Address -> device of every local pod."""
    return {
        str(address): device_name(pod.ifindex)
        for pod in plane.pods().values()
        for address in pod.addresses
    }


def filter_rows(plane: Plane) -> list[Row]:
    devices = pod_devices(plane)
    return [flow_row(flow, devices) for flow in plane.flows()]


def flow_row(flow: FlowRow, devices: Mapping[str, str]) -> Row:
    """One flow; `fast` of a direction says whether its next packet would be."""
    egress, ingress = half_row(flow.egress), half_row(flow.ingress)
    row = flow._replace(egress=egress, ingress=ingress)  # type: ignore[arg-type]
    return dict(zip(FLOW_KEYS, (*row, devices.get(flow.local)), strict=True))


def half_row(half: HalfRow) -> Row:
    return dict(zip(HALF_KEYS, (not half.reason, *half), strict=True))


class Quoted(dict[str | None, str]):
    """Text -> JSON text; a cache of flows has few different ones."""

    def __missing__(self, text: str | None) -> str:
        self[text] = quoted = json.dumps(text)
        return quoted


def text_form(devices: Mapping[str, str]) -> Form[str, str, str]:
    """What json.dumps says of a `flow_row`, put together from pieces."""
    quoted = Quoted()
    whole = "{" + ", ".join(f'"{key}": %s' for key in FLOW_KEYS) + "}"

    def shared(half: HalfRow) -> str:
        return json.dumps(half_row(half)).removesuffix(f"{half.age_seconds}}}")

    def row(protocol: str, local: str, local_port: int, remote: str, remote_port: int,
            closed: bool, egress: str, ingress: str) -> str:  # fmt: skip
        return whole % (
            quoted[protocol],
            quoted[local],
            local_port,
            quoted[remote],
            remote_port,
            "true" if closed else "false",
            egress,
            ingress,
            quoted[devices.get(local)],
        )

    return Form(shared, lambda shared, age: f"{shared}{age}}}", row)


def array(rows: Iterator[str]) -> Iterator[str]:
    """A JSON array in pieces: the whole text of a full cache would cost more than the work."""
    lead = "["
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
    return [
        pod_row(index, pod, plane.pod_generation(index))
        for index, pod in sorted(plane.pods().items())
    ]


def pod_row(index: int, pod: PodEntry, generation: int) -> Row:
    return {
        "index": index,
        "addresses": [str(address) for address in pod.addresses],
        "device": device_name(pod.ifindex),
        "ifindex": pod.ifindex,
        "mac": pod.mac.hex(":"),
        "generation": generation,
    }


def render_ingress(rows: Sequence[Row]) -> str:
    keys = ("index", "addresses", "device", "mac", "generation")
    return table(("pod", *keys[1:]), [[row[key] for key in keys] for row in rows])


CACHES = {
    "filter": Cache(filter_rows, render_filter),
    "egress": Cache(egress_rows, render_egress),
    "ingress": Cache(ingress_rows, render_ingress),
}
