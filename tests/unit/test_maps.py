# SPDX-License-Identifier: Apache-2.0
"""Map entries as plain values, without a kernel."""

import ctypes as ct

import pytest

from oncache.core.errors import LayoutError
from oncache.core.maps import columns, to_dict, total


class Hits(ct.Structure):
    _fields_ = (("from_pod", ct.c_uint64), ("local", ct.c_uint64))


class Either(ct.Union):
    _fields_ = (("word", ct.c_uint32), ("octets", ct.c_uint8 * 4))


class Entry(ct.Structure):
    _anonymous_ = ("_anonymous0",)
    _pack_ = 1
    _fields_ = (
        ("hits", Hits),
        ("port", ct.c_uint16.__ctype_be__),
        ("delta", ct.c_int8),
        ("pad", ct.c_uint8),
        ("_anonymous0", Either),
        ("address", ct.c_uint32.__ctype_be__ * 2),
        ("parts", Hits * 2),
        ("_pad7", ct.c_uint8 * 4),
    )


def test_an_entry_becomes_plain_values_without_padding() -> None:
    entry = Entry(hits=Hits(1, 2), port=80, delta=-3, word=0x01020304)
    entry.address[1] = 0x0A000001
    entry.parts[1].local = 9
    assert to_dict(entry) == {
        "hits": {"from_pod": 1, "local": 2},
        "port": 80,
        "delta": -3,
        "word": 0x01020304,
        "octets": [4, 3, 2, 1],
        "address": [0, 0x0A000001],
        "parts": [{"from_pod": 0, "local": 0}, {"from_pod": 0, "local": 9}],
    }


def test_plain_integers_and_arrays_too() -> None:
    assert to_dict(ct.c_uint64(7)) == 7
    assert to_dict((ct.c_uint8 * 3)(1, 2, 3)) == [1, 2, 3]


def test_the_total_has_the_shape_of_one_value() -> None:
    values = [Entry(hits=Hits(1, 10), delta=1), Entry(hits=Hits(2, 20), delta=-4)]
    summed = total(values)
    assert summed["hits"] == {"from_pod": 3, "local": 30}
    assert summed["delta"] == -3
    assert summed["octets"] == [0, 0, 0, 0]


def test_columns_are_the_named_fields_in_order() -> None:
    entry = Entry(hits=Hits(1, 1 << 40), delta=-3)
    entry.parts[1].local = 9
    taken = columns(Entry, ("hits.local", "delta", "parts")).unpack(bytes(entry))
    assert taken == (1 << 40, -3, bytes(24) + b"\x09" + bytes(7))
    assert columns(Entry, ("hits.local", "delta")).size == ct.sizeof(Entry)


def test_columns_in_network_byte_order() -> None:
    assert columns(Entry, ("port", "delta")).unpack(bytes(Entry(port=80, delta=2))) == (80, 2)


def test_columns_of_two_byte_orders_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"hits\.local, port"):
        columns(Entry, ("hits.local", "port"))
