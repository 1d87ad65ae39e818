# SPDX-License-Identifier: Apache-2.0
"""The one module that knows libbpf and the bpf() syscall.

Every call that reaches the kernel raises BpfError, an OSError with its errno kept. File descriptors
are plain integers; whoever obtained one closes it, except those an Object holds.
"""

import ctypes as ct
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from errno import E2BIG, EINVAL, ENOENT, EPERM
from pathlib import Path
from typing import Any

from oncache.core.btf import KERNEL_BTF, Btf, no_kernel_btf
from oncache.core.errors import HostError, LayoutError
from oncache.core.skb import SkbContext

_INT, _U32, _U64, _SIZE = ct.c_int, ct.c_uint32, ct.c_uint64, ct.c_size_t
_PTR, _STR, _BOOL = ct.c_void_p, ct.c_char_p, ct.c_bool


class BpfError(OSError):
    """A refused call: ``errno`` as the kernel gave it, and what was being done."""


class AttachType(IntEnum):
    """Where a link attaches (enum bpf_attach_type, include/uapi/linux/bpf.h)."""

    XDP = 37
    TCX_INGRESS = 46
    TCX_EGRESS = 47


class XdpMode(IntEnum):
    """Where an XDP program runs (XDP_FLAGS_*, include/uapi/linux/if_link.h): in the driver, or in
    the stack on packets that have been given their sk_buff."""

    GENERIC = 1 << 1
    NATIVE = 1 << 2


@dataclass(frozen=True, slots=True)
class VerifierStats:
    """What the verifier spent on one program: instructions walked, microseconds."""

    insns: int
    time_us: int


@dataclass(frozen=True, slots=True)
class MapInfo:
    """A map as the kernel holds it; sizes in bytes, BTF ids 0 where it keeps no types."""

    id: int
    name: str
    type: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int
    btf_id: int
    btf_key_id: int
    btf_value_id: int


@dataclass(frozen=True, slots=True)
class ProgInfo:
    """A loaded program; the kernel cuts ``name`` to 15 characters, ``tag`` is 16 hex digits."""

    id: int
    name: str
    tag: str
    jited_len: int
    xlated_len: int
    verified_insns: int
    map_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """An attachment; ``ifindex`` is 0 once its device is gone."""

    id: int
    prog_id: int
    ifindex: int


@dataclass(frozen=True, slots=True)
class TestRun:
    """Outcome of a test run: the program's verdict, the packet after it, ns for one run."""

    retval: int
    data: bytes
    ctx: SkbContext | None
    ns: int


# --- what libbpf and the kernel take


class _OpenOptions(ct.Structure):
    _fields_ = (("sz", _SIZE),)


class _LinkCreateOptions(ct.Structure):
    _fields_ = (
        ("sz", _SIZE),
        ("flags", _U32),
        ("iter_info", _PTR),
        ("iter_info_len", _U32),
        ("target_btf_id", _U32),
    )


class _LinkUpdateOptions(ct.Structure):
    _fields_ = (("sz", _SIZE), ("flags", _U32), ("old_prog_fd", _U32))


class _BatchOptions(ct.Structure):
    _fields_ = (("sz", _SIZE), ("elem_flags", _U64), ("flags", _U64))


class _TestRunOptions(ct.Structure):
    _fields_ = (
        ("sz", _SIZE),
        ("data_in", _PTR),
        ("data_out", _PTR),
        ("data_size_in", _U32),
        ("data_size_out", _U32),
        ("ctx_in", _PTR),
        ("ctx_out", _PTR),
        ("ctx_size_in", _U32),
        ("ctx_size_out", _U32),
        ("retval", _U32),
        ("repeat", _INT),
        ("duration", _U32),
        ("flags", _U32),
        ("cpu", _U32),
        ("batch_size", _U32),
    )


class _MapInfo(ct.Structure):
    _fields_ = (
        ("type", _U32),
        ("id", _U32),
        ("key_size", _U32),
        ("value_size", _U32),
        ("max_entries", _U32),
        ("map_flags", _U32),
        ("name", ct.c_char * 16),
        ("ifindex", _U32),
        ("btf_vmlinux_value_type_id", _U32),
        ("netns_dev", _U64),
        ("netns_ino", _U64),
        ("btf_id", _U32),
        ("btf_key_type_id", _U32),
        ("btf_value_type_id", _U32),
    )


