# SPDX-License-Identifier: Apache-2.0
"""Maps as typed records: single entries, batched dumps, per-CPU sums, shared memory."""

import ctypes as ct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncache.core import libbpf, maps
from oncache.core.libbpf import Object
from oncache.core.maps import Map, PerCpuArray, Shared
from oncache.core.skb import SkbContext
from tests.bpf import toy

pytestmark = pytest.mark.root

FRAME = b"\x02" * 12 + b"\x88\xb5" + bytes(46)
MANY = 65_536


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.compile_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def loaded(path: Path) -> Iterator[Object]:
    with closing(toy.opened(path)) as it:
        # An LRU map evicts before it is full; twice the room keeps every entry.
        it.resize("flows", 2 * MANY)
        it.load()
        yield it


@pytest.fixture
def flows(loaded: Object) -> Map[Any, Any]:
    return Map(loaded.maps["flows"], *loaded.btf.map_types("flows"))


def fill(flows: Map[Any, Any], count: int) -> None:
    key, value = maps.map_types(flows.fd)
    keys, values = (key * count)(), (value * count)()
    for i in range(count):
        keys[i].address, keys[i].port = i, i & 0xFFFF
        values[i].packets = i
    libbpf.update_batch(flows.fd, keys, values)


def dumped(flows: Map[Any, Any]) -> dict[int, int]:
    """Address -> packets of every entry."""
    rows = flows.columns(("address", "port"), ("packets",))
    return {address: packets for (address, _port), (packets,) in rows}


def test_an_entry_is_written_read_and_deleted(loaded: Object, flows: Map[Any, Any]) -> None:
    key, value = loaded.btf.map_types("flows")
    web = key(address=0x0A000001, port=80, protocol=6)
    assert flows.lookup(web) is None
    flows.update(web, value(packets=3, mac=(1, 2, 3, 4, 5, 6)))
    found = flows.lookup(web)
    assert found is not None
    assert maps.to_dict(found) == {"packets": 3, "ifindex": 0, "mac": [1, 2, 3, 4, 5, 6]}
    assert (flows.delete(web), flows.delete(web)) == (True, False)


def test_types_come_from_the_map_alone(loaded: Object) -> None:
    key, value = maps.map_types(loaded.maps["flows"])
    wanted_key, wanted_value = loaded.btf.map_types("flows")
    assert key._fields_ == wanted_key._fields_
    assert ct.sizeof(value) == ct.sizeof(wanted_value)


def test_an_empty_map_has_no_items(flows: Map[Any, Any]) -> None:
    assert list(flows.items()) == []
    assert dumped(flows) == {}
    assert flows.count() == 0


def test_a_full_dump_is_complete(flows: Map[Any, Any]) -> None:
    fill(flows, MANY)
    assert dumped(flows) == {i: i for i in range(MANY)}
    assert flows.count() == MANY


def test_items_stay_valid_after_the_dump(flows: Map[Any, Any]) -> None:
    fill(flows, 10_000)
    items = list(flows.items())
    assert {(key.address, value.packets) for key, value in items} == {(i, i) for i in range(10_000)}


def test_a_bucket_larger_than_the_chunk_is_read(
    flows: Map[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps, "_CHUNK", 1)
    fill(flows, 1000)
    assert len(dumped(flows)) == 1000


def test_counters_of_all_cpus_add_up(loaded: Object) -> None:
    counts = PerCpuArray(loaded.maps["counts"], loaded.btf.map_types("counts")[1])
    for _ in range(3):
        libbpf.test_run(loaded.programs["from_pod"], FRAME)
    values = counts.read(0)
    assert len(values) == libbpf.possible_cpus()
    seen = {"packets": 3, "bytes": 3 * len(FRAME)}
    assert maps.total(values) == {"seen": seen, "errors": 0}
    assert maps.total(counts.read(1))["seen"] == {"packets": 0, "bytes": 0}
    with pytest.raises(IndexError):
        counts.read(2)


def test_a_stored_field_is_seen_by_the_program_at_once(loaded: Object) -> None:
    settings = Shared(loaded.maps["settings"], loaded.btf.map_types("settings")[1])
    assert len(settings.value) == 3
    settings.value[0].mark = 0x55
    run = libbpf.test_run(loaded.programs["from_pod"], FRAME, SkbContext())
    assert run.ctx is not None
    assert run.ctx.mark == 0x55


def test_shared_memory_and_syscalls_see_one_map(loaded: Object) -> None:
    key, value = loaded.btf.map_types("settings")
    settings = Shared(loaded.maps["settings"], value)
    Map(loaded.maps["settings"], key, value).update(key(2), value(deadline=1 << 40, mark=7))
    assert maps.to_dict(settings.value[2]) == {"deadline": 1 << 40, "mark": 7}
