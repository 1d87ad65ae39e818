# SPDX-License-Identifier: Apache-2.0
"""A leaf–spine fabric from namespaces: switches are Linux routers, links have a rate.

What a switch and a host must do for slices comes from the product's documents; here are the wires,
the ways without slices to compare with, and the counters that tell where each flow went.
"""

from netns_tests.fabric.counters import Counted, Tuple, counted
from netns_tests.fabric.fabric import Fabric, Rates, Way, small
from netns_tests.fabric.keeping import Keeping, keeping
from netns_tests.fabric.streams import Loss, Stream, Traffic

__all__ = [
    "Counted",
    "Fabric",
    "Keeping",
    "Loss",
    "Rates",
    "Stream",
    "Traffic",
    "Tuple",
    "Way",
    "counted",
    "keeping",
    "small",
]
