"""`str`, `repr`, `show` and `save` of every record that people look at."""

import csv
import io
import json
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

from jaxmem import MemoryConfig, Workload, assert_equivalent, make_train_step, remat
from jaxmem._shown import JsonRecord, Shown
from jaxmem.analysis import explain_oom
from jaxmem.errors import InputError
from jaxmem.report import diff, render_comparison, shown
from jaxmem.train import Check, Verification
from tests.report import samples


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(jnp.tanh(x) @ w)
    return jnp.mean(x**2)


X = jnp.ones((8, 8))
ARGS = [X] * 4, X
WORKLOAD = Workload(loss, ARGS[0], X, optax.sgd(0.1))
CHECK = Check(name="loss", verdict="fail", detail="1.0 against 2.0.")
OOM = "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes."
RECORDS = (
    samples.gpt_report(),
    samples.comparison(),
    diff(samples.gpt_report(), samples.gpt_report(scale=0.5, name="half")),
    remat.residuals(loss, *ARGS, policy="full"),
    remat.auto(loss, 0.5).solve(*ARGS),
    remat.frontier(loss, points=4)(*ARGS),
    make_train_step(WORKLOAD).examine(),
    Verification(name="full", target="cpu", checks=(CHECK,), reference="the plain step"),
    assert_equivalent(WORKLOAD, MemoryConfig(accumulation_steps=2)),
    explain_oom(OOM),
    WORKLOAD,
)
ALL = pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)


def test_no_record_is_forgotten():
    kinds = {*Shown.__subclasses__(), *JsonRecord.__subclasses__()} - {JsonRecord}
    kinds = {cls for cls in kinds if cls.__module__.startswith("jaxmem.")}
    assert {type(record) for record in RECORDS} == kinds == set(shown.FORMS)


@ALL
def test_the_text_is_a_table_within_its_width(record, monkeypatch):
    assert len(repr(record)) < 200 and "\n" not in repr(record)
    for width in (100, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = str(record).splitlines()
        assert max(map(len, lines)) <= width and "\x1b" not in str(record)
        assert all(line == line.rstrip() for line in lines)


@ALL
def test_a_record_is_saved_by_its_ending(record, tmp_path):
    page = tmp_path / "r.html"
    record.save(page)
    assert page.read_text(encoding="utf-8").lower().startswith("<!doctype html>")
    for ending, read in ((".json", json.loads), (".csv", lambda text: list(csv.reader(io.StringIO(text))))):
        path = tmp_path / f"r{ending}"
        if type(record) is Workload:
            with pytest.raises(InputError, match=r"ends in \.html"):
                record.save(path)
            continue
        record.save(str(path))
        found = read(path.read_text(encoding="utf-8"))
        assert found and (ending == ".json" or len({len(row) for row in found}) == 1)


def test_an_unknown_ending_is_one_paragraph(tmp_path):
    with pytest.raises(InputError, match=r"ends in \.html or \.json or \.csv.*Write for example .*'r.html'"):
        samples.gpt_report().save(tmp_path / "r.pdf")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_one_paragraph(tmp_path):
    with pytest.raises(InputError, match=r"(?s)a file to write a Comparison to; got '.*No such file or directory\)"):
        samples.comparison().save(tmp_path / "none" / "r.json")


def test_the_text_of_a_comparison_is_the_terminals_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with (console := Console(width=80)).capture() as printed:
        console.print(render_comparison(samples.comparison()))
    assert [line.rstrip() for line in printed.get().splitlines()] == str(samples.comparison()).splitlines()


def test_rows_of_a_comparison_have_the_tables_columns(tmp_path):
    comparison = samples.comparison()
    comparison.save(tmp_path / "c.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "c.csv").read_text())))
    assert [row["name"] for row in rows] == [row.name for row in comparison.rows]
    assert [int(row["peak_bytes"]) for row in rows] == [row.peak_bytes for row in comparison.rows]


def test_a_solution_shows_the_largest_values_and_sums_the_rest(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("jaxmem.report.residuals._MOST", 1)
    solution = RECORDS[4]
    text = str(solution)
    assert "smaller, " in text and " in total" in text and solution.summary in " ".join(text.split())
    assert len(text.splitlines()) < len(solution.values)


def test_showing_prints_in_a_terminal_and_displays_in_a_notebook(monkeypatch, capsys):
    report, displayed = samples.gpt_report(), []
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert report.show() is None
    assert report.name in capsys.readouterr().out
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    monkeypatch.setattr(ipython, "get_ipython", lambda: types.SimpleNamespace(kernel=object()), raising=False)
    monkeypatch.setattr(display, "display", displayed.append, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    assert report.show() is None
    assert displayed == [report] and capsys.readouterr().out == ""


def test_a_report_without_a_timeline_and_with_nothing_known_is_shown():
    bare = samples.bare_report()
    assert bare.name in str(bare) and bare.name in bare._repr_html_()
    assert jax.tree.leaves(remat.residuals(lambda x: x, X).rows) == []
    assert "total" in str(remat.residuals(lambda x: x, X))
