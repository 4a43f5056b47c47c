"""Headless Chromium, spoken to over DevTools' pipe: what a page asks for and complains of, how it looks at a width.

Messages are JSON objects, each ended by a zero byte, on file descriptors 3 and 4 of the browser
(https://chromedevtools.github.io/devtools-protocol/). Standard library only.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 300.0
"""Seconds for an answer: this machine may be busy."""

TAKES_PIPES = ("bash", "-c", 'in=$1 out=$2; shift 2; exec "$@" 3<&"$in" 4>&"$out"', "browser")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests run as root, in containers too; the pages are ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)

OVERFLOW = """
(() => {
  const width = document.documentElement.clientWidth, found = [];
  const words = (e) => (e.textContent || '').slice(0, 40);
  const named = (e) => `${e.tagName.toLowerCase()}.${e.getAttribute('class') || ''} ${words(e)}`;
  const whole = document.documentElement.scrollWidth;
  if (whole > width) found.push(`the page is ${whole} wide`);
  for (const e of document.body.querySelectorAll('*')) {
    if (e.closest('svg') && e.tagName !== 'svg') continue;
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    if (box.right > width + 0.5 || box.left < -0.5) found.push(`${named(e)}: from ${box.left} to ${box.right}`);
    if (e.tagName !== 'svg' && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline')
      found.push(`${named(e)}: holds ${e.scrollWidth} in ${e.clientWidth}`);
  }
  for (const axis of document.querySelectorAll('.x, .y')) {
    const boxes = [...axis.children].map((e) => [e.getBoundingClientRect(), e.textContent]);
    boxes.forEach(([a, one], i) => boxes.slice(i + 1).forEach(([b, other]) => {
      if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
        found.push(`labels ${one} and ${other} overlap`);
    }));
  }
  return found;
})()
"""
"""What stands out of the page, or of what holds it, and labels of an axis that stand on each other."""

CONTRAST = """
(() => {
  const numbers = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const linear = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => { const [r, g, b] = c.map(linear); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c[3] === 1) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const found = [];
  let texts = 0, shapes = 0;
  const all = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (all.nextNode()) {
    const e = all.currentNode.parentElement, text = all.currentNode.textContent.trim();
    if (!text || e.closest('svg') || !e.getClientRects().length) continue;
    texts += 1;
    const r = ratio(numbers(getComputedStyle(e).color).slice(0, 3), behind(e));
    if (r < 4.5) found.push(`${text.slice(0, 40)}: ${r.toFixed(2)}`);
  }
  for (const e of document.querySelectorAll('path.line, path.dots, line.failed, line.attempt, line.restart')) {
    shapes += 1;
    const r = ratio(numbers(getComputedStyle(e).stroke).slice(0, 3), behind(e.closest('div')));
    if (r < 3) found.push(`${e.getAttribute('class')}: ${r.toFixed(2)}`);
  }
  return {found, texts, shapes};
})()
"""
"""Text with a contrast below 4.5 to 1, and curves and marks below 3 to 1 (WCAG 2.2, 1.4.3 and 1.4.11, level AA)."""


def program() -> str | None:
    """Path of the browser; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@dataclass
class Seen:
    """What happened since a page was opened."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    """Errors and warnings of the console."""


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.seen = Seen()
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of DevTools; return its result."""
        return self._browser.call(method, parameters, self._session, self._event)

    def show(
        self,
        url: str,
        *,
        width: int,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
        media: str = "screen",
    ) -> Seen:
        """Open an address at this size and with the reader's wish for light or dark; return what happened."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        wish = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media=media, features=[wish])
        self.seen, self._loaded = Seen(), False
        failed = self.call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        until = time.monotonic() + PATIENCE
        while not self._loaded:
            assert time.monotonic() < until, f"{url} is not loaded"
            self._browser.wait(self._event)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
        return self.seen

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, *, top: int = 0, height: int | None = None) -> bytes:
        """Return a PNG of the page, from `top` on; of all of it, or of so many pixels of its height."""
        width, whole = self.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": top, "width": width, "height": min(height or whole, whole - top), "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(found["data"])

    def _event(self, message: Mapping[str, Any]) -> None:
        if message.get("sessionId") != self._session:
            return
        method, values = message["method"], message["params"]
        if method == "Network.requestWillBeSent":
            self.seen.requests.append(values["request"]["url"])
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.seen.complaints.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.seen.complaints.append(str(values["args"]))
        elif method == "Runtime.exceptionThrown":
            self.seen.complaints.append(str(values["exceptionDetails"]))
        elif method == "Page.loadEventFired":
            self._loaded = True


class Browser:
    """A running browser."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number = 0
        self._rest = b""

    def call(self, method: str, parameters: Mapping[str, Any], session: str | None = None, event: Any = None) -> Any:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self.wait(event)
            if answer is not None and answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def wait(self, event: Any = None) -> dict[str, Any] | None:
        """Take one message: an answer is returned, an event handed on."""
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            data = os.read(self._back, 1 << 20)
            assert data, "the browser has gone"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "id" in message:
            return message
        if event is not None:
            event(message)
        return None

    def page(self) -> Page:
        """Open an empty tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        return Page(self, self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"])


@contextmanager
def running() -> Iterator[Browser]:
    """Start the browser, which resolves no name; end it with all that it started."""
    path = program()
    assert path is not None, "no Chromium: scripts/tools/install_chromium.sh"
    their_read, to = os.pipe()
    back, their_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [*TAKES_PIPES, str(their_read), str(their_write), path, *OPTIONS, f"--user-data-dir={folder}"],
            pass_fds=(their_read, their_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": folder, "XDG_CONFIG_HOME": folder, "XDG_CACHE_HOME": folder},
            start_new_session=True,
        )
        os.close(their_read)
        os.close(their_write)
        try:
            yield Browser(to, back)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(300)
            os.close(to)
            os.close(back)
