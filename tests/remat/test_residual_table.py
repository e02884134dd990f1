"""`residuals`: each kept value with its bytes, name, operation, module, source line and count."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jaxmem.policy import Policy
from jaxmem.remat import Residual, residual_bytes, residuals

HERE = Path(__file__).name
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


def line_of(text: str) -> str:
    """FILE:LINE of the first line of this file with `text`."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if text in line)}"


def test_a_named_product():
    def fn(x, w):
        return jnp.sin(checkpoint_name(x @ w, "product"))  # the product

    (row,) = residuals(fn, X, jax.ShapeDtypeStruct((8, 2), jnp.float32), policy=Policy(save=("product",))).rows
    assert row == Residual(
        size_bytes=4 * 2 * 4,
        shape=(4, 2),
        dtype="float32",
        name="product",
        op="dot_general",
        module="",
        source=line_of("the product"),
    )


def test_a_scan_counts_its_iterations():
    def body(x, _):
        return jnp.sin(x), None  # in the body

    (row,) = residuals(lambda x: jax.lax.scan(body, x, None, length=7)[0], X).rows
    assert (row.op, row.count, row.shape) == ("cos", 7, (7, 4, 8))
    assert row.source == line_of("in the body") and row.size_bytes == 7 * 4 * 8 * 4


def test_nested_scans_multiply():
    inner = lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=3)[0]  # noqa: E731
    (row,) = residuals(lambda x: jax.lax.scan(lambda x, _: (inner(x), None), x, None, length=5)[0], X).rows
    assert (row.count, row.shape) == (15, (5, 3, 4, 8))


def test_the_input_of_a_checkpointed_body_is_the_carry():
    block = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)), prevent_cse=False)
    (row,) = residuals(lambda x: jax.lax.scan(lambda x, _: (block(x), None), x, None, length=5)[0], X).rows
    assert (row.op, row.count) == ("carry (sin)", 5)


def test_what_a_scan_stacks_though_it_does_not_change():
    """Case 29: a loop-invariant factor is kept once an iteration where the scan stacks it, once where it does not."""

    def fn(x, z):
        y = jnp.exp(z)
        return jax.lax.scan(lambda x, _: (x * (jnp.sin(x) + y), None), x, None, length=6)[0]

    table = residuals(fn, X, X)
    assert (
        table.bytes_by("op")["exp"] == 4 * 8 * 4
    )  # for the derivative of exp itself; the scan's rows are other values
    assert all(row.count == 6 for row in table.rows if row.op != "exp")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: jax.jit(f),
        lambda f: lambda x: jax.lax.cond(x[0, 0] > 0, f, f, x),
        lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable),
        lambda f: jax.vmap(f),
    ],
)
def test_values_inside_other_programs_have_a_source(wrap):
    table = residuals(wrap(lambda x: jnp.sin(jnp.tanh(x))), X)  # within
    assert table.rows and all(row.source == line_of("# within") for row in table.rows if row.dtype == "float32")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sin(nn.Dense(8, name="up")(x))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = Block(name=f"block_{i}")(x)
        return x


def test_modules_and_the_users_line_not_flaxs():
    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    table = residuals(lambda p, x: model.apply(p, x), params, X)
    modules = {row.module for row in table.rows}
    assert {f"Model/block_{i}" for i in range(3)} <= modules
    assert {row.source.rpartition(":")[0] for row in table.rows} == {__file__}
    assert "Model/block_*" in str(table)


def test_the_total_is_residual_bytes_and_the_sum_of_every_view():
    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    fn = lambda p, x: model.apply(p, x).sum()  # noqa: E731
    table = residuals(fn, params, X, argnums=0)
    assert table.total_bytes == table.device_bytes == residual_bytes(fn, params, X, argnums=0) > 0
    for field in ("name", "op", "module", "source", "dtype", "memory"):
        assert sum(table.bytes_by(field).values()) == table.total_bytes
    assert [row.size_bytes for row in table.rows] == sorted((row.size_bytes for row in table.rows), reverse=True)


def test_before_and_after(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # all columns beside one another
    fn = lambda x: jnp.sin(jnp.tanh(checkpoint_name(x @ x, "xx")) @ x)  # noqa: E731
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    table = residuals(fn, square, policy=Policy(offload=("xx",)))
    assert table.before is not None and table.before.total_bytes == residual_bytes(fn, square)
    assert (table.total_bytes, table.host_bytes, table.device_bytes) == (256, 256, 0)
    assert residual_bytes(jax.checkpoint(fn), square) == 0
    header, *lines = str(table).splitlines()
    assert header.split() == ["before", "after", "count", "value", "op", "or", "name", "module", "source"]
    assert any("float32[8,8] host" in line and "xx" in line for line in lines)
    assert "of which on the host" in lines[-1]


def test_the_text_is_aligned_and_sums_the_small():
    def fn(x):
        big = jnp.sin(jnp.tile(x, (1000, 1)))
        return big.sum() + jnp.sin(jnp.cos(x)).sum()

    lines = str(residuals(fn, X)).splitlines()
    assert "smaller kinds" in lines[-2] and "total" in lines[-1]
    column = lines[0].index("count")
    assert all(len(line) <= column or line[column - 1] == " " for line in lines)


def test_json_holds_every_row():
    table = residuals(lambda x: jnp.sin(jnp.sin(x)), X, policy="full")
    fields = json.loads(table.to_json())
    assert fields["total_bytes"] == 0 and fields["rows"] == [] and fields["provenance"] == "modelled"
    assert fields["before"]["total_bytes"] == 2 * 4 * 8 * 4
    assert {row["source"].rpartition("/")[2].partition(":")[0] for row in fields["before"]["rows"]} == {HERE}


def test_keys_and_integers_are_rows_too():
    def fn(x, key):
        return jnp.sin(x) * jax.random.bernoulli(jax.random.split(key)[0], 0.5, x.shape)

    table = residuals(fn, X, jax.random.key(0), argnums=0)
    assert {"bool", "float32"} >= {row.dtype for row in table.rows} and table.total_bytes > 0
