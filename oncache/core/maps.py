# SPDX-License-Identifier: Apache-2.0
"""Maps as typed records. None of these classes owns the descriptor it works on."""

import ctypes as ct
import functools
import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from errno import ENOSPC
from typing import Any, Generic, TypeVar

from oncache.core import libbpf
from oncache.core.errors import LayoutError

K = TypeVar("K")
V = TypeVar("V")

_CHUNK = 4096
_TOKEN_MIN = 16


def map_types(fd: int) -> tuple[type[Any], type[Any]]:
    """Key and value classes of a map, from the types the kernel keeps with it.

    Raises LayoutError for a map that was made without types.
    """
    info = libbpf.map_info(fd)
    if not info.btf_id:
        raise LayoutError(
            f"map {info.name} has no type information in the kernel",
            hint="it was made by another program; detach and unload that one first",
        )
    types = libbpf.btf_by_id(info.btf_id)
    return types.ctype_id(info.btf_key_id), types.ctype_id(info.btf_value_id)


class Map(Generic[K, V]):
    """A hash, LRU, array or LPM map; keys and values are ctypes instances."""

    def __init__(self, fd: int, key_ctype: type[K], value_ctype: type[V]) -> None:
        self.fd = fd
        self._key: Any = key_ctype
        self._value: Any = value_ctype

    def lookup(self, key: K) -> V | None:
        """The value under a key, a copy; None if there is none."""
        value: V = self._value()
        return value if libbpf.lookup(self.fd, key, value) else None

    def update(self, key: K, value: V) -> None:
        """Write an entry, new or not; E2BIG when a map that does not evict is full."""
        libbpf.update(self.fd, key, value)

    def delete(self, key: K) -> bool:
        """Remove an entry; False if there was none."""
        return libbpf.delete(self.fd, key)

    def items(self) -> Iterator[tuple[K, V]]:
        """All entries, copies, some thousand per syscall.

        Entries that come or go meanwhile may be missed or seen twice.
        """
        for keys, values in self._chunks():
            yield from zip(keys, values, strict=True)

    def columns(
        self, key: Sequence[str], value: Sequence[str]
    ) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        """Of all entries the named fields, as ``columns`` below gives them: many times faster."""
        key_columns, value_columns = columns(self._key, key), columns(self._value, value)
        for keys, values in self._chunks():
            yield from zip(
                key_columns.iter_unpack(keys), value_columns.iter_unpack(values), strict=True
            )

    def count(self) -> int:
        """How many entries there are, by reading them."""
        return sum(len(keys) for keys, _values in self._chunks())

    def _chunks(self) -> Iterator[tuple[Any, Any]]:
        """Arrays of keys and values; new ones each time, since callers keep views of them."""
        chunk, done, first = _CHUNK, False, True
        token = ct.create_string_buffer(max(_TOKEN_MIN, ct.sizeof(self._key)))
        while not done:
            keys, values = (self._key * chunk)(), (self._value * chunk)()
            try:
                count, done = libbpf.lookup_batch(self.fd, token, first, keys, values)
            except libbpf.BpfError as error:
                if error.errno != ENOSPC:
                    raise
                chunk *= 2  # one hash bucket holds more than we offered room for
                continue
            first = False
            yield (self._key * count).from_buffer(keys), (self._value * count).from_buffer(values)


class PerCpuArray(Generic[V]):
    """An array map with one value per possible CPU."""

    def __init__(self, fd: int, value_ctype: type[V]) -> None:
        self.fd = fd
        self._value: Any = value_ctype

    def read(self, index: int) -> list[V]:
        """The values at an index, one per possible CPU."""
        stride = _aligned(ct.sizeof(self._value))
        cpus = libbpf.possible_cpus()
        raw = ct.create_string_buffer(stride * cpus)
        if not libbpf.lookup(self.fd, ct.c_uint32(index), raw):
            raise IndexError(index)
        return [self._value.from_buffer(raw, stride * cpu) for cpu in range(cpus)]


class Shared(Generic[V]):
    """An array map with BPF_F_MMAPABLE, mapped into this process.

    ``value[i]`` is the live entry: reading a field reads what the programs see, storing one is a
    single aligned store they see at once. Unmapped when the last value is let go.
    """

    def __init__(self, fd: int, value_ctype: type[V]) -> None:
        ctype: Any = value_ctype
        stride = _aligned(ct.sizeof(ctype))
        entries = libbpf.map_info(fd).max_entries
        memory = mmap.mmap(fd, stride * entries)
        self.value: list[V] = [ctype.from_buffer(memory, stride * i) for i in range(entries)]


def total(values: Iterable[Any]) -> dict[str, Any]:
    """Sum of equal structs of integers (nested ones and arrays too), as a dict of their shape."""
    sums: dict[str, Any] = functools.reduce(_add, map(to_dict, values))
    return sums


def to_dict(value: Any) -> Any:
    """A ctypes value as plain dicts, lists and ints, without the fields named pad... or _pad..."""
    if isinstance(value, ct.Structure | ct.Union):
        return dict(_fields(value))
    if isinstance(value, ct.Array):
        return [to_dict(element) for element in value]
    return getattr(value, "value", value)


def columns(ctype: Any, names: Sequence[str]) -> struct.Struct:
    """How to take fields out of the bytes of a struct: one call for all of them.

    A table has tens of thousands of entries, and reading each field through ctypes takes seconds.
    ``names`` are in the order of the struct, dotted where structs are nested; integers come as
    integers, all else as bytes. Raises LayoutError if some integers are big-endian and others not.
    """
    orders: set[str] = set()
    codes, end = "", 0
    for name in names:
        at, field = _place(ctype, name)
        codes += f"{at - end}x{_code(field)}"
        end = at + ct.sizeof(field)
        if _is_integer(field) and ct.sizeof(field) > 1:
            orders.add(">" if field.__ctype_be__ is field else "<")
    if len(orders) > 1:
        raise LayoutError(
            f"struct {ctype.__name__} mixes byte orders in {', '.join(names)}",
            hint="take the fields of one byte order, others as the bytes of a struct",
        )
    return struct.Struct("".join(orders or "<") + f"{codes}{ct.sizeof(ctype) - end}x")


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, dict):
        return {name: _add(item, right[name]) for name, item in left.items()}
    if isinstance(left, list):
        return [_add(a, b) for a, b in zip(left, right, strict=True)]
    return left + right


def _aligned(size: int) -> int:
    """The kernel keeps array and per-CPU values at multiples of 8 bytes."""
    return (size + 7) & ~7


def _is_integer(ctype: Any) -> bool:
    return isinstance(getattr(ctype, "_type_", None), str)


def _code(ctype: Any) -> str:
    """The struct module's letter for an integer, a run of bytes for anything else."""
    if not _is_integer(ctype):
        return f"{ct.sizeof(ctype)}s"
    letter = "bhiq"[ct.sizeof(ctype).bit_length() - 1]
    return letter if ctype(-1).value < 0 else letter.upper()


def _place(ctype: Any, name: str) -> tuple[int, Any]:
    """Offset and class of a field, given by a dotted name."""
    at = 0
    for part in name.split("."):
        at += getattr(ctype, part).offset
        ctype = next(inner for field, inner in ctype._fields_ if field == part)
    return at, ctype


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    for name, _inner in value._fields_:
        if name in getattr(value, "_anonymous_", ()):
            yield from _fields(getattr(value, name))
        elif not name.startswith(("_pad", "pad")):
            yield name, to_dict(getattr(value, name))
