# SPDX-License-Identifier: Apache-2.0
"""The benchmark: what a transaction costs on the wire, through an overlay, and through ours."""
