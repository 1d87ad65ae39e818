# SPDX-License-Identifier: Apache-2.0
"""A fabric from YAML, checked completely. Every complaint names the entry by its path.

An entry stands for one element or, with a range in its name (``leaf[0-127]``), for many; addresses
are then counted on. docs/slices.md describes the format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fabric_agent.slices.draft import Draft, Ends, LeafSwitch, Switch
from fabric_agent.slices.elements import Broken
from fabric_agent.slices.model import Fabric
from fabric_agent.slices.section import Section
from oncache.core.errors import ConfigError

T = TypeVar("T", bound=Switch)

RANGE = re.compile(r"([^\[\]]*)\[(\d+)-(\d+)\]([^\[\]]*)")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
DEVICE = re.compile(r"[^\s/:]{1,15}")
MOST = 1 << 16  # elements of one kind
WIRINGS = ("together", "rails")
NO_WORDS: tuple[str, ...] = ()


def load(path: Path) -> Fabric:
    """Read and check ``path``; ConfigError names what is wrong and the remedy."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(
            f"cannot read {path}: {reason}", hint="name the file that describes the fabric"
        ) from error
    return parse(text, str(path))


def parse(text: str, source: str = "fabric") -> Fabric:
    """Check a fabric given as YAML; ``source`` is its name in messages."""
    # The C loader where PyYAML has it: without ranges a fabric has tens of thousands of lines.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: not valid YAML", hint="correct it there") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: not a table", hint="begin with 'leaves:'")
    return fabric(document)


def fabric(document: Mapping[str, Any]) -> Fabric:
    """Check a fabric given as plain data."""
    top = Section("", dict(document))
    top.only("leaves", "spines", "links", "optics", "hosts", "failed")
    draft = Draft()
    for section in _entries(top, "leaves"):
        _leaves(draft, section)
    for section in _entries(top, "spines"):
        _spines(draft, section)
    if ("links" in top) == ("optics" in top):
        raise ConfigError(
            "a fabric has either links or optics",
            hint="links: [{leaves: 'leaf[0-3]', spines: 'spine[0-3]'}] cables all to all",
        )
    if "optics" in top:
        _optics(draft, top.section("optics"))
    else:
        for section in _entries(top, "links"):
            _links(draft, section)
    for section in _entries(top, "hosts"):
        _hosts(draft, section)
    failed = frozenset(top.take("failed", _words, NO_WORDS))
    done = draft.done()
    Broken.of(done, failed)  # complains of what is not there
    return replace(done, failed=failed)


def _leaves(draft: Draft, section: Section) -> None:
    section.only("name", "prefix", "ports")
    first = section.take("prefix", _network)
    for count, name in enumerate(section.take("name", _names)):
        start = int(first.network_address) + count * first.num_addresses
        if start >= 1 << 32:
            raise ConfigError(f"{section.name('prefix')}: no address left", hint="begin lower")
        draft.leaves[draft.name(section.path, name)] = LeafSwitch(
            *(name, len(draft.leaves), section.path, _most_ports(section)),
            prefix=IPv4Network((start, first.prefixlen)),
        )


def _spines(draft: Draft, section: Section) -> None:
    section.only("name", "ports")
    for name in section.take("name", _names):
        draft.spines[draft.name(section.path, name)] = Switch(
            name, len(draft.spines), section.path, _most_ports(section)
        )


def _most_ports(section: Section) -> int | None:
    return section.take("ports", _integer(1, MOST)) if "ports" in section else None


def _links(draft: Draft, section: Section) -> None:
    if "leaf" in section:
        return _one_link(draft, section)
    section.only("leaves", "spines", "parallel", "addresses")
    leaves = _switches(section, "leaves", draft.leaves)
    spines = _switches(section, "spines", draft.spines)
    parallel = section.take("parallel", _integer(1, 256), 1)
    pairs = _pairs(section)
    for leaf in leaves:
        for spine in spines:
            for _ in range(parallel):
                names = (f"up{len(leaf.ports)}", f"p{len(spine.ports)}")
                draft.cable(section.path, leaf, spine, names, next(pairs))
    return None


