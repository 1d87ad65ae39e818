# SPDX-License-Identifier: Apache-2.0
"""All slices in one document: taking links is one compare-and-set, so two controllers on one store
can never give the same link twice.

``apply`` is pure: a table and a request give a table and an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from fabric_agent.slices import allocate, ocsvclos
from fabric_agent.slices.elements import Broken
from fabric_agent.slices.invariants import require
from fabric_agent.slices.model import Fabric, Link, Slice
from fabric_agent.slices.occupancy import Occupancy, Placement, Refusal, occupancy
from fabric_agent.slices.read import WORD
from fabric_agent.slices.repair import repair
from oncache.core.errors import ConfigError, OncacheError

FORMAT: Final = 1
KEY: Final = "slices/table"

Json = dict[str, Any]


class RefusedError(OncacheError):
    """A request that does not fit now."""


@dataclass(frozen=True)
class Table:
    """``failed`` are elements reported since the fabric's file was written; ``last`` is the highest
    slice number given so far; ``asked_by`` names the request of each slice."""

    slices: tuple[Slice, ...] = ()
    failed: frozenset[str] = frozenset()
    last: int = 0
    asked_by: tuple[tuple[str, str], ...] = ()

    def slice(self, name: str) -> Slice:
        """ConfigError if there is none of that name."""
        for part in self.slices:
            if part.name == name:
                return part
        raise ConfigError(f"there is no slice {name}", hint="'fabric-agent slices list' names them")

    def broken(self, fabric: Fabric) -> Broken:
        return Broken.of(fabric, self.failed | fabric.failed)

    def free(self, fabric: Fabric) -> Occupancy:
        return occupancy(fabric, self.slices, self.broken(fabric))


@lru_cache(maxsize=4)
def fingerprint(fabric: Fabric) -> str:
    """Changes with everything that slices refer to; not with what has failed."""
    parts = (fabric.leaves, fabric.spines, fabric.hosts, fabric.nics, fabric.optics)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def encode(fabric: Fabric, table: Table) -> Json:
    return {
        "format": FORMAT,
        "fabric": fingerprint(fabric),
        "failed": sorted(table.failed),
        "last": table.last,
        "slices": [encode_slice(part) for part in table.slices],
        "asked_by": dict(table.asked_by),
    }


def encode_slice(part: Slice) -> Json:
    return {
        "name": part.name,
        "number": part.number,
        "nics": [list(group) for group in part.nics],
        "links": [[list(link) for link in row] for row in part.links],
    }


def decode(fabric: Fabric, value: Mapping[str, Any]) -> Table:
    """ConfigError for a table of a newer version or of another fabric."""
    if value.get("format", 0) > FORMAT:
        raise ConfigError(
            f"{KEY} was written by a newer version (format {value['format']})",
            hint="upgrade this program",
        )
    slices = tuple(
        Slice(
            part["name"],
            part["number"],
            tuple(tuple(group) for group in part["nics"]),
            tuple(tuple(Link(*link) for link in row) for row in part["links"]),
        )
        for part in value["slices"]
    )
    if slices and value["fabric"] != fingerprint(fabric):
        raise ConfigError(
            "the fabric's file describes another fabric than the one that has slices",
            hint="restore the file, or release all slices first; new failures go under 'failed'",
        )
    return Table(
        slices, frozenset(value["failed"]), value["last"], tuple(value["asked_by"].items())
    )


def apply(fabric: Fabric, table: Table, key: str, request: Mapping[str, Any]) -> tuple[Table, Json]:
    """The table after a request and what to answer. ``key`` identifies the request: asked twice, it
    is done once. Raises RefusedError or ConfigError, with the table as it was."""
    verb, name = request.get("verb"), str(request.get("name", ""))
    match verb:
        case "request":
            return _request(fabric, table, key, request)
        case "release":
            return _release(table, name)
        case "fail":
            Broken.of(fabric, [name])
            return _repaired(fabric, replace(table, failed=table.failed | {name}))
        case "restore":
            Broken.of(fabric, [name])
            return _repaired(fabric, replace(table, failed=table.failed - {name}))
    raise ConfigError(f"unknown request {verb!r}", hint="request, release, fail or restore")


def place(fabric: Fabric, table: Table, gpus: int, *, move: bool = False) -> Placement | Refusal:
    """Where a job would go now; ``move``: circuits of other slices may move."""
    free = table.free(fabric)
    if not fabric.optics:
        return allocate.decide(fabric, free, gpus)
    return ocsvclos.decide(fabric, free, gpus, movable=table.slices if move else ())


def _request(
    fabric: Fabric, table: Table, key: str, request: Mapping[str, Any]
) -> tuple[Table, Json]:
    name, gpus = _checked(request)
    if dict(table.asked_by).get(name) == key:
        return table, {"slice": encode_slice(table.slice(name)), "moved": []}
    if any(part.name == name for part in table.slices):
        raise ConfigError(f"there is a slice {name} already", hint="choose another name")
    decision = place(fabric, table, gpus, move=bool(request.get("move")))
    if isinstance(decision, Refusal):
        raise RefusedError(
            f"{decision.reason}: {decision.detail}",
            hint=f"ask again when a slice is released, or 'fabric-agent slices explain {gpus}'",
        )
    part = decision.named(name, table.last + 1)
    moved = dict(decision.moved)
    others = tuple(_with_moved(other, moved) for other in table.slices)
    done = replace(
        table,
        slices=(*others, part),
        last=table.last + 1,
        asked_by=(*table.asked_by, (name, key)),
    )
    require(fabric, done.slices)
    return done, {
        "slice": encode_slice(part),
        "moved": [list(map(list, m)) for m in decision.moved],
    }


def _checked(request: Mapping[str, Any]) -> tuple[str, int]:
    name, gpus = request.get("name"), request.get("gpus")
    if not isinstance(name, str) or not WORD.fullmatch(name):
        raise ConfigError(f"slice name {name!r}", hint="letters, digits, dots and dashes")
    if not isinstance(gpus, int) or gpus < 1:
        raise ConfigError(f"{name}: a slice of {gpus!r} GPUs", hint="ask for one or more")
    return name, gpus


def _with_moved(part: Slice, moved: Mapping[Link, Link]) -> Slice:
    if moved.keys().isdisjoint(part.all_links):
        return part
    rows = tuple(tuple(moved.get(link, link) for link in row) for row in part.links)
    return replace(part, links=rows)


def _release(table: Table, name: str) -> tuple[Table, Json]:
    gone = table.slice(name)
    done = replace(
        table,
        slices=tuple(part for part in table.slices if part is not gone),
        asked_by=tuple(pair for pair in table.asked_by if pair[0] != name),
    )
    return done, {"released": name}


def _repaired(fabric: Fabric, table: Table) -> tuple[Table, Json]:
    repairs = repair(fabric, table.slices, table.failed)
    after = {done.part.name: done.part for done in repairs}
    slices = tuple(after.get(part.name, part) for part in table.slices)
    require(fabric, slices)
    hit = [{"slice": done.part.name, "outcome": done.outcome} for done in repairs]
    return replace(table, slices=slices), {"failed": sorted(table.failed), "slices": hit}
