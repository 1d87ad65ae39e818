# SPDX-License-Identifier: Apache-2.0
"""Maps as typed records. None of these classes owns the descriptor it works on."""

import ctypes as ct
import functools
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
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

    def rows(self) -> Iterator[tuple[Any, Any]]:
        """The same entries as plain values (see ``to_dict``), several times faster."""
        key, value = _converter(self._key), _converter(self._value)
        key_size, value_size = ct.sizeof(self._key), ct.sizeof(self._value)
        for keys, values in self._chunks():
            for raw_key, raw_value in zip(
                _slices(bytes(keys), key_size), _slices(bytes(values), value_size), strict=True
            ):
                yield key(raw_key), value(raw_value)

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
    ctype: Any = type(value)
    return _converter(ctype)(bytes(value))


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, dict):
        return {name: _add(item, right[name]) for name, item in left.items()}
    if isinstance(left, list):
        return [_add(a, b) for a, b in zip(left, right, strict=True)]
    return left + right


def _slices(raw: bytes, size: int) -> Iterator[bytes]:
    return (raw[at : at + size] for at in range(0, len(raw), size))


def _aligned(size: int) -> int:
    """The kernel keeps array and per-CPU values at multiples of 8 bytes."""
    return (size + 7) & ~7


@functools.cache
def _converter(ctype: Any) -> Callable[[bytes], Any]:
    """The function that turns the bytes of a ctypes class into plain dicts, lists and ints.

    A table has tens of thousands of entries, and reading each field through ctypes takes seconds.
    So each class is compiled once, as namedtuple does it: two formats (one per byte order) that
    unpack an entry in one call each, and one expression that arranges what comes out.
    """
    plan = _Plan()
    expression = plan.value(ctype)
    names: dict[str, Any] = plan.inner | {
        "little": struct.Struct("<" + plan.little).unpack,
        "big": struct.Struct(">" + plan.big).unpack,
    }
    source = f"lambda raw: (lambda l, b: {expression})(little(raw), big(raw))"
    made: Callable[[bytes], Any] = eval(source, names)
    return made


class _Plan:
    """Formats for both byte orders, and the expression over their results ``l`` and ``b``."""

    def __init__(self) -> None:
        self.little = self.big = ""
        self.inner: dict[str, Callable[[bytes], Any]] = {}
        self._taken = {"l": 0, "b": 0}

    def value(self, ctype: Any) -> str:
        if issubclass(ctype, ct.Structure):
            return f"{{{', '.join(self._fields(ctype))}}}"
        if issubclass(ctype, ct.Union):
            return f"{{{', '.join(self._views(ctype))}}}"
        if issubclass(ctype, ct.Array):
            return self._array(ctype)
        return self._integer(ctype)

    def _integer(self, ctype: Any) -> str:
        letter = "bhiq"[ct.sizeof(ctype).bit_length() - 1]
        code = letter if ctype(-1).value < 0 else letter.upper()
        return self._take(code, ct.sizeof(ctype), big=ctype.__ctype_le__ is not ctype)

    def _take(self, code: str, size: int, *, big: bool = False) -> str:
        skip = f"{size}x"
        self.little += skip if big else code
        self.big += code if big else skip
        order = "b" if big else "l"
        self._taken[order] += 1
        return f"{order}[{self._taken[order] - 1}]"

    def _skip(self, size: int) -> None:
        self.little += f"{size}x"
        self.big += f"{size}x"

    def _fields(self, ctype: Any) -> Iterator[str]:
        for name, inner in ctype._fields_:
            if name in getattr(ctype, "_anonymous_", ()):
                parts = self._fields if issubclass(inner, ct.Structure) else self._views
                yield from parts(inner)
            elif name.startswith(("_pad", "pad")):
                self._skip(ct.sizeof(inner))
            else:
                yield f"{name!r}: {self.value(inner)}"

    def _views(self, ctype: Any) -> Iterator[str]:
        size = ct.sizeof(ctype)
        taken = self._take(f"{size}s", size)
        for name, inner in ctype._fields_:
            convert = f"inner{len(self.inner)}"
            self.inner[convert] = _converter(inner)
            yield f"{name!r}: {convert}({taken}[:{ct.sizeof(inner)}])"

    def _array(self, ctype: Any) -> str:
        element, count = ctype._type_, ctype._length_
        if element is ct.c_uint8:
            return f"list({self._take(f'{count}s', count)})"
        return f"[{', '.join(self.value(element) for _ in range(count))}]"
