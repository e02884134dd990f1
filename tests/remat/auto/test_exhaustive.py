"""The solver against all choices there are, one by one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxmem.remat.auto import Rates, build_problem
from jaxmem.remat.auto._assignment import assigned
from jaxmem.remat.auto._candidates import Choice
from jaxmem.remat.auto._solve import heavy
from jaxmem.remat.auto._within import assign

BUDGETS = (0.3, 0.5, 0.7, 0.9, 1.1)


def gated(x, w):
    return jnp.tanh(x @ w) * jax.nn.sigmoid(jnp.sin(x) @ w)


def shared(x, w):
    h = jnp.sin(x @ w)
    return h * jnp.cos(h @ w) + x


def chain(x, w):
    for _ in range(4):
        x = jnp.sin(x @ w)
    return x


FUNCTIONS = {fn.__name__: fn for fn in (gated, shared, chain)}


@functools.cache
def problem(name):
    """One block, scanned, so that its inputs have to be kept."""
    step = lambda x, w: (FUNCTIONS[name](x, w), None)  # noqa: E731
    x, w = jax.ShapeDtypeStruct((256, 64), "float32"), jax.ShapeDtypeStruct((3, 64, 64), "float32")
    return build_problem(lambda x, w: jax.lax.scan(step, x, w)[0].sum(), (x, w), {}, Rates.of(None), argnums=(0, 1))


@functools.cache
def everything(name, objective):
    """All choices that can be carried out: (bytes, price, what runs again)."""
    given = problem(name)
    (group,), (block,) = given.groups, given.group_of
    c, found = group.candidates, []
    assert 6 <= len(c.values) <= 16
    for flags in itertools.product((False, True), repeat=len(c.values)):
        choice = Choice(kept=tuple(i for i, kept in enumerate(flags) if kept))
        missing = c.read(choice) & (c.maker < 0)
        missing[list(choice.kept)] = False
        if not missing.any() and not (c.recomputed(choice) & c.fixed).any():
            priced = assigned(given, {block: choice}, objective=objective)
            found.append((priced.total_bytes, priced.price, c.recomputed(choice)))
    return found


@pytest.mark.parametrize("objective", ["flops", "seconds"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_choice_within_a_budget_is_cheaper(name, objective):
    all_of_them = everything(name, objective)
    least = min(size for size, _, _ in all_of_them)
    assert assign(problem(name), least - 1, objective=objective) is None
    most = max(size for size, _, _ in all_of_them)
    for share in (0.0, *BUDGETS):
        budget = least + share * (most - least)
        found = assign(problem(name), budget, objective=objective)
        assert found is not None and found.total_bytes <= budget
        best = min(price for size, price, _ in all_of_them if size <= budget)
        assert found.price == pytest.approx(best, rel=2e-3)
        assert found.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_offloaded_runs_other_things_again_too(name):
    given = problem(name)
    c, excluded = given.groups[0].candidates, []
    weight = heavy(c.weights("flops"))
    budget = 0.6 * max(size for size, _, _ in everything(name, "flops"))
    for _ in range(4):
        found = assign(given, budget, objective="flops", offload=True, unlike=excluded)
        if found is None:
            break
        runs = [c.recomputed(*each.choices.values()) & weight for each in (found, *excluded)]
        assert all((runs[0] != other).any() for other in runs[1:])
        assert found.bound <= assign(given, budget, objective="flops", offload=True).price * (1 + 1e-9)
        excluded.append(found)
    assert len(excluded) > 1


@pytest.mark.parametrize("objective", ["flops", "seconds"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_runs_other_things_again_is_the_cheapest_that_does(name, objective):
    given = problem(name)
    c = given.groups[0].candidates
    weight, all_of_them = heavy(c.weights(objective)), everything(name, objective)
    least, most = (of(size for size, _, _ in all_of_them) for of in (min, max))
    for share in BUDGETS:
        budget = least + share * (most - least)
        excluded = []
        for _ in range(3):
            known = [c.recomputed(*each.choices.values()) & weight for each in excluded]
            differs = lambda runs: all((runs & weight != other).any() for other in known)  # noqa: B023, E731
            allowed = [price for size, price, runs in all_of_them if size <= budget and differs(runs)]
            found = assign(given, budget, objective=objective, unlike=excluded)
            assert (found is None) == (not allowed)
            if found is None:
                break
            assert found.price == pytest.approx(min(allowed), rel=2e-3)
            excluded.append(found)
