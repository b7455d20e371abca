"""Runs `python -m subnetact.loadtest`."""

from subnetact.command import run_command
from subnetact.loadtest.cli import main

if __name__ == "__main__":
    run_command(main)