def _one_link(draft: Draft, section: Section) -> None:
    section.only("leaf", "spine", "leaf_port", "spine_port", "leaf_address", "spine_address")
    (leaf,) = _switches(section, "leaf", draft.leaves)
    (spine,) = _switches(section, "spine", draft.spines)
    names = (section.take("leaf_port", _device), section.take("spine_port", _device))
    ends: Ends = (None, None)
    if "leaf_address" in section or "spine_address" in section:
        ends = (section.take("leaf_address", _address), section.take("spine_address", _address))
    draft.cable(section.path, leaf, spine, names, ends)


def _pairs(section: Section) -> Iterator[Ends]:
    """The two ends of each /31 of ``addresses``, leaf first; no addresses if it is absent."""
    if "addresses" not in section:
        yield from repeat((None, None))
    network = section.take("addresses", _network)
    for value in range(int(network.network_address), int(network.broadcast_address), 2):
        yield IPv4Address(value), IPv4Address(value + 1)
    raise ConfigError(
        f"{section.name('addresses')}: {network} is too small", hint="each link takes two"
    )


def _optics(draft: Draft, section: Section) -> None:
    section.only("name", "per_spine")
    draft.optics = tuple(draft.name(section.path, name) for name in section.take("name", _names))
    per_spine = section.take("per_spine", _integer(1, 256), 1)
    for optical in range(len(draft.optics)):
        for leaf in draft.leaves.values():
            draft.fibre(section.path, leaf, optical, f"up{optical}")
        for spine in draft.spines.values():
            for _ in range(per_spine):
                draft.fibre(section.path, spine, optical, f"p{len(spine.ports)}")


def _hosts(draft: Draft, section: Section) -> None:
    if "nics" in section:
        return _one_host(draft, section)
    section.only("name", "devices", "leaves", "wiring")
    names = section.take("name", _names)
    devices = section.take("devices", _devices)
    leaves = _switches(section, "leaves", draft.leaves)
    rails = section.take("wiring", _one_of(*WIRINGS), "together") == "rails"
    if rails and len(leaves) % len(devices):
        raise ConfigError(
            f"{section.path}: {len(devices)} rails do not divide {len(leaves)} leaves",
            hint="rails need a leaf per device, or several whole groups of them",
        )
    group = len(devices) if rails else 1
    groups = len(leaves) // group
    if len(names) % groups:
        raise ConfigError(
            f"{section.path}: {len(names)} hosts do not divide evenly over {groups} "
            f"{'groups of leaves' if rails else 'leaves'}",
            hint="write an entry for each group of leaves",
        )
    for count, name in enumerate(names):
        _host(draft, section.path, name)
        first = count // (len(names) // groups) * group
        for rail, device in enumerate(devices):
            _counted_nic(draft, section.path, name, device, leaves[first + rail * rails])
    return None


def _host(draft: Draft, path: str, name: str) -> None:
    draft.hosts[draft.name(path, name)] = []


def _counted_nic(draft: Draft, path: str, host: str, device: str, leaf: LeafSwitch) -> None:
    """The next /31 of the leaf's prefix: gateway first, NIC second."""
    count = len(leaf.nics)
    gateway = int(leaf.prefix.network_address) + 2 * count
    if 2 * count + 1 >= leaf.prefix.num_addresses:
        raise ConfigError(
            f"{path}: {leaf.prefix} of {leaf.name} is too small for {count + 1} NICs",
            hint="each NIC takes two addresses",
        )
    draft.nic(
        *(path, host, device, leaf, f"down{count}"),
        IPv4Interface((gateway + 1, 31)),
        IPv4Address(gateway),
    )


