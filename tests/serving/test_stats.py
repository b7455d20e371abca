"""What a batcher tells of itself: counters, histograms, Prometheus text, the decision log and its replay."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_runners import TABLE, Echo, Timed
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from subnetact import __version__
from subnetact.errors import DeadlinePassed, FileFormatError, MissingExtra, QueueFull, WriteError
from subnetact.serving import Fixed
from subnetact.serving.live.batcher import Batcher
from subnetact.serving.live.decision_log import DecisionLog
from subnetact.serving.live.histograms import Histogram
from subnetact.serving.live.prometheus import Collector
from subnetact.serving.scheduling.request import Ask, Request
from subnetact.serving.simulation.cli import main
from subnetact.serving.simulation.replay import LiveRun


def fail() -> None:
    raise ValueError("bad")


def served(**options: Any) -> Batcher:
    """Open a batcher; requests end as 5 met, 1 late, 1 failed, 1 dropped, 1 cancelled, and 1 is refused."""
    engine = Timed()
    options |= {"slo_ms": 36.0, "clock_ms": engine.clock_ms, "max_queue": 8, "watchdog_ms": math.inf}
    batcher = Batcher(engine, policy=Fixed(TABLE, 1), learn=False, **options)
    engine.gate.clear()
    futures = [batcher.submit("first", 1000.0, min_accuracy=75.0)]
    assert engine.entered.acquire(timeout=20)
    futures += [batcher.submit(i, 1000.0) for i in range(4)]
    futures += [batcher.submit("late", 1002.5)]
    bad, dropped, gone = batcher.submit(fail, 1020.0), batcher.submit(0, 2.5), batcher.submit(0, 1500.0)
    with pytest.raises(QueueFull, match="raise max_queue"):
        batcher.submit(0, 1000.0)
    assert gone.cancel()
    engine.now = 991.0
    with pytest.raises(DeadlinePassed):
        dropped.result(20)
    engine.gate.set()
    for future in futures:
        future.result(20)
    assert bad.exception(20) is not None
    batcher.close()
    return batcher


def test_the_snapshot_counts_everything() -> None:
    stats = served().stats()
    assert (stats.submitted, stats.refused, stats.full) == (9, 1, 1)
    assert (stats.met, stats.late, stats.failed, stats.dropped, stats.cancelled) == (5, 1, 1, 1, 1)
    assert (stats.queued, stats.running, stats.closed, stats.workers, stats.workers_up) == (0, 0, 0, 1, 1)
    assert stats.served_by == {1: 6}
    assert stats.mean_accuracy == 80.0
    assert stats.attainment == 5 / 8
    latency = stats.histograms["latency_ms"]
    assert latency.count == 6
    assert latency.quantile(1.0) == 2000.0
    assert stats.histograms["batch"].total == 7.0
    plain = json.loads(stats.to_json())
    assert plain == stats.to_dict()
    assert plain["histograms"]["latency_ms"]["counts"] == list(latency.counts)
    assert plain["served_by"] == {"1": 6}
    with Batcher(Echo(), policy=Fixed(TABLE, 0), slo_ms=36.0) as fresh:
        assert math.isnan(fresh.stats().attainment)
        assert json.loads(fresh.stats().to_json())["attainment"] is None
        assert list(text_string_to_metric_families(fresh.prometheus()))


def test_prometheus_reads_the_exposition() -> None:
    batcher = served()
    text, stats = batcher.prometheus(), batcher.stats()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = ("counter", "gauge", "histogram", "summary")
    assert all(family.documentation and family.type in kinds for family in families.values())
    outcomes = {s.labels["outcome"]: s.value for s in families["subnetact_requests"].samples}
    assert outcomes == {"met": 5, "late": 1, "dropped": 1, "failed": 1, "cancelled": 1, "closed": 0}
    buckets = [s for s in families["subnetact_latency_seconds"].samples if s.name.endswith("_bucket")]
    edges, counts = [float(s.labels["le"]) for s in buckets], [s.value for s in buckets]
    assert edges == sorted(set(edges))
    assert edges[-1] == math.inf
    assert counts == sorted(counts)
    assert len(families) == text.count("# TYPE") == text.count("# HELP")
    assert "# HELP subnetact_refused_total requests that the batcher never accepted: invalid" in text
    assert not re.search(r"# HELP \w+ *\n", text), "every metric is explained"
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["subnetact_queued",] == 0
    assert samples["subnetact_latency_seconds_count",] == counts[-1] == 6
    total_s = stats.histograms["latency_ms"].total / 1000.0
    assert samples["subnetact_latency_seconds_sum",] == pytest.approx(total_s)
    assert not [name for name, *_ in samples if "_sum_" in name or "percent" in name or name.endswith("_ms")]
    assert samples["subnetact_accuracy_ratio_sum",] / samples["subnetact_accuracy_ratio_count",] == 0.8
    assert samples["subnetact_subnet_info", "1", "b"] == samples["subnetact_info", "", __version__] == 1
    assert samples["subnetact_subnet_accuracy_ratio", "1"] == 0.8


def test_slack_that_is_used_up_counts_as_none() -> None:
    engine = Timed()
    options: dict[str, Any] = {"clock_ms": engine.clock_ms, "learn": False, "expired": "serve"}
    with Batcher(engine, policy=Fixed(TABLE, 0), slo_ms=36.0, **options) as batcher:
        first = engine.held(batcher, 1000.0)
        second = batcher.submit(0, 5.0)
        engine.now += 100.0
        engine.gate.set()
        assert not second.result(20).met
        assert first.result(20).met
        slack = batcher.stats().histograms["slack_ms"]
    assert (slack.counts[0], slack.total) == (1, 1000.0)


def test_one_registry_takes_one_batcher_or_several_with_a_label() -> None:
    registry, named = CollectorRegistry(), CollectorRegistry()
    batcher = served()
    batchers = {"digits": batcher}
    registry.register(Collector(batcher))
    named.register(Collector(batchers))
    with Batcher(Timed(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batchers["faces"]:
        text = generate_latest(registry).decode()
        assert 'subnetact_requests_total{outcome="met"} 5.0' in text
        assert registry.get_sample_value("subnetact_latency_seconds_count") == 6
        text = generate_latest(named).decode()
        for name, met in (("digits", 5), ("faces", 0)):
            assert f'subnetact_requests_total{{model="{name}",outcome="met"}} {met}.0' in text
            assert f'subnetact_latency_seconds_bucket{{le="+Inf",model="{name}"}}' in text
            assert f'subnetact_queued{{model="{name}"}} 0.0' in text
        assert text.count("# TYPE subnetact_queued ") == 1
    assert not list(Collector({}).collect())


def test_without_prometheus_client_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "prometheus_client.core")
    with (
        Batcher(Echo(), policy=Fixed(TABLE, 0), slo_ms=36.0) as batcher,
        pytest.raises(MissingExtra, match=r"subnetact\[serve\]"),
    ):
        batcher.prometheus()


def test_histogram_edges_are_inclusive() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        histogram.add(value)
    histogram.add_all([1.0, 9.0])
    now = histogram.snapshot()
    assert (now.counts, now.total, now.mean) == ([3, 2, 2], 22.0, 22.0 / 7)
    assert (now.quantile(0.5), now.quantile(0.99)) == (2.0, math.inf)


def test_the_log_tells_every_arrival_and_its_end(tmp_path: Path) -> None:
    served(decision_log=tmp_path / "log.jsonl")
    header, *entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert (header["policy"], header["workers"], header["expired"]) == ("Fixed", 1, "drop")
    ends = [entry["o"] for entry in entries if "o" in entry]
    assert sorted(ends) == ["cancelled", "dropped", "failed", "full"]
    live = LiveRun.load(tmp_path / "log.jsonl")
    assert live.result.requests == 10
    assert (live.result.met, live.result.late) == (5, 1)
    assert (live.result.dropped, live.result.unserved) == (1, 3)
    assert live.result.mean_accuracy == 80.0
    assert sorted(live.slo_ms.tolist())[:2] == [2.5, 1000.0]
    assert live.floors.max() == 80.0, "75 %, which only the subnet of 80 % reaches"
    assert (live.measured.subnets, live.measured.accuracy) == (TABLE.subnets, TABLE.accuracy)
    text = (tmp_path / "log.jsonl").read_text()
    (tmp_path / "cut.jsonl").write_text(text[:-20])
    assert 0 < LiveRun.load(tmp_path / "cut.jsonl").result.requests < 10, "up to its last whole line"
    (tmp_path / "empty.jsonl").write_text(text.partition("\n")[0] + "\n")
    with pytest.raises(FileFormatError, match="nothing to replay"):
        LiveRun.load(tmp_path / "empty.jsonl")


def test_a_replay_under_the_same_policy_repeats_the_live_run(tmp_path: Path, capsys: Any) -> None:
    """Requests one at a time on an exact clock: the simulation must agree request by request."""
    engine, log = Timed(), tmp_path / "log.jsonl"
    rng = np.random.default_rng(0)
    with Batcher(
        engine, policy=Fixed(TABLE, 0), slo_ms=36.0, clock_ms=engine.clock_ms, decision_log=log, learn=False
    ) as batcher:
        for gap, slo in zip(rng.uniform(2.0, 5.0, 60), rng.choice([0.5, 1.5, 9.0], 60), strict=True):
            engine.now += float(gap)
            batcher.submit(0, float(slo)).exception(20)
    assert main(["--replay", str(log), "--policy", "fixed:0", "fixed:1", "hullfit"]) == 0
    rows = {line[:16].strip(): line[16:].split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["live Fixed"] == rows["fixed:0"]
    assert 0.0 < float(rows["live Fixed"][0]) < 1.0
    assert float(rows["fixed:1"][0]) < float(rows["fixed:0"][0])
    assert "hullfit" in rows
    target = tmp_path / "out.json"
    assert main(["--replay", str(log), "--policy", "fixed:0", "--json", str(target)]) == 0
    assert json.loads(target.read_text())["policies"]["fixed:0"]["requests"] == 60


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "line 1: not readable as a decision log"),
        ("\udcff", "not readable as a decision log"),
        ('{"kind": "other"}\n', "not a decision log"),
        ('{"kind": "subnetact.decision_log", "schema": 9}\n', "schema 9, this version reads 1"),
        ('{"kind": "subnetact.decision_log", "schema": 1}\n', "a field is missing"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, text: str, match: str, capsys: Any) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FileFormatError, match=match):
        LiveRun.load(path)
    assert main(["--replay", str(path)]) == 2
    assert "error: " in capsys.readouterr().out


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = DecisionLog(tmp_path / "log.jsonl", {}, 0.0)
    assert log._file is not None
    log._file.close()
    log._file = open("/dev/full", "w")  # noqa: SIM115
    for end in (log.flush, log.close):
        log.outcome("dropped", Request(Ask(1.0), 0.0))
        end()
    log.close()
    [record] = caplog.records
    assert "ends here" in record.message


@pytest.mark.parametrize("place", ["/dev/full", "nowhere/log.jsonl", "."])
def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path: Path, place: str) -> None:
    with pytest.raises(WriteError, match=r"decision_log: .* cannot be written \(.*; give another file"):
        Batcher(Timed(), policy=Fixed(TABLE, 0), slo_ms=36.0, decision_log=tmp_path / place)
