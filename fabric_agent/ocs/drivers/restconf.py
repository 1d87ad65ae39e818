# SPDX-License-Identifier: Apache-2.0
"""A switch that speaks RESTCONF (RFC 8040) in the shape of the public Polatis model.

`optical-switch:cross-connects` has a list `pair`, keyed by `ingress`. The table's ETag is its tag,
and every change carries it in If-Match, so the device itself refuses a change of another table
(412). A batch is one DELETE per cross-connect to take out, then one PATCH: not atomic, so a failure
after the first step is a PartialError. Changes announce themselves as `activity-log-notification`
in the event stream; what changed is then read from the table.
"""

from __future__ import annotations

import base64
import json
import math
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from socket import socket
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from fabric_agent.ocs.drivers.base import (
    Batch,
    Capabilities,
    Change,
    Credentials,
    DeviceError,
    MovedError,
    PartialError,
    PortState,
    RefusedError,
    Status,
    Table,
    polled,
)
from fabric_agent.store.readable import readable
from oncache.core.errors import ConfigError

MEDIA = "application/yang-data+json"
TABLE = "/data/optical-switch:cross-connects"
PORTS = "/data/optical-switch:port-config"
POWER = "/data/optical-switch:opm-power"
ACTIVITY = "activity-log-notification"
READ_AGAIN = "read the table again (fabric-agent ocs show), then resume or plan anew"
ANSWER_MAX = 16 << 20
# Between two looks at `stop` while the stream is silent.
STREAM_LOOK = 0.5
PIECE = 1 << 16

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """Where a device is: http(s)://HOST:PORT and the path of its API.

    TLS is verified, against `ca` if given. `timeout` is seconds per request, `poll` the interval
    for devices without an event stream.
    """

    url: str
    root: str = "/api"
    credentials: Credentials | None = None
    ca: Path | None = None
    timeout: float = 10.0
    poll: float = 2.0
    stream: str = "/streams/Polatis"


