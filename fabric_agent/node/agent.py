# SPDX-License-Identifier: Apache-2.0
"""The node agent: one task that alone changes the plane, fed by an inbox.

Netlink events, requests from the control socket and the end all arrive in the inbox. The same task
refreshes the dead-man deadline, so an agent that hangs lets go of the traffic.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from fabric_agent.node import control, plan, reconcile, sources
from fabric_agent.node import state as states
from fabric_agent.node.guarding import Guarding
from fabric_agent.node.keeper import DOCUMENTS, Keeper
from fabric_agent.node.notify import notify
from fabric_agent.node.plan import Desired
from fabric_agent.node.reconcile import DataPath
from fabric_agent.node.settings import find_uplink, settings, uplink_address
from fabric_agent.node.state import State
from fabric_agent.store import Watch, open_store
from oncache import host
from oncache.core import bpffs, overlay, sysctl
from oncache.core.config import BuiltinOverlay, Config
from oncache.core.errors import NotLoadedError, OncacheError
from oncache.core.net import Event, Overrun
from oncache.core.netlink import Events, Netlink
from oncache.plane import Plane, PodEntry

log = logging.getLogger(__name__)

Batch = list[Event | Overrun]

PORT_RANGE: Final = "ipv4.ip_local_port_range"
AUDIT_SECONDS: Final = 30.0  # how often the kernel is compared although nothing was heard
BEATS: Final = 5  # per deadline


class Mode(StrEnum):
    """Attached: in step. Waiting: uplink or tunnel is not as needed now, everything takes the base
    path. Detached: asked to leave the host alone."""

    ATTACHED = "attached"
    WAITING = "waiting"
    DETACHED = "detached"


@dataclass(frozen=True)
class Stop:
    """The end."""


@dataclass(frozen=True)
class Request:
    """A verb from the control socket and where its answer is awaited."""

    verb: str
    answer: "asyncio.Future[control.Answer]"


@dataclass(frozen=True)
class Options:
    """What the command line adds to the configuration."""

    ready_fd: int | None = None
    detach_on_exit: bool = False


class Agent:
    """One node's agent, in the network namespace the process was started in."""

    def __init__(self, config: Config, options: Options) -> None:
        self._config = config
        self._options = options
        self._inbox: asyncio.Queue[Batch | Request | Stop] = asyncio.Queue()
        self._state = State(lost=True)
        self._mode = Mode.DETACHED
        self._since = datetime.now(UTC)
        self._plane: DataPath | None = None
        self._guard = Guarding(config)
        self._lock: int | None = None
        self._desired: Desired | None = None
        self._troubles: reconcile.Troubles = {}
        self._backlog: list[plan.Detach | plan.AttachPod] = []
        self._waiting_for = ""
        self._audited = 0.0
        self._acted_upon: State | None = None
        self._keeper: Keeper | None = None

    # --- life

    async def run(self) -> None:
        """Attach, serve until SIGTERM or SIGINT, and leave the data path running unless told
        otherwise. OncacheError if this host cannot; it is then as it was before."""
        verbs: dict[str, Callable[[], Any]] = {
            "status": self._status,
            "flush": self._flush,
            "attach": self._attach,
            "detach": self._detach,
        }
        self._verbs = verbs
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._inbox.put_nowait, Stop())
        async with (
            Events() as self._events,
            Netlink() as self._netlink,
            control.serve(self._config.run_dir, self._request),
        ):
            with self._slices():
                await self._attach()
                await self._settle_slices()
                self._ready()
                await self._serve_and_listen()
                notify("STOPPING=1")
                await self._leave()

    @contextlib.contextmanager
    def _slices(self) -> Iterator[None]:
        """For the block, hear what the store says of this node's slices, if it may have any."""
        node = self._config.slices_node
        if node is None:
            yield
            return
        store = open_store(self._config.store)
        loop = asyncio.get_running_loop()
        with store.watch(DOCUMENTS) as watch:
            self._keeper = Keeper(store, node, self._netlink)
            loop.add_reader(watch.fileno(), self._store_changed, self._keeper, watch)
            try:
                yield
            finally:
                loop.remove_reader(watch.fileno())

    def _store_changed(self, keeper: Keeper, watch: Watch) -> None:
        if keeper.key in watch.changes():
            keeper.stale = True
            self._inbox.put_nowait([])

    def _ready(self) -> None:
        notify("READY=1")
        if self._options.ready_fd is not None:
            os.write(self._options.ready_fd, b"\n")
            os.close(self._options.ready_fd)

    async def _serve_and_listen(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self._listen())
            await self._serve()
            listening.cancel()

    async def _listen(self) -> None:
        # One batch at a time: while it is dealt with the kernel keeps the next ones, and says so
        # when it cannot.
        while True:
            self._inbox.put_nowait(await self._events.batch())
            await self._inbox.join()

    async def _leave(self) -> None:
        if self._options.detach_on_exit:
            await self._detach()
            if self._keeper is not None:
                await self._keeper.remove()
        elif self._plane is not None:
            self._plane.close()
            self._guard.close()
            log.info("leaving, data path runs on for %.1f s", self._config.deadline_seconds)

    async def _serve(self) -> None:
        pulse = self._config.deadline_seconds / BEATS
        due = time.monotonic()
        while True:
            item = await self._next(due)
            if isinstance(item, Stop):
                return
            if item is None:
                await self._work_off_one()
            else:
                await self._deal_with(item)
                self._inbox.task_done()
            if time.monotonic() >= due:
                due = time.monotonic() + pulse
                notify("WATCHDOG=1")
                await self._settle()

    async def _next(self, due: float) -> Batch | Request | Stop | None:
        """What is in the inbox; None if nothing came until ``due``, or is there while there is a
        backlog."""
        wait = 0.0 if self._backlog else max(due - time.monotonic(), 0.0)
        try:
            return await asyncio.wait_for(self._inbox.get(), wait)
        except TimeoutError:
            return None

    async def _deal_with(self, item: Batch | Request) -> None:
        if isinstance(item, Request):
            await self._obey(item)
            return
        for event in item:
            self._state = states.apply(self._state, event)
            if self._keeper is not None:
                self._keeper.hear(event)
        await self._settle()

    # --- requests

    async def _request(self, verb: str, _arguments: control.Answer) -> control.Answer:
        answer: asyncio.Future[control.Answer] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(Request(verb, answer))
        return await answer

    async def _obey(self, request: Request) -> None:
        verb = self._verbs.get(request.verb)
        try:
            if verb is None:
                raise OncacheError(
                    f"unknown verb {request.verb}", hint=f"one of: {', '.join(self._verbs)}"
                )
            answer = await verb() or {}
        except OncacheError as error:
            answer = control.refusal(error.message, error.hint)
        if not request.answer.done():
            request.answer.set_result(answer)

    async def _status(self) -> control.Answer:
        desired = self._desired
        slots = await asyncio.to_thread(self._plane.pods) if self._plane else {}
        names = {pod.ifindex: pod.name for pod in desired.pods.values()} if desired else {}
        return {
            "state": str(self._mode),
            "pid": os.getpid(),
            "node": self._config.node.name,
            "uplink": self._config.node.uplink,
            "tunnel": self._tunnel(),
            "since": self._since.isoformat(timespec="seconds"),
            "pods": [self._pod_row(i, pod, names) for i, pod in sorted(slots.items())],
            "problems": self._problems(),
        }

    def _tunnel(self) -> str:
        if isinstance(self._config.overlay, BuiltinOverlay):
            return overlay.DEVICE
        return self._config.overlay.device

    def _pod_row(self, index: int, pod: PodEntry, names: dict[int, str]) -> dict[str, Any]:
        return {
            "index": index,
            "name": names.get(pod.ifindex, pod.name),
            "device": self._device(pod.ifindex),
            "addresses": [str(address) for address in pod.addresses],
        }

    def _device(self, ifindex: int) -> str:
        link = self._state.links.get(ifindex)
        return link.name if link else str(ifindex)

    def _problems(self) -> list[str]:
        found = [self._waiting_for] if self._waiting_for else []
        pods, slots = len(self._desired.pods) if self._desired else 0, self._config.limits.pods
        if pods > slots:
            found.append(f"{pods} pods here, but limits.pods is {slots}")
        if self._plane is not None and self._guard.problem:
            found.append(f"guard: {self._guard.problem}")
        found += self._keeper.problems if self._keeper else []
        return found + [f"{self._device(i)}: {text}" for i, text in sorted(self._troubles.items())]

    async def _flush(self) -> None:
        await asyncio.to_thread(self._loaded().invalidate_all)
        log.info("flushed")

    def _loaded(self) -> DataPath:
        if self._plane is None:
            raise NotLoadedError("the plane is detached", hint="run 'oncache attach'")
        return self._plane

    # --- attach and detach

    async def _attach(self) -> None:
        """Take the plane into use, or take over what an earlier agent left. On an error a host
        that had no plane is left as it was."""
        if self._plane is not None:
            return
        async with contextlib.AsyncExitStack() as undo:
            await self._take_directory(undo)
            self._state = await sources.catch_up(self._state, self._netlink, self._events)
            await self._make_overlay(undo)
            desired = self._wanted()
            plane = await asyncio.to_thread(self._load)
            undo.callback(plane.close)
            undo.callback(self._guard.close)
            await asyncio.to_thread(host.prepare, self._config.run_dir)
            # What an earlier agent left was not watched since, and runs the programs it loaded.
            self._state = states.all_doubtful(self._state)
            await self._carry_out(plane, desired, replace_programs=True)
            undo.pop_all()
        self._plane = plane
        while self._backlog:
            await self._work_off_one()
        self._enter(Mode.ATTACHED)

    async def _take_directory(self, undo: contextlib.AsyncExitStack) -> None:
        bpf_dir = self._config.bpf_dir
        bpffs.require(bpf_dir)
        self._lock = bpffs.lock_dir(bpf_dir)
        undo.callback(self._unlock)
        if not _has_plane(self._config):
            undo.push_async_callback(self._restore)

    async def _restore(self) -> None:
        await asyncio.to_thread(host.unload, self._config.bpf_dir)
        await asyncio.to_thread(host.restore, self._config.run_dir, ())

    async def _make_overlay(self, undo: contextlib.AsyncExitStack) -> None:
        wanted = self._config.overlay
        if not isinstance(wanted, BuiltinOverlay):
            return
        uplink = find_uplink(self._config, self._state)
        local = uplink_address(uplink, self._state.addresses)
        if await overlay.ensure(self._netlink, wanted, uplink, local):
            undo.push_async_callback(overlay.remove, self._netlink)
        self._state = replace(self._state, lost=True)
        self._state = await sources.catch_up(self._state, self._netlink, self._events)

    def _load(self) -> DataPath:
        return Plane.load(self._config.bpf_dir, self._config.limits)

    async def _detach(self) -> None:
        if self._plane is None:
            return
        self._plane.close()
        self._guard.close()
        self._plane = None
        await asyncio.to_thread(host.take_off, self._config.bpf_dir, self._config.run_dir)
        self._unlock()
        self._desired, self._troubles, self._acted_upon, self._backlog = None, {}, None, []
        self._enter(Mode.DETACHED)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _enter(self, mode: Mode, reason: str = "") -> None:
        if (mode, reason) == (self._mode, self._waiting_for):
            return
        self._mode, self._waiting_for = mode, reason
        self._since = datetime.now(UTC)
        log.info(
            "state=%s uplink=%s tunnel=%s%s",
            *(mode, self._config.node.uplink, self._tunnel()),
            f" reason={reason!r}" if reason else "",
        )

    # --- keeping in step

    async def _settle(self) -> None:
        """Bring slices, plane and deadline up to date with all that was heard."""
        await self._settle_slices()
        self._state = await sources.catch_up(self._state, self._netlink, self._events)
        if self._plane is None:
            self._state = states.settled(self._state)
            return
        try:
            if self._news():
                await self._carry_out(self._plane, self._wanted())
        except OncacheError as error:
            self._wait(self._plane, error)
            return
        self._refresh_deadlines(self._plane)
        self._enter(Mode.ATTACHED)

    def _refresh_deadlines(self, plane: DataPath) -> None:
        plane.enable(self._config.deadline_seconds)
        self._guard.enable(self._config.deadline_seconds)

    async def _settle_slices(self) -> None:
        # A next hop that is replaced sends no event of a route, yet tunnels may take it.
        if self._keeper is not None and self._keeper.due and await self._keeper.settle():
            changes = self._state.changes | {states.RoutingChanged()}
            self._state = replace(self._state, changes=changes)

    def _wait(self, plane: DataPath, error: OncacheError) -> None:
        plane.disable()
        self._guard.disable()
        self._backlog = []
        # What changes meanwhile is not worked out one by one.
        self._state, self._acted_upon = states.all_doubtful(self._state), None
        self._desired = None
        self._enter(Mode.WAITING, error.message)

    def _wanted(self) -> Desired:
        low, high = map(int, (sysctl.read(PORT_RANGE) or "32768 60999").split())
        told = settings(self._config, self._state, (low, high))
        found = plan.pods(self._state, told.uplink) if self._config.discover_pods else {}
        return Desired(told, plan.peers(self._state, told.tunnel), found)

    def _news(self) -> bool:
        audit = time.monotonic() - self._audited > AUDIT_SECONDS
        return audit or self._state is not self._acted_upon

    async def _carry_out(
        self, plane: DataPath, desired: Desired, *, replace_programs: bool = False
    ) -> None:
        await self._settle_guard(desired)
        actual = await asyncio.to_thread(reconcile.read, plane)
        if replace_programs:
            actual = plan.with_old_programs(actual)
        paths = (
            await asyncio.to_thread(plane.paths) if plan.needs_paths(self._state.changes) else ()
        )
        doubtful = plan.invalidations(self._state, desired.settings, actual.pods, paths)
        actions = doubtful + plan.diff(desired, actual, self._config.limits.pods)
        quick, self._backlog = plan.without_slow(actions)
        troubles = await asyncio.to_thread(reconcile.execute, plane, quick) if quick else {}
        self._report(desired)
        self._state = states.settled(self._state)
        self._desired, self._audited, self._acted_upon = desired, time.monotonic(), self._state
        self._warn(troubles)
        self._troubles = {i: t for i, t in self._troubles.items() if i in desired.pods} | troubles
        self._refresh_deadlines(plane)

    async def _settle_guard(self, desired: Desired) -> None:
        """Before anything else: a new peer's packets must not be kept waiting."""
        device = self._state.links.get(desired.settings.tunnel)
        learning = bool(device and device.tunnel and device.tunnel.learning)
        await asyncio.to_thread(self._guard.settle, desired, learning=learning)

    async def _work_off_one(self) -> None:
        """One action of the backlog; what is heard meanwhile comes before the next."""
        if not self._backlog or self._plane is None:
            return
        action = self._backlog.pop(0)
        troubles = await asyncio.to_thread(reconcile.attach_or_detach, self._plane, action)
        self._warn(troubles)
        self._troubles.pop(action.ifindex, None)
        self._troubles |= troubles
        if self._mode is Mode.ATTACHED:
            self._refresh_deadlines(self._plane)

    def _warn(self, troubles: reconcile.Troubles) -> None:
        for index, trouble in troubles.items():
            if self._troubles.get(index) != trouble:
                log.warning("pod left alone device=%s reason=%s", self._device(index), trouble)

    def _report(self, desired: Desired) -> None:
        before = self._desired.pods if self._desired else {}
        for index, pod in desired.pods.items():
            if before.get(index) != pod:
                addresses = ",".join(map(str, pod.addresses))
                device = self._device(index)
                log.info("pod name=%s device=%s addresses=%s", pod.name, device, addresses)
        for index in before.keys() - desired.pods.keys():
            log.info("pod gone name=%s", before[index].name)


def _has_plane(config: Config) -> bool:
    try:
        Plane.open(config.bpf_dir).close()
    except NotLoadedError:
        return False
    except (OncacheError, LookupError, OSError):
        pass  # another build's
    return True


async def run(config: Config, options: Options) -> None:
    """The whole life of a node agent."""
    await Agent(config, options).run()
