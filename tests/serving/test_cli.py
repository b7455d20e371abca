import inspect
import json
import subprocess
import sys

import pytest

from subnetact.generation import Generator, simulate_generation
from subnetact.serving import Batcher, plan, simulate
from subnetact.serving.simulation.cli import main
from subnetact.serving.simulation.datasets import superserve_a40


def test_the_comparison_is_printed_and_written(tmp_path, capsys):
    table = tmp_path / "t.json"
    superserve_a40().save(table)
    figures = tmp_path / "r.json"
    arguments = ["--table", table, "--duration-s", 1, "--json", figures]
    assert main([*map(str, arguments), "--policy", "hullfit", "slackfit:4", "fixed:5"]) == 0
    printed = capsys.readouterr().out
    for name in ("hullfit", "slackfit:4", "fixed:5", "fluid bound"):
        assert name in printed
    document = json.loads(figures.read_text())
    assert document["policies"]["hullfit"]["missed"] == 0
    assert document["fluid_bound"] >= document["policies"]["hullfit"]["effective_accuracy"]


@pytest.mark.parametrize(
    "arguments",
    [["--policy", "nonsense"], ["--slo-ms", "1"], ["--table", "/nonexistent/t.json"], ["--workers", "0"]],
)
def test_bad_arguments_end_with_one_line(arguments, capsys):
    assert main(["--duration-s", "0.2", *arguments]) == 2
    assert capsys.readouterr().out.startswith("error: ")


def test_the_rule_for_expired_requests_is_an_option(capsys):
    arguments = ["--duration-s", "0.2", "--workers", "1", "--policy", "fixed:5"]
    assert main([*arguments, "--expired", "serve"]) == 0
    assert "expired requests: serve" in capsys.readouterr().out


def test_expired_requests_are_dropped_by_default_in_the_library_and_on_the_command_line(capsys):
    for function in (simulate, Batcher, plan, Generator, simulate_generation):
        assert inspect.signature(function).parameters["expired"].default == "drop"
    assert main(["--duration-s", "0.2", "--workers", "1", "--policy", "fixed:5"]) == 0
    assert "expired requests: drop" in capsys.readouterr().out


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for default in ("maf", "['all']", "36.0", "8", "drop", "2.0", "0"):
        assert f"(default: {default})" in printed
    assert "(default: None)" not in printed
    assert "eff acc, effective accuracy: that accuracy summed over met requests, divided by all" in printed
    assert "serve runs them all the same, as SuperServe does" in printed


def test_the_module_runs_and_does_not_hide_the_function():
    command = [sys.executable, "-m", "subnetact.simulate", "--duration-s", "0.2", "--policy", "all"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "modelswitching" in out
    assert "fixed:5" in out
    code = (
        "import inspect, subnetact; f = subnetact.simulate; import subnetact.simulate as m; "
        "assert m.__doc__ == f.__doc__ and inspect.signature(m) == inspect.signature(f); "
        "print(callable(subnetact.simulate))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "True"
    )
