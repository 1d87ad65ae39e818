# SPDX-License-Identifier: Apache-2.0
"""``fabric-agent slices`` and ``fabric-agent controller``, as a table for a command line to mount.

Reading verbs read the store; the others ask the controller through it and wait for its answer.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fabric_agent.slices import check, patterns, plot, read
from fabric_agent.slices.controller import REQUESTS, Controller, read_table
from fabric_agent.slices.model import Fabric, Slice
from fabric_agent.slices.occupancy import Placement, Refusal
from fabric_agent.slices.routing import degraded
from fabric_agent.slices.table import Table, place
from fabric_agent.store import ConflictError, Store, open_store
from oncache.core.errors import ConfigError, NotLoadedError, OncacheError

FABRIC_FILE = "/etc/oncache/fabric.yaml"
STORE = "dir:/var/lib/oncache/store"
WAIT_SECONDS = 30.0

Json = dict[str, Any]
Run = Callable[[argparse.Namespace], int]


class Argument(NamedTuple):
    """One argument: its names, and what argparse is told about it."""

    names: tuple[str, ...]
    keywords: Mapping[str, Any]


class Verb(NamedTuple):
    """One verb; ``run(args)`` gives the exit code."""

    name: str
    help: str
    run: Run
    arguments: tuple[Argument, ...] = ()


class AnswerError(OncacheError):
    """What the controller refused, with its own words and exit code."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(answer["error"], hint=answer["hint"])
        self.exit_code = answer["exit_code"]  # type: ignore[misc]


def argument(*names: str, **keywords: Any) -> Argument:
    return Argument(names, keywords)


def mount(verbs: argparse._SubParsersAction[Any]) -> None:
    """Add ``slices`` with its verbs, and ``controller``, to a command line's verbs. The parser
    leaves the function to call in ``run``."""
    slices = verbs.add_parser("slices", help="parts of the fabric that one job has to itself")
    below = slices.add_subparsers(dest="slices_verb", metavar="VERB", required=True)
    for verb in VERBS:
        _add(below, verb)
    _add(verbs, CONTROLLER)


def _add(verbs: argparse._SubParsersAction[Any], verb: Verb) -> None:
    parser = verbs.add_parser(verb.name, help=verb.help, description=f"{verb.help}.")
    for each in (*verb.arguments, *COMMON):
        parser.add_argument(*each.names, **each.keywords)
    parser.set_defaults(run=verb.run)


def _open(args: argparse.Namespace) -> tuple[Store, Fabric, Table]:
    fabric = read.load(Path(args.fabric))
    store = open_store(args.store)
    return store, fabric, read_table(store, fabric)[0]


def _ask(args: argparse.Namespace, request: Json) -> Json:
    """The controller's answer; NotLoadedError when none comes, and the request is withdrawn."""
    store = open_store(args.store)
    with store.watch(REQUESTS) as watch:
        written = store.put_if(f"{REQUESTS}/{secrets.token_hex(8)}", {"format": 1, **request}, 0)
        assert written is not None
        deadline = time.monotonic() + args.wait
        while (left := deadline - time.monotonic()) > 0:
            watch.changes(left)
            now = store.get(written.key)
            if now is not None and "answer" in now.value:
                store.put_if(now.key, None, now.version)
                return _told(now.value["answer"])
    try:
        store.put_if(written.key, None, written.version)
    except ConflictError:  # answered at the last moment
        return _told((store.get(written.key) or written).value["answer"])
    raise NotLoadedError(
        f"no controller answered within {args.wait:g} s",
        hint="start 'fabric-agent controller' on the same store",
    )


def _told(answer: Json) -> Json:
    if not answer["ok"]:
        raise AnswerError(answer)
    return {key: value for key, value in answer.items() if key != "ok"}


def run_request(args: argparse.Namespace) -> int:
    answer = _ask(
        args, {"verb": "request", "name": args.name, "gpus": args.gpus, "move": args.move_circuits}
    )
    return _show_named(args, answer["slice"]["name"])


def run_release(args: argparse.Namespace) -> int:
    answer = _ask(args, {"verb": "release", "name": args.name})
    return _print(args, answer, f"released {args.name}")


def run_fail(args: argparse.Namespace) -> int:
    answer = _ask(args, {"verb": "fail", "name": args.element})
    return _print(args, answer, _outcomes(answer))


def run_restore(args: argparse.Namespace) -> int:
    answer = _ask(args, {"verb": "restore", "name": args.element})
    return _print(args, answer, _outcomes(answer))


