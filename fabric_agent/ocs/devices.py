# SPDX-License-Identifier: Apache-2.0
"""Which physical device holds which logical switches, and on which of its ports.

A device of N x N ports holds N // pods logical switches one after the other: the n-th has ingress
ports n * pods + 1 + pod and egress ports N + n * pods + 1 + pod. Other ports are other people's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fabric_agent.ocs.wiring import REREAD, Circuit, CircuitError, Fabric, Switch
from oncache.core.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """An optical switch of `size` x `size` ports that holds `switches`."""

    name: str
    size: int
    switches: tuple[Switch, ...]


class CrossConnect(NamedTuple):
    """A circuit as a device numbers it."""

    device: str
    ingress: int
    egress: int


Tables = Mapping[str, Mapping[int, int]]  # device -> ingress -> egress


class Inventory:
    """All devices of a fabric. ConfigError unless each logical switch has one home with room."""

    def __init__(self, fabric: Fabric, devices: Iterable[Device]) -> None:
        self.fabric = fabric
        self.devices = {device.name: device for device in devices}
        self._place: dict[Switch, tuple[Device, int]] = {}
        for device in self.devices.values():
            if len(device.switches) * fabric.pods > device.size:
                raise ConfigError(
                    f"device {device.name}: {len(device.switches)} switches of {fabric.pods} pods "
                    f"need more than its {device.size} ports",
                    hint="give it fewer switches",
                )
            for number, switch in enumerate(device.switches):
                if switch in self._place:
                    raise ConfigError(f"ocs {switch} is on two devices", hint="name it once")
                self._place[switch] = device, number * fabric.pods
        self._require_all()

    def _require_all(self) -> None:
        wanted = {
            Switch(index, number)
            for index in range(self.fabric.indices)
            for number in range(2 * self.fabric.pairs)
        }
        for switch in sorted(wanted - set(self._place)):
            raise ConfigError(f"no device holds ocs {switch}", hint="add it to a device's switches")
        for switch in sorted(set(self._place) - wanted):
            raise ConfigError(f"the fabric has no ocs {switch}", hint="remove it from its device")

    def cross_connect(self, circuit: Circuit) -> CrossConnect:
        """Where a circuit is made."""
        device, offset = self._place[circuit.switch]
        return CrossConnect(
            device.name, offset + circuit.a + 1, device.size + offset + circuit.b + 1
        )

    def tables(self, circuits: Iterable[Circuit]) -> dict[str, dict[int, int]]:
        """What each device should hold of ours."""
        tables: dict[str, dict[int, int]] = {name: {} for name in self.devices}
        for circuit in circuits:
            made = self.cross_connect(circuit)
            tables[made.device][made.ingress] = made.egress
        return tables

    def ours(self, name: str, pairs: Mapping[int, int]) -> dict[int, int]:
        """The cross-connects on our ports; CircuitError for one that is half ours."""
        device = self.devices[name]
        used = len(device.switches) * self.fabric.pods
        mine = {}
        for ingress, egress in pairs.items():
            inside = (ingress <= used, egress - device.size <= used)
            if any(inside) and not all(inside):
                raise CircuitError(
                    f"{name}: {ingress} to {egress} joins our ports to somebody else's",
                    hint="find out who made it and take it out at the device",
                )
            if all(inside):
                mine[ingress] = egress
        return mine

    def circuits(self, tables: Tables) -> list[Circuit]:
        """From the devices' tables; CircuitError for one that crosses two logical switches."""
        found = []
        for name, pairs in sorted(tables.items()):
            device = self.devices[name]
            for ingress, egress in sorted(self.ours(name, pairs).items()):
                number, a = divmod(ingress - 1, self.fabric.pods)
                other, b = divmod(egress - device.size - 1, self.fabric.pods)
                if number != other:
                    raise CircuitError(
                        f"{name}: {ingress} to {egress} joins two logical switches", hint=REREAD
                    )
                found.append(Circuit(device.switches[number], a, b))
        return found