class _ProgInfo(ct.Structure):
    _fields_ = (
        ("type", _U32),
        ("id", _U32),
        ("tag", ct.c_uint8 * 8),
        ("jited_prog_len", _U32),
        ("xlated_prog_len", _U32),
        ("jited_prog_insns", _U64),
        ("xlated_prog_insns", _U64),
        ("load_time", _U64),
        ("created_by_uid", _U32),
        ("nr_map_ids", _U32),
        ("map_ids", _U64),
        ("name", ct.c_char * 16),
        ("not_read", ct.c_uint8 * 136),  # ifindex .. recursion_misses
        ("verified_insns", _U32),
    )


class _LinkInfo(ct.Structure):
    _fields_ = (
        ("type", _U32),
        ("id", _U32),
        ("prog_id", _U32),
        ("pad", _U32),
        ("ifindex", _U32),  # first in the union, for tcx and for XDP
        ("attach_type", _U32),
    )


class _XdpOptions(ct.Structure):
    _fields_ = (
        ("sz", _SIZE),
        ("prog_id", _U32),
        ("drv_prog_id", _U32),
        ("hw_prog_id", _U32),
        ("skb_prog_id", _U32),
        ("attach_mode", ct.c_uint8),
    )


class _BtfInfo(ct.Structure):
    _fields_ = (("btf", _U64), ("btf_size", _U32), ("id", _U32))


class _Query(ct.Structure):
    _fields_ = (
        ("target_ifindex", _U32),
        ("attach_type", _U32),
        ("query_flags", _U32),
        ("attach_flags", _U32),
        ("prog_ids", _U64),
        ("count", _U32),
        ("prog_attach_flags", _U64),
        ("link_ids", _U64),
        ("link_attach_flags", _U64),
        ("revision", _U64),
    )


_PRINT = ct.CFUNCTYPE(_INT, _INT, _STR, _PTR)
# name -> (result, arguments). An int result is 0 or more, or a negative errno (libbpf >= 1.0).
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "libbpf_set_print": (_PTR, _PRINT),
    "libbpf_strerror": (_INT, _INT, _PTR, _SIZE),
    "libbpf_num_possible_cpus": (_INT,),
    "bpf_object__open_file": (_PTR, _STR, _PTR),
    "bpf_object__load": (_INT, _PTR),
    "bpf_object__close": (None, _PTR),
    "bpf_object__next_map": (_PTR, _PTR, _PTR),
    "bpf_object__next_program": (_PTR, _PTR, _PTR),
    "bpf_object__btf": (_PTR, _PTR),
    "btf__raw_data": (_PTR, _PTR, _PTR),
    "bpf_map__name": (_STR, _PTR),
    "bpf_map__fd": (_INT, _PTR),
    "bpf_map__type": (_U32, _PTR),
    "bpf_map__key_size": (_U32, _PTR),
    "bpf_map__value_size": (_U32, _PTR),
    "bpf_map__map_flags": (_U32, _PTR),
    "bpf_map__max_entries": (_U32, _PTR),
    "bpf_map__set_max_entries": (_INT, _PTR, _U32),
    "bpf_map__reuse_fd": (_INT, _PTR, _INT),
    "bpf_program__name": (_STR, _PTR),
    "bpf_program__fd": (_INT, _PTR),
    "bpf_program__set_autoload": (_INT, _PTR, _BOOL),
    "bpf_program__set_log_level": (_INT, _PTR, _U32),
    "bpf_obj_pin": (_INT, _INT, _STR),
    "bpf_obj_get": (_INT, _STR),
    "bpf_obj_get_info_by_fd": (_INT, _INT, _PTR, _PTR),
    "bpf_prog_get_fd_by_id": (_INT, _U32),
    "bpf_btf_get_fd_by_id": (_INT, _U32),
    "bpf_link_create": (_INT, _INT, _INT, _INT, _PTR),
    "bpf_link_update": (_INT, _INT, _INT, _PTR),
    "bpf_link_detach": (_INT, _INT),
    "bpf_map_lookup_elem": (_INT, _INT, _PTR, _PTR),
    "bpf_map_update_elem": (_INT, _INT, _PTR, _PTR, _U64),
    "bpf_map_delete_elem": (_INT, _INT, _PTR),
    "bpf_map_lookup_and_delete_elem": (_INT, _INT, _PTR, _PTR),
    "bpf_map_lookup_batch": (_INT, _INT, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR),
    "bpf_map_update_batch": (_INT, _INT, _PTR, _PTR, _PTR, _PTR),
    "bpf_prog_test_run_opts": (_INT, _INT, _PTR),
    "bpf_xdp_query": (_INT, _INT, _INT, _PTR),
}


