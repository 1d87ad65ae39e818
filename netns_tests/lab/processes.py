# SPDX-License-Identifier: Apache-2.0
"""Child processes of the laboratory: started apart, ended by their id."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netns_tests.lab.errors import LabError
from netns_tests.lab.signals import STOPPING, undisturbed

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 10.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def environment() -> dict[str, str]:
    """Ours, with this checkout first on the module path."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def python(module: str, *args: str) -> list[str]:
    """The command line of `python -m module`, with the interpreter that runs us."""
    return [sys.executable, "-m", module, *args]


def _in_the_child() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A shell starts what it puts into the background with SIGINT ignored, which is inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child apart from our terminal (setsid).

    A Ctrl-C at the terminal then reaches us alone and we end the child in order; should we be
    killed, the kernel ends it. (The kernel means the starting *thread*: start children from a
    thread that lives as long as they.)
    """
    options.setdefault("env", environment())
    options.setdefault("stdin", subprocess.DEVNULL)
    child = None
    try:
        # Python drops what a signal raises between fork and the return from it.
        with undisturbed():
            child = subprocess.Popen(
                argv, start_new_session=True, preexec_fn=_in_the_child, **options
            )
    except BaseException:
        if child is not None:
            end(child)
        raise
    return child


def finish(
    argv: Sequence[str], *, text: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a child to its end; LabError with what it said if it fails and `check` is set."""
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, env=environment())
    except FileNotFoundError as missing:
        raise LabError(f"{argv[0]} is not installed", hint="run make setup") from missing
    if check and done.returncode != 0:
        raise LabError(
            f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}",
            hint="run the command by hand in the namespace",
        )
    return done


def end(child: subprocess.Popen[bytes], first: signal.Signals = signal.SIGTERM) -> int:
    """End one child: `first`, after a while SIGKILL. Returns its exit status."""
    if child.poll() is None:
        child.send_signal(first)
        try:
            child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
    status = child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            # What it was still to read is lost with it.
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    return status


class Ending:
    """A child as something that can be closed."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def close(self) -> None:
        end(self._child)
