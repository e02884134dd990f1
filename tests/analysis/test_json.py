"""A report's JSON: its schema is that of the records, and a report is read back as it was, or refused."""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.analysis import MemoryReport, ReportReadError, analyze, report_schema
from tests.report import samples

SMALL = json.loads(samples.gpt_report(layers=1, ops=1).to_json())
for many, name in (
    (SMALL, "buffers"),
    (SMALL, "by_layer"),
    (SMALL["timeline"], "moments"),
    (SMALL["timeline"], "buffers"),
):
    del many[name][2:]
VALIDATOR = jsonschema.Draft202012Validator(report_schema())


def _loss(w, x):
    def layer(x, w):
        return jnp.tanh(x @ w), None

    return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)


@pytest.fixture(scope="module")
def real():
    shapes = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    return analyze(jax.grad(_loss), *shapes, target="cpu")


def test_reports_obey_the_schema(real):
    VALIDATOR.check_schema(report_schema())
    assert real.buffers and real.timeline and real.by_kind
    for report in (real, samples.gpt_report(), samples.bare_report()):
        VALIDATOR.validate(json.loads(report.to_json()))
        VALIDATOR.validate(json.loads(json.dumps(report.to_dict(details=False))))


def test_every_field_is_in_the_schema_and_nothing_else_is_taken(real):
    table = json.loads(real.to_json())
    assert set(report_schema()["properties"]) == set(table)
    for change in ({"novel": 1}, {"peak_bytes": "3"}, {"peak_bytes": -1}, {"fits": "perhaps"}, {"schema": "x/1"}):
        assert not VALIDATOR.is_valid(table | change)
    assert not VALIDATOR.is_valid({name: value for name, value in table.items() if name != "target"})
    assert not VALIDATOR.is_valid(table | {"buffers": [table["buffers"][0] | {"novel": 1}]})


def test_reports_are_read_back_as_they_were(real):
    for report in (real, samples.gpt_report(), samples.bare_report()):
        assert MemoryReport.from_dict(json.loads(report.to_json())) == report


def test_a_report_without_details_is_read_back_without_them(real):
    found = MemoryReport.from_dict(real.to_dict(details=False))
    assert found == dataclasses.replace(real, buffers=(), by_layer=(), timeline=None, source_lines=())


BAD = {
    "no object": (lambda t: [t], "an object with the schema"),
    "another schema": (lambda t: t | {"schema": "jaxmem.report/9"}, "jaxmem.report/9"),
    "no schema": (lambda t: {"a": 1}, "the schema None"),
    "a comparison": (lambda t: {"rows": [t]}, "a comparison"),
    "a novel key": (lambda t: t | {"novel": 1}, "'novel', which it has not"),
    "a novel key of a buffer": (lambda t: t | {"buffers": [t["buffers"][0] | {"novel": 1}]}, r"buffers\[0\]"),
    "a missing key": (lambda t: {n: v for n, v in t.items() if n != "target"}, "the key 'target'"),
    "a missing key of a moment": (
        lambda t: t | {"timeline": t["timeline"] | {"moments": [{}]}},
        "'position' in timeline",
    ),
    "text for bytes": (lambda t: t | {"peak_bytes": "3"}, "a whole number, not negative in peak_bytes"),
    "true for bytes": (lambda t: t | {"peak_bytes": True}, "peak_bytes; got True"),
    "negative bytes": (lambda t: t | {"peak_bytes": -3}, "got -3"),
    "negative bytes of a kind": (lambda t: t | {"by_kind": {"code": -3}}, "got -3"),
    "a number too large": (lambda t: t | {"flops": 10**30}, "flops"),
    "an infinity": (lambda t: t | {"step_seconds": float("inf")}, "a finite number"),
    "half a character": (lambda t: t | {"name": "\ud800"}, "text in name"),
    "a list for an object": (lambda t: t | {"by_kind": []}, "an object of kinds"),
    "text for a list": (lambda t: t | {"warnings": "none"}, "a list in warnings"),
    "another verdict": (lambda t: t | {"fits": "perhaps"}, "'yes', 'no', 'uncertain'"),
}


@pytest.mark.parametrize("spoil, words", BAD.values(), ids=BAD)
def test_what_is_no_report_is_refused_with_the_place(real, spoil, words):
    with pytest.raises(ReportReadError, match=words):
        MemoryReport.from_dict(spoil(json.loads(real.to_json())))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_report_changed_anywhere_is_read_or_refused(data):
    place = table = copy.deepcopy(SMALL)
    while isinstance(place, dict | list) and place:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            place[key] = data.draw(st.none() | st.booleans() | st.integers() | st.text() | st.just([]) | st.just({}))
            break
        place = place[key]
    try:
        report = MemoryReport.from_dict(table)
    except ReportReadError:
        return
    VALIDATOR.validate(json.loads(report.to_json()))
