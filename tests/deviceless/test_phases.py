"""What makes the first state, compiled for a chip where only that tells whether a run fits."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

import jaxmem
from jaxmem.targets import resolve_target
from tests.deviceless.compiling import require

WIDTH, LAYERS = 256, 16
LEAF = 4 * WIDTH**2


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2) + sum(jnp.mean(w[0]) for w in params["frozen"])


def arrays(key=None):
    return {"w": jnp.ones((WIDTH, WIDTH)), "frozen": [jnp.ones((WIDTH, WIDTH)) for _ in range(LAYERS)]}


def report_of(params, capacity):
    workload = jaxmem.Workload(loss, params, jnp.ones((8, WIDTH)), optax.adam(0.1), trainable="w")
    target = dataclasses.replace(resolve_target("gpu-h100"), memory_bytes=capacity)
    return jaxmem.make_train_step(workload, target=target).report()


def test_a_run_whose_step_fits_may_not_begin():
    """The workload's own arrays stay beside the state that is a copy of them: here 17 leaves beside 19."""
    require("jax-cuda12-plugin", "gpu-aot")
    report, capacity = report_of(arrays(), 28 * LEAF), 28 * LEAF
    init, needed = report.phases[0], report.phases[0].peak_bytes
    assert needed is not None and report.peak_bytes is not None
    assert (report.fits, report.fits_reason[:36]) == ("no", "the peak of init (compiled), 9.0 MiB")
    assert init.name == "init" and report.peak_bytes < 21 * LEAF and 36 * LEAF <= needed < 36.5 * LEAF
    table = jaxmem.analysis.Comparison(rows=(report,), target="gpu-h100")
    assert table.choices[0].missing_bytes == needed - capacity


def test_a_bound_that_exceeds_the_device_is_no_verdict():
    require("jax-cuda12-plugin", "gpu-aot")
    report = report_of(lambda key: jax.tree.map(lambda x: x + jax.random.uniform(key), arrays()), 25 * LEAF)
    assert report.fits == "yes" and report.phases[0].provenance == "compiled"  # the bound has room for a leaf's bits
    assert 19 * LEAF <= (report.phases[0].peak_bytes or 0) < 20 * LEAF
