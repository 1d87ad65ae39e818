# SPDX-License-Identifier: Apache-2.0
"""Waiting with a deadline: the only way a test may wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from netns_tests.lab.errors import LabError

T = TypeVar("T")
LOOK_AGAIN_SECONDS = 0.01


def until(predicate: Callable[[], T], seconds: float, what: str) -> T:
    """Ask `predicate` until it gives something true, and return that.

    Raises LabError naming `what` when `seconds` have passed; the last answer is in the message.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise LabError(
                f"waited {seconds:g} s in vain: {what} (last answer: {answer!r})",
                hint="run the test alone with -x; on a loaded machine raise the limit",
            )
        time.sleep(LOOK_AGAIN_SECONDS)
