"""Write a model repository for Triton from a bundle: its Python backend, with our batch formation.

    python examples/triton_repository.py --bundle bundle/ --repository models/ --slo-ms 36
    tritonserver --model-repository=models

A bundle of an own network needs the function without arguments that builds it, `--model PKG.MOD:FACTORY`,
which Triton's Python must find, too.
Clients send `deadline_ms` and `min_accuracy` as request parameters; `examples/triton_client` shows how.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from subnetact.export import to_triton
from subnetact.serve.source import Source


def main() -> None:
    """Write the repository."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", required=True, help="folder of a saved engine")
    parser.add_argument("--repository", type=Path, required=True, help="folder of the model repository")
    parser.add_argument("--name", default="elastic", help="name of the model")
    parser.add_argument("--slo-ms", type=float, default=36.0, help="deadline of requests that name none")
    parser.add_argument("--model", metavar="PKG.MOD:FACTORY", help="function that builds an own network")
    args = parser.parse_args()
    source = Source(bundle=args.bundle, model=args.model)
    engine = source.engine()
    table = source.latency_table(engine)  # the bundle's, or a new profile of this machine
    own = {"name": args.name, "model": args.model}
    to_triton(engine, args.repository, "python", table=table, slo_ms=args.slo_ms, **own)


if __name__ == "__main__":
    main()
