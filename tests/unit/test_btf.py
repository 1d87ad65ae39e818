# SPDX-License-Identifier: Apache-2.0
"""The BTF reader, on type information written by hand."""

import ctypes as ct
import struct

import pytest

from oncache.core.btf import Btf, Kind, kernel_btf
from oncache.core.errors import HostError, LayoutError

MemberSpec = tuple[str, int, int]  # name, type id, offset in bits


class Writer:
    """Writes BTF record by record; every method returns the new type's id."""

    def __init__(self) -> None:
        self._strings = b"\0"
        self._types = b""
        self._count = 0

    def raw(self) -> bytes:
        size = len(self._types)
        header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, size, size, len(self._strings))
        return header + self._types + self._strings

    def integer(self, size: int, *, signed: bool = False) -> int:
        tail = struct.pack("<I", signed << 24 | size * 8)
        return self._record(Kind.INT, f"int{size}", size, tail)

    def array(self, element: int, count: int) -> int:
        return self._record(Kind.ARRAY, "", 0, struct.pack("<III", element, element, count))

    def struct(
        self, name: str, size: int, members: list[MemberSpec], *, kind: Kind = Kind.STRUCT
    ) -> int:
        tail = b"".join(struct.pack("<III", self._text(n), t, at) for n, t, at in members)
        return self._record(kind, name, size, tail, len(members))

    def bitfield(self, name: str, size: int, member: str, type_id: int, width: int) -> int:
        tail = struct.pack("<III", self._text(member), type_id, width << 24)
        return self._record(Kind.STRUCT, name, size, tail, 1, flag=True)

    def alias(self, kind: Kind, name: str, type_id: int) -> int:
        return self._record(kind, name, type_id, b"")

    def enum(self, name: str, values: dict[str, int]) -> int:
        tail = b"".join(struct.pack("<Ii", self._text(n), v) for n, v in values.items())
        return self._record(Kind.ENUM, name, 4, tail, len(values))

    def map(self, name: str, **fields: int) -> int:
        """A variable in ``.maps``: libbpf's struct of pointers to the types meant."""
        pointers = [
            (field, self.alias(Kind.PTR, "", type_id), 64 * i)
            for i, (field, type_id) in enumerate(fields.items())
        ]
        definition = self.struct("", 8 * len(pointers), pointers)
        return self._record(Kind.VAR, name, definition, struct.pack("<I", 1))

    def section(self, name: str, variables: list[int]) -> int:
        tail = b"".join(struct.pack("<III", v, 0, 32) for v in variables)
        return self._record(Kind.DATASEC, name, 0, tail, len(variables))

    def _text(self, text: str) -> int:
        if not text:
            return 0
        self._strings += text.encode() + b"\0"
        return len(self._strings) - len(text) - 1

    def _record(
        self, kind: Kind, name: str, size: int, tail: bytes, members: int = 0, *, flag: bool = False
    ) -> int:
        info = flag << 31 | kind << 24 | members
        self._types += struct.pack("<III", self._text(name), info, size) + tail
        self._count += 1
        return self._count


def flow(order: tuple[str, str] = ("port", "id")) -> Btf:
    """struct key { __be16 port; u16 id; }, struct value { u64 packets; u8 mac[6]; }, one map."""
    writer = Writer()
    u16, u64, u8 = writer.integer(2), writer.integer(8), writer.integer(1)
    types = {"port": writer.alias(Kind.TYPEDEF, "__be16", u16), "id": u16}
    members = [(name, types[name], 16 * i) for i, name in enumerate(order)]
    key = writer.struct("key", 4, members)
    value = writer.struct("value", 16, [("packets", u64, 0), ("mac", writer.array(u8, 6), 64)])
    size = writer.array(writer.integer(4), 1024)
    flows = writer.map("flows", type=size, max_entries=size, key=key, value=value)
    writer.section(".maps", [flows])
    return Btf(writer.raw())


def test_a_struct_has_the_compilers_offsets_and_size() -> None:
    value = flow().ctype("value")
    assert (value.packets.offset, value.mac.offset, ct.sizeof(value)) == (0, 8, 16)


