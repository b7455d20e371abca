"""Runs `python -m subnetact.cluster`."""

from subnetact.cluster.cli import main
from subnetact.command import run_command

if __name__ == "__main__":
    run_command(main)
