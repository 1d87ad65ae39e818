# SPDX-License-Identifier: Apache-2.0
"""Programs on a device's ingress and egress, beside whatever else is there.

Where the kernel has tcx links (6.6+) a program is attached by a link pinned in bpffs, else by a
filter on a clsact qdisc at a priority and handle of ours. Either way it stays when the process
ends, is swapped in place and never removed and added again, and what others attached is left
alone. A device takes one XDP program only, always by a pinned link, which the kernel lets nobody
replace. Everything acts in the calling thread's network namespace; failures are OSError, ENODEV for
a device that is gone. Not for use inside an event loop: wrap it in ``asyncio.to_thread``.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from errno import EINVAL, ENODEV, ENOENT
from pathlib import Path
from typing import TYPE_CHECKING

from oncache.core import libbpf
from oncache.core.errors import BusyError
from oncache.core.libbpf import AttachType, XdpMode

if TYPE_CHECKING:
    from oncache.core import tc


class Direction(StrEnum):
    """Seen from the device: what it receives, what it sends."""

    INGRESS = "ingress"
    EGRESS = "egress"


@dataclass(frozen=True, slots=True)
class Program:
    """A program on a hook; ``tag`` is the kernel's hash of its code, 16 hex digits."""

    id: int
    name: str
    tag: str
    ours: bool


# The four hooks of both planes, as their programs are called.
OUR_PROGRAMS = frozenset({"from_pod", "to_wire", "from_wire", "to_pod"})
PRIORITY = 0x0AC
HANDLE = 1

_TCX = {Direction.INGRESS: AttachType.TCX_INGRESS, Direction.EGRESS: AttachType.TCX_EGRESS}


def attach(ifindex: int, direction: Direction, prog_fd: int, pin: Path) -> bool:
    """Attach a program, or swap the one we attached before; True if this made a clsact qdisc.

    ``pin`` is the attachment's name in bpffs, one per device and direction. A pin left by a device
    that is gone or has moved to another namespace is replaced. A True has to be kept for
    ``detach``: a later swap says False. BusyError if a foreign filter holds our place on clsact.
    """
    if libbpf.tcx_available():
        _attach_link(ifindex, _TCX[direction], prog_fd, pin)
        return False
    return _attach_filter(ifindex, direction, prog_fd)


def detach(ifindex: int, direction: Direction, pin: Path, *, created_qdisc: bool = False) -> None:
    """Undo ``attach``; nothing happens if there is nothing of ours.

    With ``created_qdisc`` the clsact qdisc goes too, once no filter of anybody is left on it.
    """
    if libbpf.tcx_available():
        _remove_link(pin)
    else:
        _detach_filter(ifindex, direction, created_qdisc)


def is_attached(ifindex: int, direction: Direction, pin: Path) -> bool:
    """Whether what we attached is still on the hook, as the kernel sees it now."""
    if not libbpf.tcx_available():
        return any(_is_ours(held) for held in _filters(ifindex, direction))
    with _pinned(pin) as link:
        return link is not None and _is_live(link, ifindex, _TCX[direction])


def attached(ifindex: int, direction: Direction) -> list[Program]:
    """Every program on a hook in the order they run: the tcx chain, then clsact filters.

    ``ours`` goes by the program's name, and for a filter by its place too.
    """
    programs: list[Program] = []
    if libbpf.tcx_available():
        for prog_id, _link_id in libbpf.tcx_query(ifindex, _TCX[direction]):
            programs.extend(_program(prog_id))
    programs.extend(
        Program(held.prog_id, held.name, held.tag, _is_ours(held))
        for held in _filters(ifindex, direction)
        if held.prog_id
    )
    return programs


# --- XDP


@dataclass(frozen=True, slots=True)
class XdpHook:
    """The XDP program of a device; ``native``: run by the driver, before there is an sk_buff."""

    program: Program
    native: bool


def attach_xdp(ifindex: int, prog_fd: int, pin: Path) -> None:
    """Attach a device's XDP program, native if its driver can, else generic; or swap ours in place.

    ``pin`` is the attachment's name in bpffs; one that names another device is taken off that.
    BusyError if somebody else's program is there: it is never replaced.
    """
    with _pinned(pin) as link:
        if link is not None and _is_live_xdp(link, ifindex):
            libbpf.link_update(link, prog_fd)
            return
    _remove_link(pin)
    _keep(_create_xdp(ifindex, prog_fd), pin)


def detach_xdp(pin: Path) -> None:
    """Undo ``attach_xdp``; nothing happens if there is nothing of ours."""
    _remove_link(pin)


def xdp(ifindex: int, pin: Path | None = None) -> XdpHook | None:
    """What is on a device's XDP hook, ours if ``pin`` put it there."""
    held = libbpf.xdp_query(ifindex)
    found = next(_program(held[0]), None) if held else None
    if held is None or found is None:
        return None
    with _pinned(pin) if pin else nullcontext() as link:
        ours = link is not None and _is_live_xdp(link, ifindex)
    return XdpHook(replace(found, ours=ours), held[1] is XdpMode.NATIVE)