def test_network_order_reads_as_plain_numbers() -> None:
    key = flow().ctype("key").from_buffer_copy(b"\x00\x50\x50\x00")
    assert (key.port, key.id) == (80, 0x50)
    key.port = 443
    assert bytes(key)[:2] == b"\x01\xbb"


def test_a_map_gives_its_key_and_value() -> None:
    btf = flow()
    key, value = btf.map_types("flows")
    assert btf.map_names() == ("flows",)
    assert (key, value) == (btf.ctype("key"), btf.ctype("value"))


def test_holes_before_and_after_a_member_are_filled() -> None:
    writer = Writer()
    u8, u32 = writer.integer(1), writer.integer(4)
    writer.struct("holes", 12, [("a", u8, 0), ("b", u32, 32), ("c", u8, 64)])
    holes = Btf(writer.raw()).ctype("holes")
    assert (holes.a.offset, holes.b.offset, holes.c.offset, ct.sizeof(holes)) == (0, 4, 8, 12)


def test_members_of_an_anonymous_union_are_reached_directly() -> None:
    writer = Writer()
    u8, u32 = writer.integer(1), writer.integer(4)
    either = [("word", u32, 0), ("bytes", writer.array(u8, 4), 0)]
    union = writer.struct("", 4, either, kind=Kind.UNION)
    writer.struct("outer", 8, [("first", u32, 0), ("", union, 32)])
    btf = Btf(writer.raw())
    outer = btf.ctype("outer")(word=0x01020304)
    assert list(outer.bytes) == [4, 3, 2, 1]
    assert btf.offset("outer", "bytes") == 4


def test_signs_aliases_and_enums() -> None:
    writer = Writer()
    writer.alias(Kind.TYPEDEF, "s64", writer.integer(8, signed=True))
    const = writer.alias(Kind.CONST, "", writer.integer(2))
    writer.alias(Kind.TYPEDEF, "constant", const)
    writer.enum("reason", {"NO_ROUTE": 1, "EXPIRED": -1})
    btf = Btf(writer.raw())
    assert btf.ctype("s64") is ct.c_int64
    assert btf.ctype("constant") is ct.c_uint16
    assert btf.enum("reason") == {"NO_ROUTE": 1, "EXPIRED": -1}
    assert btf.ctype("reason") is ct.c_uint32


def test_the_layout_hash_sees_a_changed_field_order() -> None:
    assert flow().layout_hash(["flows"]) == flow().layout_hash(["flows"])
    assert flow().layout_hash(["flows"]) != flow(("id", "port")).layout_hash(["flows"])
    assert flow().layout_hash(["key"]) != flow(("id", "port")).layout_hash(["key"])
    assert flow().layout_hash(["value"]) == flow(("id", "port")).layout_hash(["value"])


def test_a_bit_field_is_refused() -> None:
    writer = Writer()
    writer.bitfield("bits", 4, "flag", writer.integer(4), 1)
    with pytest.raises(LayoutError, match=r"struct bits: bit-field flag"):
        Btf(writer.raw()).ctype("bits")


def test_a_type_that_has_no_values_is_refused() -> None:
    writer = Writer()
    writer.alias(Kind.TYPEDEF, "opaque", writer.alias(Kind.FWD, "hidden", 0))
    with pytest.raises(LayoutError, match="hidden"):
        Btf(writer.raw()).ctype("opaque")


@pytest.mark.parametrize("raw", [b"", b"\x7fELF" + bytes(60)])
def test_bytes_that_are_no_btf_are_refused(raw: bytes) -> None:
    with pytest.raises(LayoutError, match="no BTF") as caught:
        Btf(raw)
    assert "clang" in caught.value.hint


def test_a_kernel_without_btf_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr("oncache.core.btf.KERNEL_BTF", tmp_path_factory.mktemp("empty"))
    with pytest.raises(HostError, match="carries no BTF") as caught:
        kernel_btf()
    assert "CONFIG_DEBUG_INFO_BTF" in caught.value.hint
