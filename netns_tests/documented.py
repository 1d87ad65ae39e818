# SPDX-License-Identifier: Apache-2.0
"""The examples of JSON in docs/cli.md, to be compared with what the command says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
COMMAND_OR_EXAMPLE = re.compile(
    r"`oncache ([a-z]+(?: (?:filter|egress|ingress|tcp))?)|```json\n(.*?)```", re.DOTALL
)


def examples() -> dict[str, Any]:
    """The words of a command -> the example that follows where it was mentioned last."""
    found, verb = {}, ""
    for command, example in COMMAND_OR_EXAMPLE.findall(PAGE.read_text(encoding="utf-8")):
        if example:
            found[verb] = json.loads(example)
        else:
            verb = command
    return found


def shape(value: Any) -> Any:
    """Keys all the way down; of a list its first element's. Counts are shown in part: no keys."""
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    if not isinstance(value, dict):
        return None
    if all(isinstance(each, int) and not isinstance(each, bool) for each in value.values()):
        return {}
    return {key: shape(each) for key, each in value.items()}
