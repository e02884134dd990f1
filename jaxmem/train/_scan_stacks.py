"""Scans that fill their stacks when they begin, and not all at once, on a GPU.

`lax.scan` writes what it stacks – its outputs, and what its backward pass reads – into arrays that begin as zeros. All
zeros of one shape are one constant to XLA, which copies it for each scan; XLA:GPU before JAX 0.12 then makes all of the
copies in one kernel, before the first of the scans begins. Of blocks that each hold a scan, the stacks of all are alive
at once, however they are recomputed. Peaks of steps with full remat on an H100 in MiB (jax 0.10.2), without and with
what is done here:

    ten blocks, each a scan of 100 steps    2306    246
    eight layers over a sequence             418    153
    four LSTM layers of flax                 377    129
    two scans over six layers each           362    290
    four scans over six layers each          674    458

Without XLA's pass "copy_fusion", which makes the one kernel, the first takes 361 MiB: the constant stays alive. So the
zeros are made to depend on what the scan is given, by a barrier round both. What is computed is the same.
"""

import contextlib
import contextvars
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core.primitives import scan_p
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxmem import _compat

_FIXED = (0, 12)  # the first JAX whose XLA:GPU fills a copied constant where it is read
_LEAST = 2**20  # bytes of stacks of one shape that are worth it
Shape = tuple[int, ...]
_apart: contextvars.ContextVar[frozenset[Shape]] = contextvars.ContextVar("apart", default=frozenset())


@contextlib.contextmanager
def apart(shapes: frozenset[Shape]) -> Iterator[None]:
    """A context in which scans that are lowered for a GPU fill their stacks of these shapes when they begin."""
    if shapes:
        _register("gpu")
    token = _apart.set(shapes)
    try:
        yield
    finally:
        _apart.reset(token)


@functools.cache
def _register(platform: str) -> None:
    _compat.lower_otherwise(scan_p, platform, _lowered_apart)


def _lowered_apart(default, context, *args, **params):
    block = ir.InsertionPoint.current.block  # pyright: ignore[reportAttributeAccessIssue]
    before = len(block.operations)
    outs = default(context, *args, **params)
    if _apart.get():
        for operation in list(block.operations)[before:]:
            if operation.operation.name == "stablehlo.while":
                _fill_late(operation.operation)
    return outs


def _fill_late(loop: ir.Operation) -> None:
    """Makes the constants with which a loop begins depend on its arguments, which are those of a block."""
    zeros: dict[int, Any] = {i: value.owner for i, value in enumerate(loop.operands) if _is_fill(value, _apart.get())}
    given = [i for i, value in enumerate(loop.operands) if isinstance(value.owner, ir.Block) and _is_array(value)]
    if not zeros or not given:
        return
    with ir.InsertionPoint(loop), loop.location:
        scalars = [fill.operands[0] for fill in zeros.values()]
        late = list(stablehlo.OptimizationBarrierOp([*(loop.operands[i] for i in given), *scalars]).results)
        for i, value in zip(given, late, strict=False):
            loop.operands[i] = value
        # A scalar each: stacks of one scan that began as one array would be copies, too.
        for (i, fill), scalar in zip(zeros.items(), late[len(given) :], strict=True):
            own = fill.clone()
            own.operands[0] = scalar
            loop.operands[i] = own.results[0]


def _is_array(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType)


def _is_fill(value: ir.Value, shapes: frozenset[Shape]) -> bool:
    """Whether a value is of one of the shapes, and a scalar constant in every element."""
    if isinstance(value.owner, ir.Block) or value.owner.name != "stablehlo.broadcast_in_dim":
        return False
    scalar = value.owner.operands[0]
    constant = not isinstance(scalar.owner, ir.Block) and scalar.owner.name == "stablehlo.constant"
    return constant and not ir.RankedTensorType(scalar.type).shape and tuple(value.type.shape) in shapes


def shared(jaxpr: jex.Jaxpr, platform: str) -> frozenset[Shape]:
    """Shapes of the stacks that a platform's compiler would fill at once: several scans stack values of that shape.

    >>> import jax, jax.numpy as jnp
    >>> shared(jax.make_jaxpr(jnp.sin)(1.0).jaxpr, "gpu")
    frozenset()
    """
    if platform != "gpu" or jax.__version_info__ >= _FIXED:
        return frozenset()
    found = set()
    for scans in _levels(jaxpr):
        stacks = [{stack.aval for stack in _stacks(eqn)} for eqn in scans]
        for aval, count in Counter(itertools.chain.from_iterable(stacks)).items():
            if count > 1 and count * aval.size * aval.dtype.itemsize >= _LEAST:
                found.add(aval.shape)
    return frozenset(found)


def told(jaxpr: jex.Jaxpr, platform: str) -> tuple[str, ...]:
    """A sentence for the report of a step: which of its scans fill their stacks apart."""
    shapes = shared(jaxpr, platform)
    if not shapes:
        return ()
    scans = [eqn for level in _levels(jaxpr) for eqn in level if any(v.aval.shape in shapes for v in _stacks(eqn))]
    return (
        f"{len(scans)} scans, whose stacks have the same shapes, fill them when they begin; XLA:GPU (JAX "
        f"{jax.__version__}) would fill the stacks of all before the first one, so that all are alive at once "
        "(jax#27748). JAX 0.12 does not.",
    )


def _stacks(scan: jex.JaxprEqn) -> list:
    """What a scan stacks, as variables."""
    return scan.outvars[_compat.scan_layout(scan)[1] :]


def _levels(jaxpr: jex.Jaxpr) -> Iterator[list]:
    """The scans of a program, and of each body in it that runs several times or not at all, by themselves."""
    scans, bodies, todo = [], [], [jaxpr]
    while todo:
        for eqn in todo.pop().eqns:
            inner = _compat.called_jaxprs(eqn)
            if eqn.primitive is scan_p:
                scans.append(eqn)
            (bodies if eqn.primitive.name in ("scan", "while", "cond") else todo).extend(inner)
    yield scans
    for body in bodies:
        yield from _levels(body)
