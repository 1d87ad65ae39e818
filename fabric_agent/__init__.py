# SPDX-License-Identifier: Apache-2.0
"""The long-running processes: the node agent, and what plans for many nodes."""
