"""Writes the pages that follow from other files: the API from `__all__`, and the results of the benchmarks.

Both folders are made anew by every build, so that no page can be forgotten or go stale.
"""

from __future__ import annotations

import ast
import os
import re
from importlib import import_module
from pathlib import Path
from types import GenericAlias
from typing import Any

import result_plots
from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ROOMS = (
    "subnetact",
    "subnetact.errors",
    "subnetact.space",
    "subnetact.spec",
    "subnetact.operators",
    "subnetact.supernet",
    "subnetact.insertion",
    "ofa_adapters",
    "subnetact.digits",
    "subnetact.calibration",
    "subnetact.latency",
    "subnetact.training",
    "subnetact.elastic",
    "subnetact.engine",
    "subnetact.costs",
    "subnetact.nas",
    "subnetact.profile",
    "subnetact.serving",
    "subnetact.generation",
    "subnetact.export",
    "subnetact.serve",
    "subnetact.cluster",
)
"""What a user imports from, in the order of the map of the package."""
SHOWN = {
    "batcher": ["batcher.png"],
    "demo": ["../../examples/demo.png"],
    "engine": ["engine_ofa_resnet50.png", "engine_ofa_mbv3.png"],
    "policy_grid": ["policy_ablation.png"],
    "precision": ["precision.png"],
    "scheduling": ["scheduling_bursty.png"],
    "search": ["search.png"],
    "superserve": ["scheduling_maf.png"],
}
"""Page of results -> the figures that answer its question. `result_plots` draws those of other pages."""


_PUBLIC: dict[str, str] = {}
"""Public name -> the full name under which it is documented."""
_FILES = re.compile(r"(Which f\w+ answers.*\n\n)?(^[-*] `\w+(\.py|/)`.*\n(  .*\n)*)+", re.MULTILINE)
"""The list of the files of a room, which is for those who change it."""
_MADE = {
    r"examples": "gallery/index.rst",
    r"examples/(\w+)\.py": r"gallery/\2.rst",
    r"benchmarks/README\.md": "results/index.md",
    r"benchmarks/results/(\w+\.md)": r"results/\2",
    r"subnetact/(\w+)/__init__\.py": r"api/subnetact.\2.rst",
}
"""A file of the repository, seen from `docs` -> the page of the documentation that is made of it."""
_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def write(docs: Path) -> None:
    """Write `docs/api`, `docs/examples`, from which sphinx-gallery makes its pages, and `docs/results`."""
    write_api(docs / "api")
    write_examples(docs / "examples")
    write_results(docs / "results")


def write_api(folder: Path) -> None:
    """Write a page for every room, with a table of its public names; autosummary writes a page for each name.

    A name that several rooms export is documented once, under the first of them.
    """
    pages: dict[str, str] = {}
    known: dict[int, str] = {}
    for room in ROOMS:
        with mock(["ray"]):  # the extra `ray` is 490 MB, and its names suffice here
            import_module("ray").__version__ = "2.60.0"  # type: ignore[attr-defined]
            module = import_module(room)
            public = {name: getattr(module, name) for name in sorted(getattr(module, "__all__", ()))}
        here, elsewhere = [], []
        for name, value in public.items():
            if name.startswith("__") or (room == "subnetact" and name == "errors"):
                continue
            first = known.setdefault(id(value), f"{room}.{name}")
            _PUBLIC.setdefault(name, first)
            (here if first == f"{room}.{name}" else elsewhere).append(first)
        text = (module.__doc__ or "").strip().split("\n\nMap\n")[0] + "\n"
        text = _FILES.sub("", text)
        lines = [room, "=" * len(room), "", *plain_rst(text.splitlines()), ""]
        if here:
            lines += [".. autosummary::", "   :toctree: names", "   :nosignatures:", ""]
            lines += [f"   ~{name}" for name in here] + [""]
        if elsewhere:
            lines += ["Exported here as well:", ""]
            lines += [f"* :py:obj:`{name}`" for name in elsewhere] + [""]
        pages[room] = "\n".join(lines)
    tree = "\n".join(f"   {room}" for room in ROOMS)
    pages["index"] = (
        "API reference\n=============\n\nEvery public name, by the package that it is imported from. What is "
        "not listed here is private.\n\n.. toctree::\n   :maxdepth: 1\n\n" + tree + "\n"
    )
    _write(folder, {f"{name}.rst": text for name, text in pages.items()})


