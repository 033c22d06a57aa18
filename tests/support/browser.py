"""A headless Chromium, driven through its debugging pipe: no driver program, no port, no package.

    with Browser(folder) as browser:
        browser.open("http://127.0.0.1:8501")
        browser.click("Grade all")

What is clicked and filled in is found by what a person reads: a button's text, a field's label.
Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tests.support import programs
from tests.support.waiting import wait_until

PATIENCE_S = 60.0
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
_OPTIONS = ("--headless=new", *QUIET, "--remote-debugging-pipe")

# Streamlit's own mark; other pages have none.
AT_REST = "!document.querySelector('[data-test-script-state=running]')"

# Run in a Python of its own: puts the two ends where Chromium looks for them, and becomes Chromium.
_PASS_PIPES = """
import fcntl, os, sys
first, second, *command = sys.argv[1:]
high = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in (first, second)]
for source, wanted in zip(high, (3, 4)):
    os.dup2(source, wanted, inheritable=True)
os.execv(command[0], command)
"""

# A press is a real mouse event at the middle of the element: pages that listen to anything else get what they expect.
_FIND = """
(function (kind, label, nth) {
  const seen = (element) => element.getClientRects().length > 0;
  const said = (element) => element.querySelector("kbd")  // without its key
    ? element.querySelector("p") || element.querySelector("span") : element;
  const words = (element) => (said(element).innerText || said(element).textContent || "").trim();
  let found = [];
  if (kind === "button") {
    found = [...document.querySelectorAll("button, [role=button], [role=option], [role=radio], label, summary, a")]
      .filter((element) => seen(element) && words(element) === label);
  } else if (kind === "field") {
    found = [...document.querySelectorAll("input, textarea")].filter((element) =>
      element.getAttribute("aria-label") === label);
  } else {
    found = [...document.querySelectorAll(label)];
  }
  return found[nth];
})(%s, %s, %d)
"""

# Where to press an element: [x, y] of its middle. null while it can't be pressed, something else lies there, or the
# page is being drawn. From then on the page notes whether a click reaches the element: it may still be moved or
# replaced before the press, when a part of the page comes late.
_SPOT = """
function (e) {
  if (!e || e.disabled || document.querySelector("[data-test-script-state=running]")) return null;
  e.scrollIntoView({block: "center", behavior: "instant"});
  const r = e.getBoundingClientRect(), x = r.x + r.width / 2, y = r.y + r.height / 2;
  const around = e.closest("[data-testid=stSelectbox]") || e;
  if (!around.contains(document.elementFromPoint(x, y))) return null;
  window.missed = true;
  window.addEventListener("click", (event) => { if (around.contains(event.target)) window.missed = false; }, true);
  return [x, y];
}
"""

_FILE_FIELD = """
((label) => [...document.querySelectorAll("[data-testid=stFileUploader]")]
  .find((field) => field.innerText.trim().startsWith(label))?.querySelector("input[type=file]"))
