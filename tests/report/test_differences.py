"""A diff tells what grew: buffers are matched by what they hold, not by the compiler's names."""

import dataclasses

import pytest

from jaxmem.analysis import MemoryReport, Setting
from jaxmem.report import html_report
from jaxmem.report.changes import render_diff
from jaxmem.report.differences import diff
from tests.report import samples
from tests.report.test_columns import shown

pytestmark = pytest.mark.once


def test_equal_reports_differ_in_nothing():
    report = samples.gpt_report()
    renamed = dataclasses.replace(
        report, buffers=tuple(dataclasses.replace(b, name=f"other.{i}") for i, b in enumerate(report.buffers))
    )
    found = diff(report, renamed)
    assert found.layers == () and found.buffers == ()
    assert all(change.change_bytes == 0 for change in found.kinds)


def test_a_buffer_that_grows_goes_and_comes():
    before = samples.gpt_report()
    largest, second = [b for b in before.buffers if b.op != "parameter"][:2]
    new = dataclasses.replace(largest, layer="GPT/new", op="erf", size_bytes=7)
    grown = dataclasses.replace(largest, size_bytes=largest.size_bytes + 1000, shape="f32[9]")
    rest = tuple(b for b in before.buffers if b not in (largest, second))
    found = diff(before, dataclasses.replace(before, buffers=(grown, new, *rest)))
    changes = {(c.layer, c.before, c.after): c.change_bytes for c in found.buffers}
    assert changes == {
        (largest.layer, largest.shape, "f32[9]"): 1000,
        ("GPT/new", "", largest.shape): 7,
        (second.layer, second.shape, ""): -second.size_bytes,
    }
    assert [abs(c.change_bytes) for c in found.buffers] == sorted((1000, 7, second.size_bytes), reverse=True)


def test_settings_and_names_that_differ():
    def made(scale, **settings):
        told = tuple(Setting(name=name, value=value) for name, value in settings.items())
        return samples.gpt_report(scale=scale, remat=settings["remat"], settings=told)

    before, after = made(1.0, remat="none", batch="int32[8]"), made(0.5, remat="full", batch="int32[8]", seed="3")
    found = diff(before, dataclasses.replace(after, jax_version="0.12.0"))
    assert [(c.name, c.before, c.after) for c in found.settings] == [
        ("remat", "none", "full"),
        ("jax_version", "0.10.2", "0.12.0"),
        ("seed", "", "3"),
    ]
    assert {c.name for c in found.names} == {"qkv", "scores", "proj"}  # no argument has changed
    assert found.to_dict()["settings"][0] == {"name": "remat", "before": "none", "after": "full"}
    text = shown(render_diff(found))
    assert "seed" in text and "not set" in text and "by name" in text
    page = html_report(found.after, against=before)
    assert "Settings that differ" in page and ">scores</code>" in page


def test_a_report_without_settings_is_an_older_one():
    before, after = samples.gpt_report(), samples.gpt_report(settings=(Setting(name="zero", value="0"),), remat="full")
    old = before.to_dict()
    del old["settings"], old["source_lines"], old["timeline"]["phases"]
    for moment in old["timeline"]["moments"]:
        del moment["phase"]
    found = diff(MemoryReport.from_dict(old), after)
    assert [(c.name, c.before, c.after) for c in found.settings] == [("remat", "none", "full")]


def test_layers_that_differ_in_number_are_one():
    before, after = (samples.gpt_report(scanned=False, layers=5, ops=2, scale=scale) for scale in (1.0, 0.5))
    found = diff(before, after)
    assert "GPT/block_*/mlp/gelu" in {change.name for change in found.layers}
    assert any(
        change.before.startswith("5 × bf16") and change.layer == "GPT/block_*/mlp/gelu" for change in found.buffers
    )
    total = sum(b.size_bytes for b in after.buffers) - sum(b.size_bytes for b in before.buffers)
    assert sum(change.change_bytes for change in found.buffers) == total
    assert sum(change.change_bytes for change in found.layers) == total
