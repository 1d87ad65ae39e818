# SPDX-License-Identifier: Apache-2.0
"""The `oncache` command: verbs declared in `verbs`, one module each, one error handler in `app`."""

from oncache.cli.app import main

__all__ = ["main"]
