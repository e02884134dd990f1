"""Each private or version-dependent touch of JAX: that it still works, and when it can go."""

import signal
import subprocess
import sys

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.extend.core import primitives
from jax.interpreters import partial_eval

from jaxmem import _compat


def pruned(fn, *args, wanted):
    closed, used = _compat.prune(jax.make_jaxpr(fn)(*args), wanted)
    return closed, used


def test_prune_keeps_what_the_wanted_outputs_need():
    closed, used = pruned(lambda x, y, z: (jnp.sin(x) + y, jnp.cos(z)), 1.0, 2.0, 3.0, wanted=[False, True])
    assert used == [False, False, True] and len(closed.jaxpr.eqns) == 1
    (out,) = jex.jaxpr_as_fun(closed)(3.0)
    assert float(out) == float(jnp.cos(3.0))


EFFECTS = {
    "print": lambda x: jax.debug.print("{x}", x=x),
    "ordered print": lambda x: jax.debug.print("{x}", x=x, ordered=True),
    "debug callback": lambda x: jax.debug.callback(print, x),
    "io callback": lambda x: io_callback(print, None, x),
    "ordered io callback": lambda x: io_callback(print, None, x, ordered=True),
    "callback with a result": lambda x: io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x) * 0,
}
PLACES = {
    "at the top": lambda effect, x: (effect(x), x + 1)[1],
    "in jit": lambda effect, x: jax.jit(lambda x: (effect(x), x + 1)[1])(x),
    "in scan": lambda effect, x: jax.lax.scan(lambda c, _: ((effect(c), c + 1)[1], None), x, length=2)[0],
    "in while": lambda effect, x: jax.lax.while_loop(lambda c: c < 3, lambda c: (effect(c), c + 1)[1], x),
    "in cond": lambda effect, x: jax.lax.cond(x > 0, lambda: (effect(x), x)[1], lambda: x),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("effect", EFFECTS)
def test_prune_drops_prints_and_callbacks_at_every_depth(effect, place):
    if effect.startswith("ordered") and place == "in cond":
        place = "in jit"  # JAX itself refuses some ordered effects under cond
    closed, used = pruned(
        lambda x, y: (PLACES[place](EFFECTS[effect], x), 2 * y),
        jnp.float32(1.0),
        jnp.float32(2.0),
        wanted=[False, True],
    )
    assert used == [False, True] and "callback" not in str(closed) and not closed.effects


def test_prune_keeps_a_callback_whose_result_is_wanted():
    callback = lambda x: io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x)  # noqa: E731
    closed, used = pruned(lambda x: (callback(x), x), jnp.float32(1.0), wanted=[True, False])
    assert used == [True] and "io_callback" in str(closed)


def test_dead_code_elimination_alone_keeps_effects():
    """When this fails, JAX drops unused prints by itself, and `_values_only` need not erase effects."""
    closed = jax.make_jaxpr(lambda x: (jax.debug.print("{x}", x=x), x)[1])(1.0)
    kept, _ = partial_eval.dce_jaxpr(closed.jaxpr, [False])
    assert "debug" in str(kept)


def test_there_is_no_public_dead_code_elimination():
    """When this fails, `prune` should use the public function."""
    assert not any("dce" in name for module in (jax, jax.extend, jex, jax.extend.core) for name in dir(module))


def test_effects_go_by_these_names():
    names = set()
    for effect in EFFECTS.values():
        names |= {type(e).__name__ for e in jax.make_jaxpr(effect)(1.0).effects}
    assert names <= set(_compat._IO_EFFECTS) and len(names) >= 3


def both(w, m):
    return w * m, m


def vjp_of_both():
    fn = jax.custom_vjp(both)
    fn.defvjp(lambda w, m: (both(w, m), (w, m)), lambda saved, g: (g[0] * saved[1], g[0] * saved[0] + g[1]))
    return fn


def jvp_of_both():
    fn = jax.custom_jvp(both)
    fn.defjvp(lambda primals, tangents: (both(*primals), both(*tangents)))
    return fn


@pytest.mark.parametrize("fn", [vjp_of_both(), jvp_of_both(), jax.jit(vjp_of_both())])
def test_prune_looks_into_custom_rules(fn):
    """A weight often leaves the same fused function as the loss, and does not need its parameters."""
    jaxpr, used = pruned(fn, 1.0, 2.0, wanted=[False, True])
    assert used == [False, True]
    assert jax.extend.core.jaxpr_as_fun(jaxpr)(2.0) == [2.0]


