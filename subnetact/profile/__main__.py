"""Runs `python -m subnetact.profile`."""

from subnetact.command import run_command
from subnetact.profile.cli import main

if __name__ == "__main__":
    run_command(main)
