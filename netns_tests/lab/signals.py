# SPDX-License-Identifier: Apache-2.0
"""Being told to stop without leaving a mess."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOPPING = frozenset({signal.SIGINT, signal.SIGTERM})


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. A KeyboardInterrupt, because whoever stops on Ctrl-C shall stop now too."""


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(number).name)


@contextlib.contextmanager
def terminating_in_order() -> Iterator[None]:
    """During the block SIGTERM unwinds the stack instead of ending the process on the spot.

    Only the main thread can arrange that; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals to stop wait until the block is done. Children started inside inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
