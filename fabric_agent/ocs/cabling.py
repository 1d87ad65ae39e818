# SPDX-License-Identifier: Apache-2.0
"""The cabling list, and its audit against what devices and pods report.

Each strand has a name: `pod3/spine2/port7 tx` at an ingress port of a device, `... rx` at an egress
port. A device tells it by the port's label or peer; a spine tells the far transceiver it hears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fabric_agent.ocs.devices import Inventory
from fabric_agent.ocs.drivers.base import PortState
from fabric_agent.ocs.wiring import Cabling, Circuit, Port, transceiver_pairs


class Plug(NamedTuple):
    """One end of a strand: port `number` of `device` is where `strand` belongs."""

    device: str
    number: int
    strand: str


@dataclass(frozen=True)
class Finding:
    """Something that is not as the list says. `kind`: missing, crossed, wrong or neighbour."""

    kind: str
    text: str


def plugs(inventory: Inventory, cabling: Cabling) -> list[Plug]:
    """Who plugs where, by device and port."""
    listed = []
    for fibre in cabling:
        pod = fibre.port.pod
        into = inventory.cross_connect(Circuit(fibre.into, pod, pod))
        out_of = inventory.cross_connect(Circuit(fibre.out_of, pod, pod))
        listed.append(Plug(into.device, into.ingress, f"{fibre.port} tx"))
        listed.append(Plug(out_of.device, out_of.egress, f"{fibre.port} rx"))
    return sorted(listed)


Reports = Mapping[str, Mapping[int, PortState]]  # device -> port -> state


def audit(listed: Iterable[Plug], reports: Reports) -> list[Finding]:
    """Missing, crossed and wrong strands, by label or, without one, by peer."""
    findings: list[Finding] = []
    told: dict[tuple[str, int], tuple[str, str]] = {}
    for plug in listed:
        state = reports.get(plug.device, {}).get(plug.number)
        strand = (state.label or state.peer).strip() if state else ""
        where = f"{plug.device} port {plug.number}"
        if not strand:
            findings.append(Finding("missing", f"{where}: no strand, {plug.strand} belongs there"))
        elif strand != plug.strand:
            told[plug.device, plug.number] = (plug.strand, strand)
    return findings + _crossed_or_wrong(told)


def _crossed_or_wrong(told: Mapping[tuple[str, int], tuple[str, str]]) -> list[Finding]:
    """`told`: place -> (strand that belongs there, strand that is there)."""
    findings = []
    home = {belongs: place for place, (belongs, _) in told.items()}
    for place, (belongs, is_there) in sorted(told.items()):
        other = home.get(is_there)
        if other is not None and told[other][1] == belongs:
            if place < other:
                where = f"{place[0]} port {place[1]} and {other[0]} port {other[1]}"
                findings.append(
                    Finding("crossed", f"{where}: {belongs} and {is_there} are swapped")
                )
        else:
            where = f"{place[0]} port {place[1]}"
            findings.append(Finding("wrong", f"{where}: {is_there}, but {belongs} belongs there"))
    return findings


def audit_neighbours(
    cabling: Cabling, circuits: Iterable[Circuit], heard: Mapping[Port, Port]
) -> list[Finding]:
    """Compare which transceiver each lit port hears (LLDP) with what the circuits intend."""
    intended = {rx: tx for tx, rx in transceiver_pairs(cabling, circuits).items()}
    return [
        Finding("neighbour", f"{port} hears {heard.get(port) or 'nobody'}, should hear {tx}")
        for port, tx in sorted(intended.items())
        if heard.get(port) != tx
    ]
