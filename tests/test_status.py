"""What long work is at, where stderr is no terminal: lines, or one below a notebook's cell."""

import contextlib
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


def test_in_a_notebook_a_line_below_the_cell_tells_the_stage_and_is_gone_in_the_end(monkeypatch):
    said = []

    class Handle:
        def display(self, content, *, raw):
            said.append(content["text/plain"])

        update = display

    monkeypatch.setattr(_status, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.DisplayHandle", Handle)
    with contextlib.suppress(KeyboardInterrupt), _status.stages("tracing", elsewhere=False) as stage:
        _status.counted(["none", "full"], stage, of=" for cpu")("full", "compiling")
        raise KeyboardInterrupt
    assert said == ["jaxmem: tracing …", "jaxmem: 2 of 2, compiling full for cpu …", ""]


def test_other_handlers_get_what_was_asked_for_and_no_more(caplog):
    """absl, which grain brings, puts a handler at the root that prints whatever arrives."""
    log = logging.getLogger("jaxmem.train._budget")
    with _status.stages("loading"):
        log.info("compiling")
        log.warning("odd")
    with caplog.at_level(logging.INFO), _status.stages("loading"):
        log.info("compiling again")
    assert caplog.messages == ["odd", "compiling again"]
