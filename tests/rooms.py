"""Draws the map of the package from its code: `python tests/rooms.py` prints rooms, arrows and sizes.

`python tests/rooms.py --write` brings the table of sizes in `subnetact/__init__.py` up to date, so that
growth is seen where the map is read.

The order of the rooms is the map in the docstring of `subnetact/__init__.py`: a room may import only from
rooms on lines above its own. Imports by name (`import_module("subnetact.digits")`) count like statements. The
only file that is left out is `subnetact/__init__.py`, which imports every public name on first use.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("subnetact", "ofa_adapters")
INSIDE = {"serving": ("scheduling", "policies", "live", "simulation", "pipelines", "tenants")}
"""Rooms whose folders have an order of their own: a folder may import only from those before it."""
BY_COMPUTED_NAME = {
    "ofa_adapters.registry": {"ofa_adapters.networks"},
    "subnetact.command": set[str](),  # Users name modules of their own.
}
"""Modules that call `import_module` with a computed name, and what of the packages they import this way."""


def map_lines() -> list[str]:
    """Return the lines of the map in the package's docstring; those of single files are indented."""
    docstring = ast.get_docstring(ast.parse((ROOT / "subnetact" / "__init__.py").read_text())) or ""
    found = re.search(r"^Map\n-+\n[^\n]+\n\n((?:    [^\n]+\n)+)", docstring, re.MULTILINE)
    if found is None:
        raise ValueError("subnetact/__init__.py has no map")
    return [line.removeprefix("    ") for line in found.group(1).splitlines()]


def room_lines() -> dict[str, int]:
    """Return every room of the map with the number of its line; rooms that share a line share a number."""
    found = {}
    for number, line in enumerate(line for line in map_lines() if not line.startswith(" ")):
        for name in re.split(r",\s*", re.split(r"\s{2,}", line)[0]):
            found[name.rstrip("/")] = number
    return found


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the packages that a file imports, wherever in the file that happens."""
    for node in nodes(path):
        if isinstance(node, ast.Call) and (name := name_imported(node)) in known:
            yield str(name)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else str(node.module)


def name_imported(call: ast.Call) -> str | None:
    """Return the name that a call of `import_module` or `__import__` imports: "" if it is computed.

    For every other call, the result is None.
    """
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("import_module", "__import__") or not call.args:
        return None
    name = call.args[0]
    return str(name.value) if isinstance(name, ast.Constant) else ""


def arrows() -> dict[str, set[str]]:
    """Return, for every module and for every `__init__` file but that of `subnetact`, what it imports."""
    known = modules()
    return {
        name: {*imports(path, known), *BY_COMPUTED_NAME.get(name, ())} - {name, "subnetact"}
        for name, path in known.items()
        if name != "subnetact"
    }


def room_of(module: str) -> str:
    package, *rest = module.split(".")
    return "ofa_adapters" if package == "ofa_adapters" else rest[0]


def arrows_up(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports from a lower line of the map, or from a later folder of the same room.

    The `__init__` file of a room may import from all of its folders.
    """
    lines = room_lines()
    found = []
    for name, targets in graph.items():
        for target in sorted(targets):
            room = room_of(name)
            if room != room_of(target):
                up = lines[room_of(target)] > lines[room]
            elif room in INSIDE:
                order = [f"subnetact.{room}.{folder}" for folder in INSIDE[room]]
                folder, other = (
                    next(
                        (i for i, inner in enumerate(order) if f"{module}.".startswith(f"{inner}.")),
                        len(order),
                    )
                    for module in (name, target)
                )
                up = other > folder
            else:
                up = False
            if up:
                found.append(f"{name} imports {target}")
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a circle, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


class Size(NamedTuple):
    """How much there is of a room: lines of code and of docstrings, and public names."""

    code: int
    docs: int
    names: int


def sizes() -> dict[str, Size]:
    """Return the size of every room. Public names are those in the `__all__` of the room itself."""
    found: dict[str, Size] = {}
    for name, path in modules().items():
        if name == "subnetact":
            continue
        tree: Any = nodes(path)[0]
        text = path.read_text().splitlines()
        docs = {number for node in nodes(path) for number in docstring_lines(node)}
        code = {
            number
            for number, line in enumerate(text, 1)
            if number not in docs and line.strip() and not line.strip().startswith("#")
        }
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]  # what errors.py lists
        lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and is_all(node)]
        own = name.count(".") == (0 if name.startswith("ofa_adapters") else 1)
        names = len(getattr(lists[0], "elts", classes)) if own and lists else 0
        before = found.get(room_of(name), Size(0, 0, 0))
        found[room_of(name)] = Size(before.code + len(code), before.docs + len(docs), before.names + names)
    return {room: found[room] for room in room_lines()}


def is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def docstring_lines(node: ast.AST) -> range:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return range(0)
    if ast.get_docstring(node, clean=False) is None:
        return range(0)
    return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def size_table() -> list[str]:
    rows = [("room", "code", "docs", "names"), *((room, *map(str, size)) for room, size in sizes().items())]
    rows.append(("all", *(str(sum(column)) for column in zip(*sizes().values(), strict=True))))
    return [f"{room:<14}{code:>6}{docs:>6}{names:>7}" for room, code, docs, names in rows]


def written_sizes() -> dict[str, Size]:
    docstring = ast.get_docstring(ast.parse((ROOT / "subnetact" / "__init__.py").read_text())) or ""
    rows = re.findall(r"^ {4}(\w+) +(\d+) +(\d+) +(\d+)$", docstring, re.MULTILINE)
    return {room: Size(*map(int, numbers)) for room, *numbers in rows}


def write_sizes() -> None:
    path = ROOT / "subnetact" / "__init__.py"
    table = "".join(f"    {line}\n" for line in size_table())
    path.write_text(re.sub(r"(?<=\n)    room +code.*\n(?:    \w+ [ \d]+\n)*", table, path.read_text()))


def main() -> None:
    """Print the rooms, top line first, each with the rooms it imports from, and their sizes."""
    if sys.argv[1:] == ["--write"]:
        write_sizes()
    graph = arrows()
    lines = room_lines()
    for room, number in lines.items():
        targets = {
            room_of(target) for name, found in graph.items() for target in found if room_of(name) == room
        } - {room}
        files = sum(room_of(name) == room for name in graph)
        ordered = sorted(targets, key=lambda target: lines[target])
        print(f"{number:>2}  {room} ({files} file{'s' * (files != 1)}) <- {', '.join(ordered) or 'nothing'}")
    print(f"arrows up: {', '.join(arrows_up(graph)) or 'none'}")
    print(f"circle: {' <- '.join(circle(graph)) or 'none'}")
    print("\n".join(["", *size_table()]))


if __name__ == "__main__":
    main()
