# SPDX-License-Identifier: Apache-2.0
"""The traffic program from Python: a server and clients in namespaces of the laboratory."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
    UDP6_RR = "udp6_rr"  # the same over IPv6
    TCP6_RR = "tcp6_rr"

    @property
    def ip_version(self) -> int:
        return 6 if "6" in self.value else 4

    def arguments(self) -> list[str]:
        proto, kind = self.value.replace("6", "").split("_")
        return ["--proto", proto, "--kind", kind]


IPV4_KINDS = tuple(kind for kind in Kind if kind.ip_version == 4)


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
        made += ["--batches", str(self.batches)]
        if self.seconds is not None:
            made += ["--seconds", str(self.seconds)]
        return made + _pinned(self.cpu)


@dataclass(frozen=True)
class Server:
    """Where a running server answers."""

    kind: Kind
    address: IPv4Address | IPv6Address
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
    address: IPv4Address | IPv6Address,
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


class Client:
    """A client at work; a context manager that ends it if it still runs."""

    def __init__(self, namespace: Namespace, target: Server, load: Load, *options: str) -> None:
        require()
        where = ["--address", str(target.address), "--port", str(target.port)]
        self._child = namespace.spawn(
            [
                str(BINARY),
                "client",
                *target.kind.arguments(),
                *where,
                *load.arguments(),
                *options,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end(self._child)

    def result(self) -> Result:
        """Wait until it has finished; LabError with its message if it failed."""
        try:
            out, error = self._child.communicate(timeout=CLIENT_SECONDS)
        except subprocess.TimeoutExpired as late:
            raise LabError(
                f"the traffic client took longer than {CLIENT_SECONDS:g} s",
                hint="see whether anything else fills this machine's CPUs",
            ) from late
        if self._child.returncode != 0:
            raise LabError(
                f"the traffic client failed: {error.decode().strip()}",
                hint="see if the path is up (ping)",
            )
        return Result.parse(out.decode())


class SteppedClient(Client):
    """A client that runs one batch each time it is told to; `result` ends it."""

    def __init__(self, namespace: Namespace, target: Server, load: Load) -> None:
        super().__init__(namespace, target, load, "--step", "1")

    def step(self) -> None:
        """Run one batch to its end."""
        pipes = self._child
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        # A client that died is found out by its silence, and `result` has its words.
        with contextlib.suppress(BrokenPipeError):
            pipes.stdin.write(b"\n")
            pipes.stdin.flush()
        if not pipes.stdout.readline():
            self.result()


def measure(namespace: Namespace, target: Server, load: Load) -> Result:
    """Run one client to its end."""
    with Client(namespace, target, load) as client:
        return client.result()
