"""Runs `python -m subnetact.serve`."""

from subnetact.command import run_command
from subnetact.serve.cli import main

if __name__ == "__main__":
    run_command(main)
