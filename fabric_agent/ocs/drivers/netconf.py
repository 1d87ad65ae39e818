# SPDX-License-Identifier: Apache-2.0
"""A switch that speaks NETCONF (RFC 6241) over SSH in the shape of the public Polatis model.

A batch is atomic: lock, compare what runs with what was read, edit the candidate, commit, unlock.
Circuits are polled for, because the model has no notification that tells which one changed. The
client is ncclient, an optional dependency that only this module knows.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from xml.etree import ElementTree as Xml

from fabric_agent.ocs.drivers.base import (
    Batch,
    Capabilities,
    Change,
    DeviceError,
    MovedError,
    PartialError,
    PortState,
    RefusedError,
    Status,
    Table,
    fingerprint,
    polled,
)
from oncache.core.errors import ConfigError, HostError

MODEL = "http://www.polatis.com/yang/optical-switch"
BASE = "urn:ietf:params:xml:ns:netconf:base:1.0"
READ_AGAIN = "read the table again (fabric-agent ocs show), then resume or plan anew"


@dataclass(frozen=True)
class Endpoint:
    """Where a device is. `key` is our private key file, `host_key` its public key file."""

    host: str
    user: str
    key: Path
    host_key: Path
    port: int = 830
    timeout: float = 10.0
    poll: float = 2.0


class Netconf:
    """See the module."""

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name = name
        self._at = endpoint

    def capabilities(self) -> Capabilities:
        return Capabilities(atomic=True, notifies=False, power=False)

    def read(self) -> Table:
        with self._connected() as client:
            return self._running(client)

    def apply(self, batch: Batch, tag: str) -> Table:
        with self._connected() as client, self._locked(client):
            if self._running(client).tag != tag:
                raise MovedError(f"{self.name}: its table moved since it was read", hint=READ_AGAIN)
            self._edit(client, batch)
            try:
                client.commit()
            except _rpc_error() as error:
                client.discard_changes()
                raise RefusedError(f"{self.name} refuses: {error}", hint=READ_AGAIN) from error
            except Exception as error:
                raise PartialError(
                    f"{self.name}: no answer to the commit: {error}", hint=READ_AGAIN
                ) from error
            return self._running(client)

    def ports(self) -> Mapping[int, PortState]:
        with self._connected() as client:
            tree = self._get(client, "port-config")
        return {
            int(port.findtext(f"{{{MODEL}}}port-id", "")): PortState(
                Status.TUNED,
                port.findtext(f"{{{MODEL}}}label", ""),
                port.findtext(f"{{{MODEL}}}peer-port", ""),
            )
            for port in tree.iter(f"{{{MODEL}}}port")
        }

    def watch(self, stop: Event) -> Iterator[Change]:
        yield from polled(self, stop, self._at.poll)

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        manager = _client("ncclient.manager")
        try:
            client = manager.connect_ssh(
                host=self._at.host,
                port=self._at.port,
                username=self._at.user,
                key_filename=str(self._at.key),
                hostkey_b64=_public_key(self._at.host_key),
                allow_agent=False,
                look_for_keys=False,
                timeout=self._at.timeout,
            )
        except Exception as error:
            raise self._unreachable(error) from error
        try:
            yield client
        finally:
            client.close_session()

    @contextmanager
    def _locked(self, client: Any) -> Iterator[None]:
        try:
            client.lock("running")
            client.lock("candidate")
        except _rpc_error() as error:
            raise RefusedError(
                f"{self.name}: somebody else has its configuration locked: {error}",
                hint="wait for them, or end their connection at the device",
            ) from error
        try:
            yield
        finally:
            client.unlock("candidate")
            client.unlock("running")

    def _get(self, client: Any, container: str) -> Xml.Element:
        try:
            reply = client.get_config(
                "running", filter=("subtree", f'<{container} xmlns="{MODEL}"/>')
            )
            return Xml.fromstring(reply.data_xml)
        except Xml.ParseError as error:
            raise DeviceError(f"{self.name} answers nonsense: {error}", hint=READ_AGAIN) from error
        except Exception as error:
            raise self._unreachable(error) from error

    def _running(self, client: Any) -> Table:
        tree = self._get(client, "cross-connects")
        try:
            pairs = {
                int(pair.findtext(f"{{{MODEL}}}ingress", "")): int(
                    pair.findtext(f"{{{MODEL}}}egress", "")
                )
                for pair in tree.iter(f"{{{MODEL}}}pair")
            }
        except ValueError as error:
            raise DeviceError(f"{self.name} answers nonsense: {error}", hint=READ_AGAIN) from error
        return Table(pairs, fingerprint(pairs))

    def _edit(self, client: Any, batch: Batch) -> None:
        try:
            client.discard_changes()
            client.edit_config(_edit_xml(batch), target="candidate")
        except _rpc_error() as error:
            client.discard_changes()
            raise RefusedError(f"{self.name} refuses: {error}", hint=READ_AGAIN) from error

    def _unreachable(self, error: Exception) -> DeviceError:
        return DeviceError(
            f"{self.name}: no answer from {self._at.host} port {self._at.port}: {error}",
            hint="check the address, the key and the host key, then read the device's table",
        )


def _client(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise HostError(
            "ncclient is not installed", hint="pip install 'oncache[netconf]'"
        ) from error


def _rpc_error() -> type[Exception]:
    found: type[Exception] = _client("ncclient.operations").RPCError
    return found


def _public_key(path: Path) -> str:
    """Of a file with `TYPE BASE64 COMMENT`."""
    try:
        return path.read_text(encoding="utf-8").split()[1]
    except (OSError, IndexError) as error:
        raise ConfigError(
            f"host_key: {path} is no public key: {error}", hint="ssh-keyscan the device into it"
        ) from error


def _edit_xml(batch: Batch) -> str:
    """Deletions and additions in one edit; an ingress that is only re-patched is replaced."""
    root = Xml.Element(f"{{{BASE}}}config")
    table = Xml.SubElement(root, f"{{{MODEL}}}cross-connects")
    patched = {ingress for ingress, _ in batch.connect}
    for ingress, _ in batch.disconnect:
        if ingress not in patched:
            _pair(table, ingress, None).set(f"{{{BASE}}}operation", "delete")
    for ingress, egress in batch.connect:
        _pair(table, ingress, egress)
    return Xml.tostring(root, encoding="unicode")


def _pair(table: Xml.Element, ingress: int, egress: int | None) -> Xml.Element:
    pair = Xml.SubElement(table, f"{{{MODEL}}}pair")
    Xml.SubElement(pair, f"{{{MODEL}}}ingress").text = str(ingress)
    if egress is not None:
        Xml.SubElement(pair, f"{{{MODEL}}}egress").text = str(egress)
    return pair