def test_prune_still_has_to_look_into_custom_rules():
    """When this fails, JAX's own dead-code elimination does, and `_values_only` need not replace them."""
    closed = jax.make_jaxpr(vjp_of_both())(1.0, 2.0)
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, [False, True])
    assert list(used) == [True, True]


def test_name_stack_gives_scopes_and_transformations():
    def inner(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    with jax.named_scope("outer"):
        (eqn,) = jax.make_jaxpr(jax.named_scope("outer")(jax.vmap(inner)))(jnp.ones(3)).eqns
    assert _compat.name_stack(eqn) == "outer/vmap(inner)"


def test_name_stack_is_still_needed():
    """When this fails, `name_stack` should use the public attribute."""
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    assert not any("name_stack" in name or "scope" in name for name in dir(eqn))


def test_effect_names():
    def printing(x):
        jax.debug.print("{x}", x=x, ordered=True)
        return jnp.sin(x)

    names = [_compat.effect_names(eqn) for eqn in jax.make_jaxpr(printing)(1.0).eqns]
    assert names == [{"OrderedDebugEffect"}, set()]


def test_effect_names_are_still_needed():
    """When this fails, all effects have public classes, by which they should be told apart."""
    places = (jax, jax.debug, jax.experimental, jax.extend.core)
    assert not all(any(hasattr(place, name) for place in places) for name in _compat._IO_EFFECTS)


# -- equations of blocks and names ---------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["remat", "remat3"])
def rewrite(request):
    jax.config.update("jax_remat3", request.param)
    yield request.param
    jax.config.update("jax_remat3", False)


def test_blocks_and_names_are_found_under_both_implementations_of_remat(rewrite):
    block = jax.checkpoint(lambda x: jax.lax.cond(x > 0, jnp.sin, lambda x: checkpoint_name(x * x, "square"), x))
    (outer,) = jax.make_jaxpr(lambda x: block(x))(1.0).jaxpr.eqns
    assert _compat.prevents_cse(outer) is True and _compat.checkpoint_name_of(outer) is None
    (inside,) = _compat.called_jaxprs(outer)
    (cond,) = [eqn for eqn in inside.eqns if eqn.primitive.name == "cond"]
    branches = [[_compat.checkpoint_name_of(eqn) for eqn in branch.eqns] for branch in _compat.called_jaxprs(cond)]
    assert branches == [[None, "square"], [None]] and _compat.prevents_cse(cond) is None


def test_programs_that_are_called_come_with_the_constants_that_they_hold():
    table = jnp.arange(3.0)
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x * table))(jnp.ones(3)).jaxpr.eqns
    ((jaxpr, consts),) = _compat.called_programs(eqn)
    assert [list(const) for const in consts] == [[0, 1, 2]] and len(jaxpr.constvars) == 1


def test_a_block_without_its_barrier():
    (eqn,) = jax.make_jaxpr(lambda x: jax.checkpoint(jnp.sin, prevent_cse=False)(x))(1.0).jaxpr.eqns
    assert _compat.prevents_cse(eqn) is False


def test_the_parts_of_a_scan():
    """When all versions have parameters that say so, `scan_layout` can read them."""
    w, xs = jnp.ones(3), jnp.ones((4, 3))
    body = lambda carry, x: ((carry[0] + x @ w, carry[1] + 1), x)  # noqa: E731
    jaxpr = jax.make_jaxpr(lambda w, xs: jax.lax.scan(body, (0.0, 0), xs))(w, xs)
    (eqn,) = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert _compat.scan_layout(eqn) == (1, 2, 1)


def test_the_objects_of_the_rewrite_are_not_public():
    """When this fails, `prevents_cse` and `checkpoint_name_of` should compare with them (and `remat_p`, `name_p`)."""
    public = {name for module in (primitives, jex, jax.ad_checkpoint) for name in dir(module)}
    assert not {"RematTraced", "CheckpointName", "CheckpointNameFwd"} & public


# -- types of values in a shard_map --------------------------------------------------------------------


@pytest.mark.parametrize("typed", [True, False])
def test_the_axes_that_a_value_varies_over(typed):
    """When a type says so by a documented name, `varying_axes` should read that."""
    found = []

    def local(x):
        found.extend([_compat.varying_axes(x), _compat.varying_axes(jax.eval_shape(jnp.sin, x))])
        return jnp.sin(x)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=typed), jnp.ones(8))
    assert found == [{"data"} if typed else set()] * 2
    assert _compat.varying_axes(jnp.ones(8)) == set()