@functools.cache
def _library() -> ct.CDLL:
    # bcc's library is linked against libbpf, so a host with only python3-bpfcc resolves the same
    # functions through it; libbpf comes first because it does not map LLVM into every process.
    for name in ("libbpf.so.1", "libbcc.so.0"):
        try:
            library = ct.CDLL(name, use_errno=True)
        except OSError:
            continue
        for function, (result, *arguments) in _PROTOTYPES.items():
            entry = getattr(library, function)
            entry.restype, entry.argtypes = result, arguments
        return library
    raise HostError(
        "libbpf is not installed (neither libbpf.so.1 nor libbcc.so.0 can be opened)",
        hint="apt-get install libbpf1",
    )


class _Messages(threading.local):
    """What libbpf said in this thread since ``lines`` was last cleared."""

    def __init__(self) -> None:
        self.lines: list[str] = []


_messages = _Messages()
_VERIFIER_LOG = "BEGIN PROG LOAD LOG"
_MESSAGE_MAX = 1 << 20


def _on_message(level: int, template: bytes, arguments: int) -> int:
    # Warnings, and at debug level only the verifier's log of a program that was accepted.
    if level == 0 or _VERIFIER_LOG.encode() in template:
        buffer = ct.create_string_buffer(_MESSAGE_MAX)
        _vsnprintf()(buffer, len(buffer), template, arguments)
        text = buffer.value.decode(errors="replace").strip()
        _messages.lines.append(text.removeprefix("libbpf: "))
    return 0


# Kept for the life of the process: libbpf holds the pointer.
_keep_message = _PRINT(_on_message)


def _listen() -> None:
    """Start collecting; again each time, because bcc puts its own listener in our place."""
    _library().libbpf_set_print(_keep_message)
    _messages.lines.clear()


@functools.cache
def _vsnprintf() -> Callable[..., int]:
    function = ct.CDLL(None).vsnprintf
    function.argtypes = [_PTR, _SIZE, _STR, _PTR]
    return function


def _check(result: int, doing: str) -> int:
    if result < 0:
        raise BpfError(-result, f"{doing}: {_reason(-result)}")
    return result


def _reason(number: int) -> str:
    # libbpf has numbers of its own behind the kernel's.
    text = ct.create_string_buffer(256)
    _library().libbpf_strerror(number, text, len(text))
    return text.value.decode()


# --- objects


