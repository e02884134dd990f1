"""`jaxmem diff` of two saved reports: what it prints, writes and refuses, and that nothing is lost."""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.helpers import assert_refused, run
from tests.report import samples

pytestmark = pytest.mark.once


@pytest.fixture
def saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, scale in (("a.json", 1.0), ("b.json", 0.5)):
        (tmp_path / name).write_text(samples.gpt_report(layers=2, ops=2, scale=scale).to_json())
    return tmp_path


def test_it_prints_what_shrank(capfd, saved):
    ran = run(capfd, "diff", "a.json", "b.json")
    assert ran.code == 0 and ran.err == ""
    for words in ("a.json → b.json", "peak", "activations", "layers that changed most", "buffers that changed most"):
        assert words in ran.out
    back = run(capfd, "diff", "b.json", "a.json").out
    assert "−" in ran.out and "+" not in ran.out.split("layers that")[0]
    assert "+" in back and "−" not in back.split("layers that")[0]


def test_the_json_sums_to_the_change_of_the_peak(capfd, saved):
    ran = run(capfd, "diff", "a.json", "b.json", "--json", "-")
    found = json.loads(ran.out)
    assert found["before"]["name"] == "a.json" and found["after"]["name"] == "b.json"
    change = found["after"]["peak_bytes"] - found["before"]["peak_bytes"]
    assert sum(kind["change_bytes"] for kind in found["kinds"]) == change < 0
    assert found["layers"] and found["buffers"]


def test_the_page_and_the_json_at_once(capfd, saved):
    ran = run(capfd, "diff", "a.json", "b.json", "--html", "d.html", "--json", "d.json")
    assert ran.code == 0 and "a.json → b.json" in ran.out
    page = (saved / "d.html").read_text()
    assert page.startswith("<!doctype html>") and "b.json against a.json" in page
    assert json.loads((saved / "d.json").read_text())["kinds"]
    assert set(os.listdir(saved)) == {"a.json", "b.json", "d.html", "d.json"}


def test_equal_reports_and_bare_ones(capfd, saved):
    (saved / "c.json").write_text((saved / "a.json").read_text())
    assert "No layer and no buffer changed." in run(capfd, "diff", "a.json", "c.json").out
    (saved / "c.json").write_text(samples.bare_report().to_json())
    ran = run(capfd, "diff", "a.json", "c.json")
    assert ran.code == 0 and "No buffers are known of step." in ran.out and "targets differ" in ran.out


def test_names_are_no_markup_and_no_commands(capfd, saved):
    report = samples.renamed(samples.gpt_report(layers=2, ops=2), "[red]\x1b[31m")
    (saved / "c.json").write_text(report.to_json())
    ran = run(capfd, "diff", "a.json", "c.json")
    assert ran.code == 0 and "[red]" in ran.out and "\x1b" not in ran.out


@pytest.mark.parametrize(
    "text, words",
    [
        ("", ["no JSON"]),
        ("{", ["no JSON"]),
        ("\x00\xff", ["no JSON"]),
        ("[" * 100_000, ["JSON"]),
        ("[]", ["an object with the schema"]),
        ("{}", ["schema None"]),
        ('{"rows": []}', ["a comparison"]),
        ('{"schema": "jaxmem.report/1", "novel": 1}', ["'novel', which it has not"]),
        ('{"schema": "jaxmem.report/1"}', ["the key 'name'"]),
        ('{"schema": "jaxmem.report/0"}', ["jaxmem.report/0"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_no_report_is_refused(capfd, saved, text, words):
    (saved / "c.json").write_bytes(text.encode("latin-1"))
    assert_refused(run(capfd, "diff", "a.json", "c.json", "--html", "d.html"), "c.json", *words)
    assert "d.html" not in os.listdir(saved)


def test_paths_that_are_wrong_are_refused(capfd, saved):
    os.link("a.json", "linked.json")
    assert_refused(run(capfd, "diff", "a.json", "nowhere.json"), "nowhere.json", "No such file")
    assert_refused(run(capfd, "diff", "a.json", "."), "directory")
    assert_refused(run(capfd, "diff", "a.json", "a.json"), "a.json twice")
    assert_refused(run(capfd, "diff", "a.json", "linked.json"), "one file")
    assert_refused(run(capfd, "diff", "a.json", "b.json", "--html", "no/d.html"), "no directory")


def test_an_input_is_never_written_over(capfd, saved):
    before = (saved / "b.json").read_text()
    os.symlink("b.json", "link.json")
    for path in ("b.json", "./b.json", "link.json"):
        assert_refused(run(capfd, "diff", "a.json", "b.json", "--json", path), "which this command reads")
    assert (saved / "b.json").read_text() == before


def test_a_process_of_its_own_is_quiet(saved):
    done = subprocess.run(
        [sys.executable, "-m", "jaxmem", "diff", "a.json", "b.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.dirname(__file__)))},
    )
    assert (done.returncode, done.stderr) == (0, "")
