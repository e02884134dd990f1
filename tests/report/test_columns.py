"""A column of a report is one entry: declared on the record, it stands in every rendering."""

import inspect
import io
import json

import pytest
from rich.console import Console

from jaxmem._display import column, columns, record
from jaxmem.analysis import Buffer, Comparison, MemoryReport, ReportReadError
from jaxmem.analysis._json import record_schema
from jaxmem.report import html_report, render_comparison, render_report
from jaxmem.report.changes import render_diff
from jaxmem.report.differences import diff
from tests.report import samples
from tests.report.test_html import data_of


@record
class WideReport(MemoryReport):
    """A report with a made-up column."""

    sent_bytes: int | None = column(
        "Bytes sent to the moon.",
        "modelled",
        default=None,
        terminal="sent off",
        page="sent away",
        row="sent*",
        page_row="sent, all told",
        diff="sent there",
        note="by rocket",
    )


REPORTS = [WideReport(**(vars(samples.gpt_report()) | {"name": f"v{n}", "sent_bytes": n * 2**20})) for n in (3, 5)]


def shown(renderable, width=200):
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def test_a_terminal_shows_it():
    assert "sent off" in shown(render_report(REPORTS[0])) and "3.0 MiB" in shown(render_report(REPORTS[0]))
    table = shown(render_comparison(Comparison(rows=tuple(REPORTS), target="moon")))
    heading, *rows = [line for line in table.splitlines() if line.startswith(("variant", "v3", "v5"))]
    assert heading.endswith("sent*") and [row.split()[-2:] for row in rows] == [["3.0", "MiB"], ["5.0", "MiB"]]
    assert "sent off" in str(REPORTS[0]) and "3.0 MiB" in str(REPORTS[0])


def test_a_page_shows_and_explains_it():
    page = html_report(REPORTS[0])
    assert '<dt title="Bytes sent to the moon.">sent away</dt><dd>3.0 MiB<small>by rocket</small></dd>' in page
    page = html_report(Comparison(rows=tuple(REPORTS), target="moon"))
    assert 'title="Bytes sent to the moon.">sent, all told</th>' in page
    assert f'data-value="{5 * 2**20}">5.0 MiB</td>' in page


def test_json_schema_and_help_have_it():
    values = json.loads(REPORTS[0].to_json())
    assert values["sent_bytes"] == 3 * 2**20 and values["provenances"]["sent_bytes"] == "modelled"
    assert WideReport.from_dict(values) == REPORTS[0]
    with pytest.raises(ReportReadError, match="not negative in sent_bytes"):
        WideReport.from_dict(values | {"sent_bytes": -1})
    said = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "description": "Bytes sent to the moon."}
    schema = record_schema(WideReport, schema="wide/1", optional=(), computed={})
    assert schema["properties"]["sent_bytes"] == said
    assert "  sent_bytes: Bytes sent to the moon." in (inspect.getdoc(WideReport) or "")


def test_a_diff_compares_it():
    line = next(line for line in shown(render_diff(diff(*REPORTS))).splitlines() if line.startswith("sent there"))
    assert line.split() == ["sent", "there", "3.0", "MiB", "5.0", "MiB", "+2.0", "MiB"]


def test_a_view_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="margin"):
        column("Bytes.", margin="bytes")


def test_every_field_of_a_buffer_reaches_the_page():
    fields = data_of(html_report(samples.gpt_report()))["buffers"]
    assert sorted(fields["texts"] + fields["numbers"]) == sorted(each.name for each in columns(Buffer))
    assert fields["buffer_row"][0] == ["bytes", "size_bytes", "Bytes that it occupies."]
    assert ["scope", "op_name"] in [names[:2] for names in fields["detail"]]
