"""The map of the package holds: one direction of imports, nothing idle, names that readers look for."""

from __future__ import annotations

import ast
from pathlib import Path

import rooms

ROOT = Path(__file__).parents[1]
STARTED_BY_NAME = {"subnetact.elastic.language_model", "subnetact.export.triton_model", "subnetact.simulate"}
"""Modules that start a program, beside those called `__main__`; nobody imports them."""


def test_the_map_names_every_room_here_and_on_the_page_for_contributors() -> None:
    lines = rooms.room_lines()
    entries = {p.name.removesuffix(".py") for p in (ROOT / "subnetact").iterdir() if p.name != "__pycache__"}
    assert entries - set(lines) == {"__init__", "py.typed", "data"}
    assert set(lines) - entries == {"ofa_adapters"}
    assert len(entries - {"__main__"}) <= 32, "a new room has to replace one, or to live inside one"
    assert "\n".join(rooms.map_lines()) in (ROOT / "CONTRIBUTING.md").read_text()
    for room, order in rooms.INSIDE.items():
        folders = {path.parent.name for path in (ROOT / "subnetact" / room).glob("*/__init__.py")}
        assert folders == set(order)


def test_no_import_points_up_or_goes_in_a_circle() -> None:
    assert not rooms.arrows_up(rooms.arrows())
    assert not rooms.circle(rooms.arrows())


def test_imports_by_name_are_seen() -> None:
    known = rooms.modules()
    computed = {
        name
        for name, path in known.items()
        if name != "subnetact"
        for node in rooms.nodes(path)
        if isinstance(node, ast.Call) and rooms.name_imported(node) == ""
    }
    assert computed == set(rooms.BY_COMPUTED_NAME)
    assert "subnetact.digits" in rooms.arrows()["subnetact.profile.source"]
    assert rooms.arrows_up({"subnetact.operators": {"subnetact.digits"}})
    assert rooms.arrows_up({"subnetact.serving": {"subnetact.serving.pipelines"}}) == []


def test_growth_is_seen_in_the_table_of_sizes() -> None:
    written = rooms.written_sizes()
    for room, size in rooms.sizes().items():
        assert size.code <= 1.1 * written[room].code + 20, f"{room} has grown: python tests/rooms.py --write"
        assert size.docs <= 1.1 * written[room].docs + 20, f"{room} has grown: python tests/rooms.py --write"


def test_a_circle_and_an_arrow_up_would_be_found() -> None:
    assert set(rooms.circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}
    lines = rooms.room_lines()
    assert lines["errors"] < lines["ofa_adapters"] < lines["engine"]
    policy, batcher = "subnetact.serving.policies.slackfit", "subnetact.serving.live.batcher"
    assert rooms.arrows_up({batcher: {policy}, "subnetact.engine.engine": {"subnetact.errors"}}) == []
    assert rooms.arrows_up({policy: {batcher}}) == [f"{policy} imports {batcher}"]
    assert rooms.arrows_up({"subnetact.errors": {"subnetact.engine.engine"}})


def test_every_module_is_imported_or_started() -> None:
    known = rooms.modules()
    wanted = {
        target for name, path in known.items() for target in rooms.imports(path, known) if target != name
    }
    families = {name for name in known if name.startswith("ofa_adapters.networks.")}  # by computed names
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    idle = set(known) - wanted - packages - families - STARTED_BY_NAME
    assert all(name.endswith(".__main__") for name in idle)


def test_the_rooms_without_torch_never_import_it() -> None:
    for room in ("serving", "latency"):
        for path in (ROOT / "subnetact" / room).rglob("*.py"):
            for node in rooms.nodes(path):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(n.split(".")[0] == "torch" for n in names), path
