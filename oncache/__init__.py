# SPDX-License-Identifier: Apache-2.0
"""ONCache: an eBPF fast path beside a container overlay, with the overlay's own wire format."""

__version__ = "0.1.0"
