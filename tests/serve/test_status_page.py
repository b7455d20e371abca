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
WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
BAD = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
FIGURES = ("model", "state", "arrivals", "attainment", "accuracy", "queued", "workers", "total")


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
        self._numbers, self.events = itertools.count(1), []

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
            if "method" in answer:
                self.events.append(answer)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def close(self):
        self.process.kill()
        self.process.wait(20)
        self._read.close()
        self._write.close()


HOSTILE = "<img src=x onerror=alert(1)>" + "x" * 200
RENAME = f"""window.fetch = (ask => async path => {{
    const now = await (await ask(path)).json();
    return new Response(JSON.stringify({{ ...now, model: {json.dumps(HOSTILE)} }}));
}})(fetch)"""
LOOK = """JSON.stringify((() => {
    const all = [...document.querySelectorAll("body *")], charts = [...document.querySelectorAll("svg")];
    const boxes = (chart, of) => [...chart.querySelectorAll(of)].map(text => text.getBoundingClientRect());
    return {
        wide: document.documentElement.scrollWidth,
        background: getComputedStyle(document.body).backgroundColor,
        font: Math.min(...all.map(element => parseFloat(getComputedStyle(element).fontSize))),
        labels: charts.map(chart => [".x", ".y"].map(
            axis => [...chart.querySelectorAll(axis)].map(text => text.textContent))),
        inside: charts.every(chart => {
            const frame = chart.getBoundingClientRect();
            return boxes(chart, "text").every(
                box => box.left >= frame.left && box.right <= frame.right && box.bottom <= frame.bottom);
        }),
        apart: charts.every(
            chart => boxes(chart, ".x").every((box, i, row) => !i || row[i - 1].right < box.left)),
    };
})())"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_a_person_sees_what_happens(server, images, tmp_path):
    stop = threading.Event()

    def send():
        while not stop.is_set():
            server.infer(images[0])

    def run(expression):
        return browser.ask("Runtime.evaluate", session, expression=expression)["result"].get("value")

    def wait_for(expression, holds):
        end = time.monotonic() + 120
        while not holds(found := run(expression)):
            assert time.monotonic() < end, found
            time.sleep(0.1)
        return found

    thread = threading.Thread(target=send)
    thread.start()
    watchdog = threading.Timer(200, lambda: browser.process.kill())
    browser = Browser(tmp_path)
    try:
        watchdog.start()
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log"):
            browser.ask(f"{domain}.enable", session)
        browser.ask("Page.navigate", session, url=server.url)
        texts = f"{json.dumps(FIGURES)}.map(id => (document.getElementById(id) || {{}}).textContent)"
        expression = f"JSON.stringify({texts})"
        shown = json.loads(wait_for(expression, lambda found: "%" in (json.loads(found)[3] or "")))
        shown = dict(zip(FIGURES, shown, strict=True))
        assert shown["model"] == "digits"
        assert shown["state"] == "live"
        assert float(shown["arrivals"].replace(",", "")) > 0
        assert 0 <= float(shown["attainment"].rstrip("\xa0%")) <= 100
        assert 60 <= float(shown["accuracy"].rstrip("\xa0%")) <= 82
        assert shown["workers"] == "1 of 1"
        assert run("document.querySelectorAll('#subnets tr').length") == 3
        told = wait_for("document.getElementById('answer').textContent", lambda found: "Why:" in found)
        for words in ("in time", "requests in the last", "% accurate", "requests arrive per second"):
            assert words in told.replace("\xa0", " ").lower()
        run(RENAME)
        wait_for("document.getElementById('model').textContent", HOSTILE.__eq__)
        run("past[0].time_s -= 100")  # as after two minutes, whose axis has the longest labels
        backgrounds = []
        for scheme, width in itertools.product(SCHEMES, WIDTHS):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            browser.ask("Emulation.setDeviceMetricsOverride", session, **size)
            wish = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.ask("Emulation.setEmulatedMedia", session, features=wish)
            run("draw()")
            look = json.loads(run(LOOK))
            assert look["wide"] <= width, (scheme, width)
            assert look["font"] >= 13
            assert look["inside"]
            assert look["apart"]
            for (times, values), unit in zip(look["labels"], ("\xa0%", "\xa0%", "", ""), strict=True):
                assert times[0].endswith(" s ago")
                assert times[-1] == "now"
                assert len(values) >= 3
                for value in values:
                    assert value.endswith(unit)
                    assert float(value.removesuffix(unit).replace(",", "")) >= 0
            backgrounds.append(look["background"])
        assert backgrounds[0] == backgrounds[1] != backgrounds[2] == backgrounds[3]
        assert not [event for event in browser.events if event["method"] in BAD]
    finally:
        stop.set()
        watchdog.cancel()
        browser.close()
        thread.join()
