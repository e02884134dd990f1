"""Every private or version-dependent touch of JAX, Flax and Optax; each has a test that tells when it can go."""

import concurrent.futures
import contextlib
import ctypes
import functools
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend.core import primitives
from jax.interpreters import partial_eval

# Names of the effects of printing and of host callbacks; the classes are private.
_IO_EFFECTS = ("DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect")


def prune(closed: jex.ClosedJaxpr, wanted: list[bool]) -> tuple[jex.ClosedJaxpr, list[bool]]:
    """Prunes a jaxpr to the wanted outputs, without the prints and callbacks that they do not need.

    The result is for evaluation only: custom derivative rules are dropped, since dead-code elimination does not reach
    into them. Returns the smaller jaxpr, and for each input whether the jaxpr still takes it. Touches
    `jax.interpreters.partial_eval.dce_jaxpr`, which has no public equivalent with `used_outputs`.
    """
    pruned, used = partial_eval.dce_jaxpr(_values_only(closed.jaxpr), list(wanted))
    return jex.ClosedJaxpr(pruned, closed.consts), list(used)


def prune_by_place(primitive: jex.Primitive) -> None:
    """Tells dead-code elimination that an output of a primitive needs the input at its place only.

    `dce_rules` is undocumented; a rule gets the equation last, in JAX 0.12 after the inputs that are alive.
    """

    def rule(used, *rest):
        eqn = rest[-1]
        if not any(used):
            return [False] * len(used), None
        keep = lambda atoms: [atom for atom, yes in zip(atoms, used, strict=True) if yes]  # noqa: E731
        return list(used), eqn.replace(invars=keep(eqn.invars), outvars=keep(eqn.outvars))

    partial_eval.dce_rules[primitive] = rule  # pyright: ignore[reportPrivateImportUsage]


def _values_only(jaxpr):
    """The jaxpr without io effects and custom rules, at every depth, which dead-code elimination would keep."""

    def erase(effects):
        return frozenset(e for e in effects if type(e).__name__ not in _IO_EFFECTS)

    def simplify(eqn):
        if eqn.primitive in (primitives.custom_jvp_call_p, primitives.custom_vjp_call_p):
            params = {"call_jaxpr": _inside(_values_only, eqn.params["call_jaxpr"])}
            return eqn.replace(primitive=primitives.closed_call_p, params=params, effects=erase(eqn.effects))
        params = {key: _inside(_values_only, value) for key, value in eqn.params.items()}
        return eqn.replace(params=params, effects=erase(eqn.effects))

    return jaxpr.replace(eqns=[simplify(eqn) for eqn in jaxpr.eqns], effects=erase(jaxpr.effects))


def _inside(change: Callable, param: Any) -> Any:
    """A parameter of an equation, with `change(jaxpr) -> jaxpr` applied to every jaxpr in it."""
    if isinstance(param, jex.ClosedJaxpr) and not isinstance(param, jex.Jaxpr):  # one class from JAX 0.12 on
        return jex.ClosedJaxpr(change(param.jaxpr), param.consts)
    if isinstance(param, jex.Jaxpr):
        return change(param)
    if isinstance(param, (tuple, list)) and any(isinstance(p, (jex.Jaxpr, jex.ClosedJaxpr)) for p in param):
        items = [_inside(change, p) for p in param]
        return type(param)(*items) if hasattr(param, "_fields") else type(param)(items)  # named tuple of a linear solve
    return param


def whole_tracebacks() -> contextlib.AbstractContextManager:
    """A context in which JAX keeps its own frames in tracebacks, in this thread only.

    `jax.config.update` would change all threads; the option's context manager is private.
    """
    from jax._src import config

    return config.traceback_filtering("off")


def name_stack(eqn: jex.JaxprEqn) -> str:
    """The scopes under which an equation was traced, as "GPT/Block_0/vmap(attention)".

    `JaxprEqn.source_info` is undocumented.
    """
    return str(eqn.source_info.name_stack)


def effect_names(eqn: jex.JaxprEqn) -> frozenset[str]:
    """Class names of an equation's effects; not all of the classes are public."""
    return frozenset(type(effect).__name__ for effect in eqn.effects)


