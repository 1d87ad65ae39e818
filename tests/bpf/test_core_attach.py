# SPDX-License-Identifier: Apache-2.0
"""Programs on devices: tcx links, clsact filters, and other people's programs beside them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from errno import ENODEV
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from oncache.core import attach, libbpf, maps, tc
from oncache.core.attach import Direction, Program
from oncache.core.errors import BusyError
from oncache.core.libbpf import AttachType, Object
from oncache.core.maps import PerCpuArray
from tests.bpf import toy

pytestmark = [pytest.mark.root, pytest.mark.netns]

IN, OUT = Direction.INGRESS, Direction.EGRESS
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.compile_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def loaded(path: Path) -> Iterator[Object]:
    with toy.loaded(path) as it:
        yield it


@pytest.fixture
def pins(tmp_path: Path) -> Iterator[Path]:
    with toy.bpffs(tmp_path) as mount:
        folder = mount / "links"
        folder.mkdir()
        yield folder


@pytest.fixture
def device() -> Iterator[int]:
    """A veth device in a namespace of the test's own; frames sent to "peer" arrive on it."""
    with toy.namespace():
        yield toy.add_veth("device", "peer")


@pytest.fixture
def tcx() -> None:
    if not libbpf.tcx_available():
        pytest.skip("this kernel has no tcx links")