def _create_xdp(ifindex: int, prog_fd: int) -> int:
    held = xdp(ifindex)
    if held is not None:
        raise BusyError(
            f"device {ifindex} already has the XDP program '{held.program.name}' of somebody else",
            hint="remove it, or do without an XDP program of ours there",
        )
    # Drivers refuse for reasons of their own: no support, MTU, queues, offloads.
    with suppress(libbpf.BpfError):
        return libbpf.link_create(prog_fd, ifindex, AttachType.XDP, XdpMode.NATIVE)
    try:
        return libbpf.link_create(prog_fd, ifindex, AttachType.XDP, XdpMode.GENERIC)
    except libbpf.BpfError as error:
        if error.errno == EINVAL and not _exists(ifindex):  # unlike tcx
            raise OSError(ENODEV, os.strerror(ENODEV)) from error
        raise


def _exists(ifindex: int) -> bool:
    try:
        return bool(socket.if_indextoname(ifindex))
    except OSError:
        return False


def _is_live_xdp(link: int, ifindex: int) -> bool:
    # As for tcx: the device we see says what is on it.
    info, held = libbpf.link_info(link), libbpf.xdp_query(ifindex)
    return held is not None and (info.ifindex, info.prog_id) == (ifindex, held[0])


# --- tcx links


def _attach_link(ifindex: int, attach_type: AttachType, prog_fd: int, pin: Path) -> None:
    with _pinned(pin) as link:
        if link is not None and _is_live(link, ifindex, attach_type):
            libbpf.link_update(link, prog_fd)
            return
    _remove_link(pin)
    _keep(libbpf.link_create(prog_fd, ifindex, attach_type), pin)


def _keep(link: int, pin: Path) -> None:
    """Give a new link its name; without one it would go with this process."""
    try:
        libbpf.pin(link, pin)
    except OSError:
        libbpf.link_detach(link)
        raise
    finally:
        os.close(link)


def _remove_link(pin: Path) -> None:
    with _pinned(pin) as link:
        if link is None:
            return
        libbpf.link_detach(link)
        pin.unlink()


def _is_live(link: int, ifindex: int, attach_type: AttachType) -> bool:
    # A link follows its device into another namespace, where the same index may serve again; only
    # the chain of the device we see says which links are on it.
    try:
        chain = libbpf.tcx_query(ifindex, attach_type)
    except libbpf.BpfError as error:
        if error.errno == ENODEV:
            return False
        raise
    return libbpf.link_info(link).id in {link_id for _prog_id, link_id in chain}


@contextmanager
def _pinned(pin: Path) -> Iterator[int | None]:
    try:
        link = libbpf.get(pin)
    except libbpf.BpfError as error:
        if error.errno != ENOENT:
            raise
        yield None
        return
    try:
        yield link
    finally:
        os.close(link)


def _program(prog_id: int) -> Iterator[Program]:
    """The program of an id; nothing if it went away since the chain was read."""
    try:
        fd = libbpf.prog_fd_by_id(prog_id)
    except libbpf.BpfError as error:
        if error.errno == ENOENT:
            return
        raise
    try:
        info = libbpf.prog_info(fd)
    finally:
        os.close(fd)
    yield Program(info.id, info.name, info.tag, info.name in OUR_PROGRAMS)


# --- clsact filters. What they need is loaded when it is needed: with tcx, only by who asks for
# everybody's programs; commands that read start in half the time.


def _filters(ifindex: int, direction: Direction) -> "list[tc.Filter]":
    from oncache.core import tc

    return tc.tc_filters(ifindex, direction)


def _attach_filter(ifindex: int, direction: Direction, prog_fd: int) -> bool:
    from oncache.core import tc

    created = tc.clsact_add(ifindex)
    for held in tc.tc_filters(ifindex, direction):
        if (held.priority, held.handle) == (PRIORITY, HANDLE) and not _is_ours(held):
            raise BusyError(
                f"device {ifindex}: filter '{held.name}' holds {direction} priority {PRIORITY}",
                hint="give that filter another priority",
            )
    name = libbpf.prog_info(prog_fd).name
    try:
        tc.tc_filter_replace(ifindex, direction, prog_fd, name, PRIORITY, HANDLE)
    except OSError:
        if created:
            tc.clsact_delete(ifindex)
        raise
    return created


def _detach_filter(ifindex: int, direction: Direction, created_qdisc: bool) -> None:
    from oncache.core import tc

    if any(_is_ours(held) for held in tc.tc_filters(ifindex, direction)):
        tc.tc_filter_delete(ifindex, direction, PRIORITY, HANDLE)
    if created_qdisc and not any(tc.tc_filters(ifindex, each) for each in Direction):
        tc.clsact_delete(ifindex)


def _is_ours(held: "tc.Filter") -> bool:
    return (held.priority, held.handle) == (PRIORITY, HANDLE) and held.name in OUR_PROGRAMS
