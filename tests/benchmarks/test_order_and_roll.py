"""The evidence for "auto" on a model small enough for a test: cells, their file, verdicts and figures."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks import _forms, order_and_roll
from benchmarks._by_hand import plain
from benchmarks._forms import BY_HAND, Cell, Forms, form_of
from benchmarks._order_and_roll_models import MODELS, Model, shape
from jaxmem import Workload
from jaxmem._settled import Settled

GIB = 2**30


def _layer(x, w):
    return x + jnp.tanh(jnp.tanh(x @ w) @ w.T)


def _tiny() -> Model:
    def loss_of(wrap):
        def loss(params, x):
            for w in params:
                x = wrap(_layer)(x, w)
            return jnp.mean(x**2)

        return loss

    make = lambda: Workload(loss_of(lambda f: f), [shape(128, 128)] * 3, shape(4096, 128), optax.sgd(0.1))  # noqa: E731
    return Model(make=make, unrolled=True, by_hand=plain(lambda params, x, rng: loss_of(jax.checkpoint)(params, x)))


def test_a_run_and_what_is_remembered_of_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(MODELS, "tiny", _tiny())
    monkeypatch.setattr(_forms, "REMATS", ("full",))
    command = ["--models", "tiny", "--targets", "cpu", "--cache", str(tmp_path / "forms.json")]
    monkeypatch.setattr(order_and_roll, "TARGETS", ("cpu",))
    printed = []
    for more in ([], ["--limit-seconds", "0"]):
        order_and_roll.main([*command, *more])
        printed.append(json.loads(capsys.readouterr().out))
    first, second = (record["figures"] for record in printed)
    # "auto" is one of the forms that were compiled anyway.
    assert 1 <= first.pop("compiles") <= 5 and second.pop("compiles") == 0
    assert first == second
    assert first["cells"] == 7 and first["cells_missing"] == 0 and first["refused"] == 0
    assert first["worse_points"] + first["better_points"] + first["equal_points"] == 1
    assert first["over_hand_written_max"] == pytest.approx(1, abs=0.01)
    assert all(row["compile_seconds"] > 0 for row in printed[0]["rows"])


def test_when_the_time_is_up_nothing_is_compiled(monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "tiny", _tiny())
    assert Forms(limit_seconds=0).get(Cell("tiny", "cpu", "full", "plain")) is None
    order_and_roll.main(["--models", "tiny", "--targets", "gpu-h100", "--limit-seconds", "0"])
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["cells"] == figures["compiles"] == 0 and figures["cells_missing"] > 10


def test_a_form_by_its_name():
    assert form_of("plain") == (Settled(), "given")
    assert form_of("auto") == (None, "given")
    assert form_of("tied rolled fenced") == (Settled(order="tied", roll=True, random="fenced"), "given")
    assert form_of("rolled rbg") == (Settled(roll=True), "rbg")


def _record(peak, seconds, *, fits=True):
    return {"peak_bytes": peak, "temp_bytes": peak, "step_seconds": seconds, "fits": fits, "compile_seconds": 2.0}


@pytest.mark.parametrize(
    "ours, plain, verdict",
    [
        (_record(100, 1.0), _record(100, 1.0), "equal"),
        (_record(98, 1.0), _record(100, 1.0), "better"),
        (_record(100, 0.98), _record(100, 1.0), "better"),
        (_record(50, 1.02), _record(100, 1.0), "worse"),
        (_record(102, 0.5), _record(100, 1.0), "worse"),
        (_record(98, None), _record(100, None), "better"),
        (_record(200, 1.0, fits=False), _record(100, 1.0), "worse"),
        (_record(100, 1.0), _record(200, 1.0, fits=False), "better"),
        (_record(100, 1.0, fits=False), _record(200, 1.0, fits=False), "neither"),
        ({"refused": "why"}, _record(100, 1.0), "worse"),
        ({"refused": "why"}, {"refused": "why"}, "neither"),
    ],
)
def test_verdicts(ours, plain, verdict):
    assert order_and_roll.judge(ours, plain)["verdict"] == verdict


def test_figures_of_what_is_there():
    records = {
        Cell("mlp", "tpu-v5e", "full", "auto"): _record(2 * GIB, 0.2),
        Cell("mlp", "gpu-h100", "full", "auto"): _record(3 * GIB, 0.3),
        Cell("mlp", "gpu-h100", "full", "plain"): _record(2 * GIB, 0.3),
        Cell("mlp", "gpu-h100", "full", BY_HAND): _record(4 * GIB, 0.3),
        Cell("mlp", "gpu-h100", "full", "rolled"): {**_record(2 * GIB, 0.3), "compile_seconds": 1.0},
    }
    assert order_and_roll.shown(records) == {
        "mlp_v5e_temps_gib": 2.0,
        "mlp_v5e_seconds": 0.2,
        "mlp_h100_over_plain": 1.5,
        "over_hand_written_max": 0.75,
        "rolled_compile_ratio": 0.5,
    }
    rows = list(order_and_roll.compared(records))
    assert [(row["form"], row["verdict"]) for row in rows] == [("auto", "worse"), ("rolled", "equal")]
    assert order_and_roll.by_form(rows)["gpu-h100 auto"] == {
        "points": 1, "worse": 1, "better": 0, "memory": [1.5, 1.5], "time": [1.0, 1.0],
    }  # fmt: skip


@pytest.mark.parametrize("option", ["--models=bert", "--targets=gpu-h10"])
def test_unknown_parts_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        order_and_roll.main([option])
    assert "wanted some of" in capsys.readouterr().err
