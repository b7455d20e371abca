"""`python -m subnetact.elastic FOLDER`: checks a bundle, or prints its model card."""

from __future__ import annotations

import argparse

from subnetact.command import reported, run_command
from subnetact.elastic.card import model_card, require_servable, validated


def main(arguments: list[str] | None = None) -> int:
    """Check a bundle and say what is in it; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m subnetact.elastic", description=__doc__)
    parser.add_argument("folder", help="folder that save_pretrained() or Engine.save() wrote")
    parser.add_argument("--card", action="store_true", help="print its model card, for a README.md")
    return reported(_run, parser.parse_args(arguments), "elastic")


def _run(args: argparse.Namespace) -> None:
    document, tables, supernet = validated(args.folder)
    if args.card:
        print(model_card(document, tables, supernet), end="")
        return
    require_servable(document, tables, supernet)
    model = document["model"] or {"library": "an own", "name": "network"}
    print(f"{args.folder}: valid; {model['library']} {model['name']}, space {document['space']}")
    print(f"subnets: {', '.join(document['subnets'])}; latency tables: {', '.join(tables) or 'none'}")


if __name__ == "__main__":
    run_command(main)
