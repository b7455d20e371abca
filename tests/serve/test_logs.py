"""The log of the commands: lines with times for people, JSON objects for programs."""

from __future__ import annotations

import json
import logging
import re

from subnetact.serve.logs import request_id, setup


def fail(log):
    try:
        raise KeyError("lost")
    except KeyError as error:
        log.error("a request of %s failed", "alice", exc_info=error)


def test_a_line_for_people_begins_with_time_level_and_logger_and_names_the_request(capsys):
    setup()
    log = logging.getLogger("subnetact.serving.test")
    log.info("ready")
    token = request_id.set("r-17")
    fail(log)
    request_id.reset(token)
    first, second, *trace = capsys.readouterr().err.splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(time + " INFO subnetact.serving.test: ready", first)
    assert re.fullmatch(time + r" ERROR subnetact.serving.test: \[r-17\] a request of alice failed", second)
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "KeyError: 'lost'"


def test_a_line_for_programs_is_one_object_with_the_traceback(capsys):
    setup("debug", as_json=True)
    log, words = logging.getLogger("subnetact.workers"), 'a "quoted"\nline'
    log.debug(words)
    token = request_id.set("r-18")
    fail(log)
    request_id.reset(token)
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.items() >= {"level": "debug", "logger": "subnetact.workers", "message": words}.items()
    assert "request_id" not in first
    assert second["request_id"] == "r-18"
    assert second["exception"].endswith("KeyError: 'lost'")
    assert second["time"].endswith("Z")


def test_levels_are_those_of_the_package_and_lines_appear_once(capsys):
    for level in ("info", "warning"):
        setup(level)
    logging.getLogger("subnetact.serve").info("left out")
    logging.getLogger("another").info("left out")
    logging.getLogger("subnetact.serve").warning("one")
    logging.getLogger("another").warning("two")
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == ["one", "two"]
