# SPDX-License-Identifier: Apache-2.0
"""BTF, the compiler's description of C types: from its bytes to ctypes classes.

The C structs are the only definition of what a map holds. This module reads that definition from a
compiled object, from a map in the kernel, or from the kernel itself (Documentation/bpf/btf.rst).
"""

import ctypes as ct
import hashlib
import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from oncache.core.errors import HostError, LayoutError

KERNEL_BTF = Path("/sys/kernel/btf")


class Kind(IntEnum):
    """Kinds of BTF records, numbered as the format numbers them."""

    VOID = 0
    INT = 1
    PTR = 2
    ARRAY = 3
    STRUCT = 4
    UNION = 5
    ENUM = 6
    FWD = 7
    TYPEDEF = 8
    VOLATILE = 9
    CONST = 10
    RESTRICT = 11
    FUNC = 12
    FUNC_PROTO = 13
    VAR = 14
    DATASEC = 15
    FLOAT = 16
    DECL_TAG = 17
    TYPE_TAG = 18
    ENUM64 = 19


_KINDS = tuple(Kind)
# Bytes behind each record's 12-byte head: a fixed part, and a part per member.
_TAIL = {
    Kind.INT: (4, 0),
    Kind.ARRAY: (12, 0),
    Kind.STRUCT: (0, 12),
    Kind.UNION: (0, 12),
    Kind.ENUM: (0, 8),
    Kind.FUNC_PROTO: (0, 8),
    Kind.VAR: (4, 0),
    Kind.DATASEC: (0, 12),
    Kind.DECL_TAG: (4, 0),
    Kind.ENUM64: (0, 12),
}
_ALIASES = frozenset(
    {Kind.TYPEDEF, Kind.VOLATILE, Kind.CONST, Kind.RESTRICT, Kind.TYPE_TAG, Kind.VAR}
)
_NAMED = frozenset({Kind.STRUCT, Kind.UNION, Kind.ENUM, Kind.ENUM64, Kind.TYPEDEF, Kind.DATASEC})
_UNSIGNED: dict[int, type[Any]] = {
    1: ct.c_uint8,
    2: ct.c_uint16,
    4: ct.c_uint32,
    8: ct.c_uint64,
    16: ct.c_uint8 * 16,
}
_SIGNED: dict[int, type[Any]] = _UNSIGNED | {
    1: ct.c_int8,
    2: ct.c_int16,
    4: ct.c_int32,
    8: ct.c_int64,
}
# The kernel's names for network byte order. ctypes swaps on access, so Python sees plain numbers.
_BIG_ENDIAN: dict[str, type[Any]] = {
    "__be16": ct.c_uint16.__ctype_be__,
    "__be32": ct.c_uint32.__ctype_be__,
    "__be64": ct.c_uint64.__ctype_be__,
}
_INT_SIGNED = 1 << 24
_MAGIC = b"\x9f\xeb"
_HEADER = struct.Struct("<HBBIIIII")


# Tuples rather than dataclasses: a kernel has more than 100,000 records.
class Record(NamedTuple):
    """One BTF record. ``size`` is bytes, or the id of the type an alias stands for."""

    id: int
    name: str
    kind: Kind
    members: int
    has_bitfields: bool
    size: int
    tail: bytes


class Member(NamedTuple):
    """A struct or union member: name ("" when anonymous), type id, offset in bits, bit width."""

    name: str
    type_id: int
    bit_offset: int
    bit_width: int


