"""A page of a foreign origin, in a real browser, reads nothing from what listens here, under any name."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.intruders import ELSEWHERE
from tests.support.processes import DEMO, RunningProcess, config_text, environment
from tests.support.servers import free_port
from tests.support.sockets import listening, processes_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

# What the page could read of an address, and whether a WebSocket to it opened.
READ = """
(async (port, path) => {
  const read = await fetch(`http://127.0.0.1:${port}${path}`).then((answer) => answer.text()).catch(() => "");
  const opened = await new Promise((done) => {
    const socket = new WebSocket(`ws://127.0.0.1:${port}/_stcore/stream`);
    socket.onopen = () => done(true);
    socket.onerror = () => done(false);
  });
  return [read, opened];
})(%d, "%s")
"""


@contextmanager
def foreign_page() -> Iterator[str]:
    """A web server whose name is not this machine's; its URL."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<p>elsewhere</p>")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{ELSEWHERE}:{server.server_address[1]}/"
        server.shutdown()


@pytest.mark.parametrize("command", ["serve", "ui"])
def test_a_page_from_elsewhere_reads_nothing(tmp_path: Path, command: str) -> None:
    # Given a gateway with its page, or a desk, and a browser for which a foreign name leads to this machine
    config = tmp_path / "kvasir.toml"
    config.write_text(config_text({"demo": DEMO}), "utf-8")
    words = {"serve": ["--port", "0", "--state", "state", "--metrics-port", "0"], "ui": ["--port", str(free_port())]}
    process = RunningProcess(["--config", str(config), command, *words[command]], environment(tmp_path), tmp_path)
    expected = {"serve": 2, "ui": 1}[command]
    try:
        ports = wait_until(
            lambda: len(found := listening(processes_of(tmp_path))) == expected and found, f"{command} listens", 60
        )
        with foreign_page() as page, Browser(tmp_path / "browser", names={ELSEWHERE: "127.0.0.1"}) as browser:
            for _, port in ports:
                # When a page of that name asks it, and when its own name leads there
                browser.open(page)
                browser.wait_for("elsewhere")
                answers = [browser.evaluate(READ % (port, path)) for path in ("/v1/models", "/health", "/metrics", "/")]
                # Then it reads nothing, and the other is told why
                assert answers == [["", False]] * 4
                browser.open(f"http://{ELSEWHERE}:{port}/")
                browser.wait_for("only under this machine's own names")
    finally:
        process.kill()
