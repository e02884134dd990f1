"""What the page holds, without a browser: nothing from elsewhere, nothing unescaped, not too much."""

import dataclasses
import html.parser
import json
import re
import time

import pytest

from jaxmem.analysis import Moment, Timeline
from jaxmem.errors import InputError
from jaxmem.report import html_report, report_fragment, write_html
from tests.report import samples
from tests.report.test_page import HOSTILE

pytestmark = pytest.mark.once

LIMIT_BYTES = 8_000_000


class Elements(html.parser.HTMLParser):
    """The elements of a page, and the text inside of those with an id."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.scripts: dict[str, str] = {}
        self._script = None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._script = dict(attrs).get("id", "") if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self._script = None

    def handle_data(self, data):
        if self._script is None:
            self.text.append(data)
        else:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data


def data_of(page: str) -> dict:
    return json.loads(Elements(page).scripts["data"])


def decoded(report: dict, name: str) -> list:
    column = report["buffers"][name]
    count = report["buffers"]["count"]
    return column if isinstance(column, list) else [column] * count


def test_the_page_needs_nothing_from_elsewhere():
    page = html_report(samples.gpt_report())
    for tag, attributes in Elements(page).tags:
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith(("#", "data:,")), tag
    policy = next(a["content"] for t, a in Elements(page).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "http" not in policy


def test_the_data_is_that_of_the_report():
    report = samples.gpt_report(ops=4)
    data = data_of(html_report(report))["reports"][0]
    assert data["at_peak"] == len(report.buffers) and data["left_out"] == {"count": 0, "bytes": 0}
    for name in ("name", "layer", "op", "shape", "source", "path"):
        assert [data["strings"][code] for code in decoded(data, name)][: data["at_peak"]] == [
            getattr(b, name) for b in report.buffers
        ]
    for name in ("size_bytes", "offset_bytes", "start", "end", "padding_bytes"):
        assert decoded(data, name)[: data["at_peak"]] == [getattr(b, name) for b in report.buffers]
    line, alive, at = data["timeline"], {}, 0
    for i, moment in enumerate(report.timeline.moments):
        for _ in range(line["counts"][i]):
            kind = line["kinds"][line["changes"][at]]
            alive[kind] = alive.get(kind, 0) + line["changes"][at + 1]
            at += 2
        assert {kind: size for kind, size in alive.items() if size} == dict(moment.by_kind)
        assert data["strings"][line["layer"][i]] == moment.layer and line["positions"][i] == moment.position


def test_names_of_the_program_are_escaped():
    hostile = samples.renamed(samples.gpt_report(), HOSTILE)
    page = html_report(hostile, against=samples.renamed(samples.gpt_report(scale=0.5), HOSTILE))
    plain = html_report(samples.gpt_report(), against=samples.gpt_report(scale=0.5))
    count = [[tag for tag, _ in Elements(text).tags].count("script") for text in (page, plain)]
    assert count[0] == count[1]
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in Elements(page).tags)
    parts = page.split('<script type="text/plain" id="plotly">')
    assert "<script>window" not in parts[0] and "\u2028" not in Elements(page).scripts["data"]
    assert data_of(page)["reports"][1]["strings"][1].startswith(HOSTILE)
    fragment = report_fragment(hostile)
    assert "<script" not in fragment and "<img" not in fragment and HOSTILE[:20] in "".join(Elements(fragment).text)


def test_half_a_surrogate_is_no_error(tmp_path):
    write_html(tmp_path / "r.html", samples.renamed(samples.gpt_report(), "\ud800"))
    assert "?GPT/" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_hundred_unrolled_layers_stay_small_and_quick():
    report = samples.stretched(samples.gpt_report())
    assert len(report.buffers) == 6000 and len(report.timeline.moments) == 15000
    html_report(samples.bare_report())  # loads jinja and plotly's script
    start = time.process_time()
    page = html_report(report)
    assert time.process_time() - start <= 2
    assert len(page.encode()) <= LIMIT_BYTES
    assert data_of(page)["reports"][0]["at_peak"] == 6000


def test_many_long_names_leave_out_the_smallest_buffers():
    report = samples.renamed(samples.stretched(samples.gpt_report(), moments=500), "x" * 390)
    unique = [dataclasses.replace(b, op_name=f"{i}{b.op_name}") for i, b in enumerate(report.buffers)]
    report = dataclasses.replace(report, buffers=tuple(dataclasses.replace(b, layer=b.op_name + "l") for b in unique))
    page = html_report(report)
    assert len(page.encode()) <= LIMIT_BYTES
    data = data_of(page)["reports"][0]
    kept = data["at_peak"]
    assert 50 <= kept < 6000
    assert data["left_out"]["count"] == 6000 - kept
    assert data["left_out"]["bytes"] == sum(b.size_bytes for b in report.buffers[kept:])


def test_many_variants_stay_small():
    many = [samples.stretched(samples.gpt_report(name=f"v{i}"), buffers=3000, moments=3000) for i in range(6)]
    comparison = dataclasses.replace(samples.comparison(), rows=tuple(many))
    assert len(html_report(comparison).encode()) <= LIMIT_BYTES


def test_a_thinned_timeline_keeps_its_peak():
    sizes = [100 + i % 7 for i in range(50_000)]
    sizes[31_234] = 10**6
    moments = tuple(Moment(position=i, by_kind=(("activations", size),)) for i, size in enumerate(sizes))
    line = Timeline(length=50_000, peak_position=31_234, moments=moments)
    data = data_of(html_report(samples.gpt_report(timeline=line)))["reports"][0]["timeline"]
    assert len(data["positions"]) <= 16_000 and 31_234 in data["positions"]


def test_what_is_missing_is_no_error():
    bare = samples.bare_report()
    assert "Uncertain" in html_report(bare)
    assert "Nothing found that wastes bytes" in html_report(bare)
    assert html_report(bare, against=samples.gpt_report()).count("<!doctype html>") == 1
    assert "Uncertain" in report_fragment(bare)
    empty = Timeline(length=0, peak_position=0, moments=())
    html_report(samples.gpt_report(timeline=empty, by_layer=(), by_kind=()))


def test_a_kind_that_nobody_knows_is_shown():
    page = html_report(samples.gpt_report(by_kind=(("novel", 5 << 30),)))
    assert re.search(r'kind-unattributed"></span>novel</th><td class="number">5.00 GiB', page)


def test_what_cannot_be_shown_is_said():
    report = samples.gpt_report()
    with pytest.raises(InputError, match="MemoryReport or a Comparison; got dict"):
        html_report({"peak_bytes": 1})
    with pytest.raises(InputError, match="two MemoryReports"):
        html_report(samples.comparison(), against=report)


def test_verdict_bytes_and_cures_stand_in_the_page_itself():
    """Readable with scripts off, and found by a search."""
    text = " ".join("".join(Elements(html_report(samples.gpt_report())).text).split())
    for wanted in ("Fits", "of 16.00 GiB", "optimizer state648.0 MiB", "Compute the loss in chunks", "180 ms"):
        assert wanted in text, wanted
    assert "modelled, one micro-batch" in text and "estimate by the compiler's cycles, 7% filled" in text


def test_the_fragment_is_short_and_without_scripts():
    fragment = report_fragment(samples.gpt_report())
    assert len(fragment) < 80_000 and "<script" not in fragment
    text = "".join(Elements(fragment).text)
    assert "6.54 GiB" in text and "Fits" in text and "GPT/head" in text
    assert report_fragment(samples.comparison()).count('class="bar"') == 5


def test_a_comparison_has_every_variant_and_its_warnings():
    text = "".join(Elements(html_report(samples.comparison())).text)
    for row in samples.comparison().rows:
        assert row.name in text
    assert text.count("The compiler's own peak leaves out what loops hold.") == 5
