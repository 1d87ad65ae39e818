# SPDX-License-Identifier: Apache-2.0
"""A toy data path, scratch namespaces and a scratch BPF file system, for tests of the loader."""

import ctypes as ct
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pyroute2 import IPRoute

from oncache.core.libbpf import Object

SOURCE = """
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct sums { __u64 packets; __u64 bytes; };
struct counters { struct sums seen; __u64 errors; };
struct key { __be32 address; __be16 port; __u8 protocol; __u8 pad; };
struct value { __u64 packets; __u32 ifindex; __u8 mac[6]; };
struct config { __u64 deadline; __u32 mark; };

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, KEY);
	__type(value, struct value);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct counters);
} counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 3);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct config);
} settings SEC(".maps");

SEC("tc")
int from_pod(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct counters *counters = bpf_map_lookup_elem(&counts, &zero);
	struct config *config = bpf_map_lookup_elem(&settings, &zero);

	if (!counters || !config)
		return -1;
	counters->seen.packets++;
	counters->seen.bytes += skb->len;
	skb->mark = config->mark;
	return -1;
}

SEC("tc")
int to_pod(struct __sk_buff *skb)
{
	return -1;
}

SEC("tc")
int stranger(struct __sk_buff *skb)
{
	return -1;
}

SEC("xdp")
int first(struct xdp_md *ctx)
{
	return XDP_PASS;
}

SEC("xdp")
int second(struct xdp_md *ctx)
{
	return XDP_PASS;
}

SEC("tc")
int careless(struct __sk_buff *skb)
{
	KEY key = {};
	struct value *value = bpf_map_lookup_elem(&flows, &key);

	return value->ifindex; /* not checked for NULL */
}

char _license[] SEC("license") = "GPL";
"""
CLANG = ["clang", "-O2", "-g", "-Wall", "-target", "bpf", "-mcpu=v3"]
MULTIARCH = f"/usr/include/{os.uname().machine}-linux-gnu"
# The same size with the fields in another order.
OTHER_KEY = "struct { __be16 port; __u8 protocol; __u8 pad; __be32 address; }"

_CLONE_NEWNET = 0x40000000
_MNT_DETACH = 2
_libc = ct.CDLL(None, use_errno=True)


def compile_toy(folder: Path, key: str = "struct key") -> Path:
    """The toy as an object file."""
    target = folder / "toy.bpf.o"
    source = folder / "toy.bpf.c"
    source.write_text(SOURCE)
    options = [f"-I{MULTIARCH}", f"-DKEY={key}", "-c", str(source), "-o", str(target)]
    subprocess.run([*CLANG, *options], check=True)
    return target


def opened(path: Path) -> Object:
    """The toy, ready to load: all but the program the verifier refuses."""
    toy = Object(path)
    toy.set_autoload("careless", False)
    return toy


@contextmanager
def loaded(path: Path) -> Iterator[Object]:
    with closing(opened(path)) as toy:
        toy.load()
        yield toy


@contextmanager
def bpffs(folder: Path) -> Iterator[Path]:
    """A BPF file system of our own, unmounted in the end."""
    mount = folder / "bpf"
    mount.mkdir()
    _done(_libc.mount(b"bpf", os.fsencode(mount), b"bpf", 0, None))
    try:
        yield mount
    finally:
        _done(_libc.umount2(os.fsencode(mount), _MNT_DETACH))


@contextmanager
def namespace() -> Iterator[None]:
    """A network namespace without a name, for the calling thread."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _done(_libc.unshare(_CLONE_NEWNET))
        yield
    finally:
        _done(_libc.setns(before, _CLONE_NEWNET))
        os.close(before)


def add_veth(name: str, peer: str, **attributes: str) -> int:
    """A pair of devices, both up; the index of the first, which gets the link attributes."""
    with IPRoute() as netlink:
        netlink.link("add", ifname=name, kind="veth", peer={"ifname": peer}, **attributes)
        for each in (name, peer):
            netlink.link("set", index=netlink.link_lookup(ifname=each)[0], state="up")
        index: int = netlink.link_lookup(ifname=name)[0]
    return index


def send_frames(device: str, count: int) -> None:
    """Frames of a local experimental type, which no protocol of the kernel answers."""
    frame = b"\x02" * 12 + b"\x88\xb5" + bytes(46)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
        sender.bind((device, 0))
        for _ in range(count):
            sender.send(frame)


def _done(result: int) -> None:
    if result != 0:
        raise OSError(ct.get_errno(), os.strerror(ct.get_errno()))
