# SPDX-License-Identifier: Apache-2.0
"""The XMasq plane: on a hit, no tunnel header at all. Not in this version."""
