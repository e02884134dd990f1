"""Rates fitted to a made-up compiler that fuses: its seconds are the model's, each kind of them off by a factor."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.remat.auto import Measured, Rates, build_problem, fit
from jaxmem.remat.auto._assignment import plain, standard
from jaxmem.remat.auto._costs import equation_cost
from jaxmem.remat.auto._learnt import Learnt, fitted, quickest
from jaxmem.remat.auto._levels import levels
from jaxmem.remat.auto._trial import Trial

LAYERS, ROWS, WIDTH, WIDE = 6, 4096, 512, 2048
H100 = Rates.of(None)


def layer(x, w):
    x = x + jnp.tanh(jnp.sin(x) @ w["in"]) @ w["out"]
    return x + jax.nn.gelu(jnp.cos(x) @ w["up"]) @ w["down"]


def loss(weights, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0].sum()


@functools.cache
def problem():
    shapes = {"in": (WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, WIDE), "down": (WIDE, WIDTH)}
    weights = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16) for name, shape in shapes.items()}
    return build_problem(loss, (weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)), {}, H100)


SQUARE, UP = 2 * ROWS * WIDTH * WIDTH, 2 * ROWS * WIDTH * WIDE


class Fusing:
    """A compiler: products take `product` times the model's seconds, all else `rest`, a kept value `keep`."""

    def __init__(self, *, product=1.0, rest=1.0, keep=1.0, base=1e-3, tells=True):
        c = problem().groups[0].candidates
        seconds = np.where(c.flops > 0, product, rest) * c.seconds
        self.truth = dataclasses.replace(c, seconds=seconds, keep_seconds=keep * c.keep_seconds)
        self.base, self.asked = base, []
        by_flops = {int(f): s for f, s in zip(c.flops, seconds, strict=True) if f}
        self.forward = ((0, LAYERS * seconds[c.flops == 0].sum()), *by_flops.items()) if tells else ()

    def seconds(self, assignment):
        return self.base + LAYERS * self.truth.price(assignment.choices["scan"], "seconds")

    def __call__(self, assignment):
        self.asked.append(assignment)
        peak = assignment.total_bytes + 10**6
        return Measured(peak_bytes=peak, seconds=self.seconds(assignment), forward=self.forward)

    def trial(self, assignment):
        return self(assignment).trial(assignment)

    def fastest(self):
        """Of all policies, corners and neighbours of the fastest of these."""
        pool = list(levels(problem(), plain(problem())))
        return min(map(self.seconds, [*pool, *levels(problem(), min(pool, key=self.seconds))]))


def test_each_product_gets_the_seconds_of_its_flops_and_all_else_its_share_of_the_rest():
    given = problem().groups[0].candidates
    rest = LAYERS * given.seconds[given.flops == 0].sum()
    found = fitted(problem(), ((0, 0.1 * rest), (SQUARE, 7e-5), (UP, 9e-5))).groups[0].candidates
    assert set(found.seconds[given.flops == SQUARE]) == {7e-5} and set(found.seconds[given.flops == UP]) == {9e-5}
    assert np.allclose(found.seconds[given.flops == 0], 0.1 * given.seconds[given.flops == 0])


def test_products_in_one_kernel_give_their_mean_rate():
    given = problem().groups[0].candidates
    found = fitted(problem(), ((SQUARE, 7e-5), (UP + SQUARE, 1e-4))).groups[0].candidates
    assert np.allclose(found.seconds[given.flops == UP], 1e-4 * UP / (UP + SQUARE))
    assert set(found.seconds[given.flops == SQUARE]) == {7e-5}


def test_what_a_pass_keeps_besides_is_no_part_of_its_rates():
    assert quickest([((0, 3.0), (8, 2.0)), ((0, 1.0), (8, 5.0), (9, 1.0)), ()]) == ((0, 1.0), (8, 2.0), (9, 1.0))


def test_trials_tell_what_others_take():
    compiler, policies = Fusing(keep=8.0, tells=False), standard(problem())
    learnt = Learnt(problem(), [compiler.trial(policies[name]) for name in ("full", "dots")])
    (mean,), (deviation,) = learnt.expected([policies["none"]])
    assert abs(mean - compiler.seconds(policies["none"])) < 2 * deviation
    (tried,), (sure,) = learnt.expected([policies["dots"]])
    assert tried == pytest.approx(compiler.seconds(policies["dots"]), rel=1e-3) and sure < 0.1 * deviation
    less, more = learnt.gain([policies["full"], policies["none"]], compiler.seconds(policies["dots"]))
    assert less > more >= 0