def called_jaxprs(eqn: jex.JaxprEqn) -> list[jex.Jaxpr]:
    """The jaxprs in an equation's parameters: a scan's body, the branches of a cond, the program of a checkpoint."""
    return [jaxpr for jaxpr, _ in called_programs(eqn)]


def called_programs(eqn: jex.JaxprEqn) -> list[tuple[jex.Jaxpr, list]]:
    """`called_jaxprs`, each with its constants.

    Under `jax_remat3` a checkpoint is an object in the undocumented parameter `_prim`; in JAX 0.12 the equation has the
    parameters of that object.
    """
    found = []
    for param in eqn.params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            consts: list = []
            for _ in range(2):  # the object of a checkpoint holds a closed jaxpr, which holds the jaxpr
                consts = list(getattr(item, "consts", consts))
                item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns") and hasattr(item, "outvars"):
                found.append((item, consts))
    return found


def scan_layout(eqn: jex.JaxprEqn) -> tuple[int, int, int]:
    """Numbers of constants, carries and scanned inputs of a scan.

    They are told by rank, since the parameters for them are undocumented and changed in JAX 0.12.
    """

    def rank(atom):
        return len(getattr(atom.aval, "shape", ()))

    body = called_jaxprs(eqn)[0]
    carried = sum(rank(outer) == rank(inner) for outer, inner in zip(eqn.outvars, body.outvars, strict=True))
    scanned = sum(rank(outer) > rank(inner) for outer, inner in zip(eqn.invars, body.invars, strict=True))
    return len(eqn.invars) - carried - scanned, carried, scanned


def checkpoint_name_of(eqn: jex.JaxprEqn) -> str | None:
    """The name that `checkpoint_name` gave to an equation's output; None for other equations.

    Under `jax_remat3` the primitive `name` is replaced by a private object of class `CheckpointName`.
    """
    holder = eqn.params.get("_prim")
    kind = eqn.primitive.name if holder is None else type(holder).__name__
    if kind not in ("name", "CheckpointName", "CheckpointNameFwd"):
        return None
    return eqn.params["name"] if holder is None else holder.name


def prevents_cse(eqn: jex.JaxprEqn) -> bool | None:
    """Whether a `jax.checkpoint` equation has its barrier; None for other equations.

    It is recognised by its parameters, since under `jax_remat3` a checkpoint is a private object and not `remat_p`. In
    JAX 0.10 that object has no parameter for the barrier, and always has one.
    """
    params = getattr(eqn.params.get("_prim"), "params", eqn.params)
    if not {"jaxpr", "policy"} <= set(params):
        return None
    return params.get("prevent_cse", True) is not False


def checkpoint_policy(eqn: jex.JaxprEqn) -> Any:
    """The policy of a `jax.checkpoint` equation, recognised as by `prevents_cse`; None for other equations."""
    params = getattr(eqn.params.get("_prim"), "params", eqn.params)
    return None if prevents_cse(eqn) is None else params["policy"]


def linear_program(vjp, count: int) -> tuple[jex.Jaxpr, list]:
    """The linear jaxpr that a `jax.vjp` function transposes, and its variables for the `count` flat arguments.

    `vjp.jaxpr` is undocumented. Its last inputs are the arguments; from JAX 0.12 on residuals come before them.
    """
    jaxpr = vjp.jaxpr
    return jaxpr, jaxpr.invars[len(jaxpr.invars) - count :]


def transpose_into(vjp, refs: list, cotangent: Any) -> tuple:
    """`vjp(cotangent)`, where a gradient with a mutable array in `refs` is added to that array and not returned.

    `with_refs` and `jax.ad` are public and undocumented.
    """
    return vjp.with_refs(*[jax.ad.GradValue() if ref is None else ref for ref in refs])(cotangent)  # pyright: ignore


