"""Changes the package in one place at a time and counts what the tests notice.

`python tests/mutants.py --per-room 6 --seed 0 --out mutants.json` draws places in each of `ROOMS` (a sum, a
comparison, a number, an `and`), changes one of them in a copy of the project, and runs the tests of its room
until the first one fails. A mutant that no test notices "survives".
Run it before and after tests were rewritten: a seed draws the same places while the package is the same.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).parents[1]
ROOMS = {
    "subnetact/serving/scheduling": "tests/serving",
    "subnetact/generation": "tests/generation",
    "subnetact/operators": "tests/operators",
    "subnetact/insertion": "tests/insertion",
    "subnetact/engine": "tests/engine",
    "subnetact/export": "tests/export",
    "subnetact/calibration": "tests/calibration",
    "subnetact/latency": "tests/latency",
    "subnetact/nas": "tests/nas",
    "subnetact/files": "tests/files",
}
"""Every room with the folder of its tests."""
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or)),
)
OTHER: dict[type[ast.AST], type[Any]] = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
"""What stands in the place of an operation."""


def places(tree: ast.Module) -> Iterator[ast.expr]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(ast.Module(function.body, [])):
            match node:
                case ast.Compare(ops=[operation, *_]) if type(operation) in OTHER:
                    yield node
                case ast.BinOp(op=operation) | ast.BoolOp(op=operation) if type(operation) in OTHER:
                    yield node
                case ast.Constant(value=value) if type(value) is int:
                    yield node


def mutated(source: str, number: int) -> tuple[str, str]:
    """Return the source with its `number`-th place changed, and a line that says what was changed."""
    tree = ast.parse(source)
    node = list(places(tree))[number]
    before = ast.unparse(node)
    match node:
        case ast.Compare():
            node.ops[0] = OTHER[type(node.ops[0])]()
        case ast.BinOp() | ast.BoolOp():
            node.op = OTHER[type(node.op)]()
        case ast.Constant():
            node.value = node.value + 1  # type: ignore[operator]  # `places` yields whole numbers alone
    return ast.unparse(tree), f"{node.lineno}: {before} -> {ast.unparse(node)}"


def drawn(room: str, count: int, seed: int) -> list[tuple[Path, int]]:
    """Return `count` places of a room: files, relative to the project, and numbers of places in them."""
    every = [
        (path.relative_to(ROOT), number)
        for path in sorted((ROOT / room).rglob("*.py"))
        for number in range(len(list(places(ast.parse(path.read_text())))))
    ]
    return random.Random(f"{seed} {room}").sample(every, count)


def killed(copy: Path, tests: str, limit_s: float) -> bool:
    """Return whether a test fails, or does not end in time, on the changed copy."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider", tests]
    settings = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment = os.environ | settings
    try:
        ran = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return True
    return ran.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-room", type=int, default=6, help="places of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", nargs="*", default=list(ROOMS), help="rooms to change (default: all)")
    parser.add_argument("--limit-s", type=float, default=600, help="who takes longer counts as killed")
    parser.add_argument("--out", type=Path, help="JSON file of what was killed")
    arguments = parser.parse_args()
    todo = [
        (room, *place)
        for room in arguments.rooms
        for place in drawn(room, arguments.per_room, arguments.seed)
    ]
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        unused = ".git", ".venv", "build", "__pycache__", ".*_cache", ".hypothesis"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*unused))
        for room in arguments.rooms:
            if killed(copy, ROOMS[room], arguments.limit_s):
                raise SystemExit(f"{ROOMS[room]} fails without a change; correct it first")
        for room, path, number in tqdm(todo, unit="mutant"):
            source = (ROOT / path).read_text()
            text, change = mutated(source, number)
            (copy / path).write_text(text)
            outcomes[f"{path}:{change}"] = killed(copy, ROOMS[room], arguments.limit_s)
            (copy / path).write_text(source)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(outcomes, indent=1))
    survivors = [name for name, was_killed in outcomes.items() if not was_killed]
    print(
        f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants killed", *survivors, sep="\n  survives "
    )


if __name__ == "__main__":
    main()
