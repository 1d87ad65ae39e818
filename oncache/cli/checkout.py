# SPDX-License-Identifier: Apache-2.0
"""The demo and the benchmark need the laboratory, which a wheel does not carry."""

from __future__ import annotations

import sys
from pathlib import Path

import oncache
from oncache.core.errors import OncacheError

PARTS = ("netns_tests", "bench")


def require(verb: str, root: Path | None = None) -> None:
    """Make the laboratory beside this package importable; OncacheError when there is none."""
    root = root or Path(oncache.__file__).parents[1]
    if not all((root / part / "__init__.py").exists() for part in PARTS):
        raise OncacheError(
            f"oncache {verb} needs a source checkout, and {root} is none",
            hint=f"in a clone of the project: make {verb}",
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
