# SPDX-License-Identifier: Apache-2.0
"""What both planes share: loading, maps, attachment, host facts and errors."""
