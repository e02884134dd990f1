"""A program for devices that are not here: shardings, meshes, and what ties it to this machine."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.errors import RetargetError
from jaxmem.targets import compile_on, resolve_target

FOUR = "tpu-v5e:2x2"
W_BYTES, X_BYTES = 4 * 128 * 128, 4 * 512 * 128
W, X = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((512, 128), jnp.float32)


def product(w, x):
    return jnp.sum(jnp.tanh(jax.lax.with_sharding_constraint(x, P("data")) @ w))


def abstract(spec, *axes, kind=None):
    mesh = AbstractMesh(tuple(size for _, size in axes), tuple(name for name, _ in axes))
    return NamedSharding(mesh, spec, memory_kind=kind)


def sharded(leaf, sharding):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def argument_bytes(*args, target=FOUR, fn=product, **options):
    report = jaxmem.analyze(jax.grad(fn), *args, target=target, **options)
    return report.argument_bytes, " ".join(report.warnings)


def test_arguments_are_replicated_unless_they_say_otherwise():
    found, notes = argument_bytes(W, X)
    assert found == W_BYTES + X_BYTES
    assert "Arguments are replicated" in notes and "each of the 4 devices of tpu-v5e:2x2" in notes
    assert "replicated" not in argument_bytes(W, X, target="tpu-v5e")[1]


@pytest.mark.parametrize(
    "shardings",
    [(P(), P("data")), (None, P("data")), (None, abstract(P("data"), ("data", 4))), [None, P(("data",))]],
    ids=str,
)
def test_in_shardings_may_be_bare_or_over_an_abstract_mesh(shardings):
    found, notes = argument_bytes(W, X, in_shardings=shardings)
    assert found == W_BYTES + X_BYTES // 4 and "replicated" not in notes


def test_the_mesh_that_arguments_name_becomes_the_targets():
    axes = (("data", 2), ("model", 2))
    args = sharded(W, abstract(P(None, "model"), *axes)), sharded(X, abstract(P("data"), *axes))
    assert argument_bytes(*args)[0] == W_BYTES // 2 + X_BYTES // 2


def test_arrays_of_this_machine_keep_their_specs_where_the_counts_agree():
    local = Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(np.ones((512, 128), np.float32), NamedSharding(local, P("data")))
    assert argument_bytes(np.ones((128, 128), np.float32), x)[0] == W_BYTES + X_BYTES // 4
    with pytest.raises(
        RetargetError, match=r"the 8 device\(s\) of gpu-h100:1x1x8; got an argument sharded over a mesh"
    ):
        argument_bytes(W, x, target="gpu-h100:1x1x8")


def test_a_target_has_axes_of_the_type_that_arguments_have():
    """A program that is typed by explicit axes is compiled as one."""

    def resharded(w, x):
        return jnp.sum(jnp.tanh(jax.sharding.reshard(x, P(None, None)) @ w))

    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    assert argument_bytes(W, x, fn=resharded)[0] == W_BYTES + X_BYTES // 4


def test_an_axis_that_the_target_lacks_is_named():
    with pytest.raises(RetargetError, match="an argument sharded over rows"):
        argument_bytes(W, X, in_shardings=(P(), P("rows")))
    target = resolve_target(FOUR).with_mesh(rows=4)
    assert argument_bytes(W, X, in_shardings=(P(), P("rows")), target=target, fn=lambda w, x: jnp.sum(x @ w))[0]


def test_a_prefix_that_does_not_fit_is_refused():
    with pytest.raises(RetargetError, match="tree prefix of the arguments"):
        argument_bytes(W, X, in_shardings=(P(), P("data"), P()))


def test_shard_map_without_a_mesh_means_the_targets():
    def mapped(w, x):
        body = lambda w, x: jax.lax.psum(jnp.sum(x @ w), "data")  # noqa: E731
        return jax.shard_map(body, in_specs=(P(), P("data")), out_specs=P())(w, x)

    report = jaxmem.analyze(mapped, W, X, target=FOUR)
    assert report.flops == 2 * 512 * 128 * 128 // 4


LOCAL = Mesh(np.array(jax.devices()[:1]), ("data",))


def constrained(w, x):
    return jnp.sum(jax.lax.with_sharding_constraint(x, NamedSharding(LOCAL, P("data"))) @ w)


def mapped_locally(w, x):
    body = lambda w, x: jnp.sum(x @ w)[None]  # noqa: E731
    return jnp.sum(jax.shard_map(body, mesh=LOCAL, in_specs=(P(), P("data")), out_specs=P("data"))(w, x))


@pytest.mark.parametrize("target", [FOUR, "gpu-h100"])
@pytest.mark.parametrize(
    ("fn", "source"),
    [(constrained, "NamedSharding(LOCAL, P"), (mapped_locally, "mesh=LOCAL")],
    ids=["constraint", "map"],
)
def test_a_mesh_that_is_closed_over_is_named_with_its_line(fn, source, target):
    with pytest.raises(RetargetError, match="a program that leaves its devices to") as caught:
        jaxmem.analyze(fn, W, X, target=target)
    assert source in str(caught.value) and "test_retarget.py line" in str(caught.value)
    assert jaxmem.analyze(fn, W, X, target="cpu").fits  # which is where that mesh is


def test_code_that_asks_for_the_backend_is_answered_and_reported():
    def model(x):
        return x * 2 if jax.default_backend() == "tpu" else jnp.sort(x)

    report = jaxmem.analyze(model, X, target="tpu-v5e")
    assert any("reads jax.default_backend() (test_retarget.py line" in note for note in report.warnings)
    assert "sort" not in str(report)
    assert not any("default_backend" in note for note in jaxmem.analyze(model, X, target="cpu").warnings)
    assert jax.default_backend() == "cpu"


def test_what_runs_while_it_is_traced_is_refused():
    def model(x):
        with jax.ensure_compile_time_eval():
            table = jnp.sin(jnp.arange(128.0))
        return x * table

    with pytest.raises(RetargetError, match="runs an operation while it is traced at test_retarget.py line"):
        jaxmem.analyze(model, X, target="tpu-v5e")


def printing(x):
    jax.debug.print("{}", x.sum())
    return x * 2


def calling(x):
    return jax.lax.scan(lambda c, _: (jax.pure_callback(np.sin, c, c), None), x, None, length=3)[0]


@pytest.mark.parametrize(("fn", "name"), [(printing, "debug_print|debug_callback"), (calling, "pure_callback")])
def test_a_callback_that_a_gpu_must_be_here_for_is_named_with_its_line(fn, name):
    with pytest.raises(RetargetError, match=rf"callbacks to Python.*got one with ({name}) at test_retarget.py:\d+.*\."):
        jaxmem.analyze(fn, X, target="gpu-h100")
    with pytest.raises(RetargetError, match=name):
        compile_on("gpu-h100", fn, X)
    assert jaxmem.analyze(fn, X, target="cpu").argument_bytes == X_BYTES


def test_a_workloads_batch_may_be_sharded():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    batch = sharded(X, abstract(P("batch"), ("batch", 4)))
    work = jaxmem.Workload(loss, jnp.ones((128, 128)), batch, optax.adam(1e-3))
    config = jaxmem.MemoryConfig(accumulation_steps=2)
    split = jaxmem.analyze(work, config, target=FOUR)
    whole = jaxmem.analyze(jaxmem.Workload(loss, jnp.ones((128, 128)), X, optax.adam(1e-3)), config, target=FOUR)
    assert whole.argument_bytes - split.argument_bytes == X_BYTES * 3 // 4
    assert split.peak_bytes < whole.peak_bytes
    step = jaxmem.make_train_step(work, config, target=FOUR)
    assert step.compile().memory_analysis().argument_size_in_bytes == split.argument_bytes


@pytest.mark.parametrize("target", ["tpu-v5e", "gpu-h100"])
def test_an_argument_pinned_to_the_host_is_counted_there_or_said_not_to_be(target):
    def fetch(w, x):
        return x @ jax.device_put(w, jax.memory.Space.Device)

    host = abstract(P(), ("data", 1), kind="pinned_host")
    report = jaxmem.analyze(fetch, sharded(W, host), X, target=target)
    said = any("counted on the device" in note for note in report.warnings)
    counted = (0, W_BYTES + X_BYTES) if said else (W_BYTES, X_BYTES)
    assert (report.host_argument_bytes, report.argument_bytes) == counted
    assert said == (target == "gpu-h100")
