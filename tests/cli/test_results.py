"""Pages, CSV and traces that analyze and compare write; what they refuse before anything is compiled."""

import csv
import json
import os

import pytest

from jaxmem.analysis import MemoryReport
from jaxmem.cli import _output
from jaxmem.cli._output import OutputError, Outputs
from tests.cli.helpers import LINEAR, assert_refused, run, write


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path, LINEAR)


def test_analyze_writes_everything_at_once(capfd, model, tmp_path):
    options = ("--json", "r.json", "--html", "r.html", "--csv", "r.csv", "--trace", "r.trace")
    ran = run(capfd, "analyze", model, "--target", "cpu", "--set", "width=128", *options)
    assert ran.code == 0 and ran.err == "" and "fits: yes" in ran.out
    report = MemoryReport.from_dict(json.loads((tmp_path / "r.json").read_text()))
    page = (tmp_path / "r.html").read_text()
    assert page.startswith("<!doctype html>") and f"{report.name} on cpu" in page
    with open(tmp_path / "r.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["size_bytes"]) for row in rows] == [buffer.size_bytes for buffer in report.buffers]
    assert any(row["path"] == "batch" for row in rows)
    events = json.loads((tmp_path / "r.trace").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "C"]) == len(report.timeline.moments)


def test_one_result_may_go_to_stdout(capfd, model, tmp_path):
    ran = run(capfd, "analyze", model, "--target", "cpu", "--csv", "-", "--json", "r.json")
    assert ran.code == 0 and ran.out.startswith("name,kind,layer") and "fits:" not in ran.out
    assert json.loads((tmp_path / "r.json").read_text())["target"] == "cpu"


def test_compare_writes_a_page_of_every_row(capfd, model, tmp_path):
    ran = run(capfd, "compare", model, "--target", "cpu", "--remat", "none,full", "--html", "c.html", "--json", "-")
    rows = json.loads(ran.out)["rows"]
    page = (tmp_path / "c.html").read_text()
    assert ran.code == 0 and [row["name"] for row in rows] == ["none", "full"]
    assert "2 variants on cpu" in page and '"mode":"comparison"' in page


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("analyze", "--html", "no/r.html"), "no directory"),
        (("analyze", "--csv", "."), "a directory"),
        (("compare", "--html", "no/r.html"), "no directory"),
        (("analyze", "--html", "r", "--csv", "r"), "r for --html and --csv"),
        (("analyze", "--html", "r", "--trace", "./r"), "a file of its own"),
        (("compare", "--json", "-", "--html", "-"), "- for --json and --html"),
        (("analyze", "--html", "model.py"), "model.py, which this command reads"),
        (("compare", "--json", "c.json", "--config", "c.json"), "c.json, which this command reads"),
    ],
)
@pytest.mark.parametrize("spec", ["model.py", "model.py:workload"])
def test_refused_before_anything_is_compiled(capfd, model, tmp_path, arguments, words, spec):
    (tmp_path / "c.json").write_text("{}")
    before = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert_refused(run(capfd, arguments[0], spec, *arguments[1:]), words)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_log_is_never_written_over(capfd, tmp_path):
    log = tmp_path / "log"
    log.write_text("Out of memory allocating 1099511627776 bytes.\n")
    assert_refused(run(capfd, "explain-oom", log, "--json", log), "which this command reads")
    assert log.read_text().startswith("Out of memory")


def test_a_disk_that_fills_up_meanwhile_is_one_paragraph_and_the_old_file_stays(capfd, model, tmp_path, monkeypatch):
    (tmp_path / "r.html").write_text("old")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(_output.os, "replace", lambda *_: (_ for _ in ()).throw(full))
    ran = run(capfd, "analyze", model, "--target", "cpu", "--html", "r.html")
    assert_refused(ran, "No space left on device", "--html r.html")
    assert (tmp_path / "r.html").read_text() == "old"
    assert set(os.listdir(tmp_path)) - {"__pycache__"} == {"model.py", "r.html"}


def test_files_that_do_not_exist_yet_and_devices(tmp_path):
    one = str(tmp_path / "a")
    Outputs({"--json": one, "--html": str(tmp_path / "b"), "--csv": None}).check(inputs=(None, "", str(tmp_path / "c")))
    Outputs({"--json": os.devnull, "--html": os.devnull}).check()
    os.symlink(one, tmp_path / "link")
    with pytest.raises(OutputError, match="a file of its own"):
        Outputs({"--json": one, "--html": str(tmp_path / "link")}).check()
