"""What a solution says is what the function under the budget does."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.errors import BudgetInfeasible, ConfigError
from jaxmem.remat import residual_bytes
from jaxmem.remat.auto import auto

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


def test_shapes_are_enough_to_solve():
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (WS, X))
    assert auto(scanned, 0.4).solve(*shapes) == auto(scanned, 0.4).solve(WS, X)