def add_into(fn, accumulator, w, x):
    """`accumulator` with the gradient of `fn` in `w` added to it by the backward pass."""
    out, vjp = jax.vjp(lambda w: fn(w, x), w)
    ref = jax.new_ref(accumulator)
    _compat.transpose_into(vjp, [ref], jnp.ones_like(out))
    return jax.freeze(ref)


def over_layers(w, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].sum()


STACK = jnp.arange(2.0 * 3 * 3).reshape(2, 3, 3) / 9


def test_transpose_into_adds_in_place():
    got = jax.jit(lambda acc, w, x: add_into(over_layers, acc, w, x))(STACK, STACK, jnp.ones(3))
    want = STACK + jax.grad(over_layers)(STACK, jnp.ones(3))
    assert jnp.allclose(got, want, rtol=1e-6)


def test_linear_program_tells_the_arguments_among_its_inputs():
    _, vjp = jax.vjp(lambda a, b: jnp.sin(a) * b.sum(), 1.0, jnp.ones(3))
    jaxpr, inputs = _compat.linear_program(vjp, 2)
    assert [var.aval.shape for var in inputs] == [(), (3,)]
    assert all(any(operand is var for eqn in jaxpr.eqns for operand in eqn.invars) for var in inputs)
    assert _compat.linear_program(vjp, 0)[1] == []


def test_pull_back_knows_which_gradients_are_zero():
    _, vjp = jax.vjp(lambda a, b: [jnp.sqrt(a), jnp.sin(b)], 0.0, 0.0)
    nothing = jax.custom_derivatives.SymbolicZero(jax.typeof(0.0))
    assert vjp([0.0, 1.0])[0] != 0  # NaN: zero times infinity
    assert _compat.pull_back(vjp, [nothing, jnp.float32(1.0)]) == [None, 1.0]
    assert _compat.pull_back(vjp, [nothing, nothing]) == [None, None]


def test_discharge_leaves_no_mutable_array_and_names_the_additions():
    closed = jax.make_jaxpr(lambda acc, w, x: add_into(over_layers, acc, w, x))(STACK, STACK, jnp.ones(3))
    pure = _compat.discharge(closed, "here")
    assert "Ref" in str(closed) and "Ref" not in str(pure) and not pure.effects
    (out,) = jex.jaxpr_as_fun(pure)(STACK, STACK, jnp.ones(3))
    assert jnp.allclose(out, STACK + jax.grad(over_layers)(STACK, jnp.ones(3)), rtol=1e-6)
    *_, backward = [eqn for eqn in pure.jaxpr.eqns if "scan" in eqn.primitive.name]
    additions = [_compat.name_stack(eqn) for body in _compat.called_jaxprs(backward) for eqn in body.eqns]
    inner = [
        _compat.name_stack(eqn)
        for body in _compat.called_jaxprs(backward)
        for outer in body.eqns
        for called in _compat.called_jaxprs(outer)
        for eqn in called.eqns
    ]
    assert any("here" in name for name in additions + inner)
    assert not all("here" in name for name in additions + inner)


def test_a_backward_scan_over_a_mutable_array_cannot_be_vmapped():
    """When this fails, `discharge` can go."""
    with pytest.raises((AttributeError, NotImplementedError)):
        jax.vmap(lambda w: add_into(over_layers, w, w, jnp.ones(3)))(jnp.stack([STACK, STACK]))


def test_one_mutable_array_under_two_names_in_a_scan_is_refused():
    """When this fails, and JAX 0.10 (where `jit` adds to two names wrongly) is gone, they need not be looked for."""

    def twice(w, x):
        return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer @ w[0]), None), x, w)[0].sum()

    with pytest.raises((TypeError, NotImplementedError)):
        add_into(twice, STACK, STACK, jnp.ones(3))


def test_two_names_in_a_jit_were_added_wrongly_before_0_12():
    """Why they are looked for: part of the gradient was missing, without an error."""
    square = jax.jit(lambda a, b: (a @ b).sum())
    got = jax.jit(lambda w: add_into(lambda w, x: square(w, w), jnp.zeros((3, 3)), w, None))(STACK[1])
    right = jnp.allclose(got, jax.grad(lambda w: square(w, w))(STACK[1]), rtol=1e-5)
    assert right == (jax.__version_info__ >= (0, 12))