def write_examples(folder: Path) -> None:
    """Copy the programs of `examples` in the form of sphinx-gallery: their first sentence becomes the title.

    The figure that a whole run has left beside a program comes first. A folder of its own is needed because
    sphinx-gallery takes the folders beside the programs, which have a README.md each, for galleries.
    """
    pages = {"GALLERY_HEADER.rst": (Path(__file__).parent / "examples.rst.txt").read_text()}
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text()
        first, *rest = (ast.get_docstring(ast.parse(text)) or path.stem).splitlines()
        title = re.split(r"[.:](?: |$)", first)[0]
        figure = path.with_suffix(".png")
        shown = [f".. image:: /../examples/{figure.name}", "   :alt: Figure of a whole run", ""]
        left = first[len(title) :].lstrip(".: ")
        lines = [title, "=" * len(title), "", *plain_rst([left[:1].upper() + left[1:], *rest]), ""]
        lines += ["The figure of a whole run:", "", *shown] if figure.exists() else []
        code = in_cells(text)[text.index('"""', 3) + 3 :]
        thumbnail = f"\n# sphinx_gallery_thumbnail_path = '../examples/{figure.name}'\n"
        pages[path.name] = 'r"""\n' + "\n".join(lines) + '"""' + thumbnail * figure.exists() + code
    _write(folder, pages)


def in_cells(program: str) -> str:
    """Return a program with a cell for every function and class, whose first sentence stands above it."""
    lines = program.splitlines()
    for node in reversed(ast.parse(program).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = (ast.get_docstring(node) or "And now all steps in their order.").splitlines()[0]
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            lines[start:start] = ["# %%", f"# {_escaped(first)}", ""]
    return "\n".join(lines) + "\n"


def write_results(folder: Path) -> None:
    """Write a page for every page of results: its question, the answer, the figure, and the page itself."""
    folder.mkdir(exist_ok=True)
    index = (ROOT / "benchmarks" / "README.md").read_text()
    before_table = index[: index.index("| question |")].partition("\n")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in index.splitlines()
        if re.match(r"\| [^|]+ \| [^|]+ \| ", line) and not line.startswith("| question")
    ]
    asked: dict[str, tuple[str, str]] = {}
    for question, answer, *rest in rows:
        for page in re.findall(r"\(results/(\w+)\.md\)", rest[-1]):
            asked.setdefault(page, (question, answer))
    pages = {}
    for path in sorted(RESULTS.glob("*.md")):
        title, _, text = path.read_text().partition("\n")
        question, answer = asked.get(path.stem, ("", ""))
        text = _relinked(text, RESULTS, folder)
        figures = []
        for figure in SHOWN.get(path.stem, ()):
            target = os.path.relpath(RESULTS / figure, folder)
            text = re.sub(rf"!\[[^\]]*\]\({re.escape(target)}\)\n*", "", text)
            figures.append(f"![{question or title.lstrip('# ')}]({target})")
        if drawn := result_plots.draw(path.stem, folder / "figures"):
            figures.append(f"![{question or title.lstrip('# ')}](figures/{drawn})")
        short = [f"**{question}** In short: {answer[0]}{answer[1:].rstrip('.')}."] if question else []
        words = "The [glossary](../glossary.md) explains the words of this page."
        body = "\n\n".join([title, *short, *figures, words, text.strip()])
        pages[f"{path.stem}.md"] = body + "\n"
    tree = "\n".join(sorted(name.removesuffix(".md") for name in pages))
    table = ["| question | answer | page |", "|---|---|---|"]
    for question, answer, *rest in rows:
        found = re.findall(r"\(results/(\w+)\.md\)", rest[-1])
        links = ", ".join(f"[{name}]({name}.md)" for name in found) or "files only"
        table.append(f"| {question} | {answer} | {links} |")
    pages["index.md"] = "\n".join(
        [
            "# What was measured",
            "",
            before_table.strip(),
            "",
            *table,
            "",
            "```{toctree}",
            ":hidden:",
            "",
            tree,
            "```",
            "",
        ]
    )
    _write(folder, pages)


def _relinked(text: str, before: Path, after: Path) -> str:
    """Return Markdown whose relative links lead from another folder to where they led before."""

    def link(found: re.Match[str]) -> str:
        target, anchor = found[2], found[3] or ""
        if (before / target).suffix == ".md" and (before / target).parent == before:
            return f"{found[1]}({target}{anchor})"
        return f"{found[1]}({os.path.relpath(before / target, after)}{anchor})"

    return re.sub(r"(!?\[[^\]]*\])\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", link, text)


