"""Runs `python -m subnetact.profile`."""

import sys

from subnetact.profile.cli import main

if __name__ == "__main__":
    sys.exit(main())