def _counting(x, count):
    """(sin x, count + 1), as custom_vjp has it."""

    @jax.custom_vjp
    def block(x, count):
        return [jnp.sin(x), count + 1]

    def forward(x, count):
        return block(x.value, count.value), x.value

    block.defvjp(forward, lambda x, cotangents: (cotangents[0] * jnp.cos(x), None), symbolic_zeros=True)
    return block(x, count)


def _index_is_carried(keep):
    """A gradient through a cond whose index is an integer of a custom_vjp, as another trace has it."""
    closed = jax.make_jaxpr(lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos], x))(1, 1.0)
    (eqn,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "cond")
    cond = jex.jaxpr_as_fun(jex.ClosedJaxpr(closed.jaxpr.replace(invars=eqn.invars, eqns=[eqn]), ()))

    def loss(x):
        y, index = keep(_counting(x, 0))
        return cond(index, y)[0]

    return jax.grad(loss)(1.0)


def test_integers_of_a_custom_rule_are_no_index_without_help():
    """When this fails, `without_tangents` can go."""
    with pytest.raises(AssertionError):
        _index_is_carried(lambda values: values)


def test_integers_of_a_custom_rule_have_no_tangents():
    slope = _index_is_carried(_compat.without_tangents)
    assert jnp.allclose(slope, -jnp.sin(jnp.sin(1.0)) * jnp.cos(1.0))
    key, flag = jax.random.key(3), jnp.array([True, False])
    same = _compat.without_tangents([key, flag, jnp.uint8(7)])
    assert jnp.array_equal(jax.random.key_data(same[0]), jax.random.key_data(key)) and same[0].dtype == key.dtype
    assert same[1].tolist() == [True, False] and same[1].dtype == bool
    assert same[2] == 7 and same[2].dtype == jnp.uint8


def _stacked_is_not_used(keep):
    """The gradient of a scan whose stacked output is read by a custom rule that says None."""

    @jax.custom_vjp
    def stopped(stacked, x):
        return x + stacked[0]

    stopped.defvjp(lambda stacked, x: (stopped(stacked, x), None), lambda _, cotangent: (None, cotangent))

    def loss(x):
        x, stacked = jax.lax.scan(lambda x, _: (jnp.sin(x), x * x), x, None, length=3)
        return stopped(keep(stacked), x)

    return jax.grad(loss)(1.0)


def test_a_scan_takes_none_for_what_it_stacks_from_jax_0_12_on():
    """When JAX 0.12 is the oldest, `with_cotangent` can go."""
    if jax.__version_info__ >= (0, 12):
        _stacked_is_not_used(lambda stacked: stacked)
    else:
        with pytest.raises(ValueError, match="cotangent type"):
            _stacked_is_not_used(lambda stacked: stacked)


def test_a_scan_takes_zeros_for_what_it_stacks():
    want = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(1.0)
    assert jnp.allclose(_stacked_is_not_used(_compat.with_cotangent), want)


def test_only_a_private_attribute_tells_which_arguments_are_kept():
    """When this fails, `kept_arguments` should use the public attribute."""
    compiled = jax.jit(lambda x, y, z: y + z).lower(1.0, 2.0, 3.0).compile()
    assert _compat.kept_arguments(compiled, 3) == [1, 2]
    assert not any("kept" in name for name in dir(compiled) if not name.startswith("_"))


def test_a_call_is_inlined_only_without_shardings():
    """When an unspecified sharding has a public class, `call_to_inline` should compare with it."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for fn, inlined in ((jax.jit(jnp.sin), True), (jax.jit(jnp.sin, out_shardings=device), False)):
        (eqn,) = jax.make_jaxpr(lambda x, fn=fn: fn(x))(1.0).jaxpr.eqns
        assert (_compat.call_to_inline(eqn) is not None) == inlined
    assert not any("nspecified" in name for name in dir(jax.sharding))


def test_a_call_takes_more_inputs():
    """When the parameters with an item for each input are documented, `with_more_inputs` can go."""
    (eqn,) = jax.make_jaxpr(lambda x, y: jax.jit(lambda x, y: x * y)(x, y))(1.0, 2.0).jaxpr.eqns
    (wider,) = jax.make_jaxpr(lambda x, y, z: jax.jit(lambda x, y, z: x * y * z)(x, y, z))(1.0, 2.0, 3.0).jaxpr.eqns
    per_input = {key for key, value in wider.params.items() if isinstance(value, tuple) and len(value) == 3}
    params = _compat.with_more_inputs(eqn, 1)
    assert per_input and all(params[key] == wider.params[key] for key in per_input)


def test_tracebacks_of_one_thread_are_whole():
    """When this fails, JAX has a public context for it, and `whole_tracebacks` can go."""
    with _compat.whole_tracebacks(), pytest.raises(TypeError) as caught:
        jnp.dot(jnp.ones(2), jnp.ones(3))
    assert any("dot_general" in frame.name for frame in caught.traceback)
    assert not hasattr(jax, "traceback_filtering")


ABORTS = """
import os, socket, sys, time
import jax
from jax._src.lib import _jax
from jaxmem import _compat
if sys.argv[1] == "handled":
    _compat.on_abort(lambda: (os.write(1, b"left"), os._exit(3)))
