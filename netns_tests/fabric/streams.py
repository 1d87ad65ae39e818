# SPDX-License-Identifier: Apache-2.0
"""Steady one-way streams of numbered datagrams, to see what a change of ways costs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from netns_tests.fabric.counters import Tuple
from netns_tests.fabric.fabric import Fabric

PER_SECOND = 1000
RECEIVE_BUFFER = 32 << 20
SO_RCVBUFFORCE = 33
ARRIVAL_SECONDS = 0.5


@dataclass(frozen=True)
class Loss:
    """What a stream lost. ``refused`` were not even sent: the host had no way for them."""

    sent: int
    refused: int
    missing: int

    @property
    def milliseconds(self) -> float:
        """Of the stream's traffic."""
        return (self.missing + self.refused) * 1000 / PER_SECOND


class Stream:
    """One flow from a NIC to a NIC, by their numbers in the model."""

    def __init__(self, fabric: Fabric, source: int, target: int) -> None:
        model = fabric.model
        near, far = model.nics[source], model.nics[target]
        self._in = fabric.nodes[model.hosts[far.host].name].socket(
            socket.AF_INET, socket.SOCK_DGRAM
        )
        self._in.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER)
        self._in.bind((str(far.address.ip), 0))
        self._in.setblocking(False)
        self._out = fabric.nodes[model.hosts[near.host].name].socket(
            socket.AF_INET, socket.SOCK_DGRAM
        )
        self._out.bind((str(near.address.ip), 0))
        self._out.connect(self._in.getsockname())
        self.flow = Tuple("udp", *self._out.getsockname(), *self._in.getsockname())
        self.sent = self.refused = 0

    def send(self) -> None:
        try:
            self._out.send(self.sent.to_bytes(8, "big"))
            self.sent += 1
        except OSError:
            self.refused += 1

    def arrived(self) -> int:
        """All that is there now."""
        count = 0
        with contextlib.suppress(BlockingIOError):
            while self._in.recv(64):
                count += 1
        return count


class Traffic:
    """All streams at once, PER_SECOND datagrams each, for the length of the block."""

    def __init__(self, *streams: Stream) -> None:
        self.streams = streams
        self.losses: tuple[Loss, ...] = ()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send, name="streams", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self.losses = tuple(self._loss(stream) for stream in self.streams)

    def _send(self) -> None:
        due = time.monotonic()
        while not self._over.is_set():
            for stream in self.streams:
                stream.send()
            due += 1 / PER_SECOND
            self._over.wait(max(due - time.monotonic(), 0))

    def _loss(self, stream: Stream) -> Loss:
        arrived, deadline = stream.arrived(), time.monotonic() + ARRIVAL_SECONDS
        while arrived < stream.sent and time.monotonic() < deadline:
            arrived += stream.arrived()
        return Loss(stream.sent, stream.refused, stream.sent - arrived)
