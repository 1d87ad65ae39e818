# SPDX-License-Identifier: Apache-2.0
"""Entries of the filter cache as rows, or as whatever else a dump is made of. No effects."""

import socket
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from oncache.core.addresses import V4_MAPPED

S = TypeVar("S")
H = TypeVar("H")
R = TypeVar("R")
Columns = tuple[Any, ...]

PROTOCOLS = {"tcp": 6, "udp": 17, "icmp": 1, "icmp6": 58}

# What of an entry is read: of the key, then of both halves and the flags of both together.
KEY_COLUMNS = ("local", "remote", "local_port", "remote_port", "protocol")
_HALF_COLUMNS = (
    *("pod", "path", "learned", "generation", "sent", "left"),
    *("seen", "ready", "hops", "peer"),
)
FLOW_COLUMNS = (
    *(f"out.{name}" for name in _HALF_COLUMNS),
    *(f"in.{name}" for name in _HALF_COLUMNS),
    *("closed", "reset"),
)

_HALF = len(_HALF_COLUMNS)
_PROTOCOL_NAMES = {number: name for name, number in PROTOCOLS.items()}
_INDEX = 0xFFFFFFFF


class HalfRow(NamedTuple):
    """One direction of a flow: why the next packet is or is not fast ("" if it is)."""

    state: str
    reason: str
    pod: int
    path: int
    generation: int
    pod_generation: int
    path_generation: int
    hops: int
    peer: str
    age_seconds: float


class FlowRow(NamedTuple):
    """One entry of the filter cache, seen from the local pod."""

    protocol: str
    local: str
    local_port: int
    remote: str
    remote_port: int
    closed: bool
    egress: HalfRow
    ingress: HalfRow


class Form(NamedTuple, Generic[S, H, R]):
    """What a dump makes of an entry: text for a file costs less when no rows are made on the way.

    ``shared`` takes a HalfRow without its age, once for all halves that differ in nothing else;
    ``half`` takes what that gave and the age; ``row`` takes the fields of a FlowRow.
    """

    shared: Callable[[HalfRow], S]
    half: Callable[[S, float], H]
    row: Callable[[str, str, int, str, int, bool, H, H], R]


ROWS: Form[Columns, HalfRow, FlowRow] = Form(
    lambda half: half[:-1], lambda shared, age: HalfRow._make((*shared, age)), FlowRow
)


class Validity(NamedTuple):
    """What an entry is compared with: ``down`` is why nothing is fast now, "" if something may be;
    generations by index; times in ns of CLOCK_MONOTONIC."""

    now: int
    lease: int
    down: str
    generation: int
    pods: Sequence[int]
    paths: Sequence[int]


def reader(valid: Validity, form: Form[S, H, R]) -> Callable[[Columns, Columns], R]:
    """A function from the columns of one entry to what ``form`` makes of it.

    Entries differ in little but age: most halves are found among those already described.
    """
    now, lease, show = valid.now, valid.lease, _Addresses().__getitem__
    make_half, make_row = form.half, form.row
    known: dict[Columns, S] = {}

    def half(columns: Columns, closed: int, outward: bool) -> H:
        pod, path, learned, generation, sent, left, seen, ready, hops, peer = columns
        age = now - learned
        facts = (
            *(pod, path, generation, seen, ready, hops, peer),
            *(closed, age > lease, sent == left, outward),
        )
        if facts not in known:
            known[facts] = form.shared(_describe(valid, *facts))
        # Milliseconds are enough, and cheaper than round().
        return make_half(known[facts], age // 1_000_000 / 1000 if seen else 0.0)

    def row(key: Columns, flow: Columns) -> R:
        local, remote, local_port, remote_port, protocol = key
        closed = flow[-2] or flow[-1]
        return make_row(
            _PROTOCOL_NAMES.get(protocol) or str(protocol),
            show(local),
            local_port,
            show(remote),
            remote_port,
            closed != 0,
            half(flow[:_HALF], closed, True),
            half(flow[_HALF:-2], closed, False),
        )

    return row


def _describe(valid: Validity, *facts: Any) -> HalfRow:
    pod, path, generation, seen, ready, hops, peer, closed, due, settled, outward = facts
    current = generation == valid.generation and valid.pods[pod & _INDEX] == pod >> 32
    if outward:
        current = current and valid.paths[path & _INDEX] == path >> 32
    return HalfRow(
        state="ready" if ready else "seen" if seen else "empty",
        reason=valid.down or _unfit(closed, ready, current, due, settled),
        pod=pod & _INDEX,
        path=path & _INDEX,
        generation=generation,
        pod_generation=pod >> 32,
        path_generation=path >> 32,
        hops=hops,
        peer="" if outward or not seen else _address(peer),
        age_seconds=0.0,
    )


def _unfit(closed: int, ready: int, current: bool, due: bool, settled: bool) -> str:
    """half_unfit() of bpf/oncache.bpf.c: the counter that the next packet moves, "" if a hit."""
    if closed:
        return "closed"
    if not ready:
        return "unconfirmed"
    if not current:
        return "stale"
    if due:
        return "lease"
    return "" if settled else "order"


def _address(raw: bytes) -> str:
    """struct address as text."""
    if raw.startswith(V4_MAPPED):
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw)


class _Addresses(dict[bytes, str]):
    """struct address -> text; a table has few different ones."""

    def __missing__(self, raw: bytes) -> str:
        self[raw] = text = _address(raw)
        return text
