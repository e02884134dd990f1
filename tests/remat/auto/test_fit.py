"""`fit` against made-up compilers: what it promises whatever they say."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks._stacks import STACKS
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto import Measured, Rates, build_problem, fit
from jaxmem.remat.auto._assignment import assigned, smallest, standard
from jaxmem.remat.auto._within import within

LAYERS, ROWS, WIDTH = 6, 4096, 64


def layer(x, w):
    for name in ("a", "b", "c"):
        x = x + jnp.tanh(jnp.sin(x) @ w[name])
    return x


def scanned(weights, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0].sum()


def unrolled(weights, x):
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w: w[i], weights))  # noqa: B023  used at once
    return x.sum()


@functools.cache
def problem(model=scanned):
    w = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return build_problem(model, (dict.fromkeys("abc", w), x), {}, Rates.of(None))


class Compiler:
    """Needs other bytes than the model thinks, by an offset and a factor, and a whim of its own."""

    def __init__(self, *, factor=1.1, offset=3_000_000, whim=0.0, seconds=None):
        self.factor, self.offset, self.whim, self.seconds = factor, offset, whim, seconds
        self.asked = []

    def peak(self, assignment):
        whim = self.whim * (assignment.kept_bytes // 1000 % 7 - 3) / 3
        return int(assignment.total_bytes * (self.factor + whim)) + self.offset

    def __call__(self, assignment):
        self.asked.append(assignment)
        return Measured(peak_bytes=self.peak(assignment), seconds=self.seconds and self.seconds(assignment))


def ends():
    compiler, plain = Compiler(), standard(problem())
    return compiler.peak(plain["full"]), compiler.peak(plain["none"])


@pytest.mark.parametrize("whim", [0.0, 0.05])
@pytest.mark.parametrize("objective", ["seconds", "flops"])
def test_the_peak_stays_within_the_budget_in_at_most_six_compiles(objective, whim):
    low, high = ends()
    for share in (0.05, 0.3, 0.5, 0.8, 1.5):
        compiler = Compiler(whim=whim)
        budget = int(low + share * (high - low) + whim * high)
        found = fit(problem(), budget, compiler, objective=objective)
        assert found.best.peak_bytes == compiler.peak(found.best.assignment) <= budget
        assert found.compiles == len(compiler.asked) <= 6


def test_the_choice_is_the_cheapest_that_the_compiler_would_take():
    low, high = ends()
    for share in (0.2, 0.4, 0.6):
        compiler, budget = Compiler(), int(low + share * (high - low))
        found = fit(problem(), budget, compiler, objective="flops")
        room = (0.99 * budget - compiler.offset) / compiler.factor  # were the model corrected from the start
        assert found.best.assignment.price <= within(problem(), room, objective="flops", offload=False).price * 1.001
        assert found.compiles <= 4


def ladder():
    """Choices of which each is much cheaper than the one before, the fewest bytes first."""
    plain = standard(problem(), objective="flops")
    low, high = plain["full"].total_bytes, plain["none"].total_bytes
    found = []
    for i in range(61):
        one = within(problem(), low + i * (high - low) / 60, objective="flops")
        if one is not None and (not found or one.price < 0.8 * found[-1].price):
            found.append(one)
    return found


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_choice_that_the_model_thinks_too_large_is_tried_where_much_is_left(step):
    """Its peak is the budget, and less than the model says; only a compile can tell."""
    after = ladder()[step]
    budget = int(0.93 * after.total_bytes)
    before = within(problem(), budget, objective="flops")
    assert before is not None and before.price > 1.2 * after.price and before.total_bytes < 0.95 * budget

    def measure(assignment):
        size = assignment.total_bytes
        return Measured(peak_bytes=min(size, budget) if assignment.price <= after.price else size)

    found = fit(problem(), budget, measure, objective="flops")
    assert found.best.assignment.price <= after.price * (1 + 1e-9)


def test_what_is_known_makes_the_first_proposal_exact():
    low, high = ends()
    first = fit(problem(), int(low + 0.5 * (high - low)), Compiler(), objective="flops")
    again = Compiler()
    second = fit(problem(), int(low + 0.5 * (high - low)), again, objective="flops", earlier=first.trials)
    assert not again.asked and second.compiles == 0
    assert second.best.assignment.choices == first.best.assignment.choices


def test_a_larger_budget_never_gets_a_worse_choice():
    low, high = ends()
    trials, prices = (), {}
    for share in (0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 0.6):
        found = fit(problem(), int(low + share * (high - low)), Compiler(whim=0.05), earlier=trials)
        trials = found.trials
    for share in (0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.9):
        budget = int(low + share * (high - low))
        prices[share] = fit(problem(), budget, Compiler(whim=0.05), earlier=trials).best.assignment.price
    assert list(prices.values()) == sorted(prices.values(), reverse=True)


def test_the_smallest_peak_reached_is_named():
    compiler = Compiler()
    with pytest.raises(BudgetInfeasible, match="MiB as the smallest") as raised:
        fit(problem(), compiler.offset, compiler)
    assert smallest(problem()).choices in [asked.choices for asked in compiler.asked]
    assert f"{min(map(compiler.peak, compiler.asked)) / 2**20:.1f}" in str(raised.value)


def test_a_refusal_tells_a_byte_from_none():
    compiler = Compiler()
    with pytest.raises(BudgetInfeasible):
        fit(problem(), compiler.offset, compiler)
    reached = min(map(compiler.peak, compiler.asked))
    with pytest.raises(BudgetInfeasible) as refused:
        fit(problem(), reached - 1, Compiler())
    assert f"{reached - 1:,} bytes" in refused.value.wanted and f"{reached:,} bytes" in refused.value.got


def test_the_compilers_seconds_decide_where_there_are_any():
    slow = Compiler(seconds=lambda assignment: 1.0 + assignment.kept_bytes / 1e9)  # whatever is kept makes it slower
    _, high = ends()
    found = fit(problem(), 2 * high, slow)
    assert found.best.assignment.choices == smallest(problem()).choices
    fast = Compiler(seconds=lambda assignment: 1.0 - assignment.kept_bytes / 1e9)
    found = fit(problem(), 2 * high, fast)
    assert found.best.seconds <= min(fast.seconds(assignment) for assignment in standard(problem()).values())
    assert found.compiles <= 6


def test_different_members_of_unrolled_blocks_fill_the_budget():
    many = problem(unrolled)
    compiler = Compiler(factor=1.0, offset=0)
    enough = fit(many, 10**9, compiler, objective="flops").best.peak_bytes
    least = compiler.peak(standard(many)["full"])
    budget = (enough + least) // 2
    found = fit(many, budget, compiler, objective="flops")
    assert len(set(found.best.assignment.choices.values())) > 1
    assert 0.9 * budget <= found.best.peak_bytes <= budget


@pytest.mark.parametrize("name", ["full", "dots_no_batch", "dots", "none"])
def test_no_built_in_policy_is_cheaper(name):
    plain = standard(problem(), objective="flops")
    compiler = Compiler(factor=1.0, offset=0)
    found = fit(problem(), int(1.01 * compiler.peak(plain[name])), compiler, objective="flops")
    assert found.best.assignment.price <= plain[name].price * (1 + 1e-9)


GPT = dataclasses.replace(STACKS["gpt"], batch=2, time=64, width=32, heads=2, kv_heads=2, hidden=128, layers=3)


@functools.cache
def gpt(vocabulary):
    """Layers whose backward pass needs the most where the vocabulary is small, else the logits'."""
    stack = dataclasses.replace(GPT, vocabulary=vocabulary)
    return build_problem(stack.loss(), stack.shapes(), {}, Rates.of(None), argnums=(0,))


