"""Random differentiable programs, each from a seed, on which a function under a budget is compared with the function.

Values are [ROWS, WIDTH] in three floating dtypes; operations are picked with their operands when the program is made,
so that it is the same whenever it is traced.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmem.remat import nested_scan

ROWS, WIDTH, LAYERS = 3, 4, 3
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RandomProgram:
    """A loss with outputs beside it, and what it is called with.

    Args:
      fn: of `args`, returns (loss, other outputs).
      args: arguments with arrays, keys, numbers and None among them.
      argnums: the arguments that are differentiated.
      low_precision: whether anything is computed in 16 bits.
    """

    fn: Callable[..., Any]
    args: tuple
    argnums: tuple[int, ...]
    low_precision: bool


def random_program(seed: int) -> RandomProgram:
    """The program of a seed."""
    rng = np.random.default_rng(seed)
    low = bool(rng.integers(3) == 0)
    steps = _steps(rng, int(rng.integers(2, 5)), depth=2, low=low)
    reads = rng.integers(0, 1 << 16, 3)
    scale = (None, 2, 0.5)[rng.integers(3)]

    def fn(params, x, side, scale):
        values = _run(steps, [x], _Inputs(params, side))
        kept = [values[i % len(values)] for i in reads]
        total = sum(jnp.mean(v.astype(jnp.float32)) for v in (values[-1], *kept[:2]))
        total = total * (1.0 if scale is None else scale)
        return total, {"value": kept[2], "count": jnp.argmax(x, axis=1), "number": 3, "nothing": None}

    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = {
        "weights": [0.4 * normal(WIDTH, WIDTH) for _ in range(LAYERS)],
        "stacked": 0.4 * normal(LAYERS, WIDTH, WIDTH),
        "bias": normal(WIDTH),
        "unused": normal(2),
    }
    x = normal(ROWS, WIDTH) if rng.integers(4) else jnp.abs(normal(ROWS, WIDTH)).at[0, 0].set(0.0)
    side = {
        "index": jnp.asarray(rng.integers(0, ROWS, ROWS), jnp.int32),
        "mask": jnp.asarray(rng.integers(0, 2, (ROWS, WIDTH)), bool),
        "key": jax.random.key(int(rng.integers(1000))),
        "none": None,
    }
    argnums = ((0,), (1,), (0, 1))[rng.integers(3)]
    return RandomProgram(fn=fn, args=(params, x, side, scale), argnums=argnums, low_precision=low)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What every part of a program may read besides its values."""

    params: dict[str, Any]
    side: dict[str, Any]

    def weight(self, number: int, like):
        return self.params["weights"][number % LAYERS].astype(like.dtype)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One operation: `run(values, inputs)` makes a value."""

    run: Callable[[list, _Inputs], Any]


def _run(steps, values: list, inputs: _Inputs) -> list:
    values = list(values)
    for step in steps:
        values.append(step.run(values, inputs))
    return values


def _steps(rng, count: int, *, depth: int, low: bool) -> list[_Step]:
    return [_step(rng, depth, low) for _ in range(count)]


def _step(rng, depth: int, low: bool) -> _Step:
    """Operations by themselves, or (while there is depth) one with operations in it; late values are read most."""
    back = [int(b) for b in rng.geometric(0.6, 2)]
    number = int(rng.integers(1 << 16))
    if depth and rng.integers(2):
        make = _NESTED[rng.integers(len(_NESTED))]
        inner = _steps(rng, int(rng.integers(1, 3)), depth=depth - 1, low=low)

        def body(x, inputs, extra=()):
            return _run(inner, [*extra, x], inputs)[-1].astype(x.dtype)

        operation = make(body, number)
    elif low and rng.integers(4) == 0:
        dtype = FLOATS[number % 3]
        operation = lambda x, y, inputs: x.astype(dtype)  # noqa: E731
    else:
        operation = functools.partial(_PLAIN[rng.integers(len(_PLAIN))], number)

    def run(values, inputs):
        x, y = (values[max(0, len(values) - b)] for b in back)
        return operation(x, y.astype(x.dtype), inputs)

    return _Step(run)


# -- operations by themselves: (number, x, y, inputs) -> value ------------------------------------------


@jax.custom_jvp
def _soft(x):
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)


_soft.defjvp(lambda primals, tangents: (_soft(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))


@jax.custom_vjp
def _root(x, turns):
    """A fixed point by a loop that cannot be differentiated, with a rule of its own; `turns` is an integer."""
    return lax.while_loop(lambda s: s[0] < turns, lambda s: (s[0] + 1, 0.5 * (s[1] + jnp.cos(s[1]) * x)), (0, x))[1]


def _root_forward(x, turns):
    y = _root(x, turns)
    return y, (y, x)


_root.defvjp(_root_forward, lambda kept, ct: (ct * kept[0] * jnp.cos(kept[1]), None))


@jax.custom_vjp
def _attention(q, k, v):
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


def _attention_forward(q, k, v):
    p = jax.nn.softmax(q @ k.T, axis=-1)
    return p @ v, (q, k, v, p)


def _attention_backward(kept, ct):
    q, k, v, p = kept
    dp = ct @ v.T
    ds = p * (dp - jnp.sum(dp * p, axis=-1, keepdims=True))
    return ds @ k, ds.T @ q, p.T @ ct


_attention.defvjp(_attention_forward, _attention_backward)


def _normal(x):
    x32 = x.astype(jnp.float32)
    return ((x32 - x32.mean(-1, keepdims=True)) * lax.rsqrt(x32.var(-1, keepdims=True) + 1e-3)).astype(x.dtype)


def _dropout(number, x, y, inputs):
    keep = jax.random.bernoulli(jax.random.fold_in(inputs.side["key"], number), 0.7, x.shape)
    return jnp.where(keep, x / jnp.asarray(0.7, x.dtype), jnp.zeros((), x.dtype))


def _stopped(number, x, y, inputs):
    """An infinite derivative where x is 0, which must stay behind its stop."""
    return jnp.tanh(y) + lax.stop_gradient(jnp.sqrt(jnp.abs(x)))


_PLAIN = (
    lambda n, x, y, i: jnp.tanh(x @ i.weight(n, x)),
    lambda n, x, y, i: jax.nn.gelu(x @ i.weight(n, x)) @ i.weight(n + 1, x),
    lambda n, x, y, i: (x @ y.T) @ x / (1 + jnp.sum(y * y)),
    lambda n, x, y, i: jnp.sin(x) * y,
    lambda n, x, y, i: jnp.exp(-x * x) + y,
    lambda n, x, y, i: jax.nn.softmax(x) / (1 + y * y),
    lambda n, x, y, i: _normal(x) * i.params["bias"].astype(x.dtype),
    lambda n, x, y, i: jnp.where(i.side["mask"], x, y),
    lambda n, x, y, i: x[i.side["index"]] + y,
    lambda n, x, y, i: jnp.cumsum(jnp.tanh(x), axis=n % 2),
    lambda n, x, y, i: jnp.sort(x, axis=n % 2) + jnp.maximum(x, y),
    lambda n, x, y, i: checkpoint_name(jnp.cos(x), f"value{n % 3}"),
    lambda n, x, y, i: _soft(x) - _soft(y),
    lambda n, x, y, i: _root(jnp.tanh(x), jnp.int32(2)),
    lambda n, x, y, i: _attention(x, y, jnp.sin(x)),
    lambda n, x, y, i: jax.nn.one_hot(jnp.argmax(x, -1), WIDTH, dtype=x.dtype) * y,
    _dropout,
    _stopped,
)


# -- operations round others: (body, number) -> (x, y, inputs) -> value; body(x, inputs, extra=()) -----------------


def _scan(body, number):
    def run(x, y, inputs):
        def step(carry, each):
            h, turn = carry
            w, index = each
            h = jnp.tanh(body(h @ w.astype(h.dtype), inputs, (y,)))
            return (h, turn + 1), (h * y, index + turn)

        xs = (inputs.params["stacked"], jnp.arange(LAYERS))
        options = {"reverse": number % 2 == 1, "unroll": 1 + number % 3 // 2}
        (h, _), (ys, _) = lax.scan(step, (x, 0), xs, **options)
        return h + (ys.mean(0) if number % 5 else lax.stop_gradient(ys[0]))

    return run


def _scan_of_scans(body, number):
    def run(x, y, inputs):
        def inner(h, w):
            h = jnp.tanh(body(h, inputs) @ w.astype(h.dtype))
            return h, h.mean()

        def outer(h, _):
            h, means = lax.scan(inner, h, inputs.params["stacked"])
            return h + means.sum().astype(h.dtype), None

        return lax.scan(outer, x, None, length=2)[0]

    return run


def _segments(body, number):
    def run(x, y, inputs):
        step = lambda h, w: (jnp.tanh(body(h, inputs, (y,)) @ w.astype(h.dtype)), None)  # noqa: E731
        return nested_scan(step, x, inputs.params["stacked"], segment=1 + number % 2)[0]

    return run


def _turns(body, number):
    return lambda x, y, inputs: lax.fori_loop(0, 2, lambda i, h: jnp.tanh(body(h, inputs)) + y * i, x)


def _branch(body, number):
    def run(x, y, inputs):
        index = inputs.side["index"][number % ROWS]
        branches = (lambda a, b: body(a, inputs), lambda a, b: a * b, lambda a, b: jnp.tanh(body(b, inputs)))
        return lax.switch(index, branches, x, y)

    return run


def _layers(body, number):
    def run(x, y, inputs):
        for i in range(LAYERS):
            scope = f"Block_{i}" if number % 2 else "stack"
            with jax.named_scope(scope):
                x = jnp.tanh(body(x @ inputs.weight(i, x), inputs))
        return x

    return run


def _rows(body, number):
    return lambda x, y, inputs: jax.vmap(lambda r, s: body(r[None] * jnp.ones((ROWS, 1), r.dtype), inputs, (s,))[0])(
        x, jnp.broadcast_to(y, (ROWS, *y.shape))
    )


def _slope(body, number):
    return lambda x, y, inputs: jax.grad(lambda x: jnp.sum(jnp.sin(body(x, inputs)).astype(jnp.float32)))(x) + y


_NESTED = (
    _scan,
    _scan_of_scans,
    _segments,
    _turns,
    _branch,
    _layers,
    _layers,
    _slope,
    _rows,
    lambda body, number: lambda x, y, inputs: jax.jit(lambda x: body(x, inputs))(x),
    lambda body, number: lambda x, y, inputs: jax.checkpoint(lambda x: body(x, inputs))(x) * y,
)
