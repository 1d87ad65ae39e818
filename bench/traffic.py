# SPDX-License-Identifier: Apache-2.0
"""The traffic program from Python: a server and clients in namespaces of the laboratory."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from netns_tests.lab.errors import LabError
from netns_tests.lab.namespaces import Namespace
from netns_tests.lab.processes import end
from oncache.core.errors import HostError

ROOT = Path(__file__).resolve().parents[1]
BINARY = ROOT / "build" / "traffic"
CLIENT_SECONDS = 120.0


class Kind(StrEnum):
    UDP_RR = "udp_rr"
    TCP_RR = "tcp_rr"
    TCP_CRR = "tcp_crr"
    TCP_STREAM = "tcp_stream"

    def arguments(self) -> list[str]:
        proto, kind = self.value.split("_")
        return ["--proto", proto, "--kind", kind]


@dataclass(frozen=True)
class Load:
    """How much one client does: `batches` of `transactions`, or as many batches as `seconds` hold.

    `cpu` pins the client. Before the first batch it makes `warmup` short rounds with rests between.
    """

    batches: int = 1
    transactions: int = 1000
    seconds: float | None = None
    cpu: int | None = None
    warmup: int = 5

    def arguments(self) -> list[str]:
        made = ["--transactions", str(self.transactions), "--warmup", str(self.warmup)]
        if self.seconds is None:
            made += ["--batches", str(self.batches)]
        else:
            made += ["--seconds", str(self.seconds)]
        return made + _pinned(self.cpu)


@dataclass(frozen=True)
class Server:
    """Where a running server answers."""

    kind: Kind
    address: IPv4Address
    port: int


@dataclass(frozen=True)
class Result:
    """What one client saw. Microseconds are per transaction (of a stream: per MB).

    `batches_us` holds the wall time of each batch, `cpu_us` the mean CPU time of the pinned CPU,
    the kernel's packet work included; `idle_share` says how far that CPU was from saturated.
    """

    batches_us: tuple[float, ...]
    transactions: int
    lost: int
    stray: int
    mean_us: float
    cpu_us: float
    idle_share: float
    p50_us: float
    p99_us: float
    bytes: int
    seconds: float

    @classmethod
    def parse(cls, line: str) -> Result:
        raw: dict[str, Any] = json.loads(line)
        picked = {name: raw[name] for name in cls.__dataclass_fields__}
        return cls(**{**picked, "batches_us": tuple(raw["batches_us"])})


def _pinned(cpu: int | None) -> list[str]:
    return [] if cpu is None else ["--cpu", str(cpu)]


def require() -> None:
    """Raise HostError when the traffic program was not built."""
    if not BINARY.exists():
        raise HostError(f"the traffic program {BINARY} is missing", hint="run make traffic")


@contextlib.contextmanager
def server(
    namespace: Namespace,
    address: IPv4Address,
    kind: Kind,
    *,
    cpu: int | None = None,
    port: int = 0,
) -> Iterator[Server]:
    """A server in `namespace` for the length of the block; it serves any number of clients.

    TCP clients one after the other.
    """
    require()
    where = ["--address", str(address), "--port", str(port)]
    argv = [str(BINARY), "server", *kind.arguments(), *where, *_pinned(cpu)]
    child = namespace.spawn(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stderr is not None
        line = child.stdout.readline()
        if not line:
            raise LabError(
                f"the traffic server did not start: {child.stderr.read().decode().strip()}",
                hint="run build/traffic by hand",
            )
        yield Server(kind, address, json.loads(line)["port"])
    finally:
        end(child)


@contextlib.contextmanager
def started(namespace: Namespace, target: Server, load: Load) -> Iterator[subprocess.Popen[bytes]]:
    """A client at work during the block; pass it to `result` for what it saw."""
    require()
    where = ["--address", str(target.address), "--port", str(target.port)]
    argv = [str(BINARY), "client", *target.kind.arguments(), *where, *load.arguments()]
    child = namespace.spawn(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield child
    finally:
        end(child)


def result(child: subprocess.Popen[bytes]) -> Result:
    """Wait for a client to finish; LabError with its message if it failed."""
    try:
        out, error = child.communicate(timeout=CLIENT_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise LabError(
            f"the traffic client took longer than {CLIENT_SECONDS:g} s",
            hint="see whether anything else fills this machine's CPUs",
        ) from late
    if child.returncode != 0:
        message = error.decode().strip()
        raise LabError(f"the traffic client failed: {message}", hint="see if the path is up (ping)")
    return Result.parse(out.decode())


def measure(namespace: Namespace, target: Server, load: Load) -> Result:
    """Run one client to its end."""
    with started(namespace, target, load) as child:
        return result(child)
