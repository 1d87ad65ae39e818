# SPDX-License-Identifier: Apache-2.0
"""The laboratory: a machine room in namespaces that is gone when the block ends."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from netns_tests.lab import namespaces, overlay
from netns_tests.lab.hosts import Host, Shape
from netns_tests.lab.namespaces import Namespace
from netns_tests.lab.overlay import Vxlan
from netns_tests.lab.signals import terminating_in_order, undisturbed


class Lab:
    """Builds hosts, wires and overlays; undoes all of it in reverse when the block ends.

    Also when it ends by an exception, Ctrl-C or SIGTERM (raised as `signals.Terminated`). Names
    are random, with the prefix "onc-", so that several laboratories can run at once.
    """

    def __init__(self) -> None:
        namespaces.require()
        self.name = f"{namespaces.PREFIX}{secrets.token_hex(3)}"
        self.hosts: dict[str, Host] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Lab:
        self._undo.enter_context(terminating_in_order())
        try:
            with undisturbed():
                self.directory = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
                self._undo.callback(shutil.rmtree, self.directory)
                self._mount_bpffs()
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with undisturbed():
            self._undo.__exit__(kind, error, trace)

    def _mount_bpffs(self) -> None:
        self.bpffs = self.directory / "bpf"
        self.bpffs.mkdir()
        namespaces.mount("bpf", self.bpffs, "bpf")
        self._undo.callback(namespaces.unmount, self.bpffs)

    def host(self, label: str, *, ip6: bool = False) -> Host:
        """Add a host: an IPv4 (and IPv6) router without wires or pods yet."""
        work = self.directory / label
        work.mkdir()
        with undisturbed():
            made = Host(self.name, label, len(self.hosts) + 1, work, self.bpffs, ip6=ip6)
            self._undo.callback(made.delete)
        self.hosts[label] = made
        return made

    def wire(self, *hosts: Host, mtu: int = 1500) -> None:
        """Join hosts by their uplinks: two by one veth pair, more through a switch."""
        if len(hosts) == 2:
            overlay.direct_wire(*hosts, mtu=mtu)
            return
        with undisturbed():
            switch = Namespace(f"{self.name}-switch{hosts[0].number}")
            self._undo.callback(switch.delete)
        overlay.switched_wire(switch, hosts, mtu)

    def vxlan(self, *hosts: Host, device: Vxlan | None = None, shape: Shape = Shape.BRIDGE) -> None:
        """Build the overlay on wired hosts; pods can be added afterwards."""
        overlay.join(hosts, device or Vxlan(), shape)

    def pair(
        self,
        labels: tuple[str, str] = ("a", "b"),
        *,
        mtu: int = 1500,
        device: Vxlan | None = None,
        shape: Shape = Shape.BRIDGE,
        ip6: bool = False,
    ) -> tuple[Host, Host]:
        """Two wired hosts with an overlay and one pod "p1" each; with `ip6`, dual stack."""
        one, other = (self.host(label, ip6=ip6) for label in labels)
        self.wire(one, other, mtu=mtu)
        self.vxlan(one, other, device=device, shape=shape)
        for host in (one, other):
            host.pod("p1")
        return one, other
