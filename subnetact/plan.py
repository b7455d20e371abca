"""`python -m subnetact.plan PIPELINE TRACE`: provision the stages of a pipeline at least cost.

The function that plans the workers of a single stage is `subnetact.serving.plan`.
"""

from subnetact.command import run_command
from subnetact.serving.pipelines.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    run_command(main)