class Object:
    """A compiled BPF object: open, adjust (sizes, autoload, reused maps), load, close.

    ``maps`` and ``programs`` (name -> descriptor) and ``verifier`` are filled by ``load``; the
    descriptors live until ``close``. The object pins nothing by itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.maps: dict[str, int] = {}
        self.programs: dict[str, int] = {}
        self.verifier: dict[str, VerifierStats] = {}
        options = _OpenOptions(sz=ct.sizeof(_OpenOptions))
        self._handle = self._open(options)
        self._maps = dict(self._walk("map"))
        self._programs = dict(self._walk("program"))
        self.btf = self._read_btf()

    @property
    def map_names(self) -> tuple[str, ...]:
        """Names of all maps, known before loading; includes the sections of global variables."""
        return tuple(self._maps)

    @property
    def program_names(self) -> tuple[str, ...]:
        """Names of all programs, known before loading."""
        return tuple(self._programs)

    def resize(self, name: str, entries: int) -> None:
        """Give a map another number of entries; before ``load``."""
        result = _library().bpf_map__set_max_entries(self._maps[name], entries)
        _check(result, f"resize map {name} to {entries} entries")

    def set_autoload(self, name: str, load: bool) -> None:
        """Leave a program out of ``load``, or in it (all are in it at first)."""
        result = _library().bpf_program__set_autoload(self._programs[name], load)
        _check(result, f"set autoload of program {name}")

    def reuse(self, name: str, fd: int) -> None:
        """Use an existing map in place of a new one; before ``load``, after ``resize``.

        Raises LayoutError if it differs in type, sizes, flags, entries or field layout: libbpf
        itself compares nothing here, and two field orders of one size would be mistaken.
        """
        have, want = map_info(fd), self._wanted(name)
        for what in ("type", "key_size", "value_size", "flags", "max_entries"):
            if getattr(have, what) != want[what]:
                raise _mismatch(name, what, getattr(have, what), want[what])
        if have.btf_id:
            held, wanted = btf_by_id(have.btf_id).layout_hash([name]), self.btf.layout_hash([name])
            if held != wanted:
                raise _mismatch(name, "field layout", held, wanted)
        _check(_library().bpf_map__reuse_fd(self._maps[name], fd), f"reuse map {name}")

    def load(self) -> None:
        """Create the maps, verify and load the programs.

        Raises HostError with the verifier's last words; its whole log is the error's note.
        """
        result = self._attempt(_LOG_STATISTICS)
        if result < 0:
            raise _load_error(self._path, -result, [*_messages.lines, *self._refusal()])
        library = _library()
        self.maps = {name: library.bpf_map__fd(it) for name, it in self._maps.items()}
        fds = {name: library.bpf_program__fd(it) for name, it in self._programs.items()}
        self.programs = {name: fd for name, fd in fds.items() if fd >= 0}
        self.verifier = dict(_verifier_stats(_messages.lines))

    def close(self) -> None:
        """Close every descriptor the object holds; pinned maps and links live on."""
        if self._handle:
            _library().bpf_object__close(self._handle)
        self._handle = None
        self.maps, self.programs = {}, {}

    def _open(self, options: _OpenOptions) -> int | None:
        _listen()
        handle: int | None = _library().bpf_object__open_file(
            os.fsencode(self._path), ct.byref(options)
        )
        if not handle:
            number = ct.get_errno()
            detail = "; ".join([_reason(number), *_messages.lines])
            raise BpfError(number, f"open {self._path}: {detail}")
        return handle

    def _attempt(self, log_level: int) -> int:
        library = _library()
        for program in self._programs.values():
            library.bpf_program__set_log_level(program, log_level)
        _listen()
        result: int = library.bpf_object__load(self._handle)
        return result

    def _refusal(self) -> list[str]:
        """The verifier's path through the program it refused, with source lines.

        Asked for only now: writing it takes the verifier several times as long.
        """
        failed = re.search(r"prog '(\w+)': BPF program load failed", "\n".join(_messages.lines))
        if failed is None:
            return []
        with closing(Object(self._path)) as again:
            for name in again.program_names:
                again.set_autoload(name, name == failed[1])
            again._attempt(_LOG_PATH)
            return _messages.lines

    def _walk(self, what: str) -> Iterator[tuple[str, int]]:
        library = _library()
        following = getattr(library, f"bpf_object__next_{what}")
        name = getattr(library, f"bpf_{what}__name")
        item = following(self._handle, None)
        while item:
            yield name(item).decode(), item
            item = following(self._handle, item)

    def _read_btf(self) -> Btf:
        library = _library()
        types = library.bpf_object__btf(self._handle)
        if not types:
            return Btf(b"")
        size = _U32()
        address = library.btf__raw_data(types, ct.byref(size))
        return Btf(ct.string_at(address, size.value))

    def _wanted(self, name: str) -> dict[str, int]:
        library, handle = _library(), self._maps[name]
        return {
            "type": library.bpf_map__type(handle),
            "key_size": library.bpf_map__key_size(handle),
            "value_size": library.bpf_map__value_size(handle),
            "flags": library.bpf_map__map_flags(handle),
            "max_entries": library.bpf_map__max_entries(handle),
        }


_LOG_PATH = 1  # BPF_LOG_LEVEL1
_LOG_STATISTICS = 4  # BPF_LOG_STATS


def _verifier_stats(messages: list[str]) -> Iterator[tuple[str, VerifierStats]]:
    for text in messages:
        name = re.match(r"prog '(\w+)': -- " + _VERIFIER_LOG, text)
        insns = re.search(r"^processed (\d+) insns", text, re.MULTILINE)
        spent = re.search(r"^verification time (\d+) usec", text, re.MULTILINE)
        if name and insns and spent:
            yield name[1], VerifierStats(int(insns[1]), int(spent[1]))


def _load_error(path: Path, number: int, messages: list[str]) -> HostError:
    if number == EPERM and os.geteuid() != 0:
        return HostError("loading BPF programs needs root", hint="run it with sudo")
    if not (KERNEL_BTF / "vmlinux").exists():
        return no_kernel_btf()
    error = HostError(
        f"the kernel refused {path.name}: {_last_words(messages) or _reason(number)}",
        hint="compare the kernel with what 'oncache doctor' asks for; -vv shows the verifier's log",
    )
    error.add_note("\n".join(messages))
    return error


def _last_words(messages: list[str]) -> str | None:
    """Where the verifier says why: the line before the statistics, in the log that has more."""
    for text in messages:
        if _VERIFIER_LOG in text:
            told = [line for line in text.split("\n")[1:-1] if not _STATISTICS.match(line)]
            if told:
                return f"{text.partition(':')[0]}: {told[-1]}"
    return messages[0] if messages else None


_STATISTICS = re.compile(r"verification time|stack depth|processed \d+ insns")


def _mismatch(name: str, what: str, have: object, want: object) -> LayoutError:
    return LayoutError(
        f"map {name}: {what} is {have} in the kernel, {want} in this build",
        hint="another version or other limits are loaded; detach and unload that one first",
    )


# --- pins and facts


def pin(fd: int, path: Path) -> None:
    """Give a map, program or link a name in a BPF file system; it then outlives us."""
    _check(_library().bpf_obj_pin(fd, os.fsencode(path)), f"pin {path}")


def get(path: Path) -> int:
    """A new descriptor of what is pinned at ``path``."""
    return _check(_library().bpf_obj_get(os.fsencode(path)), f"open pin {path}")


def map_info(fd: int) -> MapInfo:
    """What the kernel knows of a map."""
    info = _info(fd, _MapInfo())
    return MapInfo(
        id=info.id,
        name=info.name.decode(),
        type=info.type,
        key_size=info.key_size,
        value_size=info.value_size,
        max_entries=info.max_entries,
        flags=info.map_flags,
        btf_id=info.btf_id,
        btf_key_id=info.btf_key_type_id,
        btf_value_id=info.btf_value_type_id,
    )


def prog_info(fd: int) -> ProgInfo:
    """What the kernel knows of a program."""
    count = _info(fd, _ProgInfo()).nr_map_ids
    ids = (_U32 * count)()
    info = _info(fd, _ProgInfo(nr_map_ids=count, map_ids=ct.addressof(ids)))
    return ProgInfo(
        id=info.id,
        name=info.name.decode(),
        tag=bytes(info.tag).hex(),
        jited_len=info.jited_prog_len,
        xlated_len=info.xlated_prog_len,
        verified_insns=info.verified_insns,
        map_ids=tuple(ids),
    )


def prog_fd_by_id(prog_id: int) -> int:
    """A new descriptor of a loaded program; ENOENT if it is gone."""
    return _check(_library().bpf_prog_get_fd_by_id(prog_id), f"open program {prog_id}")


def btf_by_id(btf_id: int) -> Btf:
    """The types the kernel keeps with a map or program."""
    fd = _check(_library().bpf_btf_get_fd_by_id(btf_id), f"open BTF {btf_id}")
    try:
        size = _info(fd, _BtfInfo()).btf_size
        raw = ct.create_string_buffer(size)
        _info(fd, _BtfInfo(btf=ct.addressof(raw), btf_size=size))
    finally:
        os.close(fd)
    return Btf(raw.raw)


def _info(fd: int, info: Any) -> Any:
    size = _U32(ct.sizeof(info))
    result = _library().bpf_obj_get_info_by_fd(fd, ct.byref(info), ct.byref(size))
    _check(result, "read object information")
    return info


# --- links


def link_create(prog_fd: int, ifindex: int, attach_type: AttachType, flags: int = 0) -> int:
    """Attach a program to a device, at the end of its chain if it has one; returns the link's
    descriptor. ``flags`` for XDP: the mode.

    The device is looked up in the calling thread's network namespace; ENODEV if there is none.
    """
    options = _LinkCreateOptions(sz=ct.sizeof(_LinkCreateOptions), flags=flags)
    result = _library().bpf_link_create(prog_fd, ifindex, attach_type, ct.byref(options))
    return _check(result, f"attach to device {ifindex}")


def link_update(link_fd: int, new_prog_fd: int, old_prog_fd: int | None = None) -> None:
    """Swap a link's program; no packet passes between the two.

    With ``old_prog_fd`` only if that is the present one, else EPERM.
    """
    options = _LinkUpdateOptions(sz=ct.sizeof(_LinkUpdateOptions))
    if old_prog_fd is not None:
        options.flags, options.old_prog_fd = _F_REPLACE, old_prog_fd
    _check(_library().bpf_link_update(link_fd, new_prog_fd, ct.byref(options)), "update link")


def link_detach(link_fd: int) -> None:
    """Detach at once. Closing the last descriptor detaches too, but at some later moment."""
    _check(_library().bpf_link_detach(link_fd), "detach link")


def link_info(link_fd: int) -> LinkInfo:
    """What the kernel knows of a tcx or XDP link."""
    info = _info(link_fd, _LinkInfo())
    return LinkInfo(info.id, info.prog_id, info.ifindex)


def xdp_query(ifindex: int) -> tuple[int, XdpMode] | None:
    """(program id, where it runs) of a device's XDP program; None without one or without device.

    A device holds one program at most, in one of the modes.
    """
    options = _XdpOptions(sz=ct.sizeof(_XdpOptions))
    _check(_library().bpf_xdp_query(ifindex, 0, ct.byref(options)), f"query XDP of {ifindex}")
    if options.skb_prog_id:
        return options.skb_prog_id, XdpMode.GENERIC
    held = options.drv_prog_id or options.hw_prog_id
    return (held, XdpMode.NATIVE) if held else None


def tcx_query(ifindex: int, attach_type: AttachType) -> list[tuple[int, int]]:
    """(program id, link id) of a device's chain in running order; link id 0 where there is none."""
    programs, links = (_U32 * _CHAIN_MAX)(), (_U32 * _CHAIN_MAX)()
    query = _Query(
        target_ifindex=ifindex,
        attach_type=attach_type,
        prog_ids=ct.addressof(programs),
        link_ids=ct.addressof(links),
        count=_CHAIN_MAX,
    )
    _bpf(_BPF_PROG_QUERY, query, f"query programs of device {ifindex}")
    return list(zip(programs[: query.count], links[: query.count], strict=True))


