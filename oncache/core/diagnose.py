# SPDX-License-Identifier: Apache-2.0
"""Why the kernel drops packets: a tracepoint program compiled on the spot by bcc.

The one module that knows bcc, which is an optional part of the distribution (python3-bpfcc) and is
imported only when somebody asks.
"""

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncache.core.btf import Btf, kernel_btf
from oncache.core.errors import HostError


@dataclass(frozen=True, slots=True)
class Drop:
    """Packets dropped for one reason (enum skb_drop_reason) while they belonged to one device."""

    reason: str
    ifindex: int
    count: int


_REPORT_SECONDS = 1.0

_DISTRIBUTION = "/usr/lib/python3/dist-packages"
_HEADERS = {
    # bcc brings its own bpf.h; a second one would clash.
    "linux/bpf.h": "",
    "uapi/linux/bpf.h": "",
    "linux/log2.h": "",
    "linux/kconfig.h": "#define CONFIG_BPF_SYSCALL 1\n",
    "asm/page.h": "#define PAGE_SIZE 4096\n",
    "linux/types.h": """
#ifndef _ONCACHE_TYPES_H
#define _ONCACHE_TYPES_H
#include <uapi/linux/types.h>
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s8 s8;
typedef __s16 s16;
typedef __s32 s32;
typedef __s64 s64;
typedef __SIZE_TYPE__ size_t;
typedef unsigned long uintptr_t;
typedef _Bool bool;
enum { false = 0, true = 1 };
#define NULL ((void *)0)
#endif
""",
}

# Offsets come from the running kernel's BTF: headers, where there are any, may be another kernel's.
_SOURCE = """
#include <uapi/linux/bpf.h>
struct drop { u32 reason, ifindex; };
BPF_HASH(drops, struct drop, u64, 4096);
RAW_TRACEPOINT_PROBE(kfree_skb)
{
    struct drop drop = { .reason = (u32)ctx->args[2] };
    char *skb = (void *)ctx->args[0], *device = 0, *net = 0;
    u32 namespace = 0;

    bpf_probe_read_kernel(&device, sizeof(device), skb + SKB_DEVICE);
    if (!device)
        return 0;
    bpf_probe_read_kernel(&net, sizeof(net), device + DEVICE_NET);
    bpf_probe_read_kernel(&namespace, sizeof(namespace), net + NET_INODE);
    if (namespace != NAMESPACE)
        return 0;
    bpf_probe_read_kernel(&drop.ifindex, sizeof(drop.ifindex), device + DEVICE_INDEX);
    drops.increment(drop);
    return 0;
}
"""


def drop_reasons(seconds: float) -> Iterator[Drop]:
    """Drops on devices of the calling thread's network namespace, reported each second.

    ``count`` is what came since the last report; a second passes before the program is compiled.
    Raises HostError without bcc, root, kernel BTF or the distribution's C headers. Blocks: an
    asyncio caller needs a thread.
    """
    types = kernel_btf()
    names = {value: name for name, value in types.enum("skb_drop_reason").items()}
    with _program(types) as program:
        end = time.monotonic() + seconds
        reported: dict[tuple[int, int], int] = {}
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _REPORT_SECONDS))
            for key, value in program[b"drops"].items():
                place = (key.reason, key.ifindex)
                count = value.value - reported.get(place, 0)
                reported[place] = value.value
                if count:
                    yield Drop(names.get(key.reason, str(key.reason)), key.ifindex, count)


@contextmanager
def _program(types: Btf) -> Iterator[Any]:
    if os.geteuid() != 0:
        raise HostError("tracing the kernel needs root", hint="run it with sudo")
    bcc = _import_bcc()
    with tempfile.TemporaryDirectory(prefix="oncache-") as folder:
        _write_kernel_tree(Path(folder))
        # bcc learns from the environment only where the kernel's headers are.
        os.environ["BCC_KERNEL_SOURCE"] = folder
        try:
            program = bcc.BPF(text=_SOURCE.encode(), cflags=_definitions(types))
        except Exception as error:  # bcc raises nothing more special
            raise HostError(
                f"bcc cannot compile or load the drop monitor: {error}",
                hint="bcc's own words are above; Linux 5.17 or later gives drop reasons",
            ) from error
        finally:
            del os.environ["BCC_KERNEL_SOURCE"]
    try:
        yield program
    finally:
        program.cleanup()


def _import_bcc() -> Any:
    # The distribution installs bcc for its own Python alone; it is plain Python over ctypes, so any
    # interpreter can use it. Its folder comes last and only for a moment: nothing there may shadow
    # our own packages.
    sys.path.append(_DISTRIBUTION)
    try:
        return importlib.import_module("bcc")
    except (ImportError, OSError) as error:
        raise HostError(
            "bcc is not installed", hint="apt-get install python3-bpfcc linux-libc-dev"
        ) from error
    finally:
        sys.path.remove(_DISTRIBUTION)


def _definitions(types: Btf) -> list[str]:
    values = {
        "SKB_DEVICE": types.offset("sk_buff", "dev"),
        "DEVICE_INDEX": types.offset("net_device", "ifindex"),
        "DEVICE_NET": types.offset("net_device", "nd_net"),
        "NET_INODE": types.offset("net", "ns") + types.offset("ns_common", "inum"),
        "NAMESPACE": os.stat("/proc/thread-self/ns/net").st_ino,
    }
    return [f"-D{name}={value}" for name, value in values.items()]


def _write_kernel_tree(root: Path) -> None:
    """The few headers bcc's prelude wants of a kernel tree, made of the C library's.

    So neither the headers of the running kernel are needed, which a custom kernel does not have,
    nor can those of another kernel be mistaken for them.
    """
    include = root / "include"
    uapi, generic = Path("/usr/include/linux"), Path("/usr/include/asm-generic")
    machine = Path(f"/usr/include/{os.uname().machine}-linux-gnu/asm")
    if not (uapi.exists() and machine.exists()):
        raise HostError(
            "the kernel's C headers are not installed", hint="apt-get install linux-libc-dev"
        )
    for folder, source in (("linux", uapi), ("uapi/linux", uapi), ("asm", machine)):
        (include / folder).mkdir(parents=True)
        for header in source.iterdir():
            (include / folder / header.name).symlink_to(header)
    (include / "uapi/asm").symlink_to(machine)
    (include / "asm-generic").symlink_to(generic)
    for name, text in _HEADERS.items():
        (include / name).unlink(missing_ok=True)
        (include / name).write_text(text)
