# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with the laboratory itself, as opposed to what is tested in it."""

from __future__ import annotations

from oncache.core.errors import OncacheError


class LabError(OncacheError):
    """The laboratory could not be built or did not do what was waited for."""


class AgentError(LabError):
    """A node agent ended, or was not ready in time.

    `exit_code_seen` is its exit status (negative: the signal), None while it still ran;
    `log` is all it wrote to standard error.
    """

    def __init__(self, message: str, *, exit_code_seen: int | None, log: str) -> None:
        super().__init__(f"{message}\n{log}".rstrip(), hint="read the agent's log above")
        self.exit_code_seen = exit_code_seen
        self.log = log
