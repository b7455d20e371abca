"""The command line of `python -m subnetact.serve`, with replicas on Ray Serve behind the server.

--workers replicas start on this machine, or on the cluster at --ray-address, and Ray's router spreads the
requests. The bundle must be at the same path on every node. `python -m subnetact.serve --help` explains the
addresses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from subnetact.cluster.autoscaler import Autoscaling
from subnetact.errors import ServeError
from subnetact.serve import cli
from subnetact.serve.source import Source


class RayBackend(cli.Backend):
    """Runs batches in replicas on Ray Serve, the extra `ray`."""

    command = "subnetact.cluster"
    epilog = f"replicas:\n{(__doc__ or '').partition('.')[2]}"

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that say where replicas run and how many."""
        add = parser.add_argument_group("Ray").add_argument
        add("--ray-address", help="of a running cluster; default: Ray starts on this machine")
        floor = "let the number of replicas follow the load: accuracy gives way down to this one, in "
        floor += "percent, and then replicas are added, from --workers on"
        add("--accuracy-floor", type=float, help=floor)
        add("--most-workers", type=int, help="greatest number of replicas with --accuracy-floor")

    def open(self, args: argparse.Namespace, source: Source, stack: ExitStack) -> tuple[Any, Any]:
        """Start the replicas."""
        if (args.accuracy_floor is None) != (args.most_workers is None):
            raise ServeError("--accuracy-floor and --most-workers: one needs the other; give both or neither")
        if args.worker_processes:
            raise ServeError("--worker-processes: the replicas of Ray are processes already; leave it out")
        from subnetact.cluster.application import open_replicas  # The extra `ray` may be missing.

        floor, least = args.accuracy_floor, args.workers
        scaling = None if floor is None else Autoscaling(floor, least, args.most_workers)
        return open_replicas(replace(source, workers=1), least, stack, scaling, args.ray_address)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, with the options of `sys.argv` if None are given; return the exit status."""
    return cli.main(arguments, RayBackend())
