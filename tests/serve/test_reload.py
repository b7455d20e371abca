"""A server goes on with new weights, and no request is lost."""

import json
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from subnetact import Engine, LatencyTable, calibrate
from subnetact.digits import load_digits_supernet

INDEX, LOAD, UNLOAD = (f"/v2/repository/{path}" for path in ("index", "models/it/load", "models/it/unload"))


@pytest.fixture
def folder(digits, tmp_path):
    """A bundle that a test may change."""
    return shutil.copytree(digits[1], tmp_path / "it")


@pytest.fixture
def served(start, folder):
    """A server of that bundle."""
    server = start("--bundle", str(folder), "--name", "it")
    yield server
    server.stop()


def weigh(folder, factor):
    """Save the bundle with other weights of its last layer; return its fingerprint."""
    engine = Engine.load(folder)
    weights = {name: tensor.clone() for name, tensor in engine.supernet.state_dict().items()}
    last = list(weights)[-1]
    weights[last] *= factor
    engine.supernet.load_state_dict(weights, norms=engine.supernet.norms)
    engine.save(folder)
    return Engine.load(folder).fingerprint


def version(server):
    [model] = json.loads(server.call("POST", INDEX)[2])
    assert (model["name"], model["state"]) == ("it", "READY")
    return model["version"]


@pytest.mark.parametrize("way", ["signal", "call"])
def test_no_request_is_lost_and_later_ones_see_the_new_weights(served, folder, images, way):
    former, ended = version(served), threading.Event()

    def ask(i):
        answers = []
        while not ended.is_set():
            answers.append(served.infer(images[i])[0])
        return answers

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, i) for i in range(4)]
        new = weigh(folder, 2.0)
        assert new != former
        if way == "call":
            assert served.call("POST", LOAD)[::2] == (200, "{}")
            assert version(served) == new
        else:
            served.process.send_signal(signal.SIGHUP)
            limit = time.monotonic() + 60
            while version(served) != new:
                assert time.monotonic() < limit
        assert served.call("GET", f"/v2/models/it/versions/{new}")[0] == 200
        assert served.call("GET", f"/v2/models/it/versions/{former}")[0] == 404
        ended.set()
        statuses = [status for answers in asked for status in answers.result()]
    assert set(statuses) == {200}
    metrics = served.call("GET", "/metrics")[2]
    met = f'subnetact_http_responses_total{{outcome="met",route="/infer",status="200"}} {len(statuses)}.0'
    assert met in metrics  # counts go on
    assert f'subnetact_info{{fingerprint="{new}"' in metrics


def test_what_cannot_be_loaded_leaves_what_is_served(served, folder, images):
    former = version(served)
    other = load_digits_supernet()
    calibrate(other, specs := [other.space.largest()], [torch.rand(64, 1, 20, 20)])
    engine = Engine(other, specs, example=torch.zeros(1, 1, 20, 20), accuracy=[80.0])
    engine.tables["cpu"] = LatencyTable(engine.keys, engine.accuracy, [1], [[1.0]])
    index = (folder / "elastic.json").read_bytes()
    (folder / "elastic.json").write_text("no bundle")
    status, _, answer = served.call("POST", LOAD)
    assert (status, "NotLoaded" in answer) == (400, True)
    (folder / "elastic.json").write_bytes(index)
    engine.save(folder)  # its inputs have another shape
    served.process.send_signal(signal.SIGHUP)
    assert served.call("POST", LOAD)[0] == 400
    assert version(served) == former
    assert served.infer(images[0])[0] == 200
    log = served.stop()
    assert "not readable as a bundle" in log
    assert "start another server for it" in log


def test_repository_calls_that_this_server_cannot_answer_are_refused(served):
    assert served.call("POST", UNLOAD)[0] == 400
    status, _, answer = served.call("POST", LOAD, {"parameters": {"config": "{}"}})
    assert (status, "leave them out" in answer) == (400, True)
    for body in ([], 3):
        status, _, answer = served.call("POST", LOAD, body)
        assert (status, "not a JSON object" in answer) == (400, True)
    assert served.call("POST", "/v2/repository/models/other/load")[0] == 404
