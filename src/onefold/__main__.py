"""`python -m onefold` is the command `onefold`."""

from __future__ import annotations

import sys

from onefold.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