def _one_host(draft: Draft, section: Section) -> None:
    section.only("name", "nics")
    name = section.take("name", _word)
    _host(draft, section.path, name)
    for nic in _entries(section, "nics"):
        nic.only("device", "leaf", "leaf_port", "address", "gateway")
        (leaf,) = _switches(nic, "leaf", draft.leaves)
        draft.nic(
            *(nic.path, name, nic.take("device", _device), leaf, nic.take("leaf_port", _device)),
            nic.take("address", _interface),
            nic.take("gateway", _address),
        )


def _switches(section: Section, key: str, known: Mapping[str, T]) -> list[T]:
    names = section.take(key, _names)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{section.name(key)}: there is no {name}", hint=f"there are {_few(known)}"
            )
    return [known[name] for name in names]


def _few(names: Mapping[str, object]) -> str:
    shown = list(names)
    return ", ".join(shown if len(shown) < 8 else [*shown[:3], "…", shown[-1]]) or "none"


def _entries(section: Section, key: str) -> list[Section]:
    entries = section.take(key, _list)
    named = [(f"{section.name(key)}[{index}]", entry) for index, entry in enumerate(entries)]
    for path, entry in named:
        if not isinstance(entry, dict):
            raise wrong(path, entry, "a table such as {name: 'leaf[0-3]'}")
    return [Section(path, entry) for path, entry in named]


def wrong(path: str, raw: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{path} is {raw!r}", hint=f"it must be {wanted}")


def _list(path: str, raw: Any) -> list[Any]:
    if not isinstance(raw, list) or not raw:
        raise wrong(path, raw, "a list of entries")
    return raw


def _words(path: str, raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(word, str) for word in raw):
        raise wrong(path, raw, "a list of names")
    return tuple(raw)


def _expanded(pattern: re.Pattern[str], wanted: str) -> Callable[[str, Any], list[str]]:
    def read(path: str, raw: Any) -> list[str]:
        names = [str(raw)]
        if match := RANGE.fullmatch(str(raw)):
            before, first, last, after = match.groups()
            if not 0 <= int(last) - int(first) < MOST:
                raise wrong(path, raw, f"a range from low to high, {MOST} names at most")
            names = [f"{before}{count}{after}" for count in range(int(first), int(last) + 1)]
        if not isinstance(raw, str) or not all(map(pattern.fullmatch, names)):
            raise wrong(path, raw, wanted)
        return names

    return read


_names = _expanded(WORD, "a name such as leaf0, or many such as leaf[0-7]")
_devices = _expanded(DEVICE, "a device such as eth0, or many such as eth[0-7]")


def _word(path: str, raw: Any) -> str:
    if not isinstance(raw, str) or not WORD.fullmatch(raw):
        raise wrong(path, raw, "a name of letters, digits, dots and dashes")
    return raw


def _device(path: str, raw: Any) -> str:
    if not isinstance(raw, str) or not DEVICE.fullmatch(raw):
        raise wrong(path, raw, "the name of a port, 1 to 15 characters")
    return raw


def _one_of(*words: str) -> Callable[[str, Any], str]:
    def read(path: str, raw: Any) -> str:
        if raw not in words:
            raise wrong(path, raw, " or ".join(words))
        return str(raw)

    return read


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def read(path: str, raw: Any) -> int:
        if isinstance(raw, bool) or not isinstance(raw, int) or not low <= raw <= high:
            raise wrong(path, raw, f"a whole number from {low} to {high}")
        return raw

    return read


def _address(path: str, raw: Any) -> IPv4Address:
    try:
        return IPv4Address(str(raw))
    except ValueError as error:
        raise wrong(path, raw, "an IPv4 address such as 10.0.0.1") from error


def _interface(path: str, raw: Any) -> IPv4Interface:
    try:
        return IPv4Interface(str(raw))
    except ValueError as error:
        raise wrong(path, raw, "an address with its prefix length, such as 10.0.0.1/31") from error


def _network(path: str, raw: Any) -> IPv4Network:
    try:
        return IPv4Network(str(raw))
    except ValueError as error:
        raise wrong(path, raw, "an IPv4 network such as 10.0.0.0/24, host bits zero") from error
