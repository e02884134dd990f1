"""`narrow_gathers`: the gather of a value that was just widened reads the narrow value.

A cross entropy computes in float32 on logits of a 16-bit matrix product. A compiler fuses the widening cast into all
that reads it – maxima, sums, `exp` – but XLA:TPU fuses nothing into a gather: for the one logit of each row that
`take_along_axis` reads, it writes all of them in 32 bits, beside the narrow ones. To gather and then to widen gives the
same numbers to the bit. GPT-2 small at batch 8 × 1024 on a v5e, full remat: 1571 MiB of float32 logits.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from jaxmem._compat import call_to_inline, with_more_inputs
from jaxmem._shown import Brief
from jaxmem.jaxprs import (
    body_key,
    body_of,
    body_params,
    is_nested_scan,
    is_value,
    num_bytes,
    rewritten,
    with_body_params,
)

LEAST = 2**22
"""Bytes of the smallest widened value whose gathers are changed. A smaller one is no share of a peak, and fits a TPU's
memory on the chip."""
_NARROW = (jnp.bfloat16, jnp.float16)
_WIDE = (jnp.float32, jnp.float64)  # all numbers of the narrow ones are in both
# What moves elements and changes none: to move and to widen are in any order the same.
_MOVES = frozenset("reshape transpose squeeze expand_dims slice rev copy copy_p".split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widened(Brief):
    """A gather of a widened value.

    Args:
      narrow: dtype of the value before.
      wide: dtype in which it was read.
      num_bytes: of the value in the wide dtype.
    """

    narrow: str
    wide: str
    num_bytes: int


def narrow_gathers(fn: Callable, *, least: int = LEAST) -> Callable:
    """`fn`, in which a gather of a 16-bit value that was cast to 32 bits reads the value before the cast.

    No number changes, neither a value nor a gradient: what is gathered is cast, and its cotangents are added to the
    others of the wide value, in its dtype. Gathers are looked for in bodies of `jax.jit`, scans, branches and
    checkpoints, too; but for calls of `jax.jit` the cast must be in the same body. Custom derivatives are left as they
    are, and a shard_map in `fn` that types its values by the axes over which they vary.

    The numbers are those that the program says. A compiler may leave out the rounding of a product that is widened
    again (`xla_allow_excess_precision`, on by default), and does so in one form and not in the other.

    Args:
      fn: function of pytrees of arrays, such as a loss.
      least: bytes of the smallest widened value whose gathers are changed.

    >>> import jax, jax.numpy as jnp
    >>> def second(x):
    ...     return jnp.take(x.astype(jnp.float32), 1, axis=1)
    >>> program = jax.make_jaxpr(narrow_gathers(second, least=0))(jnp.ones((4, 8), jnp.bfloat16))
    >>> "custom_jvp_call" in str(program)
    True
    """

    return rewritten(fn, lambda program: jex.jaxpr_as_fun(_Edits(least).of(program)))


def widened_gathers(program: jex.ClosedJaxpr) -> tuple[Widened, ...]:
    """The gathers that `narrow_gathers` changes in a program."""
    edits = _Edits(LEAST)
    edits.of(program)
    return tuple(edits.found)


class _Edits:
    """Programs with narrow gathers, each body edited once for each set of inputs that were widened.

    Args:
      least: bytes of the smallest widened value whose gathers are changed.
    """

    def __init__(self, least: int):
        self.least, self._known = least, {}
        self.found: list[Widened] = []

    def of(self, closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """A whole program with narrow gathers."""
        return self.edit(closed, [None] * len(body_of(closed)[0].invars))[0]

    def edit(self, program, given: Sequence[Any]) -> tuple[Any, list[int]]:
        """A program with narrow gathers, and of which inputs it also takes the narrow values, after all others.

        Args:
          program: a jaxpr, closed or not.
          given: for each input the dtype that it was widened from, or None.
        """
        key = (id(program), tuple(given))
        if key not in self._known:  # jit gives the same jaxpr to every call of one function; kept, as ids come again
            self._known[key] = (program, _Edit(self).of(program, given))
        return self._known[key][1]


class _Edit:
    """The edit of one body."""

    def __init__(self, edits: _Edits):
        self.edits = edits
        self.eqns: list[jex.JaxprEqn] = []
        self.narrow: dict[jex.Var, Any] = {}  # by widened value: the narrow one
        self.moved: dict[jex.Var, jex.JaxprEqn] = {}  # by widened value: what moved another one
        self.changed = False

    def of(self, program, given):
        jaxpr, consts = body_of(program)
        inputs = {v: _narrow_var(v, dtype) for v, dtype in zip(jaxpr.invars, given, strict=True) if dtype}
        self.narrow.update(inputs)
        for eqn in jaxpr.eqns:
            name, first = eqn.primitive.name, next(filter(is_value, eqn.invars), None)
            if body_key(eqn) in eqn.params and not is_nested_scan(eqn):
                eqn = self.with_bodies(eqn)
            elif _widens(eqn):
                self.narrow[eqn.outvars[0]] = eqn.invars[0]
            elif name in _MOVES and len(eqn.invars) == 1 and self.dtype_of(first):
                self.moved[eqn.outvars[0]] = eqn
            elif name == "gather" and self.dtype_of(eqn.invars[0]) and self.is_worth_it(eqn):
                eqn = self.read(eqn)
            self.eqns.append(eqn)
        if not self.changed:
            return program, []
        read = {v for eqn in self.eqns for v in eqn.invars if is_value(v)}
        wanted = [i for i, v in enumerate(jaxpr.invars) if v in inputs and inputs[v] in read]
        invars = [*jaxpr.invars, *(inputs[jaxpr.invars[i]] for i in wanted)]
        edited = jaxpr.replace(invars=invars, eqns=self.eqns)
        return (edited if isinstance(program, jex.Jaxpr) else jex.ClosedJaxpr(edited, consts)), wanted

    def dtype_of(self, v) -> Any:
        """The dtype that a value was widened from, or None."""
        while is_value(v) and v in self.moved:
            v = self.moved[v].invars[0]
        return self.narrow[v].aval.dtype if is_value(v) and v in self.narrow else None

    def narrow_of(self, v) -> Any:
        """The narrow value of a widened one, moved where that was."""
        if v not in self.narrow:
            eqn = self.moved[v]
            source: Any = self.narrow_of(cast(jex.Var, eqn.invars[0]))
            self.narrow[v] = _narrow_var(v, source.aval.dtype)
            self.eqns.append(eqn.replace(invars=[source], outvars=[self.narrow[v]]))
        return self.narrow[v]

    def is_worth_it(self, eqn) -> bool:
        """Whether a gather reads a part of a large value, and fills with what is the same in the narrow dtype."""
        value, out, fill = eqn.invars[0].aval, eqn.outvars[0].aval, eqn.params["fill_value"]
        same = fill is None or fill == 0 or math.isnan(fill)
        return same and num_bytes(value) >= self.edits.least and math.prod(out.shape) < math.prod(value.shape)

    def read(self, eqn):
        """The gather, of the narrow value."""
        wide, indices = eqn.invars
        narrow: Any = self.narrow_of(wide)
        dtypes = {"narrow": narrow.aval.dtype.name, "wide": wide.aval.dtype.name}
        self.edits.found.append(Widened(**dtypes, num_bytes=num_bytes(wide.aval)))
        self.changed = True
        (call,) = jax.make_jaxpr(_reader(eqn))(wide.aval, narrow.aval, indices.aval).eqns
        return eqn.replace(primitive=call.primitive, params=call.params, invars=[wide, narrow, indices])

    def with_bodies(self, eqn):
        """An equation with bodies, with those edited."""
        if call_to_inline(eqn) is not None:
            key = body_key(eqn)
            program, wanted = self.edits.edit(eqn.params[key], [self.dtype_of(v) for v in eqn.invars])
            if program is eqn.params[key]:
                return eqn
            more = [self.narrow_of(eqn.invars[i]) for i in wanted]
            params = with_more_inputs(eqn, len(more)) | {key: program}
            self.changed = True
            return eqn.replace(invars=[*eqn.invars, *more], params=params)
        if eqn.params.get("check_vma"):
            return eqn
        bodies = body_params(eqn)
        edited = [self.edits.edit(body, [None] * len(body_of(body)[0].invars))[0] for body in bodies]
        if all(new is old for new, old in zip(edited, bodies, strict=True)):
            return eqn
        self.changed = True
        return with_body_params(eqn, edited)


def _widens(eqn) -> bool:
    """Whether an equation casts a narrow float, which is no literal, to a wide one."""
    if eqn.primitive.name != "convert_element_type" or not is_value(eqn.invars[0]):
        return False
    value, out = eqn.invars[0].aval, eqn.outvars[0].aval
    return value.dtype in _NARROW and out.dtype in _WIDE and not out.weak_type


def _narrow_var(v, dtype) -> jex.Var:
    return jex.Var(v.aval.update(dtype=dtype, weak_type=False))


def _reader(eqn) -> Callable:
    """The function `(wide, narrow, indices)` that computes a gather of `wide` from `narrow`, which is the same.

    Tangents are those of the wide value, so that its cotangents are added as they were. It is a custom rule, and no
    primitive, so that JAX knows how to batch it and others what it computes; differentiated, nothing reads `wide`.
    """
    gather = functools.partial(eqn.primitive.bind, **eqn.params)

    def read(wide, narrow, indices):
        return lax.convert_element_type(gather(narrow, indices), wide.dtype)

    def rule(primals, tangents):
        return read(*primals), gather(tangents[0], primals[2])

    reader = jax.custom_jvp(read)
    reader.defjvp(rule)
    return reader
