# SPDX-License-Identifier: Apache-2.0
"""What this kernel offers, asked of the kernel itself and never guessed from its version."""

import os
from dataclasses import dataclass

from oncache.core import libbpf
from oncache.core.btf import KERNEL_BTF

_CT_LOOKUP = b"\0bpf_skb_ct_lookup\0"


@dataclass(frozen=True, slots=True)
class Features:
    """``btf``: the kernel's own types are there; ``tcx``: links on a device's tc hooks (6.6+, else
    clsact filters serve); ``ct_lookup``: programs may ask conntrack (also False while conntrack is
    a module that nobody has loaded)."""

    release: str
    btf: bool
    tcx: bool
    ct_lookup: bool


def probe() -> Features:
    """Ask the running kernel. Needs root; BpfError without."""
    return Features(
        release=os.uname().release,
        btf=(KERNEL_BTF / "vmlinux").exists(),
        tcx=libbpf.tcx_available(),
        ct_lookup=_has_ct_lookup(),
    )


def _has_ct_lookup() -> bool:
    # The name in the string table is proof enough, and costs no parsing of 100,000 types.
    sources = (KERNEL_BTF / name for name in ("vmlinux", "nf_conntrack"))
    return any(_CT_LOOKUP in source.read_bytes() for source in sources if source.exists())
