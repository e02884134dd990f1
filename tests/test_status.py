"""What long work is at, where stderr is no terminal."""

import logging
import time

import pytest

from jaxmem import _status

pytestmark = pytest.mark.once


def test_a_stage_that_takes_long_is_named(capsys, monkeypatch):
    monkeypatch.setattr(_status, "_PATIENCE_SECONDS", 0.5)
    with _status.stages("loading") as stage:
        stage("tracing")  # before anything was said of loading
        time.sleep(1.5)
        logging.getLogger("jaxmem.train._budget").info("compiling the %s choice", "first")
        time.sleep(1.5)
        stage("done")
    time.sleep(0.7)
    assert capsys.readouterr().err.splitlines() == [
        "jaxmem: tracing …",
        "jaxmem: tracing: compiling the first choice …",
    ]
    assert not logging.getLogger("jaxmem").handlers


def test_what_is_quick_is_not(capsys):
    with _status.stages("loading") as stage:
        stage("compiling")
    assert capsys.readouterr().err == ""
