"""What a notebook shows of a report or a comparison: a fragment without scripts, well formed, names escaped."""

import html.parser
import subprocess
import sys

import jax
import pytest

from jaxmem.analysis import analyze, compare
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
