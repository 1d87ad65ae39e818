# SPDX-License-Identifier: Apache-2.0
"""Stands in for the node agent when the laboratory itself is tested.

Takes the agent's command line. What it does is its configuration's key "node": {"act": ...}:
"ready" says so and waits for a signal, "fail" ends with 2, "silent" waits without a word.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

import yaml


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["node"])
    parser.add_argument("-c", dest="config", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    act = yaml.safe_load(chosen.config.read_text())["node"]["act"]
    names = [name for _, name in socket.if_nameindex()]
    print(f"{act} with {' '.join(sorted(names))}", file=sys.stderr, flush=True)
    if act == "fail":
        return 2
    if act == "ready":
        os.write(chosen.ready_fd, b"\n")
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