def tcx_available() -> bool:
    """Whether the kernel has tcx links (6.6 and later)."""
    try:
        tcx_query(_LOOPBACK, AttachType.TCX_INGRESS)
    except BpfError as error:
        if error.errno in (EINVAL, E2BIG):
            return False
        raise
    return True


_F_REPLACE = 4
_CHAIN_MAX = 64  # BPF_MPROG_MAX
_LOOPBACK = 1  # the first device of every namespace
_BPF_PROG_QUERY = 16
_SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280}


def _bpf(command: int, attribute: ct.Structure, doing: str) -> None:
    # libbpf 1.1 is older than tcx: it cannot return the links of a chain.
    number = _SYSCALL[os.uname().machine]
    size = _U32(ct.sizeof(attribute))
    if _syscall()(number, command, ct.byref(attribute), size) < 0:
        raise BpfError(ct.get_errno(), f"{doing}: {_reason(ct.get_errno())}")


@functools.cache
def _syscall() -> Callable[..., int]:
    function = ct.CDLL(None, use_errno=True).syscall
    function.restype = ct.c_long
    return function


# --- maps


def lookup(fd: int, key: Any, value: Any) -> bool:
    """Read an entry into ``value``; False if there is none."""
    result = _library().bpf_map_lookup_elem(fd, ct.byref(key), ct.byref(value))
    return result != -ENOENT and not _check(result, "read map entry")


