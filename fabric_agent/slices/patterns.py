# SPDX-License-Identifier: Apache-2.0
"""Who sends to whom in a collective, phase by phase. A flow is a pair of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from fabric_agent.slices.model import Fabric, Slice
from oncache.core.errors import ConfigError

Flow = tuple[int, int]

RANKFILE_LINE = re.compile(r"rank\s+(\d+)\s*=\s*(\S+)\s+slot\s*=\s*(\d+)")


@dataclass(frozen=True)
class Pattern:
    """``phase(k)`` for k < ``phases`` are the flows that run at the same time."""

    name: str
    phases: int
    phase: Callable[[int], list[Flow]]


def ring(ranks: Sequence[int]) -> list[Flow]:
    """Each to the next one, the last to the first."""
    return list(zip(ranks, [*ranks[1:], *ranks[:1]], strict=True)) if len(ranks) > 1 else []


def leaf_major_ring(part: Slice) -> Pattern:
    """One ring through all ranks in their order."""
    flows = ring(range(len(part.ranks)))
    return Pattern("ring", 1, lambda _: flows)


def rail_ring(part: Slice) -> Pattern:
    """A ring for each local number, through all leaves that have it."""
    flows = [flow for rail in zip_longest(*_by_leaf(part)) for flow in ring(_there(rail))]
    return Pattern("rail-ring", 1, lambda _: flows)


def _by_leaf(part: Slice) -> list[range]:
    starts = [sum(map(len, part.nics[:leaf])) for leaf in range(len(part.nics))]
    return [
        range(start, start + len(group)) for start, group in zip(starts, part.nics, strict=True)
    ]


def _there(rail: Sequence[int | None]) -> list[int]:
    return [rank for rank in rail if rank is not None]


def halving_doubling(part: Slice) -> Pattern:
    """Partners at distance 1, 2, 4, …; what exceeds a power of two joins a partner before and
    leaves it after."""
    count = len(part.ranks)
    core = 1 << count.bit_length() - 1
    extra = [(rank, rank - core) for rank in range(core, count)]
    steps = [
        [(rank, rank ^ 1 << bit) for rank in range(core)] for bit in range(core.bit_length() - 1)
    ]
    back = [(there, here) for here, there in extra]
    phases = [extra, *steps, back] if extra else steps
    return Pattern("halving-doubling", len(phases), phases.__getitem__)


def all_to_all(part: Slice) -> Pattern:
    """Pairwise exchange: in phase t everybody sends t + 1 ranks further."""
    count = len(part.ranks)
    return Pattern(
        "all-to-all",
        count - 1,
        lambda t: [(rank, (rank + t + 1) % count) for rank in range(count)],
    )


def pipeline(part: Slice) -> Pattern:
    """Each leaf is a stage; forth to the next stage, then back."""
    stages = _by_leaf(part)
    forth = [flow for one, other in pairwise(stages) for flow in zip(one, other, strict=False)]
    back = [(there, here) for here, there in forth]
    return Pattern("pipeline", 2, [forth, back].__getitem__)


def incast(part: Slice) -> Pattern:
    """Everybody to rank 0, as to a parameter server: no fabric carries it without contention."""
    flows = [(rank, 0) for rank in range(1, len(part.ranks))]
    return Pattern("incast", 1, lambda _: flows)


PATTERNS: dict[str, Callable[[Slice], Pattern]] = {
    "ring": leaf_major_ring,
    "rail-ring": rail_ring,
    "halving-doubling": halving_doubling,
    "all-to-all": all_to_all,
    "pipeline": pipeline,
    "incast": incast,
}


def named(name: str, part: Slice) -> Pattern:
    """A pattern by its name; ConfigError for an unknown one."""
    if name not in PATTERNS:
        raise ConfigError(f"there is no pattern {name}", hint=f"there are {', '.join(PATTERNS)}")
    return PATTERNS[name](part)


def permutation(part: Slice, targets: Sequence[int]) -> Pattern:
    """Rank r sends to ``targets[r]``; ConfigError unless each rank is there exactly once."""
    if sorted(targets) != list(range(len(part.ranks))):
        raise ConfigError(
            f"not a permutation of the {len(part.ranks)} ranks of {part.name}",
            hint="name each rank from 0 on exactly once",
        )
    flows = [(rank, target) for rank, target in enumerate(targets) if rank != target]
    return Pattern("permutation", 1, lambda _: flows)


def reordered(pattern: Pattern, order: Sequence[int]) -> Pattern:
    """The pattern when a job numbers its ranks otherwise: its rank r is rank ``order[r]`` here."""
    return Pattern(
        pattern.name,
        pattern.phases,
        lambda k: [(order[source], order[target]) for source, target in pattern.phase(k)],
    )


def read_rank_file(fabric: Fabric, part: Slice, text: str) -> list[int]:
    """The slice's rank of each rank of the job, from lines ``rank 3=host0 slot=1``, where the slot
    counts the server's NICs. ConfigError names the line, or the rank, that does not match."""
    known = {nic: rank for rank, nic in enumerate(part.ranks)}
    order: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        job_rank, nic = _rank_line(fabric, number, line)
        if nic not in known:
            raise ConfigError(
                f"rank file line {number}: this NIC is not of slice {part.name}",
                hint=f"'fabric-agent slices show {part.name}' lists its NICs",
            )
        if job_rank in order or known[nic] in order.values():
            raise ConfigError(f"rank file line {number}: given twice", hint="list each rank once")
        order[job_rank] = known[nic]
    missing = set(range(len(part.ranks))) - set(order)
    if missing or len(order) != len(part.ranks):
        raise ConfigError(
            f"rank file: {len(order)} ranks, {part.name} has {len(part.ranks)}",
            hint=f"rank {min(missing)} is missing" if missing else "number ranks from 0",
        )
    return [order[rank] for rank in range(len(order))]


def _rank_line(fabric: Fabric, number: int, line: str) -> tuple[int, int]:
    match = RANKFILE_LINE.fullmatch(line.strip())
    if not match:
        raise ConfigError(f"rank file line {number}: {line.strip()!r}", hint="rank 0=host0 slot=0")
    rank, name, slot = int(match[1]), match[2], int(match[3])
    if name not in fabric.host_by_name:
        raise ConfigError(f"rank file line {number}: there is no host {name}", hint="correct it")
    nics = fabric.hosts[fabric.host_by_name[name]].nics
    if slot >= len(nics):
        raise ConfigError(
            f"rank file line {number}: {name} has no NIC {slot}",
            hint=f"it has slots 0 to {len(nics) - 1}",
        )
    return rank, nics[slot]
