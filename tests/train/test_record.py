"""A step's record, and a step with a stored decision: the same program, without a solver and without a compiler."""

import contextlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import gpt, vit_nnx
from jaxmem import MemoryConfig, Workload, checkpoint, make_train_step, train_loop
from jaxmem._processes import Together
from jaxmem._settled import AS_WRITTEN
from jaxmem.errors import BudgetInfeasible, ConfigError, DecisionError, SettingWarning
from jaxmem.remat.auto import _solve
from jaxmem.remat.auto._content import digest
from jaxmem.targets import resolve_target
from jaxmem.train import _decision, _report
from jaxmem.train._forms import spend
from jaxmem.train._record import changes, record_of, resumed_step, step_of, stored_decision
from jaxmem.train._spec import StepSpec


def _vit():
    return vit_nnx.workload(layers=2)


def _loss(params, batch):
    for w in params:
        batch = batch + jax.nn.gelu(batch @ w["in"]) @ w["out"]
    return jnp.mean(batch**2)


def _mlp(rows=256, loss=_loss, optimizer=None):
    keys = [jax.random.key(i) for i in range(5)]
    params = [{"in": jax.random.normal(k, (16, 64)) * 0.1, "out": jax.random.normal(k, (64, 16)) * 0.1} for k in keys]
    return Workload(loss, params, jax.random.normal(keys[0], (rows, 16)), optimizer or optax.adam(1e-2))


@pytest.fixture(scope="module")
def peaks():
    return {
        name: make_train_step(_mlp(), MemoryConfig(remat=name), target="cpu").report().peak_bytes
        for name in ("none", "full")
    }


@pytest.fixture(scope="module")
def config(peaks):
    return MemoryConfig(remat=f"auto:{sum(peaks.values()) // 2}B")


@pytest.fixture(scope="module")
def solved(config):
    return make_train_step(_mlp(), config, target="cpu")


@pytest.fixture
def idle(monkeypatch):
    """Where a solver or a compiler is called, the test fails."""

    def called(*args, **options):
        raise AssertionError("solved or compiled")

    monkeypatch.setattr(_solve, "minimise", called)
    monkeypatch.setattr(_report, "compiled_program", called)
    return called


def test_a_stored_decision_is_put_back_without_solving_or_compiling(solved, config, idle):
    text = solved.decision.to_json()
    for again in (
        make_train_step(_mlp(), config, target="cpu", decision=text),
        solved.with_decision(text),
        make_train_step(_mlp(), target="cpu", decision=text),  # what a plan says, which has no budget
    ):
        assert again.decision.to_json() == text
        assert again.decision.peak_bytes == solved.decision.peak_bytes <= config.budget.bytes
        assert again.lower().as_text() == solved.lower().as_text()


def _code(step):
    """The compiled program without the places in Python from which it was traced."""
    text = step.compile().as_text()
    return re.sub(r", metadata=\{[^}]*\}", "", text[text.index("\n%") :])


def test_it_compiles_to_the_same_bytes(solved, config):
    again = make_train_step(_mlp(), config, target="cpu", decision=solved.decision.to_json())
    assert again.report().peak_bytes == again.decision.peak_bytes == solved.report().peak_bytes
    assert _code(again) == _code(solved)


@pytest.mark.parametrize(("make", "target"), [(gpt.workload, "gpu-h100"), (_vit, "cpu")])
def test_models_lower_to_the_same_text(make, target):
    step = make_train_step(make(), MemoryConfig(remat="auto:0.4"), target=target)
    again = make_train_step(make(), MemoryConfig(remat="auto:0.4"), target=target, decision=step.decision.to_json())
    assert again.decision.to_json() == step.decision.to_json()
    assert again.lower().as_text() == step.lower().as_text()


def test_the_peak_is_promised_only_where_it_is_proven(solved, config):
    text = solved.decision.to_json()
    fields = json.loads(text)
    fields["versions"]["jax"] = "0.9.1"
    del fields["digest"]
    fields["digest"] = digest(fields)
    with pytest.warns(SettingWarning, match=f"by jax 0.9.1, not {jax.__version__}.*not proven"):
        other = make_train_step(_mlp(), config, target="cpu", decision=json.dumps(fields))
    assert other.decision.peak_bytes is None and other.decision.hash == solved.decision.hash
    with pytest.warns(SettingWarning, match="with another step"):
        other = make_train_step(_mlp(optimizer=optax.sgd(0.1)), config, target="cpu", decision=text)
    assert other.decision.peak_bytes is None
    with pytest.warns(SettingWarning, match="for cpu, not local"):
        assert make_train_step(_mlp(), config, decision=text).decision.peak_bytes is None


