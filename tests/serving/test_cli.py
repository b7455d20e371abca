import hashlib
import inspect
import json
import subprocess
import sys

import pytest

from subnetact.generation import Generator, simulate_generation
from subnetact.serving import Batcher, simulate
from subnetact.serving.simulation.cli import main
from subnetact.serving.simulation.datasets import superserve_a40


def test_a_result_says_what_it_was_made_of_and_own_traces_and_policies_are_taken(
    tmp_path, capsys, monkeypatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_policies.py").write_text(
        "from subnetact.serving import Fixed\n"
        "class Largest(Fixed):\n"
        "    def __init__(self, table):\n"
        "        super().__init__(table, 5)\n"
        "def within(table, slo_ms):\n"
        "    assert slo_ms == 30\n"
        "    return Fixed(table, 1)\n"
        "def broken(table):\n"
        "    raise RuntimeError('on purpose')\n"
    )
    trace, figures, figure = tmp_path / "t.csv", tmp_path / "r.json", tmp_path / "f.png"
    trace.write_text("arrival\n" + "\n".join(str(i / 2000) for i in range(4000)))  # in seconds
    superserve_a40().save(tmp_path / "table.json")
    given = [
        "--table",
        tmp_path / "table.json",
        "--trace",
        trace,
        "--slo-ms",
        30,
        "--json",
        figures,
        "--figure",
        figure,
        "--policy",
    ]
    names = ["own_policies:Largest", "fixed:5", "own_policies:within", "clipper+:1", "infaas", "fixed:0"]
    assert main([*map(str, given), *names]) == 2
    assert "8 workers answer at most 20431; name the unit of its times: --unit s" in capsys.readouterr().out
    assert main([*map(str, given), *names, "--unit", "s"]) == 0
    printed = capsys.readouterr().out
    assert f"{trace} x1: 4000 requests within 2 s, 2000.5 per second" in printed
    assert "fluid bound" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")
    document = json.loads(figures.read_text())
    results = list(document["policies"].values())
    assert document["fluid_bound"] >= max(one["effective_accuracy"] for one in results)
    assert results[0::2] == results[1::2]
    made_of, table = document["made_of"], superserve_a40()
    assert made_of["files"][str(trace)]["sha256"] == hashlib.sha256(trace.read_bytes()).hexdigest()
    assert (made_of["options"]["scale"], made_of["options"]["seed"]) == (1.0, 0)
    assert made_of["tables"][0]["stamp"] == dict(table.stamp)
    assert main([*map(str, given), "own_policies:broken", "--unit", "s"]) == 2
    assert "raised RuntimeError: on purpose" in capsys.readouterr().out


def test_one_request_has_no_rate_and_many_at_one_time_have_one_that_is_doubted(tmp_path, capsys):
    trace, figures = tmp_path / "t.txt", tmp_path / "r.json"
    trace.write_text("5\n")
    assert main(["--trace", str(trace), "--json", str(figures), "--policy", "fixed:0"]) == 0
    assert "x1: 1 requests within 0 s; 8 workers" in capsys.readouterr().out
    arrivals = json.loads(figures.read_text())["made_of"]["arrivals"]
    assert arrivals == {"requests": 1, "span_s": 0.0, "mean_per_s": None}
    trace.write_text("5\n" * 3)
    assert main(["--trace", str(trace)]) == 2
    assert "name the unit" in capsys.readouterr().out
    assert main(["--trace", str(trace), "--workers", "0"]) == 2
    assert "workers: 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--policy", "nonsense"], 2, "error: "),
        (["--slo-ms", "1"], 2, "error: "),
        (["--table", "/nonexistent/t.json"], 2, "error: "),
        (["--workers", "0"], 2, "error: "),
        (["--policy", "Clipper+:x"], 2, "error: policy: 'Clipper+:x' needs a whole number after the colon"),
        (["--policy", "fixed:5", "--workers", "1", "--expired", "serve"], 0, "expired requests: serve"),
        (["--policy", "fixed:5", "--workers", "1"], 0, "expired requests: drop"),
        (["--policy", "all"], 0, "modelswitching"),
    ],
)
def test_arguments_are_used_or_refused_in_one_line(arguments, status, words, capsys):
    assert main(["--duration-s", "0.2", *arguments]) == status
    printed = capsys.readouterr().out
    assert words in printed
    assert status == 0 or printed.startswith("error: ")


def test_expired_requests_are_dropped_by_default_everywhere():
    for function in (simulate, Batcher, Generator, simulate_generation):
        assert inspect.signature(function).parameters["expired"].default == "drop"


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for default in ("maf", "['all']", "36.0", "8", "drop", "2.0", "0"):
        assert f"(default: {default})" in printed
    assert "(default: None)" not in printed
    assert "eff acc, effective accuracy: that accuracy summed over met requests, divided by all" in printed
    assert "serve runs them all the same, as SuperServe does" in printed


def test_the_module_does_not_hide_the_function():
    code = (
        "import inspect, subnetact; f = subnetact.simulate; import subnetact.simulate as m; "
        "assert m.__doc__ == f.__doc__ and inspect.signature(m) == inspect.signature(f); "
        "print(callable(subnetact.simulate))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