class Restconf:
    """See the module."""

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name = name
        self._at = endpoint
        parts = urlsplit(endpoint.url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(f"{name}: {endpoint.url} is no http(s) address", hint="https://HOST")
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"

    def capabilities(self) -> Capabilities:
        """Asks the device which of its optional parts it has."""
        return Capabilities(
            atomic=False, notifies=self._has(self._at.stream), power=self._has(POWER)
        )

    def read(self) -> Table:
        answer = self._request("GET", TABLE)
        return self._table(answer)

    def apply(self, batch: Batch, tag: str) -> Table:
        for done, (method, path, body) in enumerate(_requests(batch)):
            try:
                tag = self._change(method, path, body, tag)
            except (MovedError, RefusedError) as error:
                if not done:
                    raise
                raise self._partial(f"{error.message}, after {done} steps of the batch") from error
        return self.read()

    def ports(self) -> Mapping[int, PortState]:
        answer = self._request("GET", PORTS)
        power = self._powers()
        try:
            listed = _member(answer.body, "port-config")["port"]
            return {int(each["port-id"]): _port(each, power) for each in listed}
        except (KeyError, TypeError, ValueError) as error:
            raise self._nonsense(f"its ports: {error!r}") from error

    def watch(self, stop: Event) -> Iterator[Change]:
        if not self.capabilities().notifies:
            yield from polled(self, stop, self._at.poll)
            return
        with self._stream() as (response, sock):
            tag = self.read().tag
            for _ in _events(response, sock, stop):
                table = self.read()
                if table.tag != tag:
                    tag = table.tag
                    yield Change(table, 0.0)

    def _has(self, path: str) -> bool:
        return self._request("HEAD", path, refuse=False).status == 200

    def _powers(self) -> dict[int, float]:
        answer = self._request("GET", POWER, refuse=False)
        if answer.status != 200:
            return {}
        try:
            listed = _member(answer.body, "opm-power")["port"]
            return {int(each["port-id"]): float(each["power"]) for each in listed}
        except (KeyError, TypeError, ValueError) as error:
            raise self._nonsense(f"its power readings: {error!r}") from error

    def _table(self, answer: _Answer) -> Table:
        try:
            listed = _member(answer.body, "cross-connects").get("pair", [])
            pairs = {int(pair["ingress"]): int(pair["egress"]) for pair in listed}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._nonsense(f"its cross-connects: {error!r}") from error
        if len(pairs) < len(listed) or not answer.tag:
            raise self._nonsense("a table with a port twice" if answer.tag else "no ETag")
        return Table(pairs, answer.tag)

    def _change(self, method: str, path: str, body: JsonObject | None, tag: str) -> str:
        """One step; returns the new tag. What the device left unanswered is in doubt."""
        try:
            answer = self._request(method, path, body, tag)
        except (MovedError, RefusedError):
            raise
        except DeviceError as error:
            raise self._partial(error.message) from error
        if not answer.tag:
            raise self._partial("a change was answered without an ETag")
        return answer.tag

    def _request(
        self,
        method: str,
        path: str,
        body: JsonObject | None = None,
        tag: str | None = None,
        *,
        refuse: bool = True,
    ) -> _Answer:
        headers = {"Accept": MEDIA, **self._authorization()}
        if body is not None:
            headers["Content-Type"] = MEDIA
        if tag is not None:
            headers["If-Match"] = tag
        connection = self._connect(self._at.timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, self._at.root + path, data, headers)
            answer = _answer(connection.getresponse())
        except (OSError, HTTPException, ValueError) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()
        if refuse:
            self._require_success(answer)
        return answer

    def _require_success(self, answer: _Answer) -> None:
        if answer.status < 300:
            return
        if answer.status == 412:
            raise MovedError(f"{self.name}: its table moved since it was read", hint=READ_AGAIN)
        if answer.status in (401, 403):
            raise RefusedError(f"{self.name}: access denied", hint="check the credentials file")
        if 400 <= answer.status < 500:
            raise RefusedError(f"{self.name} refuses: {answer.complaint}", hint=READ_AGAIN)
        raise DeviceError(f"{self.name} failed: {answer.complaint}", hint=READ_AGAIN)

    def _authorization(self) -> dict[str, str]:
        known = self._at.credentials
        if known is None:
            return {}
        token = base64.b64encode(f"{known.user}:{known.password}".encode()).decode()
        return {"Authorization": f"Basic {token}"}

    def _connect(self, timeout: float) -> HTTPConnection:
        if not self._tls:
            return HTTPConnection(self._host, self._port, timeout=timeout)
        context = ssl.create_default_context(cafile=self._at.ca and str(self._at.ca))
        return HTTPSConnection(self._host, self._port, timeout=timeout, context=context)

    @contextmanager
    def _stream(self) -> Iterator[tuple[HTTPResponse, socket]]:
        connection = self._connect(self._at.timeout)
        try:
            headers = {"Accept": "text/event-stream", **self._authorization()}
            connection.connect()
            sock: socket = connection.sock
            connection.request("GET", self._at.root + self._at.stream, headers=headers)
            yield connection.getresponse(), sock
        except (OSError, HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _unreachable(self, error: Exception) -> DeviceError:
        return DeviceError(
            f"{self.name}: no answer from {self._at.url}: {error}",
            hint="check the address and the device, then read its table before anything else",
        )

    def _nonsense(self, what: str) -> DeviceError:
        return DeviceError(f"{self.name} answers nonsense: {what}", hint="look at its own console")

    def _partial(self, what: str) -> PartialError:
        return PartialError(f"{self.name}: {what}", hint=READ_AGAIN)


@dataclass(frozen=True)
class _Answer:
    status: int
    tag: str
    body: JsonObject
    complaint: str


def _answer(response: HTTPResponse) -> _Answer:
    """ValueError when a successful answer has a body that is no JSON object."""
    text = response.read(ANSWER_MAX)
    body: Any = {}
    if text and response.status < 300:
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ValueError("the answer is no JSON object")
    complaint = f"{response.status} {response.reason} {text[:200].decode(errors='replace')}"
    return _Answer(response.status, response.getheader("ETag") or "", body, complaint.strip())


def _requests(batch: Batch) -> Iterator[tuple[str, str, JsonObject | None]]:
    for ingress, _ in batch.disconnect:
        yield "DELETE", f"{TABLE}/pair={ingress}", None
    if batch.connect:
        pairs = [{"ingress": ingress, "egress": egress} for ingress, egress in batch.connect]
        yield "PATCH", TABLE, {"optical-switch:cross-connects": {"pair": pairs}}


def _member(body: JsonObject, name: str) -> JsonObject:
    """With or without the module's name; KeyError without either."""
    found: JsonObject = body.get(f"optical-switch:{name}") or body[name]
    return found


def _port(listed: JsonObject, power: Mapping[int, float]) -> PortState:
    measured = power.get(int(listed["port-id"]))
    if measured is not None and not math.isfinite(measured):
        raise ValueError(f"power {measured}")
    status = Status.FAILED if listed.get("status") == "FAILED" else Status(listed["optical-state"])
    return PortState(status, listed.get("label", ""), listed.get("peer-port", ""), measured)


def _events(response: HTTPResponse, sock: socket, stop: Event) -> Iterator[None]:
    """One item per notification of activity; ends at `stop` or with the stream."""
    pending = b""
    while not stop.is_set():
        if not _readable(sock):
            continue
        piece = response.read1(PIECE)
        if not piece:
            return
        pending += piece
        *events, pending = pending.split(b"\n\n")
        for event in events:
            if ACTIVITY.encode() in event:
                yield None


def _readable(sock: socket) -> bool:
    """Waits a moment. A read that timed out would end the stream for good."""
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return True
    return bool(readable([sock], STREAM_LOOK))