def test_what_does_not_belong_together_is_refused(solved, config):
    text = solved.decision.to_json()
    with pytest.raises(DecisionError, match=r"\[128,64\] as its value .*, which was .*\[256,64\]"):
        make_train_step(_mlp(rows=128), config, target="cpu", decision=text)
    with pytest.raises(DecisionError, match="which was"):
        solved.with_decision(make_train_step(_mlp(rows=128), MemoryConfig(remat="auto:0.5")).decision.to_json())
    with pytest.raises(ConfigError, match="remat='full'"):
        make_train_step(_mlp(), MemoryConfig(remat="full"), target="cpu", decision=text)
    tight = MemoryConfig(remat=f"auto:{solved.decision.peak_bytes - 1}B")
    with pytest.raises(ConfigError, match="is within"):
        make_train_step(_mlp(), tight, target="cpu", decision=text)
    of_share = make_train_step(_mlp(), MemoryConfig(remat="auto:0.9"), target="cpu").decision.to_json()
    with pytest.raises(DecisionError, match=r"at most 0.1 of the residuals, .*; got one that keeps 0.2.*, 400.0 KiB"):
        make_train_step(_mlp(), MemoryConfig(remat="auto:0.1"), target="cpu", decision=of_share)
    with pytest.warns(SettingWarning, match="was not compiled: that its peak is within"):
        make_train_step(_mlp(), config, target="cpu", decision=of_share)


# -- records -----------------------------------------------------------------------------------------


def test_a_record_is_json_and_says_what_a_step_is_made_with(solved):
    record = record_of(solved)
    assert json.loads(json.dumps(record)) == record
    assert record["config"] == json.loads(solved.config.to_json())
    assert record["decision"]["hash"] == solved.decision.hash
    assert record["batch"] == {"batch": "float32[256,16]"} and record["processes"] == 1
    assert record_of(print, {"batches": 3}) == {"data": {"batches": 3}}
    assert record_of(make_train_step(_mlp()))["decision"] is None


def test_differences_are_said_in_words(solved):
    record = record_of(solved)
    assert changes(record, {"jax": jax.__version__}, solved) == []
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    other = make_train_step(_mlp(rows=128), MemoryConfig(accumulation_steps=4, remat="full"), mesh=mesh)
    assert changes({**record, "processes": 2}, {"jax": "0.9.1"}, other) == [
        "accumulation_steps 1 → 4",
        f"remat {solved.config.remat} → full",
        "batch float32[256,16] → float32[128,16]",
        'mesh none → {"data": 2}',
        "processes 2 → 1",
        f"jax 0.9.1 → {jax.__version__}",
    ]
    assert changes({}, {}, other) == changes({}, {}, print) == []
    newer = {**record, "config": {**record["config"], "tiles": "dense"}}
    assert changes(newer, {}, solved) == ["tiles dense → none"]


def test_a_record_from_before_forms_reads_as_one_of_the_form_as_written(solved, config):
    """Configs and decisions of the last version have no order, roll, random and generator, and no form."""
    record = json.loads(json.dumps(record_of(solved)))
    for field in ("order", "roll", "random", "generator"):
        del record["config"][field]
    del record["decision"]["settled"], record["decision"]["digest"]
    record["decision"]["digest"] = digest(record["decision"])
    assert MemoryConfig.from_json(json.dumps(record["config"])) == config
    assert changes(record, {}, solved) == []
    step = resumed_step(record, _mlp(), config, target="cpu")
    assert step.decision.hash == solved.decision.hash and step.spec.settled == AS_WRITTEN


def test_a_record_brings_its_decision_where_the_budget_is_the_same(solved, config, idle, capsys):
    record = record_of(solved)
    step = resumed_step(record, _mlp(), config, target="cpu")
    assert step.decision.hash == solved.decision.hash
    assert step_of(record, step) is step and step_of({}, print) is print and not capsys.readouterr().err
    assert resumed_step(record, _mlp(), MemoryConfig(remat="full")).decision is None
    assert stored_decision(record, MemoryConfig(remat="auto:0.5")) is None
    assert stored_decision({}, config) is None is stored_decision(record, None)


