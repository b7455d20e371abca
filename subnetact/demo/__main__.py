"""Runs `python -m subnetact.demo`."""

from __future__ import annotations

from subnetact.command import run_command
from subnetact.demo.cli import main

if __name__ == "__main__":
    run_command(main)
