"""Runs `python -m subnetact.loadtest`."""

import sys

from subnetact.loadtest.cli import main

if __name__ == "__main__":
    sys.exit(main())