class Btf:
    """Types of one object or kernel.

    ``Btf(raw)`` takes the bytes as the object or the kernel gives them. An object's own file holds
    zeros where variables sit in their sections, so take the bytes from the opened object.
    """

    def __init__(self, raw: bytes) -> None:
        types, self._strings = _sections(raw)
        self._records = [Record(0, "void", Kind.VOID, 0, False, 0, b"")]
        self._records.extend(self._parse(types))
        self._by_name = {r.name: r for r in self._records if r.name and r.kind in _NAMED}
        self._ctypes: dict[int, type[Any]] = {}

    def ctype(self, name: str) -> type[Any]:
        """The ctypes class of a named struct, union, enum or typedef.

        Raises KeyError for an unknown name, LayoutError for a type ctypes cannot hold.
        """
        return self.ctype_id(self._by_name[name].id)

    def ctype_id(self, type_id: int) -> type[Any]:
        """The ctypes class of a type id; sizes are checked against the compiler's.

        ``__be16``, ``__be32`` and ``__be64`` become big-endian integers: a port reads as 80.
        """
        found = self._ctypes.get(type_id)
        if found is None:
            found = self._ctypes[type_id] = self._build(type_id)
        return found

    def enum(self, name: str) -> dict[str, int]:
        """Names and values of an enum, in the order of the C source."""
        record = self._resolve(self._by_name[name].id)
        if record.kind is Kind.ENUM:
            return {self._text(at): value for at, value in struct.iter_unpack("<Ii", record.tail)}
        return {
            self._text(at): low | high << 32
            for at, low, high in struct.iter_unpack("<III", record.tail)
        }

    def offset(self, name: str, field: str) -> int:
        """Byte offset of a field in a named struct, looking into anonymous members too."""
        found = self._find(self._by_name[name], field)
        if found is None:
            raise KeyError(f"{name}.{field}")
        return found

    def map_names(self) -> tuple[str, ...]:
        """Names of the maps the object defines, in the compiler's order."""
        return tuple(self._maps())

    def map_types(self, name: str) -> tuple[type[Any], type[Any]]:
        """The ctypes classes of a map's key and value; KeyError if it has no typed ones."""
        fields = self._maps()[name]
        return self.ctype_id(fields["key"]), self.ctype_id(fields["value"])

    def layout_hash(self, names: Iterable[str]) -> str:
        """16 hex digits that change when the layout of any named map or type changes.

        Covers field names, offsets, sizes and signs; not how many entries a map has.
        """
        maps = self._maps()
        lines = []
        for name in sorted(names):
            parts = maps[name] if name in maps else {"type": self._by_name[name].id}
            outlines = (f"{part} {self._outline(at)}" for part, at in sorted(parts.items()))
            lines.append(f"{name}: {', '.join(outlines)}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    # --- records

    def _text(self, offset: int) -> str:
        return self._strings[offset : self._strings.index(b"\0", offset)].decode()

    def _parse(self, types: bytes) -> Iterator[Record]:
        at, number = 0, 1
        while at < len(types):
            name, info, size = struct.unpack_from("<III", types, at)
            kind, members = _KINDS[info >> 24 & 31], info & 0xFFFF
            fixed, each = _TAIL.get(kind, (0, 0))
            end = at + 12 + fixed + each * members
            tail = types[at + 12 : end]
            yield Record(number, self._text(name), kind, members, bool(info >> 31), size, tail)
            at, number = end, number + 1

    def _resolve(self, type_id: int) -> Record:
        record = self._records[type_id]
        while record.kind in _ALIASES:
            record = self._records[record.size]
        return record

    def _members(self, record: Record) -> Iterator[Member]:
        for name, type_id, place in struct.iter_unpack("<III", record.tail):
            width = place >> 24 if record.has_bitfields else 0
            offset = place & 0xFFFFFF if record.has_bitfields else place
            yield Member(self._text(name), type_id, offset, width)

    def _find(self, record: Record, field: str) -> int | None:
        for member in self._members(record):
            if member.name == field:
                return member.bit_offset // 8
            if not member.name:
                inner = self._find(self._resolve(member.type_id), field)
                if inner is not None:
                    return member.bit_offset // 8 + inner
        return None

    def _maps(self) -> dict[str, dict[str, int]]:
        """Map name -> {"key", "value", "map_flags"...: type id}, from the section ``.maps``."""
        section = self._by_name.get(".maps")
        if section is None:
            return {}
        found = {}
        for type_id, _offset, _size in struct.iter_unpack("<III", section.tail):
            definition = self._resolve(type_id)
            found[self._records[type_id].name] = {
                # libbpf's convention: every field is a pointer to the type, or to an array as long
                # as the number meant. Sizes may differ between two loads of one layout.
                member.name: self._resolve(member.type_id).size
                for member in self._members(definition)
                if member.name not in ("max_entries", "pinning")
            }
        return found

    # --- ctypes

    def _build(self, type_id: int) -> type[Any]:
        record = self._records[type_id]
        if record.kind is Kind.TYPEDEF and record.name in _BIG_ENDIAN:
            return _BIG_ENDIAN[record.name]
        if record.kind in _ALIASES:
            return self.ctype_id(record.size)
        if record.kind is Kind.INT:
            return (_SIGNED if _is_signed(record) else _UNSIGNED)[record.size]
        if record.kind in (Kind.ENUM, Kind.ENUM64):
            return _UNSIGNED[record.size]
        if record.kind is Kind.PTR:
            return ct.c_uint64
        if record.kind is Kind.ARRAY:
            element, _index, count = struct.unpack("<III", record.tail)
            array: type[Any] = self.ctype_id(element) * count
            return array
        if record.kind in (Kind.STRUCT, Kind.UNION):
            return self._build_struct(record)
        raise LayoutError(
            f"type {record.name or record.id} ({record.kind.name}) cannot be held in Python",
            hint="use integers, arrays, structs and unions in map types",
        )

    def _build_struct(self, record: Record) -> type[Any]:
        union = record.kind is Kind.UNION
        fields: list[tuple[str, type[Any]]] = []
        anonymous: list[str] = []
        end = 0
        for member in self._members(record):
            offset = _byte_offset(record, member)
            if not union and offset > end:
                fields.append((f"_pad{len(fields)}", ct.c_uint8 * (offset - end)))
            name = member.name or f"_anonymous{len(fields)}"
            if not member.name:
                anonymous.append(name)
            inner = self.ctype_id(member.type_id)
            fields.append((name, inner))
            end = offset + ct.sizeof(inner)
        if record.size > end and not union:
            fields.append((f"_pad{len(fields)}", ct.c_uint8 * (record.size - end)))
        base = ct.Union if union else ct.Structure
        # Packed: the compiler's padding is spelt out above, ctypes must add none of its own.
        body = {"_pack_": 1, "_anonymous_": anonymous, "_fields_": fields}
        made = type(record.name or f"anonymous{record.id}", (base,), body)
        if ct.sizeof(made) != record.size:
            raise LayoutError(
                f"struct {record.name}: {ct.sizeof(made)} bytes in Python, {record.size} in C",
                hint="the object was built by a compiler this reader does not know; rebuild it",
            )
        return made

    # --- layout

    def _outline(self, type_id: int) -> str:
        """A type as text: everything that decides where its bytes are and what they mean."""
        record = self._resolve(type_id)
        if record.kind is Kind.INT:
            return f"{'i' if _is_signed(record) else 'u'}{record.size}"
        if record.kind is Kind.ARRAY:
            element, _index, count = struct.unpack("<III", record.tail)
            return f"[{count}]{self._outline(element)}"
        if record.kind in (Kind.STRUCT, Kind.UNION):
            members = (
                f"{member.name}@{member.bit_offset}:{self._outline(member.type_id)}"
                for member in self._members(record)
            )
            return f"{record.kind.name}{record.size}{{{';'.join(members)}}}"
        if record.kind in (Kind.ENUM, Kind.ENUM64):
            return f"u{record.size}"
        return record.kind.name


def kernel_btf() -> Btf:
    """The running kernel's own types (about 0.5 s to read). Raises HostError where it has none."""
    try:
        return Btf((KERNEL_BTF / "vmlinux").read_bytes())
    except OSError as error:
        raise no_kernel_btf() from error


def no_kernel_btf() -> HostError:
    """The error for a kernel without BTF."""
    return HostError(
        f"this kernel carries no BTF ({KERNEL_BTF / 'vmlinux'} is missing)",
        hint="boot a kernel built with CONFIG_DEBUG_INFO_BTF=y (the distribution's own has it)",
    )


def _sections(raw: bytes) -> tuple[bytes, bytes]:
    """The type section and the string section of a BTF blob (include/uapi/linux/btf.h)."""
    if len(raw) < _HEADER.size or raw[:2] != _MAGIC:
        raise LayoutError(
            "no BTF type information where some was expected",
            hint="build the object with 'clang -g -target bpf'; strip nothing but 'llvm-strip -g'",
        )
    header = _HEADER.unpack_from(raw)
    length, types_at, types_size, strings_at, strings_size = header[3:]
    types = raw[length + types_at : length + types_at + types_size]
    strings = raw[length + strings_at : length + strings_at + strings_size]
    return types, strings


def _is_signed(record: Record) -> bool:
    return bool(int.from_bytes(record.tail, "little") & _INT_SIGNED)


def _byte_offset(record: Record, member: Member) -> int:
    if member.bit_width or member.bit_offset % 8:
        raise LayoutError(
            f"struct {record.name}: bit-field {member.name} cannot be held in Python",
            hint="use whole bytes in map types",
        )
    return member.bit_offset // 8
