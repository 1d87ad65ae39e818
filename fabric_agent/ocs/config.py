# SPDX-License-Identifier: Apache-2.0
"""The circuits' configuration and the demand file, checked completely before anything is touched.

    fabric: {pods: 4, spine_indices: 2, uplinks: 4}
    state_dir: /var/lib/oncache/ocs
    devices:
      - {name: ocs-a, driver: restconf, url: "https://10.0.0.9", size: 32, switches: ["0/0", "0/1"],
         credentials: /etc/oncache/ocs-a.credentials, ca: /etc/oncache/ocs-ca.pem}
    policy: {floor: 0.5, moves_per_stage: 64, moves_per_hour: 3600, settle: 1.0}
    transport: {timeout: 20, retry: 7}
    failed_ports: [[pod, spine, uplink], ...]

`switches` may be left out when one device holds all. A complaint names its key by its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fabric_agent.ocs.demand import Clos, Demand, Job, Leaf, Missing, leaf_demand, logical_topology
from fabric_agent.ocs.devices import Device, Inventory
from fabric_agent.ocs.drivers import netconf, restconf
from fabric_agent.ocs.drivers.base import Driver, credentials
from fabric_agent.ocs.stages import PodPair, Policy, Transport
from fabric_agent.ocs.wiring import Fabric, Port, Switch
from oncache.core.errors import ConfigError

Json = Mapping[str, Any]

RESTCONF_KEYS = ("url", "root", "credentials", "ca", "timeout", "poll", "stream")
NETCONF_KEYS = ("host", "port", "user", "key", "host_key", "timeout", "poll")
PATHS = ("ca", "key", "host_key")


@dataclass(frozen=True)
class Config:
    """Everything `fabric-agent ocs` needs."""

    fabric: Fabric
    inventory: Inventory
    drivers: Mapping[str, Driver]
    state_dir: Path
    policy: Policy
    transport: Transport
    failed: frozenset[Port]


def load(path: Path) -> Config:
    """Read and check. ConfigError for anything unknown, missing or impossible."""
    root = _Section(_read(path), "")
    fabric_keys = root.section("fabric")
    fabric = Fabric(*(fabric_keys.integer(key) for key in ("pods", "spine_indices", "uplinks")))
    fabric_keys.done()
    listed = root.sections("devices")
    devices = [_device(section, fabric, alone=len(listed) == 1) for section in listed]
    drivers = {section.text("name"): _driver(section) for section in listed}
    for section in listed:
        section.done()
    failed = frozenset(_port(each) for each in root.take("failed_ports", []))
    config = Config(
        fabric,
        Inventory(fabric, devices),
        drivers,
        Path(root.text("state_dir")),
        _policy(root.section("policy", {})),
        _transport(root.section("transport", {})),
        failed,
    )
    root.done()
    return config


def _read(path: Path) -> Json:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="name a file with -c") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}", hint="correct it") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no keys", hint="see docs/circuits.md")
    return values


class _Section:
    """One mapping of the file, and which of its keys were taken."""

    def __init__(self, values: object, path: str) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: not a mapping", hint="write key: value")
        self._values: Json = values
        self._path = path
        self._taken: set[str] = set()

    def where(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str, default: Any = None) -> Any:
        self._taken.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where(key)} is missing", hint="see docs/circuits.md")
        return value

    def has(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str) -> str:
        return str(self._typed(key, str, "a text"))

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._typed(key, int, "a whole number", default))

    def number(self, key: str, default: float) -> float:
        return float(self._typed(key, (int, float), "a number", default))

    def _typed(self, key: str, kind: Any, called: str, default: Any = None) -> Any:
        value = self.take(key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{self.where(key)}: {value!r} is not {called}", hint="correct it")
        return value

    def section(self, key: str, default: Json | None = None) -> _Section:
        return _Section(self.take(key, default), self.where(key))

    def sections(self, key: str, default: list[Json] | None = None) -> list[_Section]:
        listed = self.take(key, default)
        if not isinstance(listed, list):
            raise ConfigError(f"{self.where(key)}: not a list", hint="begin each item with a dash")
        return [_Section(each, f"{self.where(key)}[{n}]") for n, each in enumerate(listed)]

    def done(self) -> None:
        """ConfigError for a key that nobody took."""
        for key in sorted(set(self._values) - self._taken):
            raise ConfigError(f"unknown key {self.where(key)}", hint="remove or correct it")


def _device(section: _Section, fabric: Fabric, *, alone: bool) -> Device:
    every = [f"{h}/{k}" for h in range(fabric.indices) for k in range(2 * fabric.pairs)]
    names = section.take("switches", every if alone else None)
    return Device(section.text("name"), section.integer("size"), tuple(map(_switch, names)))


def _switch(name: str) -> Switch:
    group, slash, number = str(name).partition("/")
    if not (slash and group.isdigit() and number.isdigit()):
        raise ConfigError(f"{name!r} names no ocs", hint="write SPINE_INDEX/NUMBER, as in 0/3")
    return Switch(int(group), int(number))


def _port(values: object) -> Port:
    if not isinstance(values, list) or len(values) != 3:
        raise ConfigError(f"failed_ports: {values!r} is no port", hint="[pod, spine, uplink]")
    return Port(*map(int, values))


def _driver(section: _Section) -> Driver:
    kinds: Mapping[str, Callable[[_Section], Driver]] = {"restconf": _restconf, "netconf": _netconf}
    kind = section.text("driver")
    if kind not in kinds:
        raise ConfigError(
            f"{section.where('driver')}: no driver {kind}", hint=f"one of {', '.join(kinds)}"
        )
    return kinds[kind](section)


def _restconf(section: _Section) -> Driver:
    given = _given(section, RESTCONF_KEYS)
    if "credentials" in given:
        given["credentials"] = credentials(Path(given["credentials"]))
    if "url" not in given:
        raise ConfigError(f"{section.where('url')} is missing", hint="https://HOST[:PORT]")
    return restconf.Restconf(section.text("name"), restconf.Endpoint(**given))


def _netconf(section: _Section) -> Driver:
    given = _given(section, NETCONF_KEYS)
    for key in ("host", "user", "key", "host_key"):
        if key not in given:
            raise ConfigError(f"{section.where(key)} is missing", hint="see docs/circuits.md")
    return netconf.Netconf(section.text("name"), netconf.Endpoint(**given))


def _given(section: _Section, keys: tuple[str, ...]) -> dict[str, Any]:
    given = {key: section.take(key) for key in keys if section.has(key)}
    return {key: Path(value) if key in PATHS else value for key, value in given.items()}


def _policy(section: _Section) -> Policy:
    known = Policy()
    policy = Policy(
        floor=section.number("floor", known.floor),
        moves_per_stage=section.integer("moves_per_stage", known.moves_per_stage),
        moves_per_hour=section.number("moves_per_hour", known.moves_per_hour),
        settle=section.number("settle", known.settle),
    )
    section.done()
    return policy


def _transport(section: _Section) -> Transport:
    known = Transport()
    transport = Transport(
        section.integer("timeout", known.timeout), section.integer("retry", known.retry)
    )
    section.done()
    return transport


@dataclass(frozen=True)
class Wanted:
    """A demand file: links per spine index, or jobs from which they follow.

    `missing`: what the jobs want and the leaves cannot carry. `jobs`: the pod pairs of each job;
    links between those of `protected` jobs are not to be moved.
    """

    demand: Demand
    missing: tuple[Missing, ...] = ()
    jobs: Mapping[str, frozenset[PodPair]] = field(default_factory=dict)
    protected: frozenset[str] = frozenset()


def load_demand(path: Path, fabric: Fabric) -> Wanted:
    """Read a demand file. ConfigError or DemandError, naming the element."""
    root = _Section(_read(path), "")
    wanted = _from_links(root, fabric) if root.has("links") else _from_jobs(root, fabric)
    root.done()
    wanted.demand.require(fabric)
    return wanted


def _from_links(root: _Section, fabric: Fabric) -> Wanted:
    """`links: {SPINE_INDEX: [[pod, pod, links], ...]}`; indices left out want nothing."""
    matrices = [[[0] * fabric.pods for _ in range(fabric.pods)] for _ in range(fabric.indices)]
    for index, rows in root.take("links").items():
        for row in rows:
            try:
                a, b, links = map(int, row)
                matrices[index][a][b] += links
                matrices[index][b][a] += links
            except (TypeError, ValueError, IndexError) as error:
                raise ConfigError(
                    f"links.{index}: {row!r}: {error}", hint="write [pod, pod, links]"
                ) from error
    return Wanted(Demand.of(matrices))


def _from_jobs(root: _Section, fabric: Fabric) -> Wanted:
    """`clos: {leaves, parallel}` and `jobs: [{name, stages: [[[pod, leaf], ...], ...]}, ...]`."""
    section = root.section("clos")
    clos = Clos(fabric, section.integer("leaves"), section.integer("parallel"))
    section.done()
    jobs, protected = [], set()
    for each in root.sections("jobs"):
        jobs.append(_job(each))
        if each.take("protected", False):
            protected.add(jobs[-1].name)
        each.done()
    split = logical_topology(clos, jobs)
    pairs = {
        job.name: frozenset((one.pod, other.pod) for one, other in leaf_demand(job)) for job in jobs
    }
    return Wanted(split.demand, split.missing, pairs, frozenset(protected))


def _job(section: _Section) -> Job:
    try:
        servers = tuple(
            tuple(Leaf(*map(int, leaf)) for leaf in stage) for stage in section.take("stages")
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{section.where('stages')}: {error}",
            hint="a list of stages of [pod, leaf] per replica",
        ) from error
    return Job(
        section.text("name"), servers, section.integer("tensor", 8), section.integer("experts", 1)
    )
