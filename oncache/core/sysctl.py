# SPDX-License-Identifier: Apache-2.0
"""Network settings of the calling thread's namespace, and a journal that can undo our changes.

``/proc/sys/net`` always shows the namespace of the thread that opens it, so nothing here may be
called from a thread that entered another one.
"""

import json
import logging
import os
from pathlib import Path

from oncache.core.errors import HostError, OncacheError

log = logging.getLogger(__name__)

ROOT = Path("/proc/sys/net")
JOURNAL = "sysctl.json"


def read(name: str) -> str | None:
    """The value of ``net.<name>``, such as ``ipv4.ip_local_port_range``; None if the kernel here
    has no such setting (the module behind it may not be loaded)."""
    try:
        return _path(name).read_text().strip()
    except FileNotFoundError:
        return None


def write(name: str, value: str) -> None:
    """Set ``net.<name>``; HostError if the kernel refuses."""
    try:
        _path(name).write_text(value)
    except OSError as error:
        raise HostError(
            f"cannot set net.{name} to {value}: {error.strerror}",
            hint="run as root, with /proc/sys writable",
        ) from error


def _path(name: str) -> Path:
    # As sysctl(8) has it: a slash in a name is a dot that does not separate, as in "eth0/100".
    return ROOT / name.translate(str.maketrans("./", "/."))


class Journal:
    """What settings were before we touched them, kept as JSON in the run directory.

    A later process restores what an earlier one changed. The first value noted for a name stays,
    however often ``set`` runs: the second run would otherwise take our own value for the original.
    """

    def __init__(self, run_dir: Path) -> None:
        self._file = run_dir / JOURNAL

    def changed(self) -> dict[str, str]:
        """Name -> original value of everything that ``restore`` would put back."""
        try:
            noted = json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise OncacheError(
                f"{self._file} is damaged",
                hint="set the net.netfilter settings by hand if they matter, then remove the file",
            ) from error
        return {str(name): str(value) for name, value in noted.items()}

    def set(self, name: str, value: str) -> bool:
        """Set ``net.<name>``, noting the original first; False if there is no such setting."""
        current = read(name)
        if current is None:
            return False
        if current != value:
            self._note(name, current)
            write(name, value)
            log.info("sysctl net.%s changed from %s to %s", name, current, value)
        return True

    def restore(self) -> None:
        """Put every original value back, forgetting each as soon as it is in place."""
        noted = self.changed()
        for name, original in list(noted.items()):
            if read(name) is not None:
                write(name, original)
                log.info("sysctl net.%s restored to %s", name, original)
            del noted[name]
            self._save(noted)

    def _note(self, name: str, original: str) -> None:
        noted = self.changed()
        noted.setdefault(name, original)
        self._save(noted)

    def _save(self, noted: dict[str, str]) -> None:
        if not noted:
            self._file.unlink(missing_ok=True)
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._file.with_suffix(".new")
        with fresh.open("w") as stream:
            json.dump(noted, stream)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(self._file)
