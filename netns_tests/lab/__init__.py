# SPDX-License-Identifier: Apache-2.0
"""The laboratory: hosts, pods, wires and overlays from network namespaces.

The demo, the tests and the benchmark all build on it. scapy may build and dissect the bytes that
`inject` sends and `Capture` sees; nothing here needs it.
"""

from netns_tests.lab.agent import Agent
from netns_tests.lab.capture import Capture, Direction, Frame, Injector, inject
from netns_tests.lab.errors import AgentError, LabError
from netns_tests.lab.hosts import Host, Pod, Shape
from netns_tests.lab.laboratory import Lab
from netns_tests.lab.namespaces import Namespace, inside, missing_capabilities
from netns_tests.lab.offloads import Offload, set_offload
from netns_tests.lab.overlay import Vxlan
from netns_tests.lab.sockets import Ping, ping
from netns_tests.lab.waiting import until

__all__ = [
    "Agent",
    "AgentError",
    "Capture",
    "Direction",
    "Frame",
    "Host",
    "Injector",
    "Lab",
    "LabError",
    "Namespace",
    "Offload",
    "Ping",
    "Pod",
    "Shape",
    "Vxlan",
    "inject",
    "inside",
    "missing_capabilities",
    "ping",
    "set_offload",
    "until",
]
