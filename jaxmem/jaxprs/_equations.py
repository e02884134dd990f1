"""Values and equations of a jaxpr: their bytes, the programs in them, and tables of primitives."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxmem._compat import called_jaxprs, name_stack, prevents_cse
from jaxmem.targets import Tiles

WATCH = "watch_names"  # the primitive through which the results of a watched block pass; see `remat/_queries.py`
TIE = "tie_gradients"  # see `_tie.py`

# Work that is worth a block. Everything else is cheap to compute again, or to keep, by itself.
HEAVY = frozenset(
    "dot_general conv_general_dilated ragged_dot ragged_dot_general scaled_matmul pallas_call ffi_call fft".split()
)
# A checkpoint of the user's own: it stays as it is, scans in it are looked for, and it counts as no work.
USER_CHECKPOINT = frozenset({"remat", "remat2", "remat3", "checkpoint"})
# Differentiating these needs none of their inputs or outputs: they are linear, or have no gradient.
KEEPS_NOTHING = frozenset(
    """add sub neg add_any reduce_sum broadcast_in_dim reshape transpose squeeze expand_dims unstack
    convert_element_type reduce_precision copy copy_p slice pad concatenate rev dynamic_slice dynamic_update_slice
    gather scatter scatter-add split stop_gradient real imag complex conj psum psum_invariant pvary pbroadcast
    all_gather all_to_all ppermute reduce_scatter psum_scatter sharding_constraint name optimization_barrier iota
    eq ne lt le gt ge and or xor not is_finite argmax argmin floor ceil round sign clamp random_bits
    random_fold_in random_split random_seed random_wrap random_unwrap random_clone shift_left shift_right_logical
    shift_right_arithmetic rem debug_callback debug_print axis_index cumsum""".split()
) | {WATCH}
KEEPS_OUTPUT = frozenset("exp exp2 tanh logistic sqrt rsqrt cbrt erf_inv".split())
# A block can compute these for itself from arguments of the loss: the cast or slice of a weight.
CHEAP = frozenset("convert_element_type reshape transpose squeeze expand_dims slice dynamic_slice rev unstack".split())
# The scope in which `remat.roll` stacks the parameters of layers: as an argument, the stack is there for both passes.
STACKED = "stacked_layers"
# Primitives whose bodies are looked into, and the parameter with the body. Custom rules stay opaque: differentiation
# follows the rule, so a block in the primal would have no effect.
BODIES = {
    **dict.fromkeys(("jit", "pjit", "shard_map", "scan"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call"), "call_jaxpr"),
    "cond": "branches",
}


def is_value(atom) -> TypeGuard[jex.Var]:
    """Whether an atom of a jaxpr is a variable, and not a literal."""
    return not isinstance(atom, jex.Literal)


def inputs_of(eqns) -> list[jex.Var]:
    """Values that equations read and do not make, in order of first use."""
    made = {v for eqn in eqns for v in eqn.outvars}
    return list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if is_value(v) and v not in made))


def equations_in(jaxpr) -> Iterator[jex.JaxprEqn]:
    """The equations of a program and of all that they call."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in called_jaxprs(eqn):
            yield from equations_in(inner)


def is_stacking(eqn) -> bool:
    """Whether an equation is a part of what stacks the parameters of rolled layers."""
    return (
        eqn.primitive.name in ("stack", "broadcast_in_dim", "concatenate") and name_stack(eqn).split("/")[-1] == STACKED
    )


def is_float(aval: Any) -> bool:
    """Whether an array, or an abstract one, is floating, so that it can be differentiated."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def num_bytes(aval) -> int:
    """Bytes of an abstract array; of a key array, those of its data; a token has none."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def stored_bytes(aval, tiles: Tiles | None) -> int:
    """Bytes of an abstract array in the memory of a chip with tiles; those of its elements where there are none."""
    if tiles is None or not num_bytes(aval):
        return num_bytes(aval)
    return tiles.stored_bytes(aval.shape, aval.dtype.itemsize)


def is_on_host(aval) -> bool:
    """Whether an abstract array waits in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def body_of(param) -> tuple[jex.Jaxpr, tuple]:
    """The jaxpr and constants of an equation's parameter, closed or not."""
    if isinstance(param, jex.ClosedJaxpr):
        return param.jaxpr, tuple(param.consts)
    return param, ()


def body_key(eqn) -> str:
    """The parameter with an equation's body, for those whose body is looked into; "" for others."""
    name = eqn.primitive.name
    if name in USER_CHECKPOINT:
        return "jaxpr" if {"jaxpr", "policy", "prevent_cse"} <= set(eqn.params) else ""
    if is_nested_scan(eqn):
        return "call_jaxpr"
    return BODIES.get(name, "")


def body_params(eqn) -> tuple[Any, ...]:
    """The programs under an equation's `body_key`, closed or not: one, or a branch each."""
    param = eqn.params.get(body_key(eqn), ())
    return tuple(param) if isinstance(param, (tuple, list)) else (param,)


def with_body_params(eqn, programs: Sequence[Any]) -> jex.JaxprEqn:
    """The equation with other programs under its `body_key`, as many as it has."""
    key = body_key(eqn)
    several = isinstance(eqn.params[key], (tuple, list))
    return eqn.replace(params=eqn.params | {key: type(eqn.params[key])(programs) if several else programs[0]})


def programs_of(eqn) -> list[tuple[jex.Jaxpr, tuple]]:
    """The jaxprs under an equation's `body_key`, each with its constants."""
    return [body_of(each) for each in body_params(eqn)]


def bodies(eqn) -> list[jex.Jaxpr]:
    """The jaxprs under an equation's `body_key`."""
    return [jaxpr for jaxpr, _ in programs_of(eqn)]


def has_checkpoint(jaxpr) -> bool:
    """Whether there is a checkpoint of the user's own in a program."""
    return any(prevents_cse(eqn) is not None for eqn in equations_in(jaxpr))


def is_checkpoint(jaxpr) -> bool:
    """Whether a program is one checkpoint and nothing else, watched or not."""
    return [prevents_cse(eqn) is not None for eqn in jaxpr.eqns if eqn.primitive.name not in (WATCH, TIE)] == [True]


# -- nested scans ------------------------------------------------------------------------------------


def segments_scope(cuts: tuple[int, ...]) -> str:
    """The named scope under which a nested scan is traced. It tells a reader of a jaxpr how the scan was cut.

    >>> segments_scope((25, 5)), segments_of("GPT/nested_scan_25_5"), segments_of("GPT/scan")
    ('nested_scan_25_5', (25, 5), ())
    """
    return "_".join(("nested_scan", *map(str, cuts)))


def segments_of(scope: str) -> tuple[int, ...]:
    """The segments in the innermost part of a name stack; () where that is not one of `segments_scope`."""
    found = re.search(r"(?:^|[/(])nested_scan((?:_\d+)+)\)*$", scope)
    return tuple(map(int, found[1][1:].split("_"))) if found else ()


def nested_segments(eqn) -> tuple[int, ...]:
    """The segments of the scan equation by which `jaxmem.remat.nested_scan` says what it computes; else ()."""
    return segments_of(name_stack(eqn)) if eqn.primitive.name == "scan" else ()


def is_nested_scan(eqn) -> bool:
    """Whether an equation is `jaxmem.remat.nested_scan` with its own derivative."""
    program = eqn.params.get("call_jaxpr") if eqn.primitive.name.startswith("custom_vjp_call") else None
    return program is not None and any(nested_segments(inner) for inner in body_of(program)[0].eqns)
