# SPDX-License-Identifier: Apache-2.0
"""The third ring: hosts, pods and fabrics built from network namespaces, with real traffic."""
