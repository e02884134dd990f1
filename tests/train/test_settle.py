"""Forms that a config leaves open: settled for a target, and under a budget the best of those that may win."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem import MemoryConfig, Workload, compare, make_train_step
from jaxmem._settled import AS_WRITTEN, WORDS, Settled
from jaxmem.errors import BudgetInfeasible, DecisionError
from jaxmem.remat.auto import Measured
from jaxmem.remat.auto._assignment import smallest
from jaxmem.targets import resolve_target
from jaxmem.train import _budget, _forms, _loss, _settle
from jaxmem.train._decision import step_problem
from jaxmem.train._lever import Lever
from jaxmem.train._spec import StepSpec

CPU = resolve_target("cpu")


def _loss_of(params, batch):
    for w in params:
        batch = jnp.tanh(jnp.sin(batch @ w))
    return jnp.mean(batch**2)


def _workload(layers=6):
    return Workload(_loss_of, [jnp.eye(64) for _ in range(layers)], jnp.ones((512, 64)), optax.sgd(0.1))


def _lever(rivals=()):
    """A made-up lever that rolls where it is asked to, and says which other settings may win."""
    form = lambda spec, target: {"roll": spec.config.roll is True}  # noqa: E731
    return Lever(form=form, rivals=lambda spec, target: rivals if spec.config.roll == "auto" else ())


@pytest.fixture
def levers(monkeypatch):
    """Sets the only lever, and what it makes of a loss."""

    def put(rolled, rivals=({"roll": True},)):
        monkeypatch.setattr(_settle, "LEVERS", (_lever(rivals),))
        monkeypatch.setattr(_loss, "rolled", rolled)

    return put


def frugal(fn):
    """A form that needs less: half as many rows at a time."""

    def loss(params, batch, **keywords):
        halves = batch.reshape(2, -1, batch.shape[-1])
        return jax.lax.map(lambda half: fn(params, half, **keywords), halves).mean()

    return loss


def wasteful(fn):
    """A form that takes longer and needs as much."""
    return lambda params, batch, **keywords: fn(params, batch * jnp.sum(jnp.sin(batch @ batch.T)), **keywords)


def _peak(remat, **config):
    return make_train_step(_workload(), MemoryConfig(remat=remat, **config), target="cpu").report().peak_bytes


def test_every_form_has_words():
    for name, value in dataclasses.asdict(AS_WRITTEN).items():
        assert value in WORDS[name] and ("auto" in WORDS[name] or name == "gathers")


def test_a_setting_that_is_asked_for_has_no_rival(levers):
    levers(frugal)
    for asked, rivals in (("auto", [Settled(roll=True)]), (True, []), (False, [])):
        spec = StepSpec.of(_workload(), MemoryConfig(roll=asked))
        assert list(_settle.rivals(spec, CPU)) == rivals
        assert _settle.settled(spec, CPU).settled == Settled(roll=asked is True)


def test_a_form_that_loses_costs_one_compile_and_changes_nothing(levers):
    budget = (_peak("none", roll=False) + _peak("full", roll=False)) // 2
    spec = StepSpec.of(_workload(), MemoryConfig(remat=f"auto:{budget}"))
    levers(wasteful, rivals=())
    alone = _forms.spend_in_forms(spec, budget, CPU, {})
    levers(wasteful)
    known = {}
    made = _forms.spend_in_forms(StepSpec.of(spec.workload, spec.config), budget, CPU, known)
    assert made.settled == AS_WRITTEN and made.decision.assignment == alone.decision.assignment
    assert len(known[CPU, Settled(roll=True)].made) == 1
    assert made.decision.compiles <= 6


def test_a_form_that_wins_is_searched_and_told(levers):
    full = _peak("full", roll=False)
    levers(frugal)
    step = make_train_step(_workload(), MemoryConfig(remat=f"auto:{full - 1}"), target="cpu")
    report = step.report()
    assert step.decision.settled == step.spec.settled == Settled(roll=True) and report.roll is True
    assert step.decision.peak_bytes == report.peak_bytes < full and step.decision.compiles <= 6
    assert json.loads(report.config)["roll"] == "auto"
    again = make_train_step(_workload(), step.config, target="cpu", decision=step.decision.to_json())
    assert again.lower().as_text() == step.lower().as_text() and again.decision.peak_bytes == report.peak_bytes
    asked = dataclasses.replace(step.config, roll=False)
    with pytest.raises(DecisionError, match="a step with roll=False; got one for roll=True"):
        make_train_step(_workload(), asked, target="cpu", decision=step.decision.to_json())


def test_a_larger_budget_is_never_worse_and_no_more_is_compiled_than_allowed(levers):
    none, full = _peak("none", roll=False), _peak("full", roll=False)
    levers(frugal)
    step, seconds = make_train_step(_workload(), target="cpu"), []
    for share in (0.0, 0.3, 0.7, 1.1):
        budget = int(full + share * (none - full))
        fitted = step.fit_budget(budget, max_compiles=3)
        assert fitted.decision.peak_bytes == fitted.report().peak_bytes <= budget
        assert fitted.decision.compiles <= 3
        seconds.append(fitted.report().step_seconds)
        step = fitted
    assert seconds == sorted(seconds, reverse=True)


def test_forms_that_lose_refuse_no_budget_and_make_no_larger_one_dearer(levers, monkeypatch):
    """By a made-up compiler, which needs for each choice up to 10 % more than the model says, and in other forms half
    as much again."""

    def peak(assignment, settled):
        whim = 1 + assignment.kept_bytes // 1000 % 11 / 100
        return int(assignment.total_bytes * whim * (1.0 if settled == AS_WRITTEN else 1.5))

    def measure(compiler, assignment):
        measured = Measured(peak_bytes=peak(assignment, compiler.spec.settled))
        compiler.compiles += 1
        compiler.trials.programs[_budget._same(assignment)] = ""
        compiler.trials.made.append(measured.trial(assignment))
        return measured

    monkeypatch.setattr(_budget._Compiler, "measure", measure)
    levers(lambda fn: fn, rivals=({"roll": True}, {"order": "tied"}, {"random": "fenced"}))
    known, prices = {}, {}
    spec = StepSpec.of(_workload(), MemoryConfig(remat="auto:1GiB"))
    full = smallest(step_problem(_settle.settled(spec, CPU), CPU))
    least = peak(full, AS_WRITTEN)
    for share in (1.3, 1.0, 2.0, 1.1, 1.3, 2.0):
        found = _forms.spend_in_forms(spec, int(share * least), CPU, known).decision
        assert found.settled == AS_WRITTEN and found.peak_bytes <= share * least and found.compiles <= 6
        prices[share] = found.assignment.price
    assert [prices[share] for share in sorted(prices)] == sorted(prices.values(), reverse=True)
    assert len(known) == 4


def test_what_fits_in_no_form_is_refused_with_the_smallest_peak_of_all(levers):
    levers(frugal)
    known = {}
    with pytest.raises(BudgetInfeasible, match="smallest"):
        _forms.spend_in_forms(StepSpec.of(_workload(), MemoryConfig(remat="auto:99KiB")), 99 * 1024, CPU, known)
    made = [trial for trials in known.values() for trial in trials.made]
    assert {form for _, form in known} == {AS_WRITTEN, Settled(roll=True)} and len(made) <= 6


def test_a_form_that_cannot_be_traced_is_no_form(levers):
    def broken(fn):
        raise TypeError("no such layers")

    budget = _peak("none", roll=False) * 2
    levers(broken)
    made = _forms.spend_in_forms(StepSpec.of(_workload(), MemoryConfig(remat=f"auto:{budget}")), budget, CPU, {})
    assert made.settled == AS_WRITTEN


def test_a_comparison_that_asks_has_a_row_for_each_form_that_may_win(levers):
    levers(frugal)
    configs = {"none": MemoryConfig(), "full": MemoryConfig(remat="full", roll=False)}
    table = compare(configs, _workload(), target="cpu", forms="try")
    assert [row.name for row in table.rows] == ["none", "none, rolled", "full"]
    assert [row.roll for row in table.rows] == [False, True, False]
    assert table["none, rolled"].peak_bytes != table["none"].peak_bytes
    assert table["none, rolled"].config == table["none"].config == MemoryConfig().to_json()
    assert len(compare(configs, _workload(), target="cpu").rows) == 2
