"""What a notebook shows of a report or a comparison: a fragment without scripts, well formed, names escaped."""

import dataclasses
import html.parser
import json
import re
import subprocess
import sys

import jax
import pytest
from rich.console import Group
from rich.rule import Rule
from rich.text import Text

from jaxmem._units import format_bytes
from jaxmem.analysis import KINDS, analyze, compare
from jaxmem.report import notebook
from jaxmem.report._chart import timeline_chart
from jaxmem.report._from_rich import as_html
from jaxmem.report._page import fullest
from jaxmem.report.differences import family
from jaxmem.report.terminal import table
from tests.report import samples

VOID = {"br", "hr", "img", "meta", "link", "input", "col", "wbr"}


class Page(html.parser.HTMLParser):
    """Tags, text, and whether each element is closed in the order in which it was opened."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(name.startswith("on") or (value or "").startswith("javascript:") for name, value in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_a_report():
    report = samples.gpt_report()
    page = Page(report._repr_html_())
    assert "script" not in page.tags and "link" not in page.tags
    assert report.name in page.text and report.target in page.text
    assert "activations" in page.text and report.buffers[0].shape in page.text


def test_a_comparison_has_every_row():
    comparison = samples.comparison()
    page = Page(comparison._repr_html_())
    assert all(row.name in page.text for row in comparison.rows)


def test_what_the_compiler_gave():
    shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2

    def product(a, b):
        return a @ b

    report = analyze(product, *shapes, target="cpu")
    assert "product" in Page(report._repr_html_()).text
    table = compare({"one": product, "two": lambda a, b: a @ b @ b}, *shapes, target="cpu")
    assert {"one", "two"} <= set(Page(table._repr_html_()).text.split())


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "</style><img src=x onerror=alert(1)>", "a & b \" ' <"])
def test_names_are_text(text):
    report = samples.renamed(samples.gpt_report(), text)
    plain = Page(samples.gpt_report()._repr_html_())
    page = Page(report._repr_html_())
    assert page.tags == plain.tags
    assert text in page.text


def test_nothing_of_its_styles_reaches_the_notebook():
    styles = notebook.styles()
    assert styles.startswith(":is(.jaxmem, #jaxmem){") and styles.endswith("}")
    depth, closed = 0, []
    for at, character in enumerate(styles):
        depth += {"{": 1, "}": -1}.get(character, 0)
        closed += [at] if depth == 0 and character == "}" else []
    assert closed == [len(styles) - 1], "one block holds all"
    assert "@import" not in styles and "url(" not in styles and "KINDS" not in styles
    assert all(f".kind-{kind.replace('_', '-')} {{" in styles.replace("{", " {") for kind in KINDS)


def test_the_chart_is_the_timeline():
    report = samples.gpt_report()
    chart = timeline_chart(report)
    assert chart is not None and report.timeline is not None
    kinds = {kind for m in report.timeline.moments for kind, size in m.by_kind if size}
    assert len(chart["areas"]) == len(kinds) + len(chart["layers"])
    peak = max(report.timeline.moments, key=lambda moment: moment.live_bytes)
    texts = [spot.text for spot in chart["spots"]]
    assert any(text.startswith(f"{format_bytes(peak.live_bytes)} alive, at {peak.position:,} of") for text in texts)
    widths = [float(spot.width.rstrip("%")) for spot in chart["spots"]]
    assert abs(sum(widths) - 100) < 1 and float(chart["spots"][0].left.rstrip("%")) == 0
    assert timeline_chart(samples.bare_report()) is None


def test_a_kind_that_is_nearly_all_is_cut_into_its_layers():
    report = samples.gpt_report()
    timeline, chart = report.timeline, timeline_chart(report)
    assert timeline is not None and chart is not None and len(chart["layers"]) > 1
    moments = fullest(timeline.moments, 180)
    for part in chart["layers"]:
        held = [b for b in timeline.buffers if b.kind == part.kind and part.layer in (b.layer, family(b.layer))]
        sums = [sum(b.size_bytes for b in held if b.start <= m.position <= b.end) for m in moments]
        assert part.sizes == tuple(sums) and part.most == format_bytes(max(sums))


def test_what_is_read_while_hovering_is_no_text_where_styles_are_stripped():
    page = Page(samples.gpt_report()._repr_html_())
    assert " alive, at " not in page.text and "start of the step" not in page.text


def test_a_report_has_its_findings_with_their_cures():
    report = samples.gpt_report()
    text = Page(report._repr_html_()).text
    assert report.findings and all(finding.title in text and finding.cure in text for finding in report.findings)


def test_a_comparison_is_one_table_with_bars_of_one_scale():
    rows = [dataclasses.replace(row, capacity_bytes=8 * 2**30) for row in samples.comparison().rows]
    comparison = dataclasses.replace(samples.comparison(), rows=tuple(rows))
    shown = comparison._repr_html_().partition("<details>")[0]
    assert shown.count("<table") == 1 and shown.count('class="bar"') == len(rows)
    widths = [sum(map(float, re.findall(r"width:([\d.]+)%", bar))) for bar in shown.split('class="bar"')[1:]]
    assert widths == pytest.approx([100 * (row.peak_bytes or 0) / (8 * 2**30) for row in rows], abs=0.2)
    assert shown.count("left:min(100.00%") == len(rows) and "capacity 8.00 GiB" in shown


def test_a_long_program_stays_small():
    report = samples.stretched(samples.gpt_report())
    both = [{"text/html": report._repr_html_()}, {"text/html": samples.comparison()._repr_html_()}]
    assert len(json.dumps(both)) < 300_000


@pytest.mark.parametrize(
    ("renderable", "wanted"),
    [
        (Text("a <b>", style="bold"), "<p><b>a &lt;b&gt;</b></p>"),
        (Text.assemble("x ", ("no", "red")), '<p>x <span class="fits-no">no</span></p>'),
        (Group(Text(), Text("\nunder")), "<p>under</p>"),
        (Rule("one"), "one"),
    ],
)
def test_what_rich_prints_is_html(renderable, wanted):
    assert wanted in as_html(renderable)


def test_a_table_of_rich_is_a_table():
    made = table(("name", "bytes"), right=("bytes",))
    made.add_row(Text("[a]"), "1")
    assert '<td>[a]</td><td class="number">1</td>' in as_html(made) and "<th>name</th>" in as_html(made)


def test_the_renderers_are_loaded_only_where_somebody_looks():
    program = """
