# SPDX-License-Identifier: Apache-2.0
"""The node agent: sources -> state -> plan -> reconcile -> host."""
