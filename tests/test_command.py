"""Commands end quietly when the user or the reader of their output has had enough."""

from __future__ import annotations

import configparser
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from subnetact.__main__ import COMMANDS as COMMAND_NAMES
from subnetact.command import INTERRUPTED, NOBODY_READS

PRINTS = "import sys; from subnetact.command import run_command\n"
COMMANDS = [
    ["-m", "ofa_adapters"],
    ["-m", "subnetact.simulate", "--policy", "fixed:0", "--duration-s", "1"],
    ["-m", "subnetact.simulate", "--help"],
]
ROOT = Path(__file__).parents[1]


def test_one_command_runs_all_others(tmp_path: Path) -> None:
    (tmp_path / "mynet.py").write_text("def supernet():\n    raise SystemExit('made in this folder')\n")
    model = ["profile", "--model", "mynet:supernet", "--input-shape", "1"]
    cases = {
        ("simulate", "--policy", "fixed:0", "--duration-s", "0.2"): (0, "fluid bound"),
        ("serve", "--slo-ms", "5"): (2, "--bundle"),
        ("elastic", "nowhere"): (2, "nowhere"),
        ("sell", "--help"): (2, "invalid choice: 'sell'"),
        tuple(model): (1, "made in this folder"),
    }
    scripts = configparser.ConfigParser()
    scripts.read(ROOT / "setup.cfg")
    module, _, function = scripts["options.entry_points"]["console_scripts"].split("= ")[1].partition(":")
    script = f"import sys; sys.path[0] = '/'; from {module} import {function}; sys.exit({function}())"
    for arguments, (status, words) in cases.items():
        started = ["-m", "subnetact"] if arguments[0] == "simulate" else ["-c", script]
        done = subprocess.run(
            [sys.executable, *started, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == status, done.stderr
        assert words in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_every_command_has_its_module_and_ends_as_these_do() -> None:
    """Starting all of them would take most of a minute."""
    assert all(find_spec(f"subnetact.{name}") for name in COMMAND_NAMES)
    page = (ROOT / "subnetact" / "__main__.py").read_text()
    assert "import subnetact" not in page.replace("from subnetact.command", ""), "commands are imported late"
    files = [path for package in ("subnetact", "ofa_adapters") for path in (ROOT / package).rglob("*.py")]
    commands = {path: text for path in files if '__name__ == "__main__"' in (text := path.read_text())}
    others = [path.name for path, text in commands.items() if not text.endswith("    run_command(main)\n")]
    assert others == ["language_model.py"], "the command of lm_eval"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_closed_pipe_ends_a_command_quietly(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `head -1` does when it has its line
    done = subprocess.run(
        [sys.executable, *command],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == NOBODY_READS or "--help" in command  # argparse ignores a closed pipe


def started(arguments: list[str]) -> subprocess.Popen[str]:
    """Start Python; programs that are started in the background of a script ignore Ctrl-C otherwise."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


SLEEPS = "import time\ndef main():\n    print('ready', flush=True)\n    time.sleep(60)\nrun_command(main)"
KILLS_ITSELF = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize(
    ("arguments", "statuses"),
    [
        (["-c", PRINTS + SLEEPS], (INTERRUPTED,)),
        (["-c", PRINTS + KILLS_ITSELF + "run_command(lambda: 0)"], (0,)),  # while Python shuts down
        (["-u", "-m", "subnetact.simulate"], (INTERRUPTED, 0)),
    ],
)
def test_an_interrupt_ends_a_command_quietly(arguments: list[str], statuses: tuple[int, ...]) -> None:
    process = started(arguments)
    assert process.stdout is not None
    if process.stdout.readline():
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode in statuses, errors) == (True, "")