def pull_back(vjp, cotangents: list) -> list:
    """The gradients of a `jax.vjp` function of flat arguments, with symbolic zeros on both sides.

    A `SymbolicZero` among the cotangents propagates nothing, and a gradient that is symbolically zero is None. The
    function itself uses arrays of zeros instead, and zero times an infinite derivative is NaN. Touches `ValAccum`,
    which has no public equivalent, and `vjp.with_refs`, which takes it.
    """
    from jax._src.interpreters.ad import ValAccum
    from jax.interpreters.ad import Zero

    _, inputs = linear_program(vjp, vjp.in_tree.num_leaves)
    sums = [ValAccum(v.aval.to_ct_aval()) for v in inputs]
    given = [Zero(c.aval) if isinstance(c, jax.custom_derivatives.SymbolicZero) else c for c in cotangents]
    vjp.with_refs(*sums)(given)
    return [None if isinstance(total, Zero) else total for total in (each.freeze() for each in sums)]


_NOT_IN_PLACE = ("optimization_barrier",) if jax.__version_info__ >= (0, 12) else ("slice", "shard_map")


def adds_in_place_through(eqn: jex.JaxprEqn) -> bool:
    """Whether `vjp.with_refs` can transpose an equation of a linear program; some of JAX's rules raise."""
    return eqn.primitive.name not in _NOT_IN_PLACE


def discharge(closed: jex.ClosedJaxpr, scope: str) -> jex.ClosedJaxpr:
    """The program without the mutable arrays that it creates and freezes; additions to them get the scope `scope`.

    JAX does the same when it lowers a program, by the private `discharge_state`, but cannot vmap a program before.
    """
    from jax._src.state.discharge import discharge_state

    return discharge_state(_inside(functools.partial(_name_additions, scope), closed))


def _name_additions(scope: str, jaxpr):
    """The jaxpr with all additions to mutable arrays, at every depth, in a scope."""

    def named(eqn):
        if eqn.primitive.name == "addupdate":
            info = eqn.source_info
            return eqn.replace(source_info=info.replace(name_stack=info.name_stack.extend(scope)))
        params = {key: _inside(functools.partial(_name_additions, scope), value) for key, value in eqn.params.items()}
        return eqn.replace(params=params) if any(params[key] is not eqn.params[key] for key in params) else eqn

    eqns = [named(eqn) for eqn in jaxpr.eqns]
    return jaxpr if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)) else jaxpr.replace(eqns=eqns)


def lower_otherwise(primitive: jex.Primitive, platform: str, rule: Callable) -> None:
    """Lowers a primitive for a platform by `rule(default, context, *args, **params)`, for as long as the process lives.

    `default` is JAX's own rule, which only the private table of rules has.
    """
    from jax.interpreters import mlir

    default = mlir._lowerings[primitive].rule
    mlir.register_lowering(primitive, functools.partial(rule, default), platform=platform)


def register_cuda_plugin() -> None:
    """Registers JAX's CUDA plugin on a machine without a driver, so that its compiler can be used.

    JAX itself calls `jax_plugins.xla_cuda12.initialize` once, which fails without a driver unless
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK is set or JAX_PLATFORMS excludes cuda. A running backend is not affected.
    """
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    given = os.environ.get(name)
    os.environ[name] = "1"
    try:
        for plugin in ("xla_cuda12", "xla_cuda13"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"jax_plugins.{plugin}").initialize()
                return
    finally:
        if given is None:
            del os.environ[name]
        else:
            os.environ[name] = given


@contextlib.contextmanager
def answering_default_backend(platform: str) -> Iterator[list[str]]:
    """A context in which `jax.default_backend()` returns `platform`; yields the callers, as "model.py line 12".

    There is no public way to see the callers. Used only while a function is traced for a deviceless target. Only the
    name in `jax` is replaced; JAX itself does not call it there.
    """
    asked: list[str] = []
    real = jax.default_backend

    def default_backend() -> str:
        frame = sys._getframe(1)
        asked.append(f"{os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}")
        return platform

    jax.default_backend = default_backend
    try:
        yield asked
    finally:
        jax.default_backend = real


def kept_arguments(stage, count: int) -> list[int] | None:
    """Which of a program's `count` argument leaves a lowered or compiled program takes; None if unknown.

    `jax.jit` drops unused arguments, and only the private `_kept_var_idx` says which; before compiling it is among the
    private arguments of the compiler.
    """
    arguments = getattr(getattr(stage, "_lowering", None), "compile_args", None) or {}
    kept = getattr(getattr(stage, "_executable", None), "_kept_var_idx", arguments.get("kept_var_idx"))
    return sorted(kept) if kept is not None and all(0 <= index < count for index in kept) else None


