# SPDX-License-Identifier: Apache-2.0
"""vClos slices: links of a fabric that one job has to itself, and what follows for hosts.

Knows no data path and speaks to no kernel, so it runs anywhere.
"""
