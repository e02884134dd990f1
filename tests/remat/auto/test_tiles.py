"""Bytes of tiles in problems, shares, stored decisions and tables; no compiler is asked."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax

from jaxmem import MemoryConfig, Workload, make_train_step
from jaxmem.remat import residuals
from jaxmem.remat.auto import Rates, ResidualPlan, Stored, build_problem, within_share
from jaxmem.remat.auto._content import digest
from jaxmem.targets import Tiles, resolve_target
from jaxmem.train._remat import kept
from jaxmem.train._spec import StepSpec

V5E, H100 = resolve_target("tpu-v5e"), resolve_target("gpu-h100")
X = jax.ShapeDtypeStruct((64, 8, 8, 32), jnp.float32)  # half of the lanes are padding, whatever the order
W = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 3


def layer(x, w):
    y = x @ w
    return x + jax.nn.silu(y) * jnp.cos(y)


def unrolled(ws, x):
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2)


def scanned(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(ws))[0] ** 2)


def problem(loss, target):
    return build_problem(loss, (W, X), {}, Rates.of(target), argnums=(0,))


def test_values_are_padded_on_a_tpu_only():
    on_tpu, on_gpu = (problem(unrolled, target).groups[0].candidates for target in (V5E, H100))
    sizes = dict(zip(map(str, on_tpu.values), on_tpu.value_bytes, strict=True))
    assert sizes and on_tpu.value_bytes.max() == 2 * on_gpu.value_bytes.max() == 2 * 4 * 64 * 8 * 8 * 32


def test_what_a_tpu_computes_where_it_is_read_is_no_residual_but_of_a_scan():
    """Of an unrolled layer the input and the product are stored; a scan stacks all that is traced."""
    value = 2 * 4 * 64 * 8 * 8 * 32
    flat, loop = problem(unrolled, V5E), problem(scanned, V5E)
    assert 5 * value <= flat.plain_bytes < 6.1 * value < flat.traced_bytes  # that of the first layer is an argument
    assert loop.plain_bytes == loop.traced_bytes > 3 * 4 * value
    gpu = problem(unrolled, H100)
    assert gpu.plain_bytes == gpu.traced_bytes


def test_a_share_is_one_of_what_is_stored():
    flat = problem(unrolled, V5E)
    assert within_share(flat, 0.6).kept_bytes <= 0.6 * flat.plain_bytes < 0.6 * flat.traced_bytes
    least = within_share(flat, 0.0).kept_bytes
    share = 0.9 * least / flat.plain_bytes
    assert (
        share * flat.traced_bytes > least == within_share(flat, share).kept_bytes
    )  # no refusal for what has become less


def test_a_decision_is_stored_with_its_tiles_and_an_older_one_has_none():
    made = problem(unrolled, V5E)
    text = ResidualPlan(problem=made, assignment=within_share(made, 0.6)).to_json()
    stored = Stored.read(text)
    assert stored.rates == made.rates and stored.rates.tiles == Tiles()
    assert "tiles" not in json.loads(text)["rates"] and "tiles" in json.loads(text)
    again = build_problem(unrolled, (W, X), {}, stored.rates, argnums=(0,))
    assert ResidualPlan.of_stored(stored, again).assignment.kept_bytes == within_share(made, 0.6).kept_bytes
    dense = dataclasses.replace(made.rates, tiles=None)
    plain = build_problem(unrolled, (W, X), {}, dense, argnums=(0,))
    old = json.loads(ResidualPlan(problem=plain, assignment=within_share(plain, 0.6)).to_json())
    assert old.pop("tiles") is None and old.pop("digest")  # as an older jaxmem wrote it
    older = Stored.read(json.dumps(old | {"digest": digest(old)}))
    assert older.rates == dense
    assert ResidualPlan.of_stored(older, plain).assignment.kept_bytes == within_share(plain, 0.6).kept_bytes


def test_a_table_shows_both_bytes():
    table = residuals(lambda x: jnp.sum(jnp.sin(x) ** 2), X).stored_in(Tiles())
    assert table.stored_bytes == 2 * table.device_bytes
    shown = " ".join(str(table).split())
    assert "stored bytes" in shown and "bytes" in shown
    assert residuals(lambda x: jnp.sum(jnp.sin(x) ** 2), X).stored_in(None).stored_bytes == table.device_bytes


def test_a_step_tells_what_its_target_stores():
    step = make_train_step(Workload(unrolled, W, X, optax.sgd(0.1)), MemoryConfig())
    spec = StepSpec.of(step.workload, MemoryConfig())
    assert kept(spec, V5E).stored_bytes == problem(unrolled, V5E).plain_bytes
    assert kept(spec, H100).stored_bytes == step.residual_bytes() == kept(spec, H100).device_bytes
