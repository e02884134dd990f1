"""A decision as JSON: it comes back equal for the same blocks, and names what differs for others."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks._random_programs import random_program
from jaxmem.errors import BudgetInfeasible, DecisionError
from jaxmem.remat.auto import Rates, ResidualPlan, Stored, auto, build_problem
from jaxmem.remat.auto._assignment import in_segments, smallest
from jaxmem.remat.auto._content import content_of, digest

_X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
_W = jax.ShapeDtypeStruct((6, 16, 16), jnp.float32)


def _layer(x, w):
    return jnp.tanh(jnp.tanh(x @ w) * jnp.sin(x)), None


def _scanned(ws, x):
    return jnp.sum(jax.lax.scan(_layer, x, ws)[0])


def _unrolled(ws, x):
    for i in range(ws.shape[0]):
        x, _ = _layer(x, ws[i])
    return jnp.sum(x)


def _problem(fn=_unrolled, ws=_W, x=_X, rates=None):
    return build_problem(fn, (ws, x), {}, rates or Rates.of(None))


def _plan(fn=_unrolled, budget=0.5, **options):
    return auto(fn, budget, **options).decide(_W, _X)


def _again(plan, problem):
    return ResidualPlan.of_stored(Stored.read(plan.to_json()), problem)


@pytest.mark.parametrize("fn", [_scanned, _unrolled])
@pytest.mark.parametrize("options", [{}, {"offload": True}, {"objective": "flops"}])
def test_it_comes_back_equal(fn, options):
    plan = _plan(fn, **options)
    again = _again(plan, _problem(fn))
    assert again.assignment == plan.assignment
    assert again.hash == plan.hash and again.to_json() == plan.to_json()
    made = [str(jax.make_jaxpr(jax.grad(each.apply(fn)))(_W, _X)) for each in (plan, again)]
    assert made[0] == made[1] != str(jax.make_jaxpr(jax.grad(fn))(_W, _X))


def test_segments_offloads_and_proof_come_back():
    problem = _problem(_scanned)
    (name,) = problem.scans
    cut = in_segments(problem, smallest(problem), {name: (3,)}, objective="seconds")
    proof = {"peak_bytes": 12345, "compiles": 2, "target": "cpu", "program": "abc"}
    again = _again(ResidualPlan(problem=problem, assignment=cut, **proof), _problem(_scanned))
    assert again.assignment == cut and again.assignment.segments == {name: (3,)}
    assert {field: getattr(again, field) for field in proof} == proof
    values = list(range(len(problem.groups[0].candidates.values)))
    away = _plan(_scanned, 0.5, offload=True)
    moved = {
        n: dataclasses.replace(c, kept=c.kept[:1], offloaded=c.kept[1:]) for n, c in away.assignment.choices.items()
    }
    moved = ResidualPlan(problem=away.problem, assignment=dataclasses.replace(away.assignment, choices=moved))
    assert values and _again(moved, _problem(_scanned)).assignment.choices == moved.assignment.choices


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 0.7]))
@example(214, 0.0)  # a program that keeps nothing
@example(196, 0.5)  # an integer of a block is a cond's index
def test_those_of_random_programs_come_back_equal(seed, share):
    program = random_program(seed)
    arguments, scale = program.args[:-1], program.args[-1]
    fn = lambda *args: program.fn(*args, scale)[0]  # noqa: E731
    try:
        plan = auto(fn, share).decide(*arguments)
    except BudgetInfeasible:
        return
    again = _again(plan, build_problem(fn, arguments, {}, plan.problem.rates))
    assert again.assignment.choices == plan.assignment.choices and again.hash == plan.hash
    assert again.to_json() == plan.to_json()


def test_a_person_can_read_it():
    kind = json.loads(_plan(_scanned).to_json())["kinds"][0]
    kept = kind["choices"][0]["keep"]
    assert kept[0]["is"] == "input float32[8,16]"
    assert any(each.get("source", "").startswith("test_decision_json.py:") for each in kept)
    assert kind["times"] == 6 and kind["blocks"] == kind["choices"][0]["blocks"]


def test_content_does_not_depend_on_file_line_names_or_process(tmp_path):
    other = "\n" * 7 + (
        "import jax, jax.numpy as jnp\n"
        "from jaxmem.remat.auto import Rates, build_problem\n"
        "from jaxmem.remat.auto._content import content_of\n"
        "def layer(carry, weight):\n"
        "    first = jnp.tanh(carry @ weight)\n"
        "    return jnp.tanh(first * jnp.sin(carry)), None\n"
        "def loss(a, b):\n"
        "    for i in range(a.shape[0]):\n"
        "        b, _ = layer(b, a[i])\n"
        "    return jnp.sum(b)\n"
        "S = jax.ShapeDtypeStruct\n"
        "problem = build_problem(loss, (S((6, 16, 16), 'float32'), S((8, 16), 'float32')), {}, Rates.of(None))\n"
        "print(content_of(problem).hash)\n"
    )
    path = tmp_path / "elsewhere.py"
    path.write_text(other)
    told = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert told.stdout.split()[-1] == content_of(_problem()).hash


def _in_16_bits(shape):
    return jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16)


def _reordered(ws, x):
    for i in range(ws.shape[0]):
        x = jnp.tanh(jnp.tanh(x @ ws[i]) * jnp.sin(jnp.sin(x)))
    return jnp.sum(x)


def _otherwise_read(ws, x):
    for i in range(ws.shape[0]):
        y = jnp.tanh(x @ ws[i])
        x = jnp.tanh(jnp.sin(x) * y)  # the operands the other way round
    return jnp.sum(x)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (
            lambda: _problem(x=jax.ShapeDtypeStruct((4, 16), jnp.float32)),
            r"block 'loss\[1/6\]' with dot_general float32\[4,16\] as its value 2, which was .* float32\[8,16\]",
        ),
        (lambda: _problem(ws=_in_16_bits(_W), x=_in_16_bits(_X)), r"bfloat16\[1,16,16\] as its value 0"),
        (lambda: _problem(ws=jax.ShapeDtypeStruct((7, 16, 16), jnp.float32)), r"without blocks 'loss\[1/6\]'"),
        (lambda: _problem(_reordered), "as its value .*, which was"),
        (lambda: _problem(_otherwise_read), "made of one another"),
        (lambda: _problem(_scanned), "without blocks .* and 3 more and with block 'scan' besides"),
    ],
)
def test_other_blocks_are_named(problem, said):
    stored = Stored.read(_plan().to_json())
    with pytest.raises(DecisionError, match=said) as error:
        ResidualPlan.of_stored(stored, problem())
    assert "\n" not in str(error.value) and "leave the decision out" in error.value.do


def test_another_length_of_a_scan_is_named():
    stored = Stored.read(_plan(_scanned).to_json())
    with pytest.raises(DecisionError, match="7 runs, which were 6"):
        ResidualPlan.of_stored(stored, _problem(_scanned, ws=jax.ShapeDtypeStruct((7, 16, 16), jnp.float32)))


def test_another_version_of_jax_is_named_where_blocks_differ():
    fields = json.loads(_plan().to_json())
    fields["versions"]["jax"] = "0.9.1"
    del fields["digest"]
    fields["digest"] = digest(fields)
    with pytest.raises(DecisionError, match=f"with jax 0.9.1 .this is {jax.__version__}."):
        ResidualPlan.of_stored(Stored.read(json.dumps(fields)), _problem(_scanned))


def _changed(**fields):
    return json.dumps(json.loads(_plan().to_json()) | fields)


def _with_another_choice():
    fields = json.loads(_plan().to_json())
    one = fields["kinds"][0]["choices"][0]
    one["keep"] = one["keep"][:-1]
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (lambda: "", "JSONDecodeError"),
        (lambda: "[" * 100000, "RecursionError|JSONDecodeError"),
        (lambda: "[]", "TypeError"),
        (lambda: "{}", "KeyError"),
        (lambda: _changed(kinds=[{}]), "KeyError"),
        (lambda: _changed(peak_bytes="7"), "peak"),
        (lambda: _changed(format=2, versions={"jaxmem": "9.9"}), "format 2, written by jaxmem 9.9"),
        (lambda: _changed(segments={"loss[1/6]": [2]}), "changed since"),
        (_with_another_choice, "changed since"),
        (lambda: _changed(peak_bytes=7), "changed since"),
        (lambda: _changed(modelled=None), "changed since"),
        (lambda: _changed(digest=None), "changed since"),
    ],
)
def test_damage_is_one_paragraph(text, said):
    with pytest.raises(DecisionError, match=said) as error:
        Stored.read(text())
    assert "\n" not in str(error.value)
