# SPDX-License-Identifier: Apache-2.0
"""The context a tc program sees, for running a program on a made-up packet."""

import ctypes as ct

_U32 = ct.c_uint32
_U64 = ct.c_uint64


class SkbContext(ct.Structure):
    """``struct __sk_buff`` (include/uapi/linux/bpf.h).

    A test run takes ``mark``, ``priority``, ``ingress_ifindex``, ``ifindex``, ``cb``, ``tstamp``,
    ``wire_len``, ``gso_segs``, ``gso_size`` and ``hwtstamp``; any other field set gives EINVAL.
    """

    _fields_ = (
        ("len", _U32),
        ("pkt_type", _U32),
        ("mark", _U32),
        ("queue_mapping", _U32),
        ("protocol", _U32),
        ("vlan_present", _U32),
        ("vlan_tci", _U32),
        ("vlan_proto", _U32),
        ("priority", _U32),
        ("ingress_ifindex", _U32),
        ("ifindex", _U32),
        ("tc_index", _U32),
        ("cb", _U32 * 5),
        ("hash", _U32),
        ("tc_classid", _U32),
        ("data", _U32),
        ("data_end", _U32),
        ("napi_id", _U32),
        ("family", _U32),
        ("remote_ip4", _U32),
        ("local_ip4", _U32),
        ("remote_ip6", _U32 * 4),
        ("local_ip6", _U32 * 4),
        ("remote_port", _U32),
        ("local_port", _U32),
        ("data_meta", _U32),
        ("flow_keys", _U64),
        ("tstamp", _U64),
        ("wire_len", _U32),
        ("gso_segs", _U32),
        ("sk", _U64),
        ("gso_size", _U32),
        ("tstamp_type", _U32),
        ("hwtstamp", _U64),
    )
