"""The phases of a run in every view: one line, with what each is told by."""

import dataclasses
import json

import pytest

from jaxmem.analysis import MemoryReport
from jaxmem.report import html_report
from jaxmem.report.differences import diff
from tests.report import samples

pytestmark = pytest.mark.once


def test_a_terminal_has_one_line_of_them():
    lines = str(samples.gpt_report()).splitlines()
    assert [line for line in lines if "init" in line] == ["besides the steps: init 3.00 GiB*, save 2.00 GiB*"]
    assert "besides the steps" not in str(samples.bare_report())


def test_a_page_and_a_notebook_tell_how():
    report = samples.gpt_report()
    line = '<span title="The state, and 1 GiB to draw it.">init 3.00 GiB*</span>, <span title="The state.">save'
    assert line in html_report(report) and "Besides the steps" not in html_report(samples.bare_report())
    assert '<td>init</td><td class="number">3.00 GiB*</td>' in report._repr_html_()


def test_json_has_all_of_them():
    report = samples.gpt_report()
    values = json.loads(report.to_json())
    assert values["phases"][2] == {
        "name": "save",
        "peak_bytes": 2 << 30,
        "host_bytes": 2 << 30,
        "provenance": "modelled",
        "how": "The state.",
    }
    assert MemoryReport.from_dict(values) == report


def test_a_diff_has_those_that_changed():
    before = samples.gpt_report()
    init, *rest = before.phases
    after = dataclasses.replace(before, phases=(dataclasses.replace(init, peak_bytes=4 << 30), *rest))
    lines = str(diff(before, after)).splitlines()
    assert [line.split() for line in lines if line.split()[:1] in (["init"], ["save"])] == [
        ["init", "3.00", "GiB", "4.00", "GiB", "+1.00", "GiB"]
    ]
    assert diff(before, after).to_dict()["after"]["phases"]["init"] == 4 << 30
