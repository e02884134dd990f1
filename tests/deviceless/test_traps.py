"""What compilers say that is not so, and what jaxmem says instead: each trap on a small real program.

A trap that a newer JAX closes fails its test here: then jaxmem may believe the compiler again. Elsewhere: no memory
analysis at all (case 33, tests/analysis/test_analyze.py), a program that a TPU refuses (tests/targets/test_refusal.py),
a name that nothing carries (tests/remat/test_names.py), the memory spaces of a TPU's dump
(tests/analysis/assignment/test_goldens.py), a parameter stack copied by a split scan (test_nested_scan.py).
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from optax import contrib

import jaxmem
from jaxmem import targets
from jaxmem.analysis import hlo_flops
from jaxmem.analysis.assignment import BufferDump
from jaxmem.targets import Target, find_chip, on_target, place, resolve_target
from tests.deviceless import compiling
from tests.deviceless.compiling import TARGETS

LAYERS, ROWS, WIDTH = 8, 2048, 128
WEIGHTS = jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), jnp.float32)
INPUTS = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
HIDDEN_BYTES = 4 * ROWS * 4 * WIDTH  # of one layer
EVERYWHERE = ("cpu", *TARGETS)
IN_0_10 = jax.__version__.startswith("0.10.")


def compile_on(target, fn, *shapes, **options):
    """For this machine's CPU too."""
    return (targets if target == "cpu" else compiling).compile_on(target, fn, *shapes, **options)


def layer(x, up):
    h = checkpoint_name(jnp.tanh(x @ up), "hidden")
    return x + h @ up.T


def loss_of(body, *, scan=True):
    def loss(weights, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (body(x, w), None), x, weights)
        else:
            for w in weights:
                x = body(x, w)
        return jnp.mean(x**2)

    return loss


@functools.cache
def plain(target):
    """The gradient of the scanned layers, each of whose hidden values is kept."""
    return compile_on(target, jax.grad(loss_of(layer)), WEIGHTS, INPUTS)


# ---------------------------------------------------------------- which number to believe


def test_the_cpus_peak_leaves_out_what_a_loop_holds_and_ours_does_not():
    memory = plain("cpu").memory_analysis()
    assert memory.temp_size_in_bytes > LAYERS * HIDDEN_BYTES
    assert memory.peak_memory_in_bytes < memory.temp_size_in_bytes / 4
    report = jaxmem.analyze(jax.grad(loss_of(layer)), WEIGHTS, INPUTS, target="cpu")
    assert report.compiler_peak_bytes == memory.peak_memory_in_bytes
    assert report.peak_bytes == memory.argument_size_in_bytes + memory.output_size_in_bytes + report.temp_bytes


@pytest.mark.parametrize("target", EVERYWHERE)
def test_cost_analysis_counts_the_body_of_a_scan_once_and_hlo_flops_each_time(target):
    compiled = plain(target)
    once = 2 * ROWS * WIDTH * 4 * WIDTH  # one product
    # Two products a layer forward, and for each of them two backward.
    assert hlo_flops(compiled.as_text()).flops == LAYERS * 6 * once
    cost = compiled.cost_analysis()
    if target == "gpu-h100":
        assert cost is None
    else:
        assert 6 * once <= cost["flops"] < 8 * once


@pytest.mark.parametrize("target", EVERYWHERE)
def test_offloaded_bytes_are_evidenced_by_gpu_and_tpu_only(target):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    loss = loss_of(jax.checkpoint(layer, policy=policy))
    report = jaxmem.analyze(jax.grad(loss), WEIGHTS, INPUTS, target=target)
    assert report.host_temp_bytes == (0 if target == "cpu" else LAYERS * HIDDEN_BYTES)
    assert any("0 whatever is offloaded" in warning for warning in report.warnings) == (target == "cpu")


# ---------------------------------------------------------------- remat that a compiler hides


def deep(remat: bool):
    """Unrolled layers whose hidden values are eight times their inputs."""
    body = jax.checkpoint(lambda x, w: x + jnp.tanh(jnp.tanh(x @ w) * 2) @ w.T) if remat else None
    return jax.grad(loss_of(body or (lambda x, w: x + jnp.tanh(jnp.tanh(x @ w) * 2) @ w.T), scan=False))


def test_the_cpus_default_scheduler_hides_an_unrolled_remat_in_jax_0_10_and_the_target_cpu_shows_it():
    weights = [jax.ShapeDtypeStruct((WIDTH, 8 * WIDTH), jnp.float32)] * LAYERS
    default = Target(name="default", platform="cpu")
    temps = {
        (target.name, remat): jaxmem.analyze(deep(remat), weights, INPUTS, target=target).temp_bytes
        for target in (default, resolve_target("cpu"))
        for remat in (False, True)
    }
    assert temps["cpu", True] < 0.65 * temps["cpu", False]
    hidden = temps["default", True] > 0.9 * temps["default", False]
    assert hidden == IN_0_10  # newer compilers show it under either scheduler


# ---------------------------------------------------------------- too large


