"""The API page: served by the broker alone, and, where there is a browser, used in one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until

FILES = {"/docs": "text/html", "/docs/docs.css": "text/css", "/docs/docs.js": "text/javascript"}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path_factory.mktemp("docs"))) as process:
        yield process.wait_until_ready()


@pytest.mark.parametrize(("path", "media"), FILES.items())
def test_every_file_comes_from_the_broker(broker: BrokerProcess, path: str, media: str) -> None:
    answer = broker.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(media)
    # Links within the page are relative; nothing is loaded from anywhere else.
    assert not re.search(
        r"(https?:)?//[a-z]", re.sub(r"^\s*//.*$", "", answer.text, flags=re.MULTILINE)
    )


def test_the_browser_is_told_to_load_nothing_from_elsewhere(broker: BrokerProcess) -> None:
    policy = broker.get("/docs").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "frame-ancestors 'none'" in policy


def test_the_page_names_only_files_that_are_there(broker: BrokerProcess) -> None:
    named = re.findall(r'(?:href|src)="([^"]+)"', broker.get("/docs").text)
    assert {"docs/docs.css", "docs/docs.js", "openapi.json"} == set(named)
    for name in named:
        assert broker.get(f"/{name}").status_code == 200


def test_the_front_door_leads_to_the_page(broker: BrokerProcess) -> None:
    assert broker.get("/").headers["location"] == "docs"
    assert (
        httpx.get(broker.url("/"), follow_redirects=True, timeout=PATIENCE_SECONDS).url.path
        == "/docs"
    )


def test_web_pages_from_elsewhere_do_not_get_it(broker: BrokerProcess) -> None:
    assert broker.get("/docs", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert broker.get("/docs", headers={"Host": "evil.example"}).status_code == 403


def test_the_metrics_listener_has_no_such_page(broker: BrokerProcess) -> None:
    assert broker.get("/docs", listener="metrics").status_code == 404


def test_the_script_is_javascript(broker: BrokerProcess, tmp_path: Path) -> None:
    (tmp_path / "docs.js").write_bytes(broker.get("/docs/docs.js").content)
    done = subprocess.run(
        ["node", "--check", str(tmp_path / "docs.js")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ---- in a browser


class Page:
    """A page in a browser, by way of the browser's own tools for developers."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._count = 0

    def value(self, script: str) -> object:
        """Of an expression; None also while there is no page to ask."""
        self._count += 1
        asked = {"expression": script, "returnByValue": True}
        call = {"id": self._count, "method": "Runtime.evaluate", "params": asked}
        self._socket.send(json.dumps(call))
        while True:
            reply = json.loads(self._socket.recv(4 * PATIENCE_SECONDS))
            if reply.get("id") == self._count:
                return reply.get("result", {}).get("result", {}).get("value")

    def wait_for(self, script: str) -> object:
        """The value of an expression, once it has one."""
        wait_until(lambda: self.value(script), script)
        return self.value(script)


@contextmanager
def opened(url: str, folder: Path) -> Iterator[Page]:
    assert BROWSER is not None
    browser = subprocess.Popen(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
            *(f"--user-data-dir={folder}", "--remote-debugging-port=0", url),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: tab_of(folder), "the browser")
        with connect(tab_of(folder), max_size=None, open_timeout=PATIENCE_SECONDS) as socket:
            yield Page(socket)
    finally:
        browser.kill()
        browser.wait(PATIENCE_SECONDS)


def tab_of(folder: Path) -> str:
    """Where the tools of the first tab are; nothing while there is none."""
    try:
        port = (folder / "DevToolsActivePort").read_text().split("\n")[0]
        tabs = httpx.get(f"http://127.0.0.1:{port}/json", timeout=PATIENCE_SECONDS).json()
    except (OSError, httpx.HTTPError):
        return ""
    return next((tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"), "")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed, so the page was not opened")
def test_a_visitor_finds_every_route_and_can_send_a_message(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    described = broker.get("/openapi.json").json()["paths"]
    expected = [method + path for path, item in described.items() for method in item]
    with opened(broker.url("/docs"), tmp_path) as page:
        routes = page.wait_for("[...document.querySelectorAll('details.route')].map(r => r.id)")
        assert isinstance(routes, list)
        assert sorted(routes) == sorted(expected)
        route = "document.getElementById('post/queues/{name}/enqueue')"
        page.value(f"{route}.open = true")
        page.wait_for(f"!!{route}.querySelector('textarea')")
        page.value(f"{route}.querySelector('input').value = 'visited'")
        page.value(f"{route}.querySelector('textarea').value = '{{\"payload\": \"from a page\"}}'")
        page.value(f"{route}.querySelector('button').click()")
        shown = page.wait_for(f"{route}.querySelector('pre:last-child')?.textContent")
        assert json.loads(str(shown))["queued"] is True
    assert broker.get("/queues/visited/dequeue").json()["payload"] == "from a page"
