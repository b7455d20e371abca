"""The status page in a browser without a window, while requests come; skipped if there is no Chromium."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import threading
import time

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
)
FIGURES = ("model", "state", "arrivals", "attainment", "accuracy", "subnet", "queued", "workers", "total")


class Browser:
    """Talks to Chromium through its debugging pipe: JSON with a zero byte at the end."""

    def __init__(self, profile):
        read, their_write = os.pipe()
        their_read, write = os.pipe()
        command = f'exec "$0" {OPTIONS} --user-data-dir="$1" 3<&{their_read} 4>&{their_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, str(profile)],
            pass_fds=(their_read, their_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_read)
        os.close(their_write)
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._numbers = itertools.count(1)

    def ask(self, method, session=None, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        self._write.write(
            json.dumps({**message, **({"sessionId": session} if session else {})}).encode() + b"\0"
        )
        self._write.flush()
        while True:
            text = b""
            while not text.endswith(b"\0"):
                byte = self._read.read(1)
                assert byte, "the browser ended"
                text += byte
            answer = json.loads(text[:-1])
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def close(self):
        self.process.kill()
        self.process.wait(20)
        self._read.close()
        self._write.close()


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_a_person_sees_what_happens(server, images, tmp_path):
    stop = threading.Event()

    def send():
        while not stop.is_set():
            server.infer(images[0])

    thread = threading.Thread(target=send)
    thread.start()
    watchdog = threading.Timer(200, lambda: browser.process.kill())
    browser = Browser(tmp_path)
    try:
        watchdog.start()
        target = browser.ask("Target.createTarget", url=server.url)["targetId"]
        session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        texts = f"{json.dumps(FIGURES)}.map(id => (document.getElementById(id) || {{}}).textContent)"
        expression = f"JSON.stringify({texts})"
        end = time.monotonic() + 120
        while True:
            result = browser.ask("Runtime.evaluate", session, expression=expression)["result"]
            shown = dict(zip(FIGURES, json.loads(result["value"]), strict=True))
            if shown["attainment"] and shown["attainment"].endswith("%"):
                break
            assert time.monotonic() < end, shown
            time.sleep(0.1)
        assert shown["model"] == "digits"
        assert shown["state"] == "live"
        assert float(shown["arrivals"]) > 0
        assert 0 <= float(shown["attainment"].rstrip(" %")) <= 100
        assert 60 <= float(shown["accuracy"].rstrip(" %")) <= 82
        assert shown["subnet"] in "012"
        assert shown["workers"] == "1 of 1"
        counted = "document.querySelectorAll('#subnets tr').length"
        assert browser.ask("Runtime.evaluate", session, expression=counted)["result"]["value"] == 3
    finally:
        stop.set()
        watchdog.cancel()
        browser.close()
        thread.join()