def _write(folder: Path, pages: dict[str, str]) -> None:
    """Make the folder hold these pages and no others; what has not changed keeps its time."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def link_to_pages(_: Any, page: str, source: list[str]) -> None:  # noqa: ARG001
    """Lead links to files of the repository to the pages that are made of them."""
    for file, made in _MADE.items():
        source[0] = re.sub(rf"\]\(((?:\.\./)*)\.\./{file}(?=[)#])", rf"](\1{made}", source[0])


def short_name(_: Any, env: Any, node: Any, content: Any) -> Any:
    """Lead a public name, `Engine` or `Engine.save`, to its page, whichever room its docstring is in."""
    if node.get("refdomain") != "py" or node.get("reftype") != "obj":
        return None
    first, _, rest = node["reftarget"].partition(".")
    full = ".".join(filter(None, (_PUBLIC.get(first), rest)))
    found = env.get_domain("py").objects.get(full) if first in _PUBLIC else None
    if found is None:
        return None
    return make_refnode(env.app.builder, node["refdoc"], found.docname, found.node_id, content, full)


def markdown_blocks(_: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Give docstrings, which are Markdown with sections after Google, the form that Sphinx reads."""
    del options
    if what == "data" and isinstance(obj, tuple | float | str | GenericAlias):
        lines[:] = comment_of(name)  # autodoc sees that of the class of the value
    lines[:] = plain_rst(lines)


def comment_of(name: str) -> list[str]:
    """Return the text below the assignment of a public name, in whichever module of its room that stands."""
    room, _, variable = name.rpartition(".")
    for path in sorted(Path(import_module(room).__file__ or "").parent.glob("*.py")):
        analyzer = ModuleAnalyzer.for_string(path.read_text(), path.stem)
        analyzer.analyze()
        if ("", variable) in analyzer.attr_docs:
            return list(analyzer.attr_docs["", variable])
    return []


def _escaped(line: str) -> str:
    """Return a line without what only reStructuredText sees: `name_` is no link, and "`Phase`s" is code."""
    parts = re.split(r"(`[^`]*`)", line)
    for i, part in enumerate(parts):
        if not i % 2:
            parts[i] = re.sub(r"(?<=[a-z])_(?=[\s,.;)|]|$)", r"\_", part)
            parts[i] = re.sub(r"^(?=\w)", r"\\ " if i else "", parts[i])
    return "".join(parts)


def plain_rst(lines: list[str]) -> list[str]:
    """Return the lines with code blocks, lists and tables of Markdown as reStructuredText.

    Blocks that are indented by four spaces after a blank line, and fenced ones, become literal blocks; lists
    get the blank lines around them that reStructuredText wants.
    """
    found: list[str] = []
    fence = literal = False
    table: list[str] = []
    for number, line in enumerate(lines):
        stripped = line.strip()
        before = found[-1] if found else ""
        if table and not stripped.startswith("|"):
            found += _list_table(table)
            table = []
        if stripped.startswith("```"):
            fence = not fence
            found += ["", "::", ""] if fence else [""]
        elif fence:
            found.append("    " + line)
        elif literal and (not stripped or line.startswith("    ")):
            found.append(line)
        elif stripped.startswith("|") and stripped.endswith("|") and not line.startswith("    "):
            table.append(_escaped(stripped))
        elif line.startswith("    ") and not before.strip() and _begins_code(lines[:number]):
            literal = True
            found += ["::", "", line]
        else:
            literal = False
            begun = not before.strip() or before.startswith(" ") or _ITEM.match(before)
            if _ITEM.match(line) and not begun:
                found.append("")
            found.append(_escaped(line))
    return found + (_list_table(table) if table else [])


def _begins_code(lines: list[str]) -> bool:
    """Tell whether an indented block after these lines is code, and not a part of a list or a section."""
    last = next((line for line in reversed(lines) if line.strip()), " ")
    return not last.startswith((" ", ":", "..", "-", "*", "+")) and not re.match(r"\w+:$", last)


def _list_table(rows: list[str]) -> list[str]:
    """Return a table of Markdown as one of reStructuredText."""
    rows = [row for row in rows if not set(row) <= set("|- :")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    found = ["", ".. list-table::", "   :header-rows: 1", ""]
    for row in cells:
        found += [f"   {'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(row)]
    return [*found, ""]
