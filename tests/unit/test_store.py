# SPDX-License-Identifier: Apache-2.0
"""The store in a directory: compare and set, watches, leases, and what it refuses."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from fabric_agent.store import ConflictError, StoreError, open_store
from fabric_agent.store.directory import DirectoryStore
from oncache.core.errors import ConfigError

SECONDS = 20.0


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def test_a_document_is_read_as_written(store: DirectoryStore) -> None:
    written = store.put_if("nodes/host0", {"a": [1, "two"]}, 0)
    assert written is not None
    assert store.get("nodes/host0") == written
    assert store.get("nodes/host1") is None


def test_versions_grow_and_never_come_back(store: DirectoryStore) -> None:
    first = store.put_if("a/x", {}, 0)
    assert first is not None
    second = store.put_if("a/x", {"n": 2}, first.version)
    assert second is not None
    assert second.version > first.version
    store.put_if("a/x", None, second.version)
    again = store.put_if("a/x", {}, 0)
    assert again is not None
    assert again.version > second.version


@pytest.mark.parametrize("version", [0, 999])
def test_an_old_version_is_refused(store: DirectoryStore, version: int) -> None:
    store.put_if("a/x", {"n": 1}, 0)
    with pytest.raises(ConflictError, match="a/x"):
        store.put_if("a/x", {"n": 2}, version)
    with pytest.raises(ConflictError):
        store.put_if("a/y", {}, 7)
    kept = store.get("a/x")
    assert kept is not None
    assert kept.value == {"n": 1}


def test_list_is_by_folder_and_sorted(store: DirectoryStore) -> None:
    for key in ("b/z", "b/a", "c/a"):
        store.put_if(key, {}, 0)
    assert [document.key for document in store.list("b")] == ["b/a", "b/z"]
    assert store.list("nothing") == ()


def _count(root: str, times: int) -> None:
    store = DirectoryStore(root)
    for _ in range(times):
        while True:
            document = store.get("a/count")
            value = {"n": document.value["n"] + 1 if document else 1}
            try:
                store.put_if("a/count", value, document.version if document else 0)
                break
            except ConflictError:
                continue


def test_no_write_is_lost_between_processes(store: DirectoryStore) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_count, args=(str(store.root), 15)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS * 2)
        assert process.exitcode == 0
    document = store.get("a/count")
    assert document is not None
    assert document.value == {"n": 45}


def test_a_watch_tells_of_writes_and_removals(store: DirectoryStore) -> None:
    with store.watch("a") as watch:
        assert watch.changes() == frozenset()
        written = store.put_if("a/x", {}, 0)
        store.put_if("b/x", {}, 0)
        assert watch.changes(SECONDS) == {"a/x"}
        assert written is not None
        store.put_if("a/x", None, written.version)
        assert watch.changes(SECONDS) == {"a/x"}
        assert watch.fileno() >= 0


def test_a_lease_has_one_holder(store: DirectoryStore) -> None:
    lease = store.lease("controller")
    assert lease is not None
    assert store.lease("controller") is None
    assert DirectoryStore(store.root).lease("controller") is None
    assert lease.held()
    with lease:
        pass
    assert not lease.held()
    again = store.lease("controller")
    assert again is not None
    again.close()


@pytest.mark.parametrize("key", ["x", "a/b/c", "../x", "a/../b", "a/.x", "", "a/", ".store/x"])
def test_what_is_no_key(store: DirectoryStore, key: str) -> None:
    with pytest.raises(StoreError, match="not a key"):
        store.get(key)


def test_a_newer_format_is_refused_and_kept(store: DirectoryStore) -> None:
    store.put_if("a/x", {}, 0)
    path = store.root / "a" / "x.json"
    newer = json.dumps({"format": 2, "version": 1, "value": {}})
    path.write_text(newer)
    with pytest.raises(StoreError, match="newer version"):
        store.get("a/x")
    with pytest.raises(StoreError, match="newer version"):
        store.put_if("a/x", {}, 1)
    assert path.read_text() == newer


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1, "version": "x"}'])
def test_what_is_no_document(store: DirectoryStore, text: str) -> None:
    store.put_if("a/x", {}, 0)
    (store.root / "a" / "x.json").write_text(text)
    with pytest.raises(StoreError, match="a/x is not a document"):
        store.get("a/x")


def test_a_store_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        DirectoryStore(tmp_path / "file")


def test_stores_are_opened_by_name(tmp_path: Path) -> None:
    assert open_store(f"dir:{tmp_path}/s").list("a") == ()
    with pytest.raises(ConfigError):
        open_store("etcd://127.0.0.1:2379")


def test_a_watch_works_with_a_descriptor_that_select_refuses(tmp_path: Path) -> None:
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        store = open_store(f"dir:{tmp_path}/store")
        with store.watch("nodes") as watch:
            assert watch.fileno() > 1024
            store.put_if("nodes/a", {"format": 1}, 0)
            assert watch.changes(5.0) == {"nodes/a"}
    finally:
        for file in taken:
            os.close(file)
