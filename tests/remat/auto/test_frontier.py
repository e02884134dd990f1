"""The curve of memory against recomputation, and its plot."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest

from jaxmem import remat
from jaxmem.report._chart import frontier_chart
from jaxmem.targets import resolve_target

WIDTHS = (32, 128, 64, 96, 32)
WEIGHTS = [jnp.ones((6, m, n)) / m for m, n in itertools.pairwise(WIDTHS)]
X = jnp.ones((64, 32))


def layer(x, weights):
    h = x
    for w in weights:
        h = jnp.tanh(jnp.sin(h) @ w)
    return x + h, None


def loss(weights, x):
    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


@pytest.fixture(scope="module", params=["seconds", "flops"])
def curve(request):
    return remat.frontier(loss, "tpu-v5e", objective=request.param)(WEIGHTS, X)


def test_more_bytes_are_cheaper_from_the_least_to_the_cheapest(curve):
    assert len(curve.points) > 3
    for a, b in itertools.pairwise(curve.points):
        assert a.total_bytes < b.total_bytes and a.price > b.price
    assert all(0 < p.bound <= p.price <= 1.002 * p.bound for p in curve.points)
    assert curve.points[0].total_bytes == min(p.total_bytes for p in (*curve.points, *curve.policies))


def test_no_policy_is_cheaper_within_the_same_bytes(curve):
    assert [p.name for p in curve.policies] == ["full", "dots_no_batch", "dots", "none"]
    for policy in curve.policies:
        within = [p.price for p in curve.points if p.total_bytes <= 1.25 * policy.total_bytes]
        assert min(within) <= policy.price * (1 + 1e-9), policy.name


def test_what_a_policy_runs_again_is_what_jax_does(curve):
    products = [6 * 2 * 64 * m * n for m, n in itertools.pairwise(WIDTHS)]
    again = {policy.name: policy.recompute_flops for policy in curve.policies}
    assert again == {"full": sum(products), "dots_no_batch": 0, "dots": 0, "none": 0}
    kept = {policy.name: policy.kept_bytes for policy in curve.policies}
    stored = remat.residuals(loss, WEIGHTS, X).stored_in(resolve_target("tpu-v5e").tiles).stored_bytes
    assert kept["full"] < kept["dots"] < kept["none"] == stored > remat.residual_bytes(loss, WEIGHTS, X)


def test_policies_that_jax_refuses_cost_no_others():
    def complex_layer(x, w):
        return x + jnp.tanh((x @ (w + 1j * w)).real), None

    ws = 0.1 * jnp.ones((3, 8, 8))
    curve = remat.frontier(lambda w, x: jax.lax.scan(complex_layer, x, w)[0].sum())(ws, jnp.ones((4, 8)))
    assert len(curve.points) > 1 and [policy.name for policy in curve.policies] == ["full", "none"]
    assert [name for name, _ in curve.refused] == ["dots_no_batch", "dots"]
    assert "dots: refused. TypeError: reduce_precision does not accept dtype complex64" in str(curve)
    assert [name for name, _ in json.loads(curve.to_json())["refused"]] == ["dots_no_batch", "dots"]
    assert list(curve.figure().data[2].text) == ["full", "none"]


def test_nothing_to_keep_is_a_frontier_of_one_point():
    curve = remat.frontier(jnp.sum)(jnp.ones(3))
    assert [point.price for point in curve.points] == [0.0]


def test_it_is_a_table_json_and_a_plot(curve):
    lines = str(curve).splitlines()
    assert lines[1 + len(curve.points) + len(curve.policies) :] == ["", f"modelled, by {curve.objective}"]
    assert json.loads(curve.to_json())["policies"][0]["name"] == "full"
    figure = curve.figure()
    chosen, bound, policies = figure.data
    assert len(chosen.x) == len(bound.y) == len(curve.points)
    assert all(b <= y for b, y in zip(bound.y, chosen.y, strict=True))
    assert list(policies.text) == [p.name for p in curve.policies]
    assert curve.objective == "flops" or "ms" in figure.layout.yaxis.title.text
    chart, page = frontier_chart(curve), curve._repr_html_()
    assert sum(len(at["spots"]) for at in chart["points"]) == len(curve.points)
    assert chart["line"].count("V") == chart["bound"].count("H") == len(curve.points) - 1
    assert page.count("spot point") == len(curve.points) + len(curve.policies) and "<script" not in page