def update(fd: int, key: Any, value: Any) -> None:
    """Write an entry, new or not."""
    result = _library().bpf_map_update_elem(fd, ct.byref(key), ct.byref(value), 0)
    _check(result, "write map entry")


def delete(fd: int, key: Any) -> bool:
    """Remove an entry; False if there was none."""
    result = _library().bpf_map_delete_elem(fd, ct.byref(key))
    return result != -ENOENT and not _check(result, "delete map entry")


def push(fd: int, value: Any) -> None:
    """Put a value into a queue map; E2BIG when it is full."""
    result = _library().bpf_map_update_elem(fd, None, ct.byref(value), 0)
    _check(result, "push to queue")


def pop(fd: int, value: Any) -> bool:
    """Take the next value of a queue map; False if there is none."""
    result = _library().bpf_map_lookup_and_delete_elem(fd, None, ct.byref(value))
    return result != -ENOENT and not _check(result, "pop from queue")


def lookup_batch(fd: int, token: Any, first: bool, keys: Any, values: Any) -> tuple[int, bool]:
    """Read as many entries as the arrays hold: (how many, whether those were the last).

    ``token`` remembers the place between calls, at least 16 bytes and a key's size. ENOSPC: the
    arrays are smaller than one hash bucket; the token has not moved.
    """
    count = _U32(len(keys))
    start = None if first else ct.byref(token)
    result = _library().bpf_map_lookup_batch(
        fd, start, ct.byref(token), ct.byref(keys), ct.byref(values), ct.byref(count), None
    )
    if result == -ENOENT:  # the end of the map; the count is valid all the same
        return count.value, True
    _check(result, "read map entries")
    return count.value, False


