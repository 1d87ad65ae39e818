# SPDX-License-Identifier: Apache-2.0
"""Errors an operator sees: what happened, and what to do next.

    OncacheError        1   something of ours failed
    +-- ConfigError     2   the configuration is wrong
    +-- NotLoadedError  3   nothing is loaded (or no agent runs) where the question was asked
    +-- HostError       4   this host, kernel or user cannot do what is needed
    +-- LayoutError     1   another layout is loaded
    +-- BusyError       1   somebody else already does this job

The number is the exit code of a command that ends with the error.
"""

from typing import ClassVar


class OncacheError(Exception):
    """Base of all errors meant for the operator; ``str(error)`` is the message alone."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def lines(self) -> str:
        """The two lines that go to standard error: what, and what next."""
        return f"error: {self.message}\nnext: {self.hint}"


class ConfigError(OncacheError):
    """The configuration names something unknown, missing or impossible."""

    exit_code = 2


class NotLoadedError(OncacheError):
    """No plane is loaded, or no agent answers."""

    exit_code = 3


class HostError(OncacheError):
    """The kernel, its settings or our privileges do not allow it."""

    exit_code = 4


class LayoutError(OncacheError):
    """A pinned map was made by another build, or with other sizes."""


class BusyError(OncacheError):
    """A second agent on the same directory, or a slot somebody else holds."""