def rule_round_the_end(given, more):
    """A compiler that needs so much more bytes where what follows the last block has a rule of ours round it."""
    head = given.groups[given.group_of["head"]].candidates

    def measure(assignment):
        chosen = assignment.choices["head"]
        size = assigned(given, assignment.choices | {"head": head.plain}).total_bytes
        return Measured(peak_bytes=size + (0 if chosen == head.plain else more(chosen == head.products())))

    return measure


@pytest.mark.parametrize(("vocabulary", "name"), [(300, "full"), (300, "dots_no_batch"), (300, "dots"), (1000, "dots")])
def test_what_follows_the_last_block_stays_as_it_is_written(name, vocabulary):
    """A rule round a loss makes the compiler store logits that it fuses without one, whatever the rule saves."""
    given = gpt(vocabulary)
    policy = standard(given, objective="flops")[name]
    dear = rule_round_the_end(given, lambda products: policy.end_bytes)
    found = fit(given, int(1.01 * policy.total_bytes), dear, objective="flops")
    assert found.best.assignment.price <= policy.price * 1.001  # which is the solver's gap
    assert found.compiles <= 2


def test_logits_alone_are_kept_where_that_saves_the_most():
    given = gpt(4000)
    full = standard(given, objective="flops")["full"]
    saved = full.end_bytes // 2
    cheap = rule_round_the_end(given, lambda products: -saved if products else saved)
    found = fit(given, int(1.01 * full.total_bytes), cheap, objective="flops").best.assignment
    least = fit(given, full.total_bytes - saved // 2, cheap, objective="flops").best.assignment
    assert found.price < 0.5 * full.price and least.price < 1.01 * full.price
