# SPDX-License-Identifier: Apache-2.0
"""`python -m oncache.cli`: the command without its console script."""

import sys

from oncache.cli import main

if __name__ == "__main__":
    sys.exit(main())
