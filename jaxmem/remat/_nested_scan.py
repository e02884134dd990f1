"""`nested_scan`: a scan that keeps the carry of every k-th step, without copies of the parameter stack."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from jaxmem.jaxprs import is_checkpoint, segments_scope, vjp_residuals
from jaxmem.policy import Policy, as_policy
from jaxmem.remat._checkpoint import checkpoint
from jaxmem.remat._nested_pricing import segment_lengths
from jaxmem.remat._segments import Segments


def nested_scan(
    body: Callable,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    segment: int | Literal["sqrt"] | None = None,
    levels: int | None = None,
    policy: str | Policy = "full",
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """`lax.scan` whose backward pass keeps the carry of every k-th step and recomputes the others.

    The N steps are cut into segments of k. The forward pass keeps the N/k carries that segments start
    from. The backward pass takes the last segment first: it runs the segment again, now keeping what
    `policy` says of its k steps, and differentiates it. With "full" that is the carry of each step:

        kept carries   N/k + k, at least 2·√N, for k = √N
        recomputation  each step runs twice more: to find its carry, and when it is differentiated

    and with "none" it is all that the step's derivative needs, for one more run of each step: Chen et
    al.'s scheme. `levels=m` cuts each segment again: m·N^(1/m) kept carries for m more runs, where m = 1
    is a checkpoint at every step and m = 2 is √N. Where k does not divide N the last N mod k steps are a
    shorter segment: nothing is padded, but the body is compiled once more.

    Splitting or nesting `lax.scan` itself copies xs, the stacked parameters, and their gradients: k of N
    slices each, or the whole stack where scans are split. Here every loop reads its slice from the one stack
    by its index, and writes the slice's gradient into the one buffer that is the result, so nothing is copied.

    A `jax.debug.print` or callback in the body fires again with each run, so more often than in `lax.scan`.

    Args:
      body: `body(carry, x) -> (carry, y)`, as of `lax.scan`; it may close over traced arrays.
      init, xs, length: as of `lax.scan`; pytrees of arrays, PRNG keys too.
      segment: k, or "sqrt", the default, for ⌈√N⌉. A segment of N steps or more is a plain checkpoint of
        each step by `policy`.
      levels: m, instead of a segment.
      policy: what is kept of the steps of the segment that is being differentiated; a preset's name or a
        `Policy`. A body that is a block (`memory.block(body, scanned=True)`, `jaxmem.remat.checkpoint`) has its
        own policy, which takes the place of this one; in a train step whose loss declares no `memory`, so does
        the step's remat setting, unless that is "none".
      reverse, unroll: as of `lax.scan`; `unroll` applies to the innermost loops.

    Returns:
      `(carry, ys)`, as `lax.scan`.

    Raises:
      InputError: segment or levels below 1, or both; what `jaxmem.remat.checkpoint` raises about a policy, and
        what `lax.scan` raises. `jax.jvp` raises a TypeError, since the derivative is a `jax.custom_vjp`;
        `jax.grad`, also of `jax.grad`, and `jax.hessian` work.

    >>> import jax, jax.numpy as jnp
    >>> layers = jnp.linspace(0.5, 1.5, 100)
    >>> loss = lambda layers: nested_scan(lambda h, w: (jnp.sin(w * h), None), 1.0, layers, segment=10)[0]
    >>> plain = lambda layers: jax.lax.scan(lambda h, w: (jnp.sin(w * h), None), 1.0, layers)[0]
    >>> bool(jnp.allclose(jax.grad(loss)(layers), jax.grad(plain)(layers)))
    True

    Sources: Chen et al. 2016, "Training deep nets with sublinear memory cost". For comparison Griewank &
    Walther 2000, "Revolve": with c kept carries and every step run at most r times it differentiates
    binomial(c + r, c) steps, which is the optimum; segments of equal length come near it and stay loops.
    """
    given = length
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else None for leaf in jax.tree.leaves(xs)}
    lengths |= set() if length is None else {length}
    length = lengths.pop() if len(lengths) == 1 else None
    if length is None:
        return lax.scan(body, init, xs, given, reverse=reverse, unroll=unroll)  # which says what is wrong
    cuts, policy = segment_lengths(length, segment, levels), as_policy(policy)
    if cuts in ((), (1,)):
        step = checkpoint(body, policy if cuts == () and segment != 1 else "full", scanned=True)
        with jax.named_scope(segments_scope((1,))):
            return lax.scan(step, init, xs, length, reverse=reverse, unroll=unroll)

    jaxpr, init, out_tree = _trace(body, init, xs, length, reverse)
    # Only tracers can have a gradient; what else the body closes over stays inside.
    traced = [isinstance(const, Tracer) for const in jaxpr.consts]

    def flat_body(consts, carry, x):
        consts = iter(consts)
        consts = [next(consts) if t else const for t, const in zip(traced, jaxpr.consts, strict=True)]
        outs = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr.jaxpr, consts))(*carry, *x)
        return outs[: len(carry)], outs[len(carry) :]

    consts = [const for t, const in zip(traced, jaxpr.consts, strict=True) if t]
    xs = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in jax.tree.leaves(xs)]
    plan = functools.partial(Segments, body=flat_body, length=length, reverse=reverse, unroll=unroll)
    init = jax.tree.leaves(init)
    if is_checkpoint(jaxpr.jaxpr):
        carry, ys = _scan_marked(plan, cuts, consts, init, xs)
    else:
        cuts = (*cuts, 1) if policy == Policy() and cuts[-1] != 1 else cuts
        carry, ys = plan(cuts=cuts, policy=policy).scan()(consts, init, xs)
    return jax.tree.unflatten(out_tree, [*carry, *ys])


def nested_scan_of(body: jex.ClosedJaxpr, cuts: tuple[int, ...], like: dict, num_consts: int, num_carry: int, args):
    """The outputs of a nested scan whose body is a jaxpr on flat values, which has a policy already.

    Args:
      body: `(*consts, *carry, *x) -> (*carry, *y)`.
      cuts: the segments of the nested scan that it takes the place of; (1,) for a checkpoint of each step.
      like: parameters of the scan equation that it takes the place of.
      num_consts, num_carry: numbers of inputs.
      args: inputs; the scanned ones as stacks.
    """
    run = jex.jaxpr_as_fun(body)

    def flat_body(consts, carry, x):
        outs = run(*consts, *carry, *x)
        return outs[:num_carry], outs[num_carry:]

    how = {name: like[name] for name in ("length", "reverse", "unroll")}
    consts, init, xs = args[:num_consts], args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]
    if cuts == (1,):
        carry, ys = lax.scan(functools.partial(flat_body, consts), init, xs, **how)
    else:
        plan = functools.partial(Segments, body=flat_body, **how)
        carry, ys = _scan_marked(plan, cuts, consts, init, xs)
    return [*carry, *ys]


def _scan_marked(make: Callable[..., Segments], cuts: tuple[int, ...], consts: list, init: list, xs: list):
    """Runs a plan whose body is a checkpoint: its policy, not the plan's, says what is kept of a step."""
    plan = make(cuts=cuts, policy=Policy(rest="save"))
    x = jax.eval_shape(lambda xs: [leaf[0] for leaf in xs], xs)
    _, kept = vjp_residuals(plan.body, consts, init, x)
    if not kept and cuts[-1] != 1:  # as for the policy "full"
        plan = dataclasses.replace(plan, cuts=(*cuts, 1))
    return plan.scan()(consts, init, xs)


def _trace(body, init, xs, length, reverse):
    """The body's jaxpr on flat values, `init` in the dtypes that the body returns, and the tree of (carry, ys)."""
    x = jax.tree.map(lambda leaf: jax.eval_shape(lambda a: a[0], leaf), xs)
    jaxpr, out = jax.make_jaxpr(body, return_shape=True)(init, x)
    carry = out[0] if isinstance(out, tuple) and len(out) == 2 else None
    if _types(carry) != _types(init):
        # lax.scan widens Python numbers, and says what is wrong with all else.
        carry, _ = jax.eval_shape(lambda init, xs: lax.scan(body, init, xs, length, reverse=reverse), init, xs)
        init = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), init, carry)
        jaxpr, out = jax.make_jaxpr(body, return_shape=True)(init, x)
    return jaxpr, jax.tree.map(jnp.asarray, init), jax.tree.structure(out)


def _types(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves]
