# SPDX-License-Identifier: Apache-2.0
"""An optical switch that is not there: its state, and a RESTCONF server in front of it."""
