"""A headless Chromium. In CI it must be there: a skipped test would be a claim that nobody checked."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from jaxmem.report import write_html

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # A conftest's hooks see the whole session's tests, hence the path.
    if report.skipped and os.environ.get("CI") == "true" and item.path.is_relative_to(HERE):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI=true: {call.excinfo.value if call.excinfo else report.longrepr}"
    return report


@pytest.fixture(scope="module")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """A function that opens a report's page, drawn to the end; what the page says or asks for is in `page.said`."""
    folder = tmp_path_factory.mktemp("pages")
    with contextlib.ExitStack() as contexts:

        def open_page(report, *, against=None, width=1280, **context):
            path = folder / f"{len(list(folder.iterdir()))}.html"
            write_html(path, report, against=against)
            page = browser.new_context(viewport={"width": width, "height": 900}, **context).new_page()
            contexts.callback(page.context.close)
            page.said = []
            page.on("console", lambda message: page.said.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: page.said.append(f"error: {error}"))
            page.on("dialog", lambda dialog: (page.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
            page.on("request", lambda request: page.said.append(f"request: {request.url[:200]}"))
            page.goto(path.as_uri(), wait_until="commit")
            drawn(page)
            assert page.said == [f"request: {path.as_uri()}"]
            page.said.clear()
            return page

        yield open_page


def drawn(page):
    """Waits for the charts."""
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
