"""The device check without a device: its children, their records, and the honest lack of a measurement."""

import json
import subprocess
import sys

import pytest

from benchmarks import device_check


def test_the_quick_check_runs_on_a_cpu(pytestconfig):
    command = [sys.executable, "-m", "benchmarks.device_check", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=pytestconfig.rootpath, check=True)
    record = json.loads(done.stdout)
    assert record["figures"] | {"max_error_resident": None} == {
        "cases": 2,
        "failed": 0,
        "measured": 0,  # an allocator's statistics, which a CPU lacks
        "max_error_resident": None,
    }
    large, small = record["rows"]
    assert large["compiled_bytes"] > device_check.MEASURABLE_BYTES > small["compiled_bytes"]
    assert large["measured_by"] == "resident memory" or sys.platform != "linux"
    for row in (large, small):
        assert row["measured_seconds"] > 0 and row["loss"] > 0 and row["device"] == "cpu"
        assert row["deviceless_bytes"] is None and row["estimated_seconds"] is None
    assert "resident memory" in done.stderr or sys.platform != "linux"
    if sys.platform == "linux":  # what a process grows by is within a third of what its large step was compiled to
        assert 0.67 < large["compiled_bytes"] / large["measured_bytes"] < 1.5


def test_a_case_that_fails_is_told_and_the_others_go_on(monkeypatch, capsys):
    monkeypatch.setattr(device_check, "QUICK", (("no-such", "none"),))
    device_check.main(["--quick"])
    record = json.loads(capsys.readouterr().out)
    assert record["figures"]["failed"] == 1 and "KeyError" in record["rows"][0]["error"]


def test_out_of_time_is_told(capsys):
    device_check.main(["--quick", "--seconds", "1"])
    record = json.loads(capsys.readouterr().out)
    assert record["figures"]["cases"] == 0 and record["left_out"] == ["gpt-small/none", "gpt-tiny/full_k4"]


def row(**changes):
    fields = {"compiled_bytes": 2**28, "deviceless_bytes": None, "measured_bytes": 2**28, "measured_by": "allocator"}
    return {**fields, "masked": False, "measured_seconds": 1.0, "estimated_seconds": None, **changes}


def test_what_counts_as_an_error():
    figures = device_check.summary([row(), row(compiled_bytes=1.04 * 2**28), row(compiled_bytes=1, masked=True)])
    assert figures["max_error"] == pytest.approx(0.04) and figures["measured"] == 2
    resident = row(measured_by="resident memory", compiled_bytes=1.2 * 2**28)
    assert device_check.summary([resident])["max_error_resident"] == pytest.approx(0.2)
    assert "max_error" not in device_check.summary([resident, row(measured_bytes=None)])
    assert "max_error_resident" not in device_check.summary([row(measured_by="resident memory", compiled_bytes=2**20)])
