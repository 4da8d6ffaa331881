"""`python -m expertly`."""

from __future__ import annotations

import sys

from expertly.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
