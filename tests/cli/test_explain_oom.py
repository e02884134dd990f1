"""`jaxmem explain-oom` on the goldens: what it prints, its JSON, and what it refuses."""

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import assert_refused, run

pytestmark = pytest.mark.once

GOLDENS = Path(__file__).parent.parent / "analysis" / "oom" / "goldens"


def test_it_prints_numbers_buffers_and_advice(capfd):
    ran = run(capfd, "explain-oom", GOLDENS / "tpu_report.txt")
    assert ran.code == 0 and ran.err == ""
    for words in ("TPU out of device memory at compile time", "15.75 GiB", "2.84 GiB", "gpt.py:51", "what to try"):
        assert words in ran.out


def test_json_from_stdin(capfd, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO((GOLDENS / "gpu_bfc.txt").read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    ran = run(capfd, "explain-oom", "-", "--json", "-")
    said = json.loads(ran.out)
    assert ran.code == 0
    assert said["requested_bytes"] == 10 * 2**30 and said["buffers"][0]["source"] == "net.py:40"


def test_a_log_without_one_is_refused(capfd, tmp_path):
    (tmp_path / "log").write_text("step 1 loss 2.0\n")
    assert_refused(run(capfd, "explain-oom", tmp_path / "log"), "out-of-memory", "2>&1 | tee log")


def test_a_missing_log_is_refused(capfd, tmp_path):
    assert_refused(run(capfd, "explain-oom", tmp_path / "nowhere.log"), "a log file at", "No such file")