def test_one_trial_expects_nothing_but_what_the_model_says():
    only = Trial(assignment=plain(problem()), peak_bytes=1, seconds=2.0)
    mean, _ = Learnt(problem(), [only]).expected([plain(problem())])
    assert mean == pytest.approx([2.0])


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(
    "factors",
    [{}, {"rest": 0.05}, {"rest": 0.05, "keep": 4.0}, {"product": 4.0, "rest": 0.1}, {"keep": 10.0}, {"keep": 0.05}],
    ids=str,
)
def test_a_loose_budget_finds_the_fastest_level_whatever_is_slow(factors, tells):
    compiler = Fusing(**factors, tells=tells)
    found = fit(problem(), 10**12, compiler)
    assert found.best.seconds <= min(map(compiler.seconds, standard(problem()).values()))
    assert found.best.seconds <= 1.005 * compiler.fastest()
    assert found.compiles == len(compiler.asked) <= 6


@pytest.mark.parametrize("max_compiles", [4, 6])
def test_the_fastest_built_in_policy_is_compiled_where_it_may_be_as_fast(max_compiles):
    compiler = Fusing(base=0.05)
    found = fit(problem(), 10**12, compiler, max_compiles=max_compiles)
    policy = min(standard(problem()).values(), key=compiler.seconds)
    assert found.best.seconds < compiler.seconds(policy) < 1.02 * found.best.seconds
    assert policy.choices in [each.choices for each in compiler.asked]


def test_micro_batches_run_the_function_again():
    once, four = problem(), dataclasses.replace(problem(), runs=4)
    compiler = Fusing(rest=0.1)
    assert fitted(once, compiler.forward).groups[0].candidates.seconds == pytest.approx(compiler.truth.seconds)
    (rest, *products) = compiler.forward
    again = fitted(four, ((0, 4 * rest[1]), *products))
    assert again.groups[0].candidates.seconds == pytest.approx(compiler.truth.seconds)
    tried = [compiler.trial(standard(again)[name]) for name in ("full", "none")]
    tried = [dataclasses.replace(each, seconds=4 * each.seconds) for each in tried]
    (mean,), _ = Learnt(again, tried).expected([standard(again)["dots"]])
    assert mean == pytest.approx(4 * compiler.seconds(standard(again)["dots"]), rel=1e-3)


def test_where_the_model_is_right_the_search_ends_early():
    assert fit(problem(), 10**12, Fusing()).compiles <= 4


def test_a_larger_budget_is_never_slower():
    compiler, trials, seconds = Fusing(rest=0.05, keep=3.0), (), []
    low, high = (each.total_bytes for each in (standard(problem())["full"], plain(problem())))
    for share in (0.6, 0.2, 1.5, 0.1, 0.9):
        trials = fit(problem(), int(low + share * (high - low) + 10**6), compiler, earlier=trials).trials
    for share in (0.1, 0.2, 0.6, 0.9, 1.5):
        budget = int(low + share * (high - low) + 10**6)
        found = fit(problem(), budget, compiler, earlier=trials)
        trials = found.trials
        assert found.best.peak_bytes <= budget
        seconds.append(found.best.seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_what_is_said_of_a_choice_is_by_the_rates_of_the_chip():
    best = fit(problem(), 10**12, Fusing(rest=0.05)).best.assignment
    again = problem().groups[0].candidates.price(best.choices["scan"], "seconds")
    assert best.price == pytest.approx(LAYERS * again) and 0 < best.bound <= best.price


def test_a_product_takes_the_time_of_its_tiles_on_a_gpu():
    def seconds(columns, rates):
        shapes = jnp.zeros((1536, 8192), jnp.bfloat16), jnp.zeros((8192, columns), jnp.bfloat16)
        return equation_cost(jax.make_jaxpr(jnp.dot)(*shapes).eqns[0], rates).seconds

    assert H100.multiprocessors == 132  # 12 by 11 tiles of 128 by 128: one wave
    assert seconds(1409, H100) > 1.05 * seconds(1408, H100)
    whole = dataclasses.replace(H100, multiprocessors=None)
    assert seconds(1409, whole) < 1.001 * seconds(1408, whole) == 1.001 * seconds(1408, H100)