import sys
from jaxmem import MemoryReport
report = MemoryReport(name="a", target="cpu", backend="cpu", jax_version="0", fits="yes", fits_reason="")
assert "jaxmem.report" not in sys.modules
assert "<div" in report._repr_html_()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


HOSTS = {
    "Jupyter, light": ('<body data-jp-theme-light="true" style="color: #111">', "light", "dark"),
    "Jupyter, dark": ('<body data-jp-theme-light="false" style="color: #eee">', "dark", "light"),
    "VS Code, dark": ('<body class="vscode-dark" style="color: #eee">', "dark", "light"),
    "Colab, dark": ('<html theme="dark"><body style="color: #eee">', "dark", "light"),
    "a page": ("<body>", "light dark", "dark"),
}


def test_it_follows_the_theme_of_its_host_and_leaves_the_host_alone(browser):
    piece = samples.gpt_report()._repr_html_()
    other = '<table id="other"><tr><td class="number">1</td></tr></table><p class="bar">x</p>'
    for host, (start, wanted, system) in HOSTS.items():
        tab = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=system)
        tab.set_content(f"<!doctype html>{start}{other}")
        place = "e => [...document.querySelectorAll(e)].map(e => { let s = getComputedStyle(e); return "
        place += "[s.color, s.padding, s.textAlign, s.display, s.fontSize, s.backgroundColor].join() }).join()"
        before = tab.evaluate(place, "#other, #other td, p.bar")
        tab.evaluate("piece => document.body.insertAdjacentHTML('beforeend', piece)", piece)
        assert tab.evaluate(place, "#other, #other td, p.bar") == before, host
        scheme, colour, shown = tab.evaluate(
            "() => { let s = getComputedStyle(document.querySelector('.jaxmem')), i = document.querySelector('.spot');"
            "return [s.colorScheme, s.color, getComputedStyle(i, '::after').display] }"
        )
        assert scheme == wanted and shown == "none", host
        assert colour == tab.evaluate("getComputedStyle(document.body).color"), "text has the host's colour"
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390, "wide tables scroll by themselves"
        box = tab.locator(".jaxmem .chart").bounding_box()
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        hovered = "getComputedStyle(document.querySelector('.spot:hover'), '::after').content"
        assert " alive, at " in tab.evaluate(hovered)
        tab.close()
