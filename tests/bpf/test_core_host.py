# SPDX-License-Identifier: Apache-2.0
"""The BPF file system and the kernel's features."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncache.core import bpffs, features, libbpf
from oncache.core.errors import BusyError, HostError
from tests.bpf import toy

pytestmark = pytest.mark.root


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    with toy.bpffs(tmp_path) as it:
        yield it


def test_a_directory_is_made_in_a_bpf_file_system(mount: Path) -> None:
    wanted = mount / "oncache" / "links"
    bpffs.require(wanted)
    assert wanted.is_dir()
    assert bpffs.is_bpffs(wanted)
    bpffs.require(wanted)


def test_another_file_system_is_refused_and_untouched(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="not in a BPF file system") as caught:
        bpffs.require(tmp_path / "oncache")
    assert "mount -t bpf" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_name_the_file_system_refuses(mount: Path) -> None:
    with pytest.raises(HostError, match="cannot make"):
        bpffs.require(mount / "v0.1")


def test_one_holder_at_a_time(mount: Path) -> None:
    held = bpffs.lock_dir(mount)
    with pytest.raises(BusyError, match="another process works with"):
        bpffs.lock_dir(mount)
    os.close(held)
    os.close(bpffs.lock_dir(mount))


def test_the_kernel_is_asked_for_its_features() -> None:
    found = features.probe()
    assert found.release == os.uname().release
    assert found.btf is Path("/sys/kernel/btf/vmlinux").exists()
    assert found.tcx is libbpf.tcx_available()


def test_a_kernel_without_btf_offers_no_conntrack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "KERNEL_BTF", tmp_path)
    found = features.probe()
    assert (found.btf, found.ct_lookup) == (False, False)
    (tmp_path / "nf_conntrack").write_bytes(b"x\0bpf_skb_ct_lookup\0")
    assert features.probe().ct_lookup is True