def test_a_step_takes_the_decision_of_a_record_in_exchange_for_its_own(capsys):
    def kept(share):
        return make_train_step(_mlp(), MemoryConfig(remat=f"auto:{share}"))

    own, other = kept(0.6), kept(0)
    record = {**record_of(other), "config": record_of(own)["config"]}
    assert own.decision.hash != other.decision.hash
    made = step_of(record, own)
    assert made.decision.hash == other.decision.hash and made.lower().as_text() == other.lower().as_text()
    assert "had decided" in capsys.readouterr().err
    assert step_of(record_of(other), own) is own  # another budget


def test_a_decision_for_other_blocks_is_said_and_not_used():
    config = MemoryConfig(remat="auto:0.5")
    record, own = record_of(make_train_step(_mlp(rows=128), config)), make_train_step(_mlp(), config)
    with pytest.warns(SettingWarning, match="is decided anew.*which was"):
        assert step_of(record, own) is own
    with pytest.warns(SettingWarning, match="is decided anew.*which was"):
        assert resumed_step(record, _mlp(), config).decision.hash == own.decision.hash


def test_a_decision_moves_between_meshes():
    config, made = MemoryConfig(remat="auto:0.3"), {}
    for devices in (1, 2):
        axes = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((devices,), ("data",), axes, devices=jax.devices()[:devices]) if devices > 1 else None
        made[mesh] = make_train_step(_mlp(), config, mesh=mesh)
    for mesh, own in made.items():
        for other in made.values():
            step = resumed_step(record_of(other), _mlp(), config, mesh=mesh)
            assert step.decision.hash == other.decision.hash
            assert step.decision.assignment.kept_bytes == own.decision.assignment.kept_bytes  # a device's share


# -- several processes -------------------------------------------------------------------------------


@contextlib.contextmanager
def _process(index, monkeypatch, said):
    """As if this were one of two, the second after the first."""
    with monkeypatch.context() as patch:
        gather = (lambda _, value: said.append(value) or said) if index == 0 else (lambda _, value: [*said, value])
        patch.setattr(Together, "gather", gather)
        patch.setattr(_decision.jax, "process_count", lambda: 2)
        patch.setattr(_decision.jax, "process_index", lambda: index)
        yield


def test_one_process_solves_and_the_others_follow(monkeypatch, request):
    spec, target, said = StepSpec.of(_mlp(), MemoryConfig(remat="auto:0.5")), resolve_target("cpu"), []
    with _process(0, monkeypatch, said):
        made = spend(spec, target)
    request.getfixturevalue("idle")
    with _process(1, monkeypatch, said):
        assert spend(spec, target).decision.to_json() == made.decision.to_json() == said[0][1]


def test_a_failure_of_the_one_is_one_of_all(monkeypatch):
    spec, target, said = StepSpec.of(_mlp(), MemoryConfig(remat="auto:1KiB")), resolve_target("cpu"), []
    with _process(0, monkeypatch, said), pytest.raises(BudgetInfeasible) as first:
        spend(spec, target)
    with _process(1, monkeypatch, said), pytest.raises(BudgetInfeasible) as other:
        spend(spec, target)
    assert other.value.got == f"{first.value.got} (process 0)"


# -- resumed -----------------------------------------------------------------------------------------


def _data(window):
    return jax.random.normal(jax.random.key(window), (256, 16))


def test_a_resumed_run_under_a_budget_ends_as_the_uninterrupted_one(tmp_path, solved, config, monkeypatch):
    def trained(step, windows, folder):
        return train_loop(step, None, _data, windows, checkpoint=folder, progress=False).params

    whole = trained(solved, 6, tmp_path / "whole")
    trained(solved, 3, tmp_path / "parts")

    def called(*args, **options):
        raise AssertionError("solved")

    with monkeypatch.context() as patch:
        patch.setattr(_solve, "minimise", called)
        record = checkpoint.latest(tmp_path / "parts").record
        end = trained(resumed_step(record, _mlp(), config, target="cpu"), 6, tmp_path / "parts")
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(end), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


def test_the_loop_itself_takes_the_decision_of_what_it_resumes(tmp_path, solved, config, capsys):
    """As where the solver was stopped by its time limit, and now decides otherwise."""
    other = make_train_step(_mlp(), MemoryConfig(remat="auto:0"), target="cpu")
    train_loop(other, None, _data, 2, checkpoint=tmp_path, progress=False)
    own = make_train_step(_mlp(), MemoryConfig(remat="auto:0"), target="cpu", decision=solved.decision.to_json())
    assert own.decision.hash != other.decision.hash
    train_loop(own, None, _data, 4, checkpoint=tmp_path, progress=False)
    assert "had decided" in capsys.readouterr().err
    assert checkpoint.latest(tmp_path).record["decision"]["hash"] == other.decision.hash
