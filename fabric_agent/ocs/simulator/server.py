# SPDX-License-Identifier: Apache-2.0
"""RESTCONF in front of a simulated switch: `python -m fabric_agent.ocs.simulator.server`.

Prints its address as one JSON line when it answers. Beside the device's own interface there is
POST /lab, which makes faults: {"faults": {...}}, {"fail": PORT}, {"reboot": SECONDS},
{"labels": {PORT: [LABEL, PEER]}}, and {"tamper": {INGRESS: EGRESS}} for somebody else's hands.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Any

from fabric_agent.ocs.simulator.switch import Faults, Gone, Switch, SwitchError

DATA = "/api/data/optical-switch:"
PAIR = f"{DATA}cross-connects/pair="
STREAM = "/api/streams/Polatis"
BODY_MAX = 4 << 20
# The event stream ends when nobody reads it; it is looked at this often (seconds).
STREAM_LOOK = 0.5

Json = dict[str, Any]


class Server(ThreadingHTTPServer):
    """One switch, any number of clients."""

    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], switch: Switch, login: str, notifies: bool
    ) -> None:
        super().__init__(address, Handler)
        self.switch = switch
        self.notifies = notifies
        self.login = login and f"Basic {base64.b64encode(login.encode()).decode()}"


class Handler(BaseHTTPRequestHandler):
    """One request; the switch's lock is held while it is looked at."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self._refused():
            return
        if self.path == STREAM and self.server.notifies:
            self._stream(self.command == "GET")
            return
        with self.server.switch.changed:
            self._guarded(self._read)

    do_HEAD = do_GET

    def do_PATCH(self) -> None:
        body = self._body()
        if not self._refused():
            with self.server.switch.changed:
                self._guarded(lambda: self._patch(body))

    def do_DELETE(self) -> None:
        if not self._refused():
            with self.server.switch.changed:
                self._guarded(self._delete)

    def do_POST(self) -> None:
        body = self._body()
        with self.server.switch.changed:
            _make_faults(self.server.switch, body)
            self._answer(HTTPStatus.NO_CONTENT)

    def _refused(self) -> bool:
        if self.server.login and self.headers.get("Authorization") != self.server.login:
            self._answer(HTTPStatus.UNAUTHORIZED)
            return True
        return False

    def _guarded(self, action: Any) -> None:
        switch = self.server.switch
        try:
            switch.require_present()
            action()
        except Gone:
            self.close_connection = True
        except SwitchError as error:
            self._answer(HTTPStatus.CONFLICT, {"ietf-restconf:errors": str(error)})
        except (KeyError, TypeError, ValueError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"ietf-restconf:errors": repr(error)})

    def _read(self) -> None:
        switch = self.server.switch
        if switch.faults.nonsense > 0 and self.command == "GET":
            switch.faults.nonsense -= 1
            self._answer(
                HTTPStatus.OK, {"optical-switch:cross-connects": {"pair": [{"egress": 1}]}}
            )
            return
        readers = {
            "cross-connects": lambda: _table(switch),
            "port-config": lambda: _ports(switch),
            "opm-power": lambda: _power(switch),
        }
        reader = readers.get(self.path.removeprefix(DATA))
        if reader is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, reader())

    def _patch(self, body: Json) -> None:
        pairs = body["optical-switch:cross-connects"]["pair"]
        self._change(set(), {int(each["ingress"]): int(each["egress"]) for each in pairs})

    def _delete(self) -> None:
        self._change({int(self.path.removeprefix(PAIR))}, {})

    def _change(self, disconnect: set[int], connect: dict[int, int]) -> None:
        switch = self.server.switch
        if self.headers.get("If-Match", switch.tag) != switch.tag:
            self._answer(HTTPStatus.PRECONDITION_FAILED)
        elif switch.change(disconnect, connect, self.client_address[0]):
            self._answer(HTTPStatus.NO_CONTENT)
        else:
            self.close_connection = True

    def _stream(self, wanted: bool) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        switch = self.server.switch
        seen = len(switch.activity)
        try:
            while wanted:
                with switch.changed:
                    if len(switch.activity) == seen:
                        switch.changed.wait(STREAM_LOOK)
                    fresh = switch.activity[seen:]
                seen += len(fresh)
                # A comment when there is nothing to say: it finds out whether anybody listens.
                lines = [f"data: {json.dumps(_activity(text))}" for text in fresh] or [": quiet"]
                self.wfile.write("".join(f"{line}\n\n" for line in lines).encode())
        except OSError:
            return

    def _body(self) -> Json:
        length = min(int(self.headers.get("Content-Length", "0")), BODY_MAX)
        body: Json = json.loads(self.rfile.read(length) or b"{}")
        return body

    def _answer(self, status: HTTPStatus, body: Json | None = None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("ETag", self.server.switch.tag)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(data)))
        if data:
            self.send_header("Content-Type", "application/yang-data+json")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: the audit log of the caller tells what was done."""


def _table(switch: Switch) -> Json:
    pairs = [{"ingress": i, "egress": e} for i, e in sorted(switch.pairs.items())]
    return {"optical-switch:cross-connects": {"pair": pairs}}


def _ports(switch: Switch) -> Json:
    ports = [
        {
            "port-id": number,
            "status": "FAILED" if port.failed else "ENABLED",
            "optical-state": switch.state(number),
            "label": port.label,
            "peer-port": port.peer,
        }
        for number, port in switch.ports.items()
    ]
    return {"optical-switch:port-config": {"port": ports}}


def _power(switch: Switch) -> Json:
    ports = [{"port-id": number, "power": switch.power(number)} for number in switch.ports]
    return {"optical-switch:opm-power": {"port": ports}}


def _activity(text: str) -> Json:
    return {"ietf-restconf:notification": {"polatis-switch:activity-log-notification": text}}


def _make_faults(switch: Switch, wanted: Json) -> None:
    if "faults" in wanted:
        switch.faults = Faults(**wanted["faults"])
    if "fail" in wanted:
        switch.fail(wanted["fail"])
    if "reboot" in wanted:
        switch.reboot(wanted["reboot"])
    if "tamper" in wanted:
        switch.change(set(), {int(i): e for i, e in wanted["tamper"].items()}, "somebody")
    for number, (label, peer) in wanted.get("labels", {}).items():
        port = switch.ports[int(number)]
        port.label, port.peer = label, peer


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="A simulated optical switch.")
    parser.add_argument("--size", type=int, required=True, metavar="N", help="N x N ports")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--tuning", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--volatile", action="store_true", help="a reboot loses all circuits")
    parser.add_argument("--silent", action="store_true", help="announces no changes")
    parser.add_argument("--login", default="", metavar="USER:PASSWORD")
    parser.add_argument("--certificate", type=Path, metavar="PEM", help="TLS, key and chain")
    args = parser.parse_args(argv)
    host, _, port = args.listen.rpartition(":")
    switch = Switch(args.size, tuning=args.tuning, preserve=not args.volatile)
    server = Server((host, int(port)), switch, args.login, not args.silent)
    scheme = "http"
    if args.certificate:
        context = SSLContext(PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    print(json.dumps({"url": f"{scheme}://{host}:{server.server_port}"}), flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