def _outcomes(answer: Json) -> str:
    lines = [f"failed: {', '.join(answer['failed']) or 'nothing'}"]
    return "\n".join(lines + [f"{hit['slice']}: {hit['outcome']}" for hit in answer["slices"]])


def run_list(args: argparse.Namespace) -> int:
    _, fabric, table = _open(args)
    rows = [_summary(fabric, table, part) for part in table.slices]
    return _print(args, rows, _columns(rows) if rows else "no slices")


def run_show(args: argparse.Namespace) -> int:
    return _show_named(args, args.name)


def _show_named(args: argparse.Namespace, name: str) -> int:
    _, fabric, table = _open(args)
    part = table.slice(name)
    result = {**_summary(fabric, table, part), **_named(fabric, part)}
    lines = [f"{key}  {_cell(value)}" for key, value in result.items() if key != "links"]
    lines += [f"  {' '.join(row)}" for row in result["links"]]
    return _print(args, result, "\n".join(lines))


def _summary(fabric: Fabric, table: Table, part: Slice) -> Json:
    return {
        "slice": part.name,
        "number": part.number,
        "gpus": len(part.ranks),
        "leaves": len(part.nics),
        "spines": part.width,
        "links": len(part.all_links),
        "contention_free": not degraded(part, table.broken(fabric)),
    }


def _named(fabric: Fabric, part: Slice) -> Json:
    hosts: dict[str, list[str]] = {}
    for nic in part.ranks:
        hosts.setdefault(fabric.hosts[fabric.nics[nic].host].name, []).append(
            fabric.nics[nic].device
        )
    rows = [
        [
            f"{fabric.leaves[link.leaf].name}:{fabric.leaves[link.leaf].uplinks[link.uplink].name}"
            f"={fabric.spines[link.spine].name}"
            for link in row
        ]
        for row in part.links
    ]
    return {"hosts": hosts, "links": rows}


def run_check(args: argparse.Namespace) -> int:
    """0 when contention-free, 1 when not."""
    _, fabric, table = _open(args)
    parts = [table.slice(args.name)] if args.name else list(table.slices)
    report = check.total(_reports(args, fabric, table, parts))
    result = _report(fabric, report)
    verdict = "contention-free" if report.contention_free else "not contention-free"
    lines = [f"{verdict}: the most loaded link carries {report.worst} flows"]
    lines += [f"  {remark}" for remark in report.remarks[:20]]
    busiest = islice(check.contended(report), 5)
    lines += [f"  {load} flows on {directed.name(fabric)}" for directed, load in busiest]
    if report.phases < report.of_phases:
        lines.append(f"  computed {report.phases} of {report.of_phases} phases, evenly spread")
    _print(args, result, "\n".join(lines))
    return 0 if report.contention_free else 1


def _reports(
    args: argparse.Namespace, fabric: Fabric, table: Table, parts: Sequence[Slice]
) -> Iterator[check.Report]:
    broken = table.broken(fabric)
    if args.rank_file and len(parts) != 1:
        raise ConfigError("a rank file is of one slice", hint="name the slice")
    for part in parts:
        pattern = patterns.named(args.pattern, part)
        if args.rank_file:
            text = _text(args.rank_file)
            order = patterns.read_rank_file(fabric, part, text)
            pattern = patterns.reordered(pattern, order)
        yield check.check(fabric, part, pattern, broken)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}", hint="name a text file") from error


def _report(fabric: Fabric, report: check.Report) -> Json:
    return {
        "contention_free": report.contention_free,
        "worst": report.worst,
        "unreachable": report.unreachable,
        "remarks": list(report.remarks),
        "phases": report.phases,
        "of_phases": report.of_phases,
        "loads": {each.name(fabric): load for each, load in report.loads.items()},
    }


def run_explain(args: argparse.Namespace) -> int:
    """0 when the request would fit, 1 when not."""
    _, fabric, table = _open(args)
    decision = place(fabric, table, args.gpus, move=args.move_circuits)
    result: Json = {"fits": isinstance(decision, Placement), "gpus": args.gpus}
    if isinstance(decision, Refusal):
        largest = _largest(fabric, table, args.gpus, args.move_circuits)
        result |= {"reason": decision.reason, "detail": decision.detail, "largest": largest}
        words = f"{decision.reason}: {decision.detail}\na slice of {largest} GPUs would fit"
    else:
        shape = decision.named("", 1)
        result |= {"leaves": len(shape.nics), "spines": shape.width, "moved": len(decision.moved)}
        words = f"fits: {len(shape.nics)} leaves, {shape.width} spines"
        words += f", {len(decision.moved)} circuits of others move" if decision.moved else ""
    _print(args, result, words)
    return 0 if result["fits"] else 1


