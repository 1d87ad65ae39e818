# SPDX-License-Identifier: Apache-2.0
"""One table of a file: values are taken by name, and what nobody may take is an error."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar

from oncache.core.errors import ConfigError

T = TypeVar("T")


class Section:
    """``path`` leads to the table from the top of the file, as in ``hosts[2]``."""

    def __init__(self, path: str, values: dict[Any, Any]) -> None:
        self.path = path
        self._values = values

    def name(self, key: object) -> str:
        """The path of ``key``."""
        return f"{self.path}.{key}" if self.path else str(key)

    def only(self, *valid: str) -> None:
        """Refuse every other key."""
        for key in self._values:
            if key not in valid:
                near = get_close_matches(str(key), valid, n=1, cutoff=0.5)
                meant = f"did you mean {self.name(near[0])}? " if near else ""
                raise ConfigError(
                    f"unknown key {self.name(key)}", hint=f"{meant}valid here: {', '.join(valid)}"
                )

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, read: Callable[[str, Any], T], default: T | None = None) -> T:
        """The value of ``key`` through ``read(path, raw)``; without a default it must be there."""
        if key in self._values:
            return read(self.name(key), self._values[key])
        if default is None:
            raise ConfigError(f"{self.name(key)} is missing", hint=f"add {self.name(key)}")
        return default

    def section(self, key: str) -> Section:
        """The table under ``key``."""
        return Section(self.name(key), self.take(key, _table))


def _table(path: str, raw: Any) -> dict[Any, Any]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is {raw!r}", hint="it must be a table of settings")
    return raw
