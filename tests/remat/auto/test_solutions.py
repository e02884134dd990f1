"""What a solution says is what the function under the budget does."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks import budget_promises
from jaxmem import Workload, make_train_step
from jaxmem.errors import BudgetInfeasible, ConfigError
from jaxmem.remat import checkpoint, residual_bytes
from jaxmem.remat.auto import Rates, auto, build_problem, frontier
from jaxmem.remat.auto._assignment import smallest
from jaxmem.remat.auto._within import within_bytes
from jaxmem.targets import resolve_target

X = jnp.linspace(-1.0, 1.0, 128).reshape(8, 16)
WS = [0.5 * jnp.eye(16)] * 3


def layer(x, w):
    return x + jnp.sin(jnp.tanh(x @ w) @ w) * jnp.cos(x)


def loop(ws, x):
    for w in ws:
        x = layer(x, w)
    return x.sum()


def scanned(ws, x):
    return lax.scan(lambda h, w: (layer(h, w), None), x, jnp.stack(ws))[0].sum()


SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.99)


@pytest.mark.parametrize("fn", [loop, scanned])
def test_bytes_are_those_that_differentiation_keeps(fn):
    least = auto(fn, 0.0).solve(WS, X)
    for share in SHARES:
        if 0 < share < least.kept_bytes / least.plain_bytes:
            with pytest.raises(BudgetInfeasible, match=f"at least {least.kept_bytes / least.plain_bytes:.3g}, "):
                auto(fn, share).solve(WS, X)
            continue
        solution = auto(fn, share).solve(WS, X)
        assert solution.plain_bytes == residual_bytes(fn, WS, X)
        kept = residual_bytes(auto(fn, share), WS, X)
        assert kept <= solution.kept_bytes <= kept + X.nbytes, (share, kept)  # x is there as an argument anyway


@pytest.mark.parametrize("fn", [loop, scanned])
@pytest.mark.parametrize("objective", ["seconds", "flops"])
def test_more_bytes_never_cost_more(fn, objective):
    least = auto(fn, 0.0).solve(WS, X)
    most = least.plain_bytes + least.working_bytes
    sizes = [least.kept_bytes + least.working_bytes + i * most // 6 for i in range(6)]
    solved = [auto(fn, size, objective=objective).solve(WS, X) for size in sizes]
    for size, one in zip(sizes, solved, strict=True):
        assert one.kept_bytes <= size and one.budget_bytes == size
    prices = [one.price for one in solved]
    assert all(b <= a * (1 + 1e-6) for a, b in itertools.pairwise(prices)), prices
    assert solved[-1].recompute_flops == 0


def test_a_share_is_of_the_plain_functions_residuals():
    plain = residual_bytes(loop, WS, X)
    for share in SHARES[2:]:
        assert auto(loop, share).solve(WS, X).kept_bytes <= share * plain


def test_a_budget_that_is_too_small_says_what_is_needed():
    with pytest.raises(BudgetInfeasible, match=r"within 1000 B; got at least") as raised:
        jax.grad(auto(loop, 1000))(WS, X)
    assert "Allow more bytes" in str(raised.value)
    for wrong in ("6 apples", 1.5, -1, True, None):
        with pytest.raises(ConfigError):
            auto(loop, wrong)
    with pytest.raises(ConfigError, match="objective"):
        auto(loop, 0.5, objective="bytes")


def test_what_is_no_function_of_arrays_is_refused():
    step = make_train_step(Workload(loop, WS, X, optax.sgd(0.1)))
    for wrong in (step, step.workload, 3):
        for make in (lambda fn: auto(fn, 0.5), frontier):
            with pytest.raises(ConfigError, match=r"fit_budget"):
                make(wrong)


def test_zero_is_full_rematerialisation_however_it_is_written():
    for zero in (0, 0.0, "0", "auto:0"):
        assert auto(scanned, zero).solve(WS, X) == auto(scanned, 0.0).solve(WS, X)


def test_shapes_are_enough_to_solve():
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (WS, X))
    assert auto(scanned, 0.4).solve(*shapes) == auto(scanned, 0.4).solve(WS, X)


def _block(x, w, name=lambda value: value):
    return x + jnp.tanh(name(jnp.tanh(jnp.sin(x) @ w) @ w.T))


def test_a_solution_is_a_policy_and_the_names_to_paste():
    ws, x = jnp.ones((5, 16, 64)) / 64, jnp.ones((8, 16))
    stack = lambda block: lambda ws, x: lax.scan(lambda x, w: (block(x, w), None), x, ws)[0].sum()  # noqa: E731
    solution = auto(stack(_block), 8 * (16 + 64) * 4 * 5 + 8 * 16 * 4 * 8, objective="flops").solve(ws, x)
    policy, (line,) = solution.policy()
    # Unrolled layers share the line, whatever each of them keeps.
    loop = lambda ws, x: functools.reduce(_block, ws, 2 * x).sum()  # noqa: E731
    assert len(auto(loop, 0.6, objective="flops").solve(list(ws), x).policy()[1]) <= 2
    (name,) = policy.save
    source, _, pasted = line.partition(": ")
    assert source.rpartition(":")[0].endswith("test_solutions.py") and not policy.offload
    # What is kept is the outer tanh: as many products less as the inner, and fewer bytes. A name on it keeps nothing.
    assert {value.op for value in solution.values if value.fate == "keep"} == {"argument", "tanh"}
    assert pasted == f"checkpoint_name(<dot_general>, {name!r})"
    # With the line pasted the policy keeps what was chosen, and needs nothing of this package.
    named = checkpoint(lambda x, w: _block(x, w, lambda h: checkpoint_name(h, name)), policy, scanned=True)
    assert residual_bytes(stack(named), ws, x) == residual_bytes(auto(stack(_block), solution.budget_bytes), ws, x)


def test_a_budget_is_met_to_the_byte():
    """The solver meets it to a millionth, which is 372 bytes of the least budget of this network."""
    loss, shapes = budget_promises.models()["convnet"]
    problem = build_problem(loss, shapes, {}, Rates.of(resolve_target("tpu-v5e:1x1")), argnums=(0,))
    least = smallest(problem).total_bytes
    assert within_bytes(problem, least).total_bytes <= least
    for size in (least + 100, least + 300, least + 10_000):
        assert within_bytes(problem, size).total_bytes <= size
