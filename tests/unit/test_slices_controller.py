# SPDX-License-Identifier: Apache-2.0
"""The controller: requests answered once, nothing given twice, documents that follow."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fabric_agent.slices import commands, table
from fabric_agent.slices.controller import Controller, read_table
from fabric_agent.slices.invariants import violations
from fabric_agent.slices.table import RefusedError, Table
from fabric_agent.store.directory import DirectoryStore
from oncache.core.errors import ConfigError, NotLoadedError
from tests.unit.slices_fabrics import cabled, document

FABRIC = cabled()  # 16 GPUs
SECONDS = 30.0


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def ask(store: DirectoryStore, key: str, **request: object) -> None:
    store.put_if(f"requests/{key}", {"format": 1, **request}, 0)


def answer(store: DirectoryStore, key: str) -> dict[str, Any]:
    document = store.get(f"requests/{key}")
    assert document is not None
    value: dict[str, Any] = document.value["answer"]
    return value


def test_a_request_becomes_documents(store: DirectoryStore) -> None:
    controller = Controller(store, FABRIC)
    ask(store, "1", verb="request", name="job", gpus=8)
    controller.serve()
    assert answer(store, "1")["ok"]
    nodes = {each.key for each in store.list("nodes")}
    assert nodes == {f"nodes/host{n}" for n in range(4)}
    switches = {each.key for each in store.list("switches")}
    assert switches == {
        "switches/leaf0",
        "switches/leaf1",
        *(f"switches/spine{n}" for n in range(4)),
    }
    assert [each.key for each in store.list("jobs")] == ["jobs/job"]
    ask(store, "2", verb="release", name="job")
    controller.serve()
    assert not [*store.list("nodes"), *store.list("switches"), *store.list("jobs")]


def test_a_refusal_is_an_answer_and_changes_nothing(store: DirectoryStore) -> None:
    controller = Controller(store, FABRIC)
    ask(store, "1", verb="request", name="job", gpus=17)
    ask(store, "2", verb="dance")
    ask(store, "3", verb="request", name="../x", gpus=1)
    ask(store, "4", verb="request", name="x", gpus="many")
    controller.serve()
    assert "larger than the fabric" in answer(store, "1")["error"]
    assert not any(answer(store, key)["ok"] for key in "1234")
    assert read_table(store, FABRIC) == (Table(), 0)


def test_two_controllers_never_give_a_link_twice(store: DirectoryStore) -> None:
    controllers = [Controller(store, FABRIC), Controller(DirectoryStore(store.root), FABRIC)]
    for number in range(10):
        ask(store, f"r{number}", verb="request", name=f"job{number}", gpus=3)
    failures: list[BaseException] = []

    def serve(controller: Controller) -> None:
        try:
            controller.serve()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=serve, args=(each,)) for each in controllers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    now, _ = read_table(store, FABRIC)
    assert not failures
    assert not list(violations(FABRIC, now.slices))
    assert sum(answer(store, f"r{number}")["ok"] for number in range(10)) == len(now.slices) > 3


def test_asked_twice_is_done_once() -> None:
    request = {"verb": "request", "name": "job", "gpus": 8}
    once, first = table.apply(FABRIC, Table(), "key", request)
    twice, second = table.apply(FABRIC, once, "key", request)
    assert (twice, second) == (once, first)
    with pytest.raises(ConfigError, match="already"):
        table.apply(FABRIC, once, "other", request)


def test_a_controller_that_died_is_made_good(store: DirectoryStore) -> None:
    ask(store, "1", verb="request", name="job", gpus=8)
    now, _ = table.apply(
        FABRIC, Table(), "requests/1", {"verb": "request", "name": "job", "gpus": 8}
    )
    store.put_if(table.KEY, table.encode(FABRIC, now), 0)  # and there it died
    store.put_if("nodes/host7", {"stale": True}, 0)
    Controller(store, FABRIC).serve()
    assert answer(store, "1")["ok"]
    assert {each.key for each in store.list("nodes")} == {f"nodes/host{n}" for n in range(4)}


def test_failures_are_kept_and_heal() -> None:
    now, _ = table.apply(FABRIC, Table(), "k", {"verb": "request", "name": "job", "gpus": 16})
    hurt, told = table.apply(FABRIC, now, "f", {"verb": "fail", "name": "spine0"})
    assert told["slices"] == [{"slice": "job", "outcome": "on backup uplinks, load 2 at most"}]
    assert table.decode(FABRIC, json.loads(json.dumps(table.encode(FABRIC, hurt)))) == hurt
    well, _ = table.apply(FABRIC, hurt, "r", {"verb": "restore", "name": "spine0"})
    assert well == now
    with pytest.raises(ConfigError, match="no element"):
        table.apply(FABRIC, now, "f", {"verb": "fail", "name": "moon"})


def test_numbers_are_not_used_again() -> None:
    now, _ = table.apply(FABRIC, Table(), "a", {"verb": "request", "name": "a", "gpus": 4})
    now, _ = table.apply(FABRIC, now, "b", {"verb": "release", "name": "a"})
    now, _ = table.apply(FABRIC, now, "c", {"verb": "request", "name": "a", "gpus": 4})
    assert now.slice("a").number == 2


def test_another_fabric_or_a_newer_table_is_refused() -> None:
    now, _ = table.apply(FABRIC, Table(), "a", {"verb": "request", "name": "a", "gpus": 4})
    value = table.encode(FABRIC, now)
    with pytest.raises(ConfigError, match="another fabric"):
        table.decode(cabled(hosts=4), value)
    with pytest.raises(ConfigError, match="newer version"):
        table.decode(FABRIC, {**value, "format": 2})


def test_refusal_has_a_remedy() -> None:
    with pytest.raises(RefusedError) as caught:
        table.apply(FABRIC, Table(), "a", {"verb": "request", "name": "a", "gpus": 99})
    assert "explain 99" in caught.value.hint


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[str]]:
    """A controller in a thread; the options that reach it."""
    (tmp_path / "fabric.yaml").write_text(yaml.safe_dump(document()))
    stop, stopped = os.pipe()
    ready, readied = os.pipe()
    controller = Controller(DirectoryStore(tmp_path / "store"), FABRIC)
    thread = threading.Thread(target=controller.run, args=(stop, readied))
    thread.start()
    os.read(ready, 1)
    yield ["--fabric", f"{tmp_path}/fabric.yaml", "--store", f"dir:{tmp_path}/store"]
    os.write(stopped, b"x")
    thread.join(SECONDS)
    assert not thread.is_alive()
    for file in (stop, stopped, ready, readied):
        os.close(file)


def run(options: list[str], *words: str) -> int:
    parser = argparse.ArgumentParser()
    commands.mount(parser.add_subparsers())
    args = parser.parse_args([*words, *options])
    return int(args.run(args))


def test_the_verbs(served: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str, code: int = 0) -> Any:
        assert run(served, "slices", *words, "--json") == code
        return json.loads(capsys.readouterr().out)

    assert told("list") == []
    assert told("request", "job", "16")["links"][0][0] == "leaf0:up0=spine0"
    assert told("list")[0] == {
        "slice": "job",
        "number": 1,
        "gpus": 16,
        "leaves": 4,
        "spines": 4,
        "links": 16,
        "contention_free": True,
    }
    assert told("show", "job")["hosts"]["host0"] == ["eth0", "eth1"]
    assert told("check", "job")["worst"] == 1
    assert told("check", "--pattern", "incast", code=1)["remarks"]
    assert told("explain", "2", code=1)["reason"] == "no GPUs"
    assert told("fail", "leaf0:up0")["slices"][0]["slice"] == "job"
    assert told("check", code=1)["worst"] == 2
    assert told("restore", "leaf0:up0") == {"failed": [], "slices": []}
    assert told("plot", f"{tmp_path}/p.svg", "--pattern", "ring")["file"].endswith("p.svg")
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert told("release", "job") == {"released": "job"}
    fits = {"fits": True, "gpus": 8, "leaves": 2, "spines": 4, "moved": 0}
    assert told("explain", "8") == fits
    with pytest.raises(commands.AnswerError) as caught:
        run(served, "slices", "release", "job")
    assert caught.value.exit_code == 2


def test_words_for_people(served: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(served, "slices", "request", "job", "8")
    run(served, "slices", "list")
    run(served, "slices", "check")
    run(served, "slices", "explain", "9")
    told = capsys.readouterr().out
    assert "SLICE  NUMBER" in told
    assert "contention-free: the most loaded link carries 1 flows" in told
    assert "a slice of 8 GPUs would fit" in told


def test_nobody_answers(tmp_path: Path) -> None:
    options = ["--store", f"dir:{tmp_path}/store", "--wait", "0.05"]
    with pytest.raises(NotLoadedError, match="no controller"):
        run(options, "slices", "release", "job")
    assert not DirectoryStore(tmp_path / "store").list("requests")
