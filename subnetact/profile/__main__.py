"""`python -m subnetact.profile`: runs the command line of this room."""

import sys

from subnetact.profile.cli import main

if __name__ == "__main__":
    sys.exit(main())