def test_a_gpus_compiler_accepts_what_no_gpu_holds_and_fits_says_no():
    """272 GiB: the compiler is content, so bytes are compared with the chip's."""
    x = jax.ShapeDtypeStruct((34, 2**30), jnp.float32)
    report = jaxmem.analyze(jnp.sin, x, target="gpu-b200")
    assert report.peak_bytes == 2 * 4 * 34 * 2**30
    assert report.fits == "no" and "272.00 GiB, exceeds" in report.fits_reason


def test_a_tpus_compiler_refuses_with_the_bytes_and_the_report_says_no():
    report = jaxmem.analyze(jnp.sin, jax.ShapeDtypeStruct((40, 2**26), jnp.float32), target="tpu-v5e:1x1")
    assert report.fits == "no" and "the compiler refused it" in report.fits_reason
    assert report.peak_bytes == pytest.approx(2 * 4 * 40 * 2**26, rel=0.01)
    assert report.capacity_bytes == find_chip("tpu-v5e").usable_bytes


# ---------------------------------------------------------------- donation


@pytest.mark.parametrize("target", EVERYWHERE)
def test_a_donated_leaf_whose_dtype_changes_is_named_where_jax_is_silent(target):
    def step(state):
        return {"kept": state["kept"] + 1, "cast": (state["cast"] * 2).astype(jnp.bfloat16)}

    state = {name: jax.ShapeDtypeStruct((256, 1024), jnp.float32) for name in ("kept", "cast")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = compile_on(target, step, state, donate_argnums=0)
    assert compiled.memory_analysis().alias_size_in_bytes == 2**20
    report = jaxmem.analyze(step, state, target=target, donate_argnums=0)
    (miss,) = report.donation_misses
    assert (miss.path, miss.size_bytes) == ("state['cast']", 2**20)
    assert (miss.dtype_in, miss.dtype_out) == ("float32", "bfloat16")


def test_case_34_a_state_that_holds_one_buffer_twice_cannot_be_donated_and_init_copies_it():
    """The runtime refuses it; a `TrainState` is made of copies, whoever shares the buffer."""
    twice = jax.jit(lambda params, ema: (params + 1, ema + 1), donate_argnums=(0, 1))
    shared = jnp.ones((4,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="donate the same buffer twice"):
        twice(shared, shared)

    def loss(params, x):
        return jnp.mean((x @ params["w"] - params["tied"].sum()) ** 2)

    average = optax.GradientTransformation(lambda params: params, lambda updates, mean, params: (updates, mean))
    schedule_free = contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1)  # its `z` begins as the parameters
    for optimizer in (optax.chain(optax.sgd(0.1), average), schedule_free):
        work = jaxmem.Workload(loss, {"w": shared, "tied": shared}, jnp.ones((8, 4)), optimizer)
        step = jaxmem.make_train_step(work)
        state = step.init()
        arrays = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,)]
        assert len(arrays) == 4 and len({leaf.unsafe_buffer_pointer() for leaf in arrays}) == 4
        for _ in range(2):
            state, _ = step(state, work.batch)
    assert not shared.is_deleted()


# ---------------------------------------------------------------- dumps


def assigned(target):
    """The buffer assignment of the plain program, and its temporaries."""
    resolved = resolve_target(target)
    placed = place((WEIGHTS, INPUTS), resolved)
    with on_target(placed.target):
        lowered = jax.jit(jax.grad(loss_of(layer))).trace(*placed.args).lower()
    with BufferDump(dict(resolved.compiler_options), platform=resolved.platform) as dump:
        compiled = lowered.compile(compiler_options=dump.options)
        return dump.of(compiled, compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes


def test_the_union_of_places_is_the_temporaries_where_live_ranges_count_a_loop_twice():
    assignment, temps = assigned("gpu-h100")
    counted = max(
        sum(v.size_bytes for a in assignment.temps for v in a.values if v.start <= position <= v.end)
        for position in range(len(assignment.schedule))
    )
    assert counted > 1.2 * temps
    assert assignment.used_temp_bytes == pytest.approx(temps, rel=0.01)
    assert assignment.temp_sweep.peak_bytes <= temps


@pytest.mark.parametrize("target", TARGETS)
def test_buffers_that_the_compiler_calls_while_are_followed_to_what_computes_them(target):
    """The kept hidden values come out of a loop, and say no more than that."""
    inputs = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)  # too many for the on-chip memory of a TPU
    shape = f"f32[{LAYERS},{8 * ROWS},{4 * WIDTH}]"
    loss = jax.grad(loss_of(layer))
    text = compile_on(target, loss, WEIGHTS, inputs).as_text()
    names = re.findall(re.escape(shape) + r'.*op_name="([^"]*)"', text)
    assert any(name.endswith("/while") for name in names)
    kept = [b for b in jaxmem.analyze(loss, WEIGHTS, inputs, target=target).buffers if b.shape == shape]
    assert kept and {b.kind for b in kept} == {"activations"}
    assert not any(b.op == "while" or b.op_name.endswith("/while") for b in kept)
    assert all(b.source.startswith("test_traps.py:") for b in kept)
