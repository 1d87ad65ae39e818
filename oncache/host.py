# SPDX-License-Identifier: Apache-2.0
"""What attaching changes on a host beside the data path, and taking everything off again.

Plain functions for the network namespace of the calling thread, outside of any event loop: the
command uses them when no agent runs, the agent in a worker thread.
"""

import asyncio
import logging
import os
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Final

from oncache.core import bpffs, conntrack, overlay
from oncache.core.errors import OncacheError
from oncache.core.net import IpAddress
from oncache.core.netlink import Netlink
from oncache.core.sysctl import Journal
from oncache.guard import Guard
from oncache.plane import Plane

log = logging.getLogger(__name__)

# Conntrack misses what the fast path carries: its windows fall behind, and after 2 GB unseen it
# would not even believe an RST.
LIBERAL: Final = "netfilter.nf_conntrack_tcp_be_liberal"
SETTINGS: Final = {LIBERAL: "1", "netfilter.nf_conntrack_tcp_ignore_invalid_rst": "1"}


def prepare(run_dir: Path) -> None:
    """Set what conntrack must forgive while we are attached; the journal keeps the originals."""
    journal = Journal(run_dir)
    for name, value in SETTINGS.items():
        journal.set(name, value)


def restore(run_dir: Path, pods: Collection[IpAddress] | None) -> None:
    """Put the settings back, after giving every open connection of ``pods`` (None: every one) its
    own forgiveness: without it, those that were fast would be INVALID from their next packet on."""
    journal = Journal(run_dir)
    if journal.changed().get(LIBERAL, "1") == "0":
        freed = asyncio.run(_liberate(pods))
        log.info("conntrack flows=%d made liberal", freed)
    journal.restore()


async def _liberate(pods: Collection[IpAddress] | None) -> int:
    return await conntrack.liberate(await conntrack.tcp_flows(pods))


def detach_host(bpf_dir: Path, run_dir: Path) -> None:
    """Take everything of ours off this host, when no agent does it. Idempotent.

    BusyError if an agent holds ``bpf_dir``.
    """
    lock = bpffs.lock_dir(bpf_dir) if bpf_dir.is_dir() else None
    try:
        take_off(bpf_dir, run_dir)
    finally:
        if lock is not None:
            os.close(lock)


def take_off(bpf_dir: Path, run_dir: Path) -> None:
    """``detach_host`` for who holds the lock: stop the fast path, leave open connections in a state
    conntrack accepts, then remove programs, pins and an overlay of our making."""
    pods = _stop(bpf_dir)
    restore(run_dir, pods)
    unload(bpf_dir)
    asyncio.run(_remove_overlay())
    log.info("detached bpf_dir=%s", bpf_dir)


def unload(bpf_dir: Path) -> None:
    """Detach every program of ours and remove every pin, whatever the layout. Idempotent."""
    Guard.unload(bpf_dir)
    Plane.unload(bpf_dir)


def _stop(bpf_dir: Path) -> frozenset[IpAddress] | None:
    """Stop learning and forwarding; returns the pods' addresses, None if the maps cannot say: they
    are gone, or another build's."""
    try:
        plane = Plane.open(bpf_dir)
    except (OncacheError, LookupError, OSError) as error:
        log.debug("no maps to read bpf_dir=%s reason=%s", bpf_dir, error)
        return None
    with closing(plane):
        plane.pause_learning()
        plane.disable()
        return frozenset(address for pod in plane.pods().values() for address in pod.addresses)


async def _remove_overlay() -> None:
    async with Netlink() as netlink:
        await overlay.remove(netlink)
