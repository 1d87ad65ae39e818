# SPDX-License-Identifier: Apache-2.0
"""Fabrics for the tests of slices, written as an operator writes them."""

from __future__ import annotations

from typing import Any

from fabric_agent.slices import read
from fabric_agent.slices.model import Fabric


def document(
    leaves: int = 4, spines: int = 4, hosts: int = 8, nics: int = 2, parallel: int = 1
) -> dict[str, Any]:
    return {
        "leaves": [{"name": f"leaf[0-{leaves - 1}]", "prefix": "10.1.0.0/24"}],
        "spines": [{"name": f"spine[0-{spines - 1}]"}],
        "links": [
            {
                "leaves": f"leaf[0-{leaves - 1}]",
                "spines": f"spine[0-{spines - 1}]",
                "parallel": parallel,
                "addresses": "10.254.0.0/16",
            }
        ],
        "hosts": [
            {
                "name": f"host[0-{hosts - 1}]",
                "devices": f"eth[0-{nics - 1}]",
                "leaves": f"leaf[0-{leaves - 1}]",
            }
        ],
    }


def cabled(*sizes: int, **named: int) -> Fabric:
    return read.fabric(document(*sizes, **named))


def optical(leaves: int = 8, size: int = 8, spines: int = 8, per_spine: int = 1) -> Fabric:
    """``size`` GPUs, and as many optical switches, for each leaf; two GPUs a server."""
    value = document(leaves, spines, leaves * size // 2, 2)
    del value["links"]
    value["optics"] = {"name": f"ocs[0-{size - 1}]", "per_spine": per_spine}
    return read.fabric(value)
