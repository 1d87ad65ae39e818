# SPDX-License-Identifier: Apache-2.0
"""Where the plane of this host is: from the configuration, or from flags, or the defaults."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from oncache.core.config import Config, load

DEFAULT_FILE = Path("/etc/oncache/config.yaml")


@dataclass(frozen=True)
class Places:
    """Directories of one plane, and the configuration they came from, if there is one."""

    bpf_dir: Path
    run_dir: Path
    config: Config | None


def places(args: argparse.Namespace) -> Places:
    """Flags win over the file; a file that was named must be there, the default one need not.

    Raises ConfigError when the file cannot be read or is wrong.
    """
    config = load(Path(args.config)) if args.config else default_config()
    return Places(
        bpf_dir=Path(args.bpf_dir or (config.bpf_dir if config else Config.bpf_dir)),
        run_dir=Path(args.run_dir or (config.run_dir if config else Config.run_dir)),
        config=config,
    )


def default_config() -> Config | None:
    return load(DEFAULT_FILE) if DEFAULT_FILE.exists() else None
