# SPDX-License-Identifier: Apache-2.0
"""Optical circuits between pods: wiring, demand, plans, stages and the devices that carry them out.

    jobs -> demand -> plan(lit, demand) -> verify -> stages -> apply(devices)

Words: a *port* is a transceiver of a spine; a *link* a bidirectional pair of ports; a *circuit* one
A-to-B cross-connect of an optical switch, two per link; a *drain unit* is all links between two
pods at one spine index.
"""
