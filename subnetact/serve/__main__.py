"""Runs `python -m subnetact.serve`."""

import sys

from subnetact.serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
