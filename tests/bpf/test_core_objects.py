# SPDX-License-Identifier: Apache-2.0
"""Objects: open, adjust, load, pin, reuse, run."""

import os
from collections.abc import Iterator
from contextlib import closing
from errno import ENOENT
from pathlib import Path

import pytest

from oncache.core import libbpf
from oncache.core.errors import HostError, LayoutError
from oncache.core.libbpf import Object
from oncache.core.skb import SkbContext
from tests.bpf import toy

pytestmark = pytest.mark.root

FRAME = b"\x02" * 12 + b"\x88\xb5" + bytes(46)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.compile_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def loaded(path: Path) -> Iterator[Object]:
    with toy.loaded(path) as it:
        yield it


@pytest.fixture
def pins(tmp_path: Path) -> Iterator[Path]:
    with toy.bpffs(tmp_path) as mount:
        yield mount


def test_names_and_types_are_known_before_loading(path: Path) -> None:
    with closing(Object(path)) as unloaded:
        assert {"flows", "counts", "settings"} <= set(unloaded.map_names)
        assert {"from_pod", "to_pod", "stranger", "careless"} <= set(unloaded.program_names)
        assert set(unloaded.btf.map_names()) == {"flows", "counts", "settings"}
        assert unloaded.maps == unloaded.programs == {}


def test_loading_gives_descriptors_and_what_the_verifier_spent(loaded: Object) -> None:
    assert set(loaded.programs) == set(loaded.verifier) >= {"from_pod", "to_pod", "stranger"}
    info = libbpf.prog_info(loaded.programs["from_pod"])
    assert info.name == "from_pod"
    assert info.verified_insns == loaded.verifier["from_pod"].insns > 10
    assert len(info.tag) == 16
    assert info.jited_len > 0
    used = {libbpf.map_info(loaded.maps[name]).id for name in ("counts", "settings")}
    assert used <= set(info.map_ids)


def test_a_map_is_as_large_as_asked(path: Path) -> None:
    with closing(toy.opened(path)) as resized:
        resized.resize("flows", 2048)
        resized.load()
        assert libbpf.map_info(resized.maps["flows"]).max_entries == 2048


def test_a_pinned_map_outlives_its_object_and_is_reused(path: Path, pins: Path) -> None:
    with toy.loaded(path) as first:
        libbpf.pin(first.maps["flows"], pins / "flows")
        made = libbpf.map_info(first.maps["flows"]).id
    fd = libbpf.get(pins / "flows")
    with closing(toy.opened(path)) as second:
        second.reuse("flows", fd)
        os.close(fd)
        second.load()
        assert libbpf.map_info(second.maps["flows"]).id == made


def test_a_map_of_another_size_is_not_reused(path: Path, loaded: Object) -> None:
    with closing(toy.opened(path)) as other:
        other.resize("flows", 2048)
        with pytest.raises(LayoutError, match="flows: max_entries is 1024 in the kernel, 2048"):
            other.reuse("flows", loaded.maps["flows"])


def test_a_map_with_another_field_order_is_not_reused(loaded: Object, tmp_path: Path) -> None:
    with closing(toy.opened(toy.compile_toy(tmp_path, toy.OTHER_KEY))) as other:
        with pytest.raises(LayoutError, match="flows: field layout"):
            other.reuse("flows", loaded.maps["flows"])
        other.reuse("counts", loaded.maps["counts"])


def test_the_kernel_keeps_the_layout_with_the_map(loaded: Object) -> None:
    kept = libbpf.btf_by_id(libbpf.map_info(loaded.maps["flows"]).btf_id)
    names = ["flows", "counts", "settings"]
    assert kept.layout_hash(names) == loaded.btf.layout_hash(names)


def test_the_verifiers_words_reach_the_error(path: Path) -> None:
    with closing(Object(path)) as refused, pytest.raises(HostError) as caught:
        refused.load()
    assert "careless" in caught.value.message
    assert "invalid mem access 'map_value_or_null'" in caught.value.message
    assert "\n" not in caught.value.message
    log = "\n".join(caught.value.__notes__)
    assert "return value->ifindex; /* not checked for NULL */" in log


def test_a_kernel_without_btf_is_named(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libbpf, "KERNEL_BTF", tmp_path)
    with closing(Object(path)) as refused, pytest.raises(HostError, match="carries no BTF"):
        refused.load()


def test_a_missing_object_and_one_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(libbpf.BpfError, match="No such file") as missing:
        Object(tmp_path / "none.bpf.o")
    assert missing.value.errno == ENOENT
    (tmp_path / "text.bpf.o").write_text("not an object")
    with pytest.raises(libbpf.BpfError, match=r"open .*text\.bpf\.o: .*not a proper ELF"):
        Object(tmp_path / "text.bpf.o")


def test_nothing_pinned_there(pins: Path) -> None:
    with pytest.raises(libbpf.BpfError) as caught:
        libbpf.get(pins / "nothing")
    assert caught.value.errno == ENOENT


def test_a_run_gives_verdict_packet_and_context(loaded: Object) -> None:
    run = libbpf.test_run(loaded.programs["from_pod"], FRAME, SkbContext(mark=0xFF, priority=3))
    assert (run.retval, run.data) == (-1, FRAME)
    assert run.ctx is not None
    assert (run.ctx.mark, run.ctx.priority) == (0, 3)


def test_a_run_without_context_can_be_timed(loaded: Object) -> None:
    run = libbpf.test_run(loaded.programs["to_pod"], FRAME, repeat=10_000)
    assert run.ctx is None
    assert 0 < run.ns < 10_000


def test_a_packet_the_kernel_refuses(loaded: Object) -> None:
    with pytest.raises(libbpf.BpfError, match="test run: Invalid argument"):
        libbpf.test_run(loaded.programs["to_pod"], b"short")
