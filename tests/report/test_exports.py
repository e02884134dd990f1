"""CSV and Chrome trace hold what the report holds, and programs that read such files can."""

import csv
import io
import json

import pytest

from jaxmem.report import buffers_csv, chrome_trace
from tests.report import samples

pytestmark = pytest.mark.once


def test_csv_reads_back():
    report = samples.renamed(samples.gpt_report(), 'a "quoted", name\nof two lines ')
    rows = list(csv.DictReader(io.StringIO(buffers_csv(report), newline="")))
    assert len(rows) == len(report.buffers)
    for row, buffer in zip(rows, report.buffers, strict=True):
        assert row["name"] == buffer.name and row["layer"] == buffer.layer
        assert int(row["size_bytes"]) == buffer.size_bytes and int(row["end"]) == buffer.end


def test_the_trace_is_one_that_perfetto_reads():
    report = samples.gpt_report()
    trace = json.loads(json.dumps(chrome_trace(report)))
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in "MCXibe" and isinstance(event["name"], str) and isinstance(event["pid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] > 0
    counters = [event for event in events if event["ph"] == "C"]
    totals = {event["ts"]: sum(event["args"].values()) for event in counters}
    assert totals == {moment.position: moment.live_bytes for moment in report.timeline.moments}
    assert len({tuple(event["args"]) for event in counters}) == 1, "a kind left out would keep its last value"
    loops = [event for event in events if event["ph"] == "X" and "trips" in event["args"]]
    assert [(e["ts"], e["ts"] + e["dur"] - 1, e["args"]["trips"]) for e in loops] == [
        (loop.start, loop.end, loop.trips) for loop in report.timeline.loops
    ]
    begun = {e["id"]: e["ts"] for e in events if e["ph"] == "b"}
    ended = {e["id"]: e["ts"] for e in events if e["ph"] == "e"}
    assert len(begun) == len(report.timeline.buffers)
    assert all(ended[number] > begun[number] for number in begun)


def test_without_a_timeline_only_the_name_is_left():
    assert [event["ph"] for event in chrome_trace(samples.bare_report())["traceEvents"]] == ["M"]