def _largest(fabric: Fabric, table: Table, gpus: int, move: bool) -> int:
    """The largest size found by halving: what fits is nearly monotonic."""
    low, high = 0, min(gpus, len(fabric.nics) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if isinstance(place(fabric, table, middle, move=move), Placement):
            low = middle
        else:
            high = middle
    return low


def run_plot(args: argparse.Namespace) -> int:
    _, fabric, table = _open(args)
    loads = None
    if args.pattern:
        args.rank_file = None
        loads = check.total(_reports(args, fabric, table, table.slices)).loads
    picture = plot.fabric_picture(fabric, table.slices, table.broken(fabric), loads)
    try:
        Path(args.output).write_text(picture)
    except OSError as error:
        raise ConfigError(
            f"cannot write {args.output}: {error.strerror}", hint="name a file"
        ) from (error)
    return _print(args, {"file": args.output}, f"wrote {args.output}")


def run_controller(args: argparse.Namespace) -> int:
    store, fabric, _ = _open(args)
    with _stop_signal() as stop:
        Controller(store, fabric).run(stop, args.ready_fd)
    return 0


@contextmanager
def _stop_signal() -> Iterator[int]:
    """A descriptor that becomes readable on SIGTERM and SIGINT."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _print(args: argparse.Namespace, result: object, words: str) -> int:
    print(json.dumps(result) if args.json else words, file=sys.stdout)
    return 0


def _columns(rows: Sequence[Mapping[str, object]]) -> str:
    cells = [[name.upper() for name in rows[0]]]
    cells += [[_cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _cell(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case dict():
            return "; ".join(f"{key} {','.join(each)}" for key, each in value.items())
        case _:
            return str(value)


JSON = argument("--json", action="store_true", help="for programs: JSON on standard output")
WAIT = argument(
    *("--wait",), type=float, default=WAIT_SECONDS, metavar="N", help="seconds for the controller"
)
NAME = argument("name", metavar="NAME", help="the slice")
MOVE = argument(
    *("--move-circuits",), action="store_true", help="optics: circuits of other slices may move"
)
ELEMENT = argument("element", metavar="ELEMENT", help="SWITCH, SWITCH:PORT, HOST or HOST:NIC")
GPUS = argument("gpus", type=int, metavar="GPUS", help="how many")
RANK_FILE = argument("--rank-file", metavar="FILE", help="lines 'rank 0=host0 slot=0'")

COMMON = (
    argument("--fabric", default=FABRIC_FILE, metavar="FILE", help=f"the fabric ({FABRIC_FILE})"),
    argument("--store", default=STORE, metavar="URL", help=f"shared state ({STORE})"),
)

VERBS = (
    Verb("request", "take a slice", run_request, (NAME, GPUS, MOVE, WAIT, JSON)),
    Verb("release", "give a slice back", run_release, (NAME, WAIT, JSON)),
    Verb("list", "all slices", run_list, (JSON,)),
    Verb("show", "one slice: hosts and links", run_show, (NAME, JSON)),
    Verb(
        "check",
        "the load of every link under a pattern; exit 1 if two flows meet",
        run_check,
        (
            argument("name", nargs="?", metavar="NAME", help="the slice (all)"),
            argument("--pattern", default="all-to-all", choices=tuple(patterns.PATTERNS)),
            RANK_FILE,
            JSON,
        ),
    ),
    Verb("explain", "would a request fit, and if not, why", run_explain, (GPUS, MOVE, JSON)),
    Verb(
        "plot",
        "the fabric with its slices, as SVG",
        run_plot,
        (
            argument("output", metavar="FILE"),
            argument("--pattern", choices=tuple(patterns.PATTERNS), help="draw its link loads"),
            JSON,
        ),
    ),
    Verb("fail", "an element has failed: re-plan who is hit", run_fail, (ELEMENT, WAIT, JSON)),
    Verb("restore", "an element works again", run_restore, (ELEMENT, WAIT, JSON)),
)

CONTROLLER = Verb(
    "controller",
    "serve slice requests from the store",
    run_controller,
    (argument("--ready-fd", type=int, metavar="N", help="gets a byte when requests are served"),),
)
