import dataclasses
import io
import re

import pytest
from rich.console import Console

from jaxmem.analysis import Comparison, MemoryReport
from jaxmem.report import print_comparison, print_report

pytestmark = pytest.mark.once

GIB = 2**30
ROWS = tuple(
    MemoryReport(
        name=name,
        target="cpu",
        backend="cpu",
        jax_version="0.0",
        peak_bytes=peak,
        temp_bytes=int(99.5 * GIB),
        argument_bytes=3 * 2**20,
        output_bytes=512,
        alias_bytes=0,
        saved_residual_bytes=residuals,
        forward_flops=int(1.234e17),
        recompute_flops=0,
        fits=fits,
        fits_reason="because",
        warnings=("everyone's [note]", *extra),
    )
    for name, peak, residuals, fits, extra in (
        ("none", int(115.25 * GIB), 93 * GIB, "no", ()),
        ("dots [no batch]", None, None, "uncertain", ("its own note",)),
    )
)
NUMBERS = ("115.25 GiB", "99.50 GiB", "93.00 GiB", "123.40 PFLOP", "3.0 MiB", "512 B", "0 FLOP")


def shown(print_, record, width: int, **options) -> str:
    out = io.StringIO()
    print_(record, Console(file=out, width=width, **options))
    return out.getvalue()


@pytest.mark.parametrize("width", [200, 80, 50, 30])
def test_no_number_and_no_name_is_cut_whatever_the_width(width):
    text = shown(print_comparison, Comparison(rows=ROWS, target="cpu"), width)
    assert max(map(len, text.splitlines())) <= width
    for number in NUMBERS:
        assert number in text
    assert "dots [no batch]" in text
    assert "…" not in text


def test_a_warning_stands_once_with_the_rows_it_concerns():
    text = shown(print_comparison, Comparison(rows=ROWS, target="cpu"), 80)
    assert text.count("everyone's [note]") == 1
    assert "! dots [no batch]: its own note" in text
    assert "! everyone's [note]" in text


def test_host_bytes_are_shown_where_there_are_any():
    none, full = (dataclasses.replace(row, host_temp_bytes=0) for row in ROWS)
    offloads = dataclasses.replace(full, host_temp_bytes=7 * GIB)
    for rows, stands in (((none, full), False), ((none, offloads), True)):
        text = shown(print_comparison, Comparison(rows=rows, target="cpu"), 200)
        assert ("host temps" in text, "7.00 GiB" in text) == (stands, stands)


def test_unknown_numbers_are_dashes_and_rows_that_may_not_fit_say_why():
    text = shown(print_comparison, Comparison(rows=ROWS, target="cpu"), 200)
    line = next(line for line in text.splitlines() if line.startswith("dots [no batch] "))
    assert re.search(r" - +99\.50 GiB +- +0 FLOP +- +uncertain", line)
    assert "none: fits no, because" in text


@pytest.mark.parametrize("width", [80, 40])
def test_a_report_shows_every_number(width):
    text = shown(print_report, ROWS[0], width)
    assert max(map(len, text.splitlines())) <= width
    for number in NUMBERS:
        assert number in text
    assert "fits: no - because" in text


def test_a_dumb_terminal_gets_no_escapes(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in shown(print_comparison, Comparison(rows=ROWS, target="cpu"), 80)
    colour = shown(print_comparison, Comparison(rows=ROWS, target="cpu"), 80, force_terminal=True, no_color=True)
    assert "\x1b[3" not in colour