def varying_axes(value) -> frozenset[str]:
    """The mesh axes that a value in a `jax.shard_map` varies over; the value is an array, a shape or a type.

    Empty if values are not typed by these axes (`check_vma=False`). The attribute of the types is undocumented.
    """
    kind = value if hasattr(value, "manual_axis_type") else jax.typeof(value)
    return frozenset(getattr(kind.manual_axis_type, "varying", ()))


def call_to_inline(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | jex.Jaxpr | None:
    """The jaxpr of a `jax.jit` call that specifies no shardings; None for other equations.

    An unspecified sharding is recognised by the class name of a private value.
    """
    if eqn.primitive.name not in ("jit", "pjit", "closed_call", "core_call"):
        return None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
        return None
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def with_more_inputs(eqn: jex.JaxprEqn, count: int) -> dict[str, Any]:
    """The parameters of a `jax.jit` call that specifies no shardings, for `count` more inputs than it has.

    Parameters with an item for each input are undocumented.
    """
    keys = ("in_shardings", "in_layouts", "donated_invars")
    return {key: value + value[-1:] * count if key in keys else value for key, value in eqn.params.items()}


def without_tangents(values: list) -> list:
    """The values, with integers passed through an operation that has no derivative.

    A custom_vjp gives its integer outputs a tangent, which the index of a cond and the carry of a scan must not have.
    """
    return [value if jnp.issubdtype(value.dtype, jnp.inexact) else _unchanged(value) for value in values]


def _unchanged(value):
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _unchanged(jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return value | value


@jax.custom_vjp
def with_cotangent(value):
    """The value; its cotangent is always an array, of zeros for a symbolic zero.

    A custom_vjp that returns None for a cotangent passes a symbolic `Zero` on, which a scan in JAX 0.10 does not accept
    for its stacked outputs.
    """
    return value


with_cotangent.defvjp(lambda value: (value, None), lambda _, cotangent: (cotangent,))


def before_threads_end(function: Callable[[], None]) -> None:
    """Calls a function when the main thread has ended; what it waits for may still use executors, so `to_thread`, too.

    `atexit` is later: then `concurrent.futures` accepts nothing any more, and what Orbax does by it fails. Touches
    `threading._register_atexit`, whose functions are called in reverse order, so before that of `concurrent.futures`.
    Since Python 3.12 no thread is started even there, so that meanwhile whoever submits work does it.
    """
    pool = importlib.import_module("concurrent.futures.thread").ThreadPoolExecutor  # whose module registers its own

    def call() -> None:
        submit, pool.submit = pool.submit, _done_at_once
        try:
            function()
        finally:
            pool.submit = submit

    threading._register_atexit(call)  # pyright: ignore[reportAttributeAccessIssue]


def _done_at_once(_, function: Callable, /, *arguments: Any, **keywords: Any) -> concurrent.futures.Future:
    done = concurrent.futures.Future()
    try:
        done.set_result(function(*arguments, **keywords))
    except BaseException as error:
        done.set_exception(error)
    return done


def coordinator() -> Any:
    """The client of `jax.distributed`'s coordinator, whose store of keys and values has no public name."""
    from jax._src import distributed

    return distributed.global_state.client


def every_of_optax(optimizer: Any) -> Callable[[Any], Any] | None:
    """The function by which an `optax.MultiSteps` says how many calls a window has; None for other objects."""
    return getattr(optimizer, "_every_k_schedule", None)


def coordinator_address() -> str | None:
    """Where `jax.distributed`'s coordinator listens, "host:port"; there is no public name."""
    from jax._src import distributed

    return distributed.global_state.coordinator_address


_on_abort: list[Any] = []  # held for as long as the process lives: C calls them


def on_abort(leave: Callable[[], Any]) -> None:
    """Calls a function, which must not return, where C++ aborts this process.

    JAX's client aborts when the connection to the coordinator breaks. Its `missed_heartbeat_callback` cannot be a
    function of Python's: no `absl::Status` is converted. Python's own handlers of signals run in the main thread, which
    waits in a collective then; so the handler is one of C's, and takes Python's lock in the thread that aborts.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signum: leave())
    _on_abort.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, type(handler)], ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)
