"""The package as users install and import it, and as it writes into log files."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import shutil
import subprocess
import sys
import tarfile
import typing
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import ofa_adapters
import subnetact
import subnetact.calibration
import subnetact.insertion
import subnetact.nas
import subnetact.serving
from subnetact import Engine, Supernet
from subnetact.errors import MissingExtra, extra_needed
from subnetact.export import to_torchscript

ROOT = Path(__file__).parents[1]


def python(code: str, **kwargs: object) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, **kwargs)
    assert not done.stderr
    return done.stdout.strip()


def test_every_public_name_exists_and_is_documented() -> None:
    tree = ast.parse(Path(subnetact.__file__).read_text())
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    typed = {alias.asname or alias.name for node in imports for alias in node.names}
    assert {*typed, "errors", "__version__"} == set(subnetact.__all__) == set(dir(subnetact))
    for name in subnetact.__all__:
        value = getattr(subnetact, name)
        assert name == "__version__" or value.__doc__, name
    for name in ofa_adapters.__all__:
        assert getattr(ofa_adapters, name).__doc__
    code = "import subnetact; print(subnetact.training.distill_.__name__, subnetact.insertion.fold_.__name__)"
    assert python(code) == "distill_ fold_"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        subnetact.nonsense  # noqa: B018


def test_what_public_functions_return_is_public_and_no_name_hides_a_module() -> None:
    serving = subnetact.serving
    assert not {path.stem for path in Path(serving.__file__).parent.iterdir()} & set(serving.__all__)
    public = {getattr(subnetact, name) for name in subnetact.__all__ if name != "errors"}
    for room in (serving, subnetact.calibration, subnetact.insertion, subnetact.nas):
        public |= {getattr(room, name) for name in room.__all__}
    for name in set(serving.__all__) & set(subnetact.__all__):
        assert getattr(serving, name) is getattr(subnetact, name)
    for function in filter(inspect.isfunction, public):
        returned = typing.get_type_hints(function)["return"]
        assert not dataclasses.is_dataclass(returned) or returned in public, function


def test_importing_is_quiet_and_initialises_nothing() -> None:
    code = "import sys, subnetact, subnetact.serving, subnetact.latency; print('torch' in sys.modules)"
    assert python(code) == "False"
    code = (
        "import sys, torch, subnetact, ofa_adapters; subnetact.Supernet, subnetact.Engine;"
        "heavy = ('torchvision', 'timm', 'sklearn', 'matplotlib', 'scipy');"
        "print(torch.cuda.is_initialized(), [m for m in heavy if m in sys.modules])"
    )
    assert python(code) == "False []"


BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"


IMPORTS = {
    "absent_extra": ("import no_such_package", True),
    "old_extra": ("from json import nonsense", True),
    "broken_extra": (BROKEN, False),
    # transformers raises an error of its own for whatever went wrong
    "lazy_extra": (
        f"try:\n    {BROKEN}\nexcept RuntimeError as e:\n    raise ModuleNotFoundError('m') from e",
        False,
    ),
}


@pytest.mark.parametrize("module", IMPORTS)
def test_a_broken_extra_is_not_missing(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, missing = IMPORTS[module]
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtra) as raised, extra_needed("a: it needs b; pip install 'subnetact[b]'"):
        import_module(module)
    text = str(raised.value)
    assert ("pip install 'subnetact[b]'" in text) == missing
    broken = (
        "a: it needs b, which is installed but cannot be imported (RuntimeError: operator torchvision::nms"
    )
    assert text.startswith("a: it needs b; pip install" if missing else broken)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist of a copy of the checkout, for a build writes beside the sources, and a wheel made from it."""
    out = tmp_path_factory.mktemp("dist")
    left = shutil.ignore_patterns(".*", "build", "results", "figures", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, out / "copy", ignore=left)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(out / "copy")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {"sdist": next(out.glob("*.tar.gz")), "wheel": next(out.glob("*.whl"))}


DATA = "digits_supernet.safetensors text_supernet.safetensors text_supernet.json text_supernet.md"


DATA += " text_tokenizer.json traces/maf2019_per_minute.npz"