def update_batch(fd: int, keys: Any, values: Any) -> None:
    """Write all entries of two arrays of one length."""
    count = _U32(len(keys))
    options = _BatchOptions(sz=ct.sizeof(_BatchOptions))
    result = _library().bpf_map_update_batch(
        fd, ct.byref(keys), ct.byref(values), ct.byref(count), ct.byref(options)
    )
    _check(result, f"write {len(keys)} map entries")


@functools.cache
def possible_cpus() -> int:
    """How many values a per-CPU map keeps for each key."""
    return _check(_library().libbpf_num_possible_cpus(), "count possible CPUs")


# --- test runs


def test_run(
    prog_fd: int,
    data: bytes,
    ctx: SkbContext | None = None,
    repeat: int = 1,
    room: int = 256,
) -> TestRun:
    """Run a program on a made-up packet (BPF_PROG_TEST_RUN), without a device.

    ``room`` is how many bytes the packet may grow. Devices and routes are those of the calling
    thread's network namespace. The kernel wants at least 14 bytes, 34 for IPv4, 54 for IPv6.
    """
    before = ct.create_string_buffer(data, len(data))
    after = ct.create_string_buffer(len(data) + room)
    options = _TestRunOptions(
        sz=ct.sizeof(_TestRunOptions),
        data_in=ct.addressof(before),
        data_size_in=len(data),
        data_out=ct.addressof(after),
        data_size_out=len(after),
        repeat=repeat,
    )
    ctx_after = SkbContext() if ctx is not None else None
    if ctx is not None and ctx_after is not None:
        options.ctx_in, options.ctx_size_in = ct.addressof(ctx), ct.sizeof(ctx)
        options.ctx_out, options.ctx_size_out = ct.addressof(ctx_after), ct.sizeof(ctx_after)
    _check(_library().bpf_prog_test_run_opts(prog_fd, ct.byref(options)), "test run")
    verdict = ct.c_int32(options.retval).value
    return TestRun(verdict, after.raw[: options.data_size_out], ctx_after, options.duration)
