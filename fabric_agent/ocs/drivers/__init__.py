# SPDX-License-Identifier: Apache-2.0
"""Ways to an optical switch, behind one small interface (`base`)."""
