"""The algebra of objectives, without any accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import Last, LossOutput, Max, Sum, WeightedMean


def values(objective):
    """(factor, total or value, weight) of each term, as Python numbers."""
    out = []
    for factor, term in objective.terms():
        total = getattr(term, "total", getattr(term, "value", term))
        weight = getattr(term, "weight", None)
        out.append((float(factor), float(total), weight if weight is None else float(weight)))
    return out


CE, AUX = WeightedMean(6.0, 3), WeightedMean(4.0, 2)


@pytest.mark.parametrize(
    "objective, want",
    [
        (CE, [(1, 6, 3)]),
        (CE + AUX, [(1, 6, 3), (1, 4, 2)]),
        (CE + 0.5 * AUX, [(1, 6, 3), (0.5, 4, 2)]),
        (AUX * 0.5 + CE, [(0.5, 4, 2), (1, 6, 3)]),
        (2 * (CE + 0.5 * AUX), [(2, 6, 3), (1, 4, 2)]),
        ((CE + AUX) / 4, [(0.25, 6, 3), (0.25, 4, 2)]),
        (CE - 2 * AUX, [(1, 6, 3), (-2, 4, 2)]),
        (-(CE - AUX), [(-1, 6, 3), (1, 4, 2)]),
        (CE + 7.0, [(1, 6, 3), (1, 7, None)]),
        (7.0 + CE, [(1, 6, 3), (1, 7, None)]),
        (7.0 - CE, [(-1, 6, 3), (1, 7, None)]),
        (CE - 7.0, [(1, 6, 3), (1, -7, None)]),
        (CE + Sum(5.0), [(1, 6, 3), (1, 5, None)]),
        (3 * Sum(5.0), [(3, 5, None)]),
        (sum([CE, AUX, Sum(5.0)]), [(1, 6, 3), (1, 4, 2), (1, 5, None)]),
        (0 + CE, [(1, 6, 3)]),
        (0.0 + CE, [(1, 6, 3)]),
    ],
)
def test_sums_and_factors(objective, want):
    assert values(objective) == want


@pytest.mark.parametrize(
    "scalar", [np.float32(2), np.float64(2), np.int64(2), np.array(2.0), jnp.float32(2), jnp.array(2)]
)
def test_numpy_and_jax_scalars_on_either_side(scalar):
    """numpy would otherwise make an object array of the term, or try to multiply its attributes."""
    for product in (scalar * CE, CE * scalar):
        assert values(product) == [(2, 6, 3)]
    assert values(CE / scalar) == [(0.5, 6, 3)]
    assert values(scalar + CE) == values(CE + scalar) == [(1, 6, 3), (1, 2, None)]
    assert values(scalar - CE) == [(-1, 6, 3), (1, 2, None)]
    assert values(CE - scalar) == [(1, 6, 3), (1, -2, None)]


@pytest.mark.parametrize("other", [np.ones(2), jnp.ones(2), [1.0], "a", None, CE])
def test_only_scalars_are_factors(other):
    for combine in (lambda: CE * other, lambda: other * CE, lambda: CE / other):
        with pytest.raises(TypeError):
            combine()
    if other is not CE:
        with pytest.raises(TypeError):
            CE + other


def test_an_objective_is_no_divisor_and_metrics_are_no_terms():
    with pytest.raises(TypeError):
        1.0 / CE
    for metric in (Max(1.0), Last(1.0)):
        with pytest.raises(TypeError):
            CE + metric


def test_operands_are_not_changed():
    both = CE + AUX
    both * 3, both + 1.0, -both
    assert values(both) == [(1, 6, 3), (1, 4, 2)] and values(CE) == [(1, 6, 3)]


def test_objectives_are_pytrees():
    objective = jax.jit(lambda x: 0.5 * WeightedMean(x, 2 * x) + Sum(x) + x)(3.0)
    assert values(objective) == [(0.5, 3, 6), (1, 3, None), (1, 3, None)]
    assert "WeightedMean" in repr(objective)
    output = jax.tree.map(lambda x: x * 2, LossOutput(CE, {"n": Sum(1.0), "m": Max(2.0), "l": Last(3.0)}, state=None))
    assert values(output.objective) == [(1, 12, 6)]
    assert {name: metric.value for name, metric in output.metrics.items()} == {"n": 2.0, "m": 4.0, "l": 6.0}
    assert LossOutput(1.0).metrics == {} and LossOutput(1.0).state is None