with socket.create_server(("127.0.0.1", 0)) as free:
    at = f"127.0.0.1:{free.getsockname()[1]}"
service = _jax.get_distributed_runtime_service(at, 1)
called = lambda status: os._exit(7)
client = _jax.get_distributed_runtime_client(at, 0, missed_heartbeat_callback=called, shutdown_on_destruction=False)
client.connect()
time.sleep(1)  # until it asks for errors
service.shutdown()
time.sleep(20)
"""


@pytest.mark.parametrize(("way", "code", "said"), [("handled", 3, "left"), ("plain", -signal.SIGABRT, "")])
def test_a_lost_coordinator_aborts_since_its_callback_cannot_be_pythons(way, code, said):
    """An exit code of 7 in the second would say that `on_abort` can go."""
    ran = subprocess.run([sys.executable, "-c", ABORTS, way], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (code, said), ran.stderr


# Of a thread that the main thread does not wait for: whether it may still start another by `asyncio.to_thread`.
LATE = """
import asyncio, concurrent.futures.thread, sys, threading, time
from jaxmem import _compat
done = threading.Event()
def work():
    time.sleep(0.2)
    try:
        asyncio.new_event_loop().run_until_complete(asyncio.to_thread(int))
        print("started")
    except RuntimeError as error:
        print(error)
    done.set()
threading.Thread(target=work).start()
if sys.argv[1] == "hook":
    _compat.before_threads_end(done.wait)
"""


@pytest.mark.parametrize(
    "hook, said", [("hook", "started"), ("none", "can")]
)  # "cannot schedule ...", "can't create ..."
def test_what_waits_before_threads_end_can_start_threads(hook, said):
    """Without the hook Python starts none any more; where it does, `before_threads_end` can go."""
    ran = subprocess.run([sys.executable, "-c", LATE, hook], capture_output=True, text=True)
    assert ran.stdout.startswith(said), ran.stderr


def test_jax_has_no_public_name_for_its_coordinator():
    """When `jax.distributed` has a store of keys and values, and tells its address, both can go."""
    assert _compat.coordinator() is None and _compat.coordinator_address() is None  # one process
    assert not [name for name in dir(jax.distributed) if "key" in name or "client" in name or "address" in name]


def test_how_long_a_window_of_optax_is_has_no_public_name():
    """When this fails, `every_of_optax` should use the public attribute."""
    optimizer = optax.MultiSteps(optax.sgd(0.1), lambda step: step + 3)
    assert _compat.every_of_optax(optimizer)(4) == 7
    assert not any("every" in name for name in dir(optimizer) if not name.startswith("_"))


def test_pruning_by_place_is_not_what_jax_does_by_itself():
    """Fails when JAX prunes primitives with several results by itself: then `prune_by_place` can go."""
    plain, by_place = jex.Primitive("plain_pair"), jex.Primitive("pair_by_place")
    needed = []
    for primitive in (plain, by_place):
        primitive.multiple_results = True
        primitive.def_abstract_eval(lambda *avals: list(avals))
        if primitive is by_place:
            _compat.prune_by_place(primitive)
        jaxpr = jax.make_jaxpr(lambda a, b, primitive=primitive: primitive.bind(a, b))(1.0, 2.0).jaxpr
        needed.append(list(partial_eval.dce_jaxpr(jaxpr, [False, True])[1]))
    assert needed == [[True, True], [False, True]]


def test_the_policy_of_a_checkpoint_is_found():
    policy = jax.checkpoint_policies.everything_saveable
    (eqn,) = jax.make_jaxpr(jax.checkpoint(jnp.sin, policy=policy))(1.0).eqns
    assert _compat.checkpoint_policy(eqn) is policy
    (eqn,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    assert _compat.checkpoint_policy(eqn) is None
