"""Which row of a comparison to take."""

import io
import json

import pytest
import rich.console

from jaxmem.analysis import Comparison, MemoryReport
from jaxmem.analysis._choice import choose
from jaxmem.report import html_report, print_comparison

GIB = 2**30


def row(name, fits, peak, seconds=None, recompute=None, target="gpu-t4"):
    return MemoryReport(
        name=name,
        target=target,
        backend="gpu",
        jax_version="0",
        fits=fits,
        fits_reason="",
        peak_bytes=peak,
        step_seconds=seconds,
        recompute_flops=recompute,
        capacity_bytes=10 * GIB,
    )


NONE, FULL, DOTS = (
    row("none", "no", 12 * GIB, 0.1, 0),
    row("full", "yes", 3 * GIB, 0.3, 9),
    row("dots", "yes", 5 * GIB, 0.2, 5),
)


@pytest.mark.parametrize(
    ("rows", "name", "fits", "missing", "text"),
    [
        (
            [NONE, FULL, DOTS],
            "dots",
            "yes",
            None,
            "cheapest that fits: dots, 200 ms a step (estimate), peak 5.00 GiB",
        ),
        ([NONE, row("a", "yes", GIB, None, 7), row("b", "yes", 2 * GIB, 0.1, 3)], "b", "yes", None, "3 FLOP|100 ms"),
        ([row("a", "yes", 2 * GIB, 0.1), row("b", "yes", GIB, 0.1)], "b", "yes", None, "cheapest that fits: b"),
        (
            [NONE, row("c", "uncertain", 9.8 * GIB, 0.2)],
            "c",
            "uncertain",
            None,
            "none fits for sure; cheapest that may: c",
        ),
        (
            [NONE, row("d", "no", 11 * GIB, 0.9)],
            "d",
            "no",
            GIB,
            "none fits: d, the smallest, needs 1.00 GiB more than the 10.00 GiB of a device",
        ),
        ([row("e", "no", None)], "", "no", None, "no peak is known"),
    ],
)
def test_the_fastest_that_fits_or_the_least_that_is_missing(rows, name, fits, missing, text):
    choice = choose(rows)
    assert (choice.name, choice.fits, choice.missing_bytes) == (name, fits, missing)
    assert any(words in str(choice) for words in text.split("|"))


def test_a_comparison_has_one_for_each_target():
    table = Comparison(
        rows=(NONE, FULL, DOTS, row("full", "no", 12 * GIB, target="gpu-v100")), target="gpu-t4,gpu-v100"
    )
    assert [(choice.target, choice.name, choice.fits) for choice in table.choices] == [
        ("gpu-t4", "dots", "yes"),
        ("gpu-v100", "full", "no"),
    ]
    written = json.loads(table.to_json())["choices"]
    assert [each["name"] for each in written] == ["dots", "full"] and written[1]["missing_bytes"] == 2 * GIB
    assert str(table.choices[0]) in str(table)


def test_every_view_of_a_comparison_tells_it():
    table = Comparison(rows=(NONE, FULL, DOTS), target="gpu-t4")
    text = io.StringIO()
    print_comparison(table, rich.console.Console(file=text, width=200))
    assert str(table.choices[0]) in text.getvalue() and str(table.choices[0]) in html_report(table)
