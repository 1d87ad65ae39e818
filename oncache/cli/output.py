# SPDX-License-Identifier: Apache-2.0
"""Results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Plain = Mapping[str, object] | Sequence[object]
R = TypeVar("R", bound=Plain)


def show(result: R, render: Callable[[R], str], *, as_json: bool) -> None:
    """Print `result` as one line of JSON, or as `render` writes it for people."""
    print(json.dumps(result) if as_json else render(result))


def say(line: str) -> None:
    """Progress and remarks: for a person beside the result, never a part of it."""
    print(line, file=sys.stderr, flush=True)