"""


class BrowserFailed(AssertionError):
    """The page did not do what was asked of it; the message has what it shows."""


class Browser:
    """One window. Use as a context manager."""

    def __init__(
        self, folder: Path, width: int = 1280, height: int = 900, names: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`folder` takes the profile, and what the page downloads (in `downloads`). `names`: where each name leads."""
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True, exist_ok=True)
        self._number = 0
        self._buffer = b""
        self._session = ""
        self._tabs: list[str] = []
        self._size = width, height
        self._process, self._writing_end, self._reading_end = _start(folder / "profile", width, height, names)
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End it at once. Idempotent."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._writing_end)
            os.close(self._reading_end)

    def quit(self) -> None:
        """Close it as a person does: it writes down what its pages keep, and ends."""
        self._of_browser("Browser.close")
        self._process.wait(PATIENCE_S)
        os.close(self._writing_end)
        os.close(self._reading_end)

    # --- asking

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserFailed(f"{script[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def text(self) -> str:
        """What a person can read on the page now."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_for(self, words: str, timeout_s: float = PATIENCE_S) -> None:
        """Return when these words are on the page."""
        self._until(lambda: words in self.text(), f"the page says {words!r}", timeout_s)

    def wait_gone(self, words: str, timeout_s: float = PATIENCE_S) -> None:
        """Return when these words are not on the page."""
        self._until(lambda: words not in self.text(), f"the page no longer says {words!r}", timeout_s)

    # --- acting

    def open(self, url: str) -> None:
        """Go there."""
        self.call("Page.navigate", url=url)

    def reload(self) -> None:
        """Load the page again, as F5 does, once it has come to rest: until then its address may be that of before."""
        # What was typed last is on its way for a moment before the page is seen to run.
        rest_script = f"new Promise((done) => setTimeout(() => done({AT_REST}), 300))"
        self._until(lambda: self.evaluate(rest_script), "the page has come to rest", PATIENCE_S)
        self.evaluate("window.before = true")
        self.call("Page.reload")

        def is_loaded() -> bool:
            try:
                return bool(self.evaluate("!window.before && document.readyState === 'complete'"))
            except BrowserFailed:  # between the two
                return False

        self._until(is_loaded, "the page is loaded again", PATIENCE_S)

    def go_back(self, steps: int = 1) -> None:
        """As the browser's own button does; fewer than 0 steps go forward."""
        self.evaluate(f"history.go({-steps})")

    def tab(self, number: int) -> None:
        """Turn to another tab of the same window, from 0; the next number opens one."""
        if number == len(self._tabs):
            self._attach_to(self._of_browser("Target.createTarget", url="about:blank")["targetId"])
        self._session = self._tabs[number]

    def click(self, label: str, nth: int = 0, timeout_s: float = PATIENCE_S) -> None:
        """Press the button, option or tab that says exactly this, once it can be pressed."""
        self.press("button", label, nth, timeout_s)

    def press(self, kind: str, label: str, nth: int = 0, timeout_s: float = PATIENCE_S) -> None:
        """Press the middle of an element: kind `button`, `field`, or `css` with a selector as label."""

        def press_once() -> bool:
            spot = self.evaluate(f"({_SPOT})({_find(kind, label, nth)})")
            if not spot:
                return False
            for event in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=event, x=spot[0], y=spot[1], button="left", clickCount=1)
            return not self.evaluate("window.missed")  # a page that has gone meanwhile knows nothing of it

        self._until(press_once, f"{kind} {label!r} can be pressed", timeout_s)

    def fill(self, label: str, text: str, nth: int = 0) -> None:
        """Put a text into the field with this label, in place of what is there, and leave it."""
        self.press("field", label, nth)
        self.evaluate(f"{_find('field', label, nth)}.select()")
        self.call("Input.insertText", text=text)
        self.key("Tab", 9)

    def key(self, name: str, code: int) -> None:
        """Press a key."""
        for event in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=event, key=name, code=name, windowsVirtualKeyCode=code)

    def upload(self, label: str, *files: Path) -> None:
        """Give files to the field whose label begins so; on return they have arrived. For pages of Streamlit.

        Not by its place: file fields may appear in any order while the page is drawn.
        """
        script = f"{_FILE_FIELD}({json.dumps(label)})"
        self._until(lambda: self.evaluate(f"!!{script}"), f"file field {label!r} is there", PATIENCE_S)
        object_id = self.call("Runtime.evaluate", expression=script)["result"]["objectId"]
        self.evaluate("performance.clearResourceTimings()")
        self.call("DOM.setFileInputFiles", objectId=object_id, files=[str(path) for path in files])
        # Their names are shown while they are still on their way; the browser lists an answer once it has it whole.
        upload_count = (
            "performance.getEntriesByType('resource').filter(entry => entry.name.includes('/upload_file/')).length"
        )
        self._until(lambda: self.evaluate(upload_count) >= len(files), f"file field {label!r} is uploaded", PATIENCE_S)

    def wait_for_download(self, name: str) -> Path:
        """The file that the page downloads under this name, once it is whole."""
        path = self.downloads / name
        self._until(path.exists, f"{name} is downloaded", PATIENCE_S)
        return path

    def picture(self, path: Path) -> None:
        """What is seen now, as a PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    # --- the pipe

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its answer; events are passed over."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(method)
            if answer.get("id") == self._number:
                break
        if "error" in answer:
            raise BrowserFailed(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self, method: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading_end], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._reading_end, 1 << 20) if ready else b""
            if not data:
                raise BrowserFailed(f"Chromium did not answer {method} within {PATIENCE_S:g} s, or has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _attach(self) -> None:
        pages = [target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        target = pages[0]["targetId"] if pages else self.call("Target.createTarget", url="about:blank")["targetId"]
        self._attach_to(target)
        self._of_browser("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def _attach_to(self, target: str) -> None:
        self._session = self._of_browser("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._tabs.append(self._session)
        self.call("Page.enable")
        width, height = self._size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def _of_browser(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command that is the browser's, not a page's."""
        session, self._session = self._session, ""
        try:
            return self.call(method, **parameters)
        finally:
            self._session = session

    def _until(self, condition: Any, description: str, timeout_s: float) -> None:
        try:
            wait_until(condition, description, timeout_s, poll_s=0.05)
        except AssertionError as error:
            raise BrowserFailed(f"{error}\nThe page says:\n{self.text()[-4000:]}") from None


def _find(kind: str, label: str, nth: int) -> str:
    return _FIND % (json.dumps(kind), json.dumps(label), nth)


def _start(
    profile: Path, width: int, height: int, names: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int, int]:
    """Chromium reads commands from its file descriptor 3, and writes answers to 4."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    program = shutil.which("chromium") or programs.require("chromium")
    rules = ",".join(f"MAP {name} {address}" for name, address in names.items())
    options = [f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--host-resolver-rules={rules}"]
    command = [program, *_OPTIONS, *options, "about:blank"]
    ends = [str(command_read), str(answer_write)]
    process = subprocess.Popen(
        [sys.executable, "-c", _PASS_PIPES, *ends, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(command_read, answer_write),
        start_new_session=True,
    )
    os.close(command_read)
    os.close(answer_write)
    return process, command_write, answer_read
