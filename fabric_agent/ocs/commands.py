# SPDX-License-Identifier: Apache-2.0
"""The verbs of `fabric-agent ocs`; `mount` hangs them into a command line.

Each verb takes parsed arguments and prints a table for people, or with --json one object with
stable keys. Errors are raised, for the outermost handler.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fabric_agent.ocs import cabling, config, plot, stages
from fabric_agent.ocs.apply import Hooks, Runner, inside
from fabric_agent.ocs.drivers.base import Status, Table
from fabric_agent.ocs.journal import Document, Journal
from fabric_agent.ocs.plan import Constraints, Plan, plan
from fabric_agent.ocs.stages import DryRun, Policy, Staged, sequence
from fabric_agent.ocs.verify import verify
from fabric_agent.ocs.wiring import (
    Circuit,
    CircuitError,
    Layout,
    Link,
    cross,
    link_counts,
    links_of,
)
from oncache.core.errors import OncacheError

# A running job's links cost this many times an idle one's to tear down.
JOB_WEIGHT = 10

Args = argparse.Namespace
Json = dict[str, Any]


class Argument(NamedTuple):
    """One argument: its names, and what argparse is told about it."""

    names: tuple[str, ...]
    keywords: Mapping[str, Any]


class Verb(NamedTuple):
    """One verb, what it runs and its own arguments."""

    name: str
    help: str
    run: Callable[[Args], None]
    arguments: tuple[Argument, ...] = ()


def mount(parser: argparse.ArgumentParser, common: Sequence[argparse.ArgumentParser]) -> None:
    """Add the verbs below `parser` (`fabric-agent ocs`); `common` brings -c FILE as `config`.

    A chosen verb is in `args.run`, to be called with the arguments.
    """
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        sub = verbs.add_parser(verb.name, parents=list(common), help=verb.help)
        for each in verb.arguments:
            sub.add_argument(*each.names, **each.keywords)
        sub.add_argument("--json", action="store_true", help="for programs")
        sub.set_defaults(run=verb.run)


def runner(known: config.Config, hooks: Hooks | None = None) -> Runner:
    """What carries out plans on the configured devices; `hooks` move the hosts away and back."""
    return Runner(known.inventory, known.drivers, Journal(known.state_dir), hooks)


def show(args: Args) -> None:
    """What is lit: per device, and links between pods."""
    known = config.load(args.config)
    tables, circuits = _read(known)
    layout = _layout(known, circuits)
    counts = link_counts(known.fabric, layout)
    devices = [_device(known, name, table) for name, table in tables.items()]
    pairs: list[Json] = [
        {"spine": index, "pods": [b, a], "links": matrix[a][b]}
        for index, matrix in enumerate(counts)
        for a in range(known.fabric.pods)
        for b in range(a)
        if matrix[a][b]
    ]
    frozen = Journal(known.state_dir).frozen()
    if args.json:
        _print_json({"devices": devices, "links": pairs, "frozen": frozen})
        return
    _print_table(devices)
    _print_table([{**pair, "pods": "-".join(map(str, pair["pods"]))} for pair in pairs])
    if frozen:
        print(f"frozen by {frozen}")


def make_plan(args: Args) -> None:
    """Plan from what is lit to what a file wants; print a dry run; keep it under its id."""
    known = config.load(args.config)
    wanted = config.load_demand(args.demand, known.fabric)
    tables, circuits = _read(known)
    lit = _layout(known, circuits)
    constraints = _constraints(known, lit, wanted, keep_surplus=args.keep_surplus)
    made = plan(known.fabric, lit, wanted.demand, constraints)
    _require_sound(verify(known.fabric, lit, wanted.demand, made, constraints))
    policy = _policy(known, constraints)
    staged = sequence(known.fabric, made, policy)
    _require_sound(stages.check(known.fabric, staged, policy))
    dry = stages.dry_run(staged, wanted.jobs)
    dry.require(known.transport, drained=not args.unannounced)
    tags = {name: table.tag for name, table in tables.items()}
    plan_id = Journal(known.state_dir).save(Document(known.fabric, staged, tags, args.why))
    described = _describe(plan_id, made, staged, dry, wanted)
    if args.json:
        _print_json(described)
    else:
        _print_plan(described)


def apply(args: Args) -> None:
    """Carry out a plan, go on with an interrupted one, or undo it."""
    known = config.load(args.config)
    work = runner(known)
    if args.resume:
        work.resume(args.plan)
    elif args.roll_back:
        work.roll_back(args.plan)
    else:
        work.run(Journal(known.state_dir).plan(args.plan))
    progress = Journal(known.state_dir).progress(args.plan)
    if args.json:
        _print_json({"plan": args.plan, "ended": progress.ended, "stages": progress.done})
    else:
        print(f"plan {args.plan} {progress.ended}, {progress.done} stages in force")


def audit(args: Args) -> None:
    """Compare cabling, table, port states and power with what they should be."""
    known = config.load(args.config)
    tables, circuits = _read(known)
    reports = {name: driver.ports() for name, driver in known.drivers.items()}
    listed = cabling.plugs(known.inventory, cross(known.fabric))
    findings = [(each.kind, each.text) for each in cabling.audit(listed, reports)]
    findings += _fibres(known, circuits)
    for name, table in tables.items():
        for port in sorted({*table.pairs, *table.pairs.values()} & set(reports[name])):
            state = reports[name][port]
            if state.status is not Status.TUNED:
                findings.append(("port", f"{name} port {port} is {state.status}"))
            elif state.power is not None and not inside(state.power):
                findings.append(("power", f"{name} port {port} has {state.power} dBm"))
    rows: list[Json] = [{"kind": kind, "finding": text} for kind, text in findings]
    if args.json:
        _print_json({"findings": rows})
    elif rows:
        _print_table(rows)
    else:
        print("as it should be")


def history(args: Args) -> None:
    """Plans with their state, and the audit log."""
    journal = Journal(config.load(args.config).state_dir)
    plans = [{"plan": each, **_state(journal, each)} for each in journal.plans()]
    entries = journal.history()
    if args.json:
        _print_json({"plans": plans, "audit": entries, "metrics": metrics(journal)})
        return
    _print_table(plans)
    _print_table([_short(entry) for entry in entries[-args.last :]])


def metrics(journal: Journal) -> dict[str, int]:
    """Counts over the whole audit log: commands, circuits lit and torn down, failures."""
    entries = journal.history()
    return {
        "commands": len(entries),
        "circuits_lit": sum(len(e["connect"]) for e in entries if e["answer"] == "done"),
        "circuits_torn_down": sum(len(e["disconnect"]) for e in entries if e["answer"] == "done"),
        "failures": sum(e["answer"] != "done" for e in entries),
    }


def freeze(args: Args) -> None:
    """Forbid or allow changes."""
    journal = Journal(config.load(args.config).state_dir)
    if args.off:
        journal.thaw()
    else:
        journal.freeze(args.why)
    why = journal.frozen()
    _say(args, {"frozen": why}, f"frozen by {why}" if why else "changes are allowed")


def abort(args: Args) -> None:
    """Stop the running plan before its next stage, or give up one that was interrupted."""
    answer = Journal(config.load(args.config).state_dir).abort()
    _say(args, {"abort": answer}, answer)


def draw(args: Args) -> None:
    """Write an SVG of a plan, before and after."""
    known = config.load(args.config)
    document = Journal(known.state_dir).plan(args.plan)
    picture = plot.svg(document.fabric, document.staged.before, document.staged.after)
    args.output.write_text(picture, encoding="utf-8")
    _say(args, {"file": str(args.output)}, f"wrote {args.output}")


def argument(*names: str, **keywords: Any) -> Argument:
    return Argument(names, keywords)


PLAN = argument("plan", metavar="ID", help="as `plan` printed it")
VERBS = (
    Verb("show", "what is lit", show),
    Verb(
        "plan",
        "plan towards a demand, dry run",
        make_plan,
        (
            argument("demand", type=Path, metavar="FILE", help="links wanted, or jobs"),
            argument("--why", default="", help="for the audit log"),
            argument("--keep-surplus", action="store_true", help="leave unwanted links lit"),
            argument("--unannounced", action="store_true", help="no host is told to move away"),
        ),
    ),
    Verb(
        "apply",
        "carry out a plan",
        apply,
        (
            PLAN,
            argument("--resume", action="store_true", help="go on with an interrupted plan"),
            argument("--roll-back", action="store_true", help="undo a plan that has not ended"),
        ),
    ),
    Verb("audit", "compare cabling, tables, ports and power", audit),
    Verb(
        "history",
        "plans and the audit log",
        history,
        (argument("--last", type=int, default=20, metavar="N", help="entries (20)"),),
    ),
    Verb(
        "freeze",
        "forbid changes",
        freeze,
        (
            argument("why", nargs="?", default="no reason given", help="shown to others"),
            argument("--off", action="store_true", help="allow changes again"),
        ),
    ),
    Verb("abort", "stop the running plan, or give up an interrupted one", abort),
    Verb(
        "plot",
        "draw a plan, before and after",
        draw,
        (
            PLAN,
            argument("-o", "--output", type=Path, default=Path("circuits.svg"), metavar="FILE"),
        ),
    ),
)


def _read(known: config.Config) -> tuple[dict[str, Table], list[Circuit]]:
    tables = {name: driver.read() for name, driver in known.drivers.items()}
    circuits = known.inventory.circuits({name: table.pairs for name, table in tables.items()})
    return tables, circuits


def _layout(known: config.Config, circuits: Iterable[Circuit]) -> Layout:
    return Layout.of(known.fabric, links_of(known.fabric, circuits))


def _constraints(
    known: config.Config, lit: Layout, wanted: config.Wanted, *, keep_surplus: bool
) -> Constraints:
    used = {pair for pairs in wanted.jobs.values() for pair in pairs}
    guarded = {pair for name in wanted.protected for pair in wanted.jobs[name]}
    links = list(lit.links())
    return Constraints(
        failed=known.failed,
        pinned=frozenset(link for link in links if link.unit[:2] in guarded),
        weights={link: JOB_WEIGHT for link in links if link.unit[:2] in used},
        keep_surplus=keep_surplus,
    )


def _policy(known: config.Config, constraints: Constraints) -> Policy:
    base = known.policy
    return Policy(
        base.floor,
        base.moves_per_stage,
        base.moves_per_hour,
        constraints.pinned,
        base.settle,
        constraints.weights,
    )


def _require_sound(wrong: Sequence[str]) -> None:
    if wrong:
        raise OncacheError(
            f"the plan is wrong: {'; '.join(wrong[:3])}", hint="nothing is changed; report this"
        )


def _fibres(known: config.Config, circuits: Iterable[Circuit]) -> list[tuple[str, str]]:
    try:
        links_of(known.fabric, circuits)
    except CircuitError as error:
        return [("circuit", error.message)]
    return []


def _device(known: config.Config, name: str, table: Table) -> Json:
    able = known.drivers[name].capabilities()
    return {
        "device": name,
        "circuits": len(known.inventory.ours(name, table.pairs)),
        "of_others": len(table.pairs) - len(known.inventory.ours(name, table.pairs)),
        "tag": table.tag,
        "changes": "announced" if able.notifies else "polled",
        "power": able.power,
    }


def _describe(plan_id: str, made: Plan, staged: Staged, dry: DryRun, wanted: config.Wanted) -> Json:
    return {
        "plan": plan_id,
        "torn_down": len(made.removed),
        "lit": len(made.added),
        "bound": made.bound,
        "unplaced": [each._asdict() for each in made.unplaced],
        "missing": [
            {"leaves": [list(m.one), list(m.other)], "links": m.links, "reason": m.reason}
            for m in wanted.missing
        ],
        "seconds": max((stage.ends for stage in staged.stages), default=0.0),
        "jobs": list(dry.jobs),
        "dark_units": [
            {"pods": [a, b], "spine": spine, "seconds": seconds}
            for (a, b, spine), seconds in sorted(dry.dark_units.items())
        ],
        "dark_pairs": [
            {"pods": list(pair), "seconds": seconds}
            for pair, seconds in sorted(dry.dark_pairs.items())
        ],
        "stages": [
            {
                "stage": number,
                "spine": stage.index,
                "starts": stage.starts,
                "dark": stage.dark,
                "remove": _texts(stage.remove),
                "add": _texts(stage.add),
            }
            for number, stage in enumerate(staged.stages)
        ],
    }


def _texts(links: Iterable[Link]) -> list[str]:
    return [str(link) for link in links]


def _print_plan(described: Json) -> None:
    for stage in described["stages"]:
        print(
            f"stage {stage['stage']}: spine index {stage['spine']}, "
            f"at {stage['starts']:.1f} s, {stage['dark']} links dark meanwhile"
        )
        for sign, key in (("-", "remove"), ("+", "add")):
            for link in stage[key]:
                print(f"  {sign} {link}")
    for each in described["unplaced"]:
        print(f"cannot be placed: {each}")
    for each in described["missing"]:
        print(f"does not fit: {each}")
    for each in described["dark_units"]:
        print(f"dark: pods {each['pods']}, spine index {each['spine']}, {each['seconds']:.2f} s")
    print(f"jobs touched: {', '.join(described['jobs']) or 'none'}")
    print(
        f"{described['torn_down']} links torn down (at least {described['bound']}), "
        f"{described['lit']} lit, {described['seconds']:.1f} s"
    )
    print(f"plan {described['plan']}")


def _state(journal: Journal, plan_id: str) -> Json:
    progress = journal.progress(plan_id)
    document = journal.plan(plan_id)
    return {
        "stages": f"{progress.done}/{len(document.staged.stages)}",
        "state": progress.ended or ("planned" if not progress.done else "unfinished"),
        "why": document.why,
    }


def _short(entry: Json) -> Json:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["when"]))
    return {
        "when": when,
        "who": entry["who"],
        "device": entry["device"],
        "plan": f"{entry['plan']}/{entry['stage']}",
        "out": len(entry["disconnect"]),
        "in": len(entry["connect"]),
        "answer": entry["answer"],
    }


def _say(args: Args, values: Json, text: str) -> None:
    if args.json:
        _print_json(values)
    else:
        print(text)


def _print_json(values: Json) -> None:
    json.dump(values, sys.stdout)
    print()


def _print_table(rows: Sequence[Json]) -> None:
    """Columns as wide as their widest cell."""
    if not rows:
        return
    lines = [[name.upper() for name in rows[0]], *([str(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
