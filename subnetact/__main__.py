"""Runs a command of the package: `subnetact serve` is `python -m subnetact.serve`, and so on."""

import argparse
import os
import runpy
import sys

from subnetact.command import run_command

COMMANDS = ("serve", "profile", "simulate", "elastic")


def main() -> int:
    """Run the command that the first argument names with the others; return the exit status."""
    parser = argparse.ArgumentParser("subnetact", description=__doc__)
    parser.add_argument("command", choices=COMMANDS, help="what to run; COMMAND --help lists its options")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.argv[1:] = args.options
    sys.path.insert(0, os.getcwd())  # as `python -m` does: users name modules of their own
    runpy.run_module(f"subnetact.{args.command}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    run_command(main)
