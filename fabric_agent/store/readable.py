# SPDX-License-Identifier: Apache-2.0
"""Waiting for descriptors by poll(2): select(2) refuses those above 1023, which agents reach."""

import select
from collections.abc import Iterable
from typing import Protocol


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(files: Iterable[int | HasFileno], seconds: float | None = None) -> frozenset[int]:
    """Those of the descriptors that can be read, at the latest after so many seconds."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return frozenset(fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000))
