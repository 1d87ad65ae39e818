# SPDX-License-Identifier: Apache-2.0
"""What is on disk: plans by id, how far each got, and the audit log.

    DIR/lock          held by the one controller that changes devices
    DIR/frozen        exists while nothing may be changed; says who and why
    DIR/abort         the running plan stops before its next stage
    DIR/plans/ID.json
    DIR/runs/ID.jsonl one line per step: begun, done, failed, undone, aborted,
                      finished, rolled-back
    DIR/audit.jsonl   one line per command to a device: who, when, why, before, after, answer

Lines are written whole and reach the disk before the step they announce is taken.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_agent.ocs.stages import Stage, Staged
from fabric_agent.ocs.wiring import Fabric, Layout, Link
from oncache.core.errors import BusyError, OncacheError

FORMAT = 1
HISTORY_HINT = "fabric-agent ocs history lists what is known"

Json = dict[str, Any]


class JournalError(OncacheError):
    """A plan or journal that is missing, damaged or of another version."""


class FrozenError(OncacheError):
    """Changes are forbidden for now."""


@dataclass(frozen=True)
class Document:
    """A staged plan as it was made: `tags` are those of the device tables it was made from."""

    fabric: Fabric
    staged: Staged
    tags: Mapping[str, str]
    why: str

    @property
    def id(self) -> str:
        """From the content, so that the same plan has the same id."""
        return hashlib.sha256(json.dumps(encode(self), sort_keys=True).encode()).hexdigest()[:12]


def encode(document: Document) -> Json:
    """As JSON values."""
    staged = document.staged
    return {
        "format": FORMAT,
        "fabric": [document.fabric.pods, document.fabric.indices, document.fabric.uplinks],
        "tags": dict(document.tags),
        "why": document.why,
        "before": [list(link) for link in staged.before.links()],
        "after": [list(link) for link in staged.after.links()],
        "stages": [_encode_stage(stage) for stage in staged.stages],
    }


def _encode_stage(stage: Stage) -> Json:
    return {
        "index": stage.index,
        "remove": [list(link) for link in stage.remove],
        "add": [list(link) for link in stage.add],
        "starts": stage.starts,
        "ends": stage.ends,
        "dark": stage.dark,
    }


def decode(values: Json) -> Document:
    """From JSON values; JournalError if they are no plan of this version."""
    try:
        if values["format"] != FORMAT:
            raise JournalError(
                f"the plan has format {values['format']}, this version knows {FORMAT}",
                hint="use the version that made it, or plan anew",
            )
        fabric = Fabric(*values["fabric"])
        before, after = (Layout.of(fabric, _links(values[key])) for key in ("before", "after"))
        stages = tuple(_stage(each) for each in values["stages"])
        return Document(fabric, Staged(before, after, stages), values["tags"], values["why"])
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"damaged plan: {error!r}", hint="plan anew") from error


def _stage(values: Json) -> Stage:
    remove, add = _links(values["remove"]), _links(values["add"])
    return Stage(values["index"], remove, add, values["starts"], values["ends"], values["dark"])


def _links(values: list[list[int]]) -> tuple[Link, ...]:
    return tuple(Link(*each) for each in values)


@dataclass(frozen=True)
class Progress:
    """Of one plan. `begun`: the stage that may be half in force; `done`: stages in force."""

    done: int = 0
    begun: int | None = None
    ended: str = ""


class Journal:
    """See the module."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        for part in ("plans", "runs"):
            (directory / part).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """BusyError while another controller has it."""
        with (self._dir / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError(
                    "another controller is at work on these circuits",
                    hint="wait for it, or fabric-agent ocs abort",
                ) from None
            yield

    def save(self, document: Document) -> str:
        """Keep a plan; returns its id."""
        path = self._dir / "plans" / f"{document.id}.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(encode(document)), encoding="utf-8")
        temporary.replace(path)
        return document.id

    def plan(self, plan_id: str) -> Document:
        """JournalError when there is none."""
        path = self._dir / "plans" / f"{plan_id}.json"
        if not plan_id.isalnum() or not path.exists():
            raise JournalError(f"there is no plan {plan_id}", hint=HISTORY_HINT)
        return decode(_parsed(path.read_text(encoding="utf-8"), str(path)))

    def plans(self) -> list[str]:
        """Ids, oldest first."""
        paths = (self._dir / "plans").glob("*.json")
        return [path.stem for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]

    def step(self, plan_id: str, event: str, stage: int | None = None, **more: object) -> None:
        """Note a step."""
        self._append(f"runs/{plan_id}.jsonl", {"event": event, "stage": stage, **more})

    def progress(self, plan_id: str) -> Progress:
        """How far a plan got."""
        done, ended = 0, ""
        begun: int | None = None
        for line in self._lines(f"runs/{plan_id}.jsonl"):
            match line["event"]:
                case "begun":
                    done = begun = line["stage"]
                case "done":
                    done, begun = line["stage"] + 1, None
                case "undone":
                    done, begun = line["stage"], None
                case "aborted" | "finished" | "rolled-back":
                    ended = line["event"]
        return Progress(done, begun, ended)

    def unfinished(self) -> str | None:
        """A plan that started and did not end."""
        for plan_id in self.plans():
            started = any(True for _ in self._lines(f"runs/{plan_id}.jsonl"))
            if started and not self.progress(plan_id).ended:
                return plan_id
        return None

    def audit(self, **entry: object) -> None:
        """One command to a device."""
        self._append("audit.jsonl", {"who": getpass.getuser(), **entry})

    def history(self) -> list[Json]:
        """The audit log, oldest first."""
        return list(self._lines("audit.jsonl"))

    def freeze(self, why: str) -> None:
        """Forbid changes until `thaw`."""
        (self._dir / "frozen").write_text(f"{getpass.getuser()}: {why}", encoding="utf-8")

    def thaw(self) -> None:
        """Allow changes again."""
        (self._dir / "frozen").unlink(missing_ok=True)

    def frozen(self) -> str:
        """Who and why, or nothing."""
        with suppress(FileNotFoundError):
            return (self._dir / "frozen").read_text(encoding="utf-8")
        return ""

    def require_thawed(self) -> None:
        """FrozenError while frozen."""
        if why := self.frozen():
            raise FrozenError(
                f"circuits are frozen by {why}", hint="fabric-agent ocs freeze --off allows changes"
            )

    def abort(self) -> str:
        """The running plan stops before its next stage; one that nobody runs has ended."""
        (self._dir / "abort").touch()
        try:
            with self.exclusive():
                self.take_abort()
                left = self.unfinished()
                if left is None:
                    return "nothing runs and nothing is unfinished"
                self.step(left, "aborted")
                return f"plan {left} is given up; what is lit stays"
        except BusyError:
            return "the running plan stops before its next stage"

    def take_abort(self) -> bool:
        """Was it asked for? Asked only once."""
        asked = (self._dir / "abort").exists()
        (self._dir / "abort").unlink(missing_ok=True)
        return asked

    def _append(self, name: str, entry: Json) -> None:
        line = json.dumps({"when": round(time.time(), 3), **entry}) + "\n"
        with (self._dir / name).open("a", encoding="utf-8") as log:
            log.write(line)
            log.flush()
            os.fsync(log.fileno())

    def _lines(self, name: str) -> Iterator[Json]:
        path = self._dir / name
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                # A line without its end was being written when the machine stopped.
                if line.endswith("\n"):
                    yield _parsed(line, name)


def _parsed(text: str, where: str) -> Json:
    try:
        values: Json = json.loads(text)
    except ValueError as error:
        raise JournalError(
            f"{where} is damaged: {error}", hint="move it away and plan anew"
        ) from error
    return values