@pytest.mark.heavy
def test_archives_hold_what_they_should_for_a_package_index(archives: dict[str, Path]) -> None:
    wheel = set(zipfile.ZipFile(archives["wheel"]).namelist())
    sources = [p for package in ("subnetact", "ofa_adapters") for p in (ROOT / package).rglob("*.py")]
    needed = {p.relative_to(ROOT).as_posix() for p in sources}
    needed |= {f"subnetact/data/{name}" for name in DATA.split()}
    needed |= {f"subnetact/serve/{name}" for name in ("openapi.json", "palette.css", "status.html")}
    assert needed | {"subnetact/py.typed", "ofa_adapters/py.typed"} <= wheel
    tops = {name.split("/")[0] for name in wheel}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"subnetact", "ofa_adapters"}
    with tarfile.open(archives["sdist"]) as sdist:
        inside = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert {"profiling/on_gpu.sh", "tests/conftest.py", "benchmarks/engine.py", "LICENSE"} <= inside
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives.values())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


CODES = {
    "wheel": "import subnetact, ofa_adapters, subnetact.digits as d; s = d.load_digits_supernet();"
    "print(subnetact.__file__, s.space.size(), ofa_adapters.families()[0])",
    "editable": "import subnetact, importlib.util as u;"
    "print(subnetact.__file__, u.find_spec('ofa_adapters').origin)",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["editable", "wheel"])
def test_every_way_to_install_works_anywhere(archives: dict[str, Path], tmp_path: Path, how: str) -> None:
    """The wheel is made from the sdist, so that an installation of the sdist or the folder is one of it."""
    source = ["-e", str(ROOT)] if how == "editable" else [str(archives[how])]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "v")], check=True)
    inner = str(tmp_path / "v" / "bin" / "python")
    # The new environment sees this one's dependencies, but not its installation of the package.
    site = next((tmp_path / "v" / "lib").glob("python*")) / "site-packages"
    here = [p for p in sys.path if p.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(here) + "\n")
    options = ["--no-deps", "--no-build-isolation", "--ignore-installed", "--no-compile", "--quiet"]
    subprocess.run([inner, "-m", "pip", "install", *options, *source], check=True, capture_output=True)
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([inner, "-c", CODES[how]], cwd=tmp_path, capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr
    where, *rest = done.stdout.split()
    assert (str(ROOT) in where) == (how == "editable")
    assert rest == (
        [str(ROOT / "ofa_adapters" / "__init__.py")] if how == "editable" else ["864", "ofa_resnet50"]
    )


IMAGES = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))


def bars() -> Iterator[tuple[str, ast.Call]]:
    """Yield every call of tqdm in the packages, with its place."""
    for folder in (Path(str(package.__file__)).parent for package in (subnetact, ofa_adapters)):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("tqdm", "trange", "tqdm.tqdm"):
                    yield f"{path.relative_to(folder.parent)}:{node.lineno}", node


def test_every_bar_asks_for_a_terminal() -> None:
    found = list(bars())
    assert len(found) > 5
    for place, call in found:
        disable = [ast.unparse(k.value) for k in call.keywords if k.arg == "disable"]
        lines = ["not progress"] if "training/progress_bar.py" in place else []  # It prints lines there.
        quiet = [text.replace("self.", "") for text in disable]
        assert quiet in (["not progress or None"], ["None"], lines), f"{place}: a bar in log files"


def engine(digits: Supernet) -> Engine:
    spec = digits.space.smallest()
    return Engine(digits, [spec], example=IMAGES[:1], accuracy=[60.0], allow_uncalibrated=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "work",
    [
        lambda digits, path: subnetact.calibrate(digits, [digits.space.smallest()], [IMAGES]),
        lambda digits, path: subnetact.profile_latency(engine(digits), [1], warmup_ms=0, min_time_ms=1),
        lambda digits, path: subnetact.evaluate(
            digits, [digits.space.smallest()], [(IMAGES, torch.zeros(4, dtype=torch.long))]
        ),
        lambda digits, path: subnetact.search(
            digits, lambda spec: 60.0, lambda spec: 1.0, method="random", evaluations=4
        ),
        lambda digits, path: to_torchscript(engine(digits), path / "m.pt"),
    ],
    ids=["calibrate", "profile_latency", "evaluate", "search", "to_torchscript"],
)
def test_nothing_is_written_to_a_log_file(
    digits: Supernet, tmp_path: Path, work: Callable[[Supernet, Path], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    work(digits, tmp_path)
    assert capfd.readouterr() == ("", "")
