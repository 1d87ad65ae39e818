# SPDX-License-Identifier: Apache-2.0
"""Keeps the uplink's guard in step with the configuration and the tunnel's peers."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from fabric_agent.node.plan import Desired
from oncache.core.attach import XdpHook
from oncache.core.config import Config, GuardMode
from oncache.core.errors import OncacheError
from oncache.core.net import IpAddress
from oncache.guard import Guard

log = logging.getLogger(__name__)

LEARNING: Final = (
    "the tunnel device learns its peers from their packets, so a new node would be shut out: "
    "strangers are only counted (list the nodes in guard.peers to enforce)"
)


class Gate(Protocol):
    """What is used of a guard; ``oncache.guard.Guard`` is one."""

    def configure(self, port: int, *, enforce: bool) -> None: ...
    def set_peers(self, wanted: Iterable[IpAddress]) -> None: ...
    def attach(self, ifindex: int) -> None: ...
    def is_attached(self, ifindex: int) -> bool: ...
    def hook(self, ifindex: int) -> XdpHook | None: ...
    def enable(self, deadline_seconds: float) -> None: ...
    def disable(self) -> None: ...
    def close(self) -> None: ...


class Guarding:
    """The guard as the agent sees it. Trouble with it is a ``problem`` for the operator, lets every
    packet in, and never keeps the data path from its work."""

    def __init__(
        self,
        config: Config,
        load: Callable[[Path, int], Gate] = Guard.load,
        unload: Callable[[Path], None] = Guard.unload,
    ) -> None:
        self.problem = ""
        self._config = config
        self._load = load
        self._unload = unload
        self._gate: Gate | None = None
        self._in_step = False

    def settle(self, desired: Desired, *, learning: bool) -> None:
        """Bring the guard in step. ``learning``: the tunnel device takes peers from packets.

        Blocking. A new peer is welcome when this returns; judging starts with ``enable``.
        """
        try:
            problem = self._bring_about(desired, learning)
            self._in_step = True
        except (OncacheError, OSError) as error:
            self._in_step = False
            self.disable()
            problem = str(error)
        if problem and problem != self.problem:
            log.warning("guard: %s", problem)
        self.problem = problem

    def enable(self, seconds: float) -> None:
        """Judge for so long, if there is a guard in step."""
        if self._gate is not None and self._in_step:
            self._gate.enable(seconds)

    def disable(self) -> None:
        """Let every packet in, until ``enable``."""
        if self._gate is not None:
            self._gate.disable()

    def close(self) -> None:
        """Let go; what is attached stays, and lets everything in once the deadline has passed."""
        if self._gate is not None:
            self._gate.close()
        self._gate = None

    def _bring_about(self, desired: Desired, learning: bool) -> str:
        wanted, uplink = self._config.guard, desired.settings.uplink
        if wanted.mode is GuardMode.OFF:
            self._unload(self._config.bpf_dir)
            return ""
        shy = learning and not wanted.peers
        if self._gate is None:
            room = self._config.limits.peers + len(wanted.peers)
            self._gate = self._load(self._config.bpf_dir, room)
        gate = self._gate
        gate.set_peers(desired.peers | frozenset(wanted.peers))
        gate.configure(desired.settings.port, enforce=wanted.mode is GuardMode.ENFORCE and not shy)
        if not gate.is_attached(uplink):
            gate.attach(uplink)
            hook = gate.hook(uplink)
            where = "native" if hook and hook.native else "generic"
            log.info("guard mode=%s device=%s xdp=%s", wanted.mode, uplink, where)
        return LEARNING if shy and wanted.mode is GuardMode.ENFORCE else ""