@pytest.fixture
def no_tcx(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel before 6.6."""
    monkeypatch.setattr(libbpf, "tcx_available", lambda: False)


def names(ifindex: int, direction: Direction) -> list[str]:
    return [program.name for program in attach.attached(ifindex, direction)]


def packets(loaded: Object) -> int:
    counts = PerCpuArray(loaded.maps["counts"], loaded.btf.map_types("counts")[1])
    seen: int = maps.total(counts.read(0))["seen"]["packets"]
    return seen


def add_foreign_filter(loaded: Object, ifindex: int) -> None:
    tc.clsact_add(ifindex)
    tc.tc_filter_replace(ifindex, IN, loaded.programs["stranger"], "stranger", 1, 1)


# --- tcx links


@pytest.mark.usefixtures("tcx")
def test_a_link_runs_the_program_and_goes(loaded: Object, device: int, pins: Path) -> None:
    pin = pins / "in"
    before = packets(loaded)
    assert attach.attach(device, IN, loaded.programs["from_pod"], pin) is False
    assert attach.is_attached(device, IN, pin)
    toy.send_frames("peer", 5)
    assert packets(loaded) - before >= 5
    attach.detach(device, IN, pin)
    assert not attach.is_attached(device, IN, pin)
    assert names(device, IN) == []
    assert list(pins.iterdir()) == []
    attach.detach(device, IN, pin)


@pytest.mark.usefixtures("tcx")
def test_a_program_is_swapped_in_its_link(loaded: Object, device: int, pins: Path) -> None:
    pin = pins / "out"
    attach.attach(device, OUT, loaded.programs["from_pod"], pin)
    [(_prog, link)] = libbpf.tcx_query(device, AttachType.TCX_EGRESS)
    attach.attach(device, OUT, loaded.programs["to_pod"], pin)
    to_pod = libbpf.prog_info(loaded.programs["to_pod"])
    assert libbpf.tcx_query(device, AttachType.TCX_EGRESS) == [(to_pod.id, link)]
    assert attach.attached(device, OUT) == [Program(to_pod.id, "to_pod", to_pod.tag, ours=True)]


@pytest.mark.usefixtures("tcx")
def test_a_swap_can_insist_on_the_old_program(loaded: Object, device: int) -> None:
    programs = loaded.programs
    link = libbpf.link_create(programs["from_pod"], device, AttachType.TCX_INGRESS)
    try:
        libbpf.link_update(link, programs["to_pod"], old_prog_fd=programs["from_pod"])
        with pytest.raises(libbpf.BpfError):
            libbpf.link_update(link, programs["to_pod"], old_prog_fd=programs["from_pod"])
    finally:
        libbpf.link_detach(link)
        os.close(link)


@pytest.mark.usefixtures("tcx")
def test_foreign_programs_are_listed_and_stay(loaded: Object, device: int, pins: Path) -> None:
    link = libbpf.link_create(loaded.programs["stranger"], device, AttachType.TCX_INGRESS)
    add_foreign_filter(loaded, device)
    attach.attach(device, IN, loaded.programs["from_pod"], pins / "in")
    listed = [(program.name, program.ours) for program in attach.attached(device, IN)]
    assert listed == [("stranger", False), ("from_pod", True), ("stranger", False)]
    attach.detach(device, IN, pins / "in")
    assert names(device, IN) == ["stranger", "stranger"]
    os.close(link)


@pytest.mark.usefixtures("tcx")
def test_a_link_outlives_its_creator(path: Path, device: int, pins: Path) -> None:
    script = """
import sys
from pathlib import Path
from oncache.core import attach
from tests.bpf import toy
path, pin, ifindex = sys.argv[1:]
with toy.loaded(Path(path)) as it:
    attach.attach(int(ifindex), attach.Direction.INGRESS, it.programs["from_pod"], Path(pin))
"""
    pin = pins / "in"
    arguments = [sys.executable, "-c", script, str(path), str(pin), str(device)]
    subprocess.run(arguments, check=True, cwd=ROOT)
    assert attach.is_attached(device, IN, pin)
    assert names(device, IN) == ["from_pod"]


@pytest.mark.usefixtures("tcx")
def test_the_pin_of_a_deleted_device_is_replaced(loaded: Object, device: int, pins: Path) -> None:
    pin = pins / "in"
    attach.attach(device, IN, loaded.programs["from_pod"], pin)
    with IPRoute() as netlink:
        netlink.link("del", index=device)
    link = libbpf.get(pin)
    assert libbpf.link_info(link).ifindex == 0
    os.close(link)
    assert not attach.is_attached(device, IN, pin)
    again = toy.add_veth("device", "peer")
    attach.attach(again, IN, loaded.programs["from_pod"], pin)
    assert attach.is_attached(again, IN, pin)


@pytest.mark.usefixtures("tcx")
def test_a_link_that_moved_away_is_not_mistaken(loaded: Object, device: int, pins: Path) -> None:
    pin = pins / "in"
    attach.attach(device, IN, loaded.programs["from_pod"], pin)
    with toy.namespace():
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        # The same index in another namespace: the pin is another device's.
        assert toy.add_veth("device", "peer") == device
        assert not attach.is_attached(device, IN, pin)
        attach.attach(device, IN, loaded.programs["from_pod"], pin)
        assert attach.is_attached(device, IN, pin)
    os.close(here)
    assert names(device, IN) == []


@pytest.mark.usefixtures("tcx")
def test_a_device_that_is_not_there(loaded: Object, device: int, pins: Path) -> None:
    with pytest.raises(libbpf.BpfError) as caught:
        attach.attach(device + 1000, IN, loaded.programs["from_pod"], pins / "in")
    assert caught.value.errno == ENODEV
    assert list(pins.iterdir()) == []


@pytest.mark.usefixtures("tcx")
def test_without_a_pin_nothing_stays_attached(loaded: Object, device: int, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="pin"):
        attach.attach(device, IN, loaded.programs["from_pod"], tmp_path / "not-bpffs")
    assert names(device, IN) == []


# --- clsact filters


@pytest.mark.usefixtures("no_tcx")
def test_a_filter_runs_is_swapped_and_goes(loaded: Object, device: int, pins: Path) -> None:
    pin = pins / "in"
    before = packets(loaded)
    assert attach.attach(device, IN, loaded.programs["from_pod"], pin) is True
    toy.send_frames("peer", 5)
    assert packets(loaded) - before >= 5
    assert attach.attach(device, IN, loaded.programs["to_pod"], pin) is False
    to_pod = libbpf.prog_info(loaded.programs["to_pod"])
    assert attach.attached(device, IN) == [Program(to_pod.id, "to_pod", to_pod.tag, ours=True)]
    assert attach.is_attached(device, IN, pin)
    attach.detach(device, IN, pin, created_qdisc=True)
    assert not attach.is_attached(device, IN, pin)
    assert tc.clsact_add(device) is True


@pytest.mark.usefixtures("no_tcx")
def test_a_foreign_filter_survives(loaded: Object, device: int, pins: Path) -> None:
    add_foreign_filter(loaded, device)
    assert attach.attach(device, IN, loaded.programs["from_pod"], pins / "in") is False
    listed = [(program.name, program.ours) for program in attach.attached(device, IN)]
    assert listed == [("stranger", False), ("from_pod", True)]
    attach.detach(device, IN, pins / "in")
    assert names(device, IN) == ["stranger"]


@pytest.mark.usefixtures("no_tcx")
def test_a_qdisc_of_ours_stays_for_those_who_came_later(
    loaded: Object, device: int, pins: Path
) -> None:
    assert attach.attach(device, OUT, loaded.programs["to_pod"], pins / "out") is True
    add_foreign_filter(loaded, device)
    attach.detach(device, OUT, pins / "out", created_qdisc=True)
    assert names(device, IN) == ["stranger"]


@pytest.mark.usefixtures("no_tcx")
def test_a_foreign_filter_in_our_place_is_reported(loaded: Object, device: int, pins: Path) -> None:
    tc.clsact_add(device)
    place = (attach.PRIORITY, attach.HANDLE)
    tc.tc_filter_replace(device, IN, loaded.programs["stranger"], "stranger", *place)
    with pytest.raises(BusyError, match="filter 'stranger' holds ingress priority"):
        attach.attach(device, IN, loaded.programs["from_pod"], pins / "in")
    attach.detach(device, IN, pins / "in")
    assert names(device, IN) == ["stranger"]


@pytest.mark.usefixtures("no_tcx")
def test_a_device_that_is_gone(loaded: Object, device: int, pins: Path) -> None:
    gone = device + 1000
    with pytest.raises(OSError, match="No such device") as caught:
        attach.attach(gone, IN, loaded.programs["from_pod"], pins / "in")
    assert caught.value.errno == ENODEV
    attach.detach(gone, IN, pins / "in", created_qdisc=True)


# --- XDP


@pytest.fixture
def bridge() -> Iterator[int]:
    """A device whose driver knows no XDP, in a namespace of the test's own."""
    with toy.namespace(), IPRoute() as netlink:
        netlink.link("add", ifname="bridge", kind="bridge")
        yield netlink.link_lookup(ifname="bridge")[0]


def test_xdp_is_native_where_the_driver_can(loaded: Object, device: int, pins: Path) -> None:
    pin, programs = pins / "xdp", loaded.programs
    assert attach.xdp(device, pin) is None
    attach.attach_xdp(device, programs["first"], pin)
    hook = attach.xdp(device, pin)
    assert hook is not None
    assert (hook.program.name, hook.program.ours, hook.native) == ("first", True, True)
    attach.detach_xdp(pin)
    assert attach.xdp(device, pin) is None
    assert list(pins.iterdir()) == []
    attach.detach_xdp(pin)


def test_xdp_is_generic_where_it_cannot(loaded: Object, bridge: int, pins: Path) -> None:
    attach.attach_xdp(bridge, loaded.programs["first"], pins / "xdp")
    hook = attach.xdp(bridge, pins / "xdp")
    assert hook is not None
    assert (hook.program.ours, hook.native) == (True, False)


def test_an_xdp_program_is_swapped_in_its_link(loaded: Object, device: int, pins: Path) -> None:
    pin, programs = pins / "xdp", loaded.programs
    attach.attach_xdp(device, programs["first"], pin)
    link = libbpf.get(pin)
    before = libbpf.link_info(link)
    attach.attach_xdp(device, programs["second"], pin)
    after = libbpf.link_info(link)
    os.close(link)
    assert (after.id, after.ifindex) == (before.id, device)
    assert after.prog_id == libbpf.prog_info(programs["second"]).id


def test_a_foreign_xdp_program_is_never_replaced(loaded: Object, device: int, pins: Path) -> None:
    programs = loaded.programs
    flags = libbpf.XdpMode.GENERIC
    link = libbpf.link_create(programs["second"], device, AttachType.XDP, flags)
    with pytest.raises(BusyError, match="XDP program 'second' of somebody else"):
        attach.attach_xdp(device, programs["first"], pins / "xdp")
    hook = attach.xdp(device, pins / "xdp")
    assert hook is not None
    assert (hook.program.name, hook.program.ours, hook.native) == ("second", False, False)
    assert list(pins.iterdir()) == []
    libbpf.link_detach(link)
    os.close(link)
    attach.attach_xdp(device, programs["first"], pins / "xdp")


def test_an_xdp_pin_follows_to_another_device(loaded: Object, device: int, pins: Path) -> None:
    pin, programs = pins / "xdp", loaded.programs
    attach.attach_xdp(device, programs["first"], pin)
    other = toy.add_veth("other", "other-peer")
    attach.attach_xdp(other, programs["first"], pin)
    assert attach.xdp(device) is None
    hook = attach.xdp(other, pin)
    assert hook is not None
    assert hook.program.ours


def test_an_xdp_link_of_a_deleted_device_is_replaced(
    loaded: Object, device: int, pins: Path
) -> None:
    pin = pins / "xdp"
    attach.attach_xdp(device, loaded.programs["first"], pin)
    with IPRoute() as netlink:
        netlink.link("del", index=device)
    again = toy.add_veth("device", "peer")
    assert attach.xdp(again, pin) is None
    attach.attach_xdp(again, loaded.programs["first"], pin)
    assert attach.xdp(again, pin) is not None


def test_xdp_on_a_device_that_is_not_there(loaded: Object, device: int, pins: Path) -> None:
    with pytest.raises(OSError, match="No such device") as caught:
        attach.attach_xdp(device + 1000, loaded.programs["first"], pins / "xdp")
    assert caught.value.errno == ENODEV
    assert attach.xdp(device + 1000) is None
