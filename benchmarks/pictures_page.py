"""Pictures of the page for GPT-2 (124 M) on an H100 that need not be there, to be looked at.

    python -m benchmarks.pictures_page FOLDER

A report, a comparison and a diff, each in light, in dark and as wide as a phone; and the charts of the report coloured
by kind, layer and phase, with a buffer chosen on the map and a moment on the timeline. Needs Chromium.
"""

import argparse
import dataclasses
import shutil
import sys
import time
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import jaxmem
from examples import gpt
from jaxmem.report import write_html

TARGET = "gpu-h100"
REMATS = ("none", "dots", "full", "auto:0.25")
VIEWS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (390, "light"), "phone-dark": (390, "dark")}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def write_pages(folder: Path) -> list[Path]:
    """The pages of a report, a comparison and a diff."""
    workload = gpt.gpt2_124m()
    plain = dataclasses.replace(jaxmem.analyze(workload, target=TARGET), name="gpt2_124m")
    lean = jaxmem.MemoryConfig(remat="full", precision="bfloat16", accumulation_steps=2)
    configs = {name: jaxmem.MemoryConfig(remat=name) for name in REMATS}
    better = dataclasses.replace(jaxmem.analyze(workload, lean, target=TARGET), name="gpt2_124m, lean")
    pages = {
        "report": (plain, None),
        "comparison": (jaxmem.compare(configs, workload, target=TARGET), None),
        "diff": (better, plain),
    }
    for name, (shown, against) in pages.items():
        write_html(folder / f"{name}.html", shown, against=against)
    return [folder / f"{name}.html" for name in pages]


def drawn(page: Page) -> None:
    """Waits for all charts."""
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    page.wait_for_timeout(300)  # the last of plotly's frames


def opened(browser, path: Path, width: int, scheme: str) -> tuple[Page, float]:
    """A page drawn to its end, and the seconds that it took."""
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    page.on("pageerror", lambda error: print(f"{path.name}: {error}", file=sys.stderr))
    start = time.perf_counter()
    page.goto(path.resolve().as_uri(), wait_until="commit")
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    return page, time.perf_counter() - start


def section(page: Page, name: str, path: Path) -> None:
    """A picture of one section, without the bar that stays above it."""
    place = """(e) => { const r = e.getBoundingClientRect();
      return { x: r.x, y: r.y + scrollY, width: r.width, height: r.height }; }"""
    box = page.locator(f"#{name}").evaluate(place)
    page.evaluate("document.querySelector('nav').style.position = 'static'")
    page.screenshot(path=path, full_page=True, clip=box)
    page.evaluate("document.querySelector('nav').style.position = ''")


def take_whole(browser, pages: list[Path], folder: Path) -> None:
    """Each page in each view."""
    for path in pages:
        for view, (width, scheme) in VIEWS.items():
            page, seconds = opened(browser, path, width, scheme)
            drawn(page)
            page.screenshot(path=folder / f"{path.stem}-{view}.png", full_page=True)
            beside = page.evaluate("document.documentElement.scrollWidth") - width
            print(f"{path.stem}-{view}: drawn in {seconds:.2f} s, {max(beside, 0)} px too wide", file=sys.stderr)
            page.context.close()


def take_charts(browser, report: Path, folder: Path) -> None:
    """The report's charts by each colouring, and what clicks show."""
    for scheme in ("light", "dark"):
        page, _ = opened(browser, report, 1280, scheme)
        for colour in ("kind", "layer", "phase"):
            page.locator("#colour").select_option(colour)
            drawn(page)
            for name in ("layers", "timeline", "map"):
                section(page, name, folder / f"{name}-by-{colour}-{scheme}.png")
        page.locator("#alive-peak").click()
        section(page, "timeline", folder / f"timeline-alive-{scheme}.png")
        page.locator("#alive tbody button").first.click()
        page.wait_for_timeout(1000)  # it scrolls
        page.screenshot(path=folder / f"buffer-chosen-{scheme}.png")
        section(page, "map", folder / f"map-chosen-{scheme}.png")
        page.context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    pages = write_pages(folder)
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        take_whole(browser, pages, folder)
        take_charts(browser, pages[0], folder)
        browser.close()


if __name__ == "__main__":
    main()
