import json
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.analysis import JaxprFlops, MemoryReport, Program, analyze
from jaxmem.errors import InputError, UnknownTargetError
from jaxmem.targets import Target

from .programs import BACKWARD, FORWARD, INPUTS, ONE, WEIGHTS, scanned, unrolled

VECTOR = jax.ShapeDtypeStruct((1000,), jnp.float32)
SMALL = Target(name="small", platform="cpu", memory_bytes=8000)


def warned(report: MemoryReport, text: str) -> bool:
    return any(text in warning for warning in report.warnings)


def pick(tree):
    return tree["w"] * 2


def test_bytes_of_a_function():
    report = analyze(jax.grad(scanned(remat=True)), WEIGHTS, INPUTS, target="cpu")
    weights, inputs = 4 * WEIGHTS.size, 4 * INPUTS.size
    assert (report.argument_bytes, report.output_bytes) == (weights + inputs, weights)
    kept = WEIGHTS.shape[0] * inputs  # each layer's input
    assert report.temp_bytes > kept
    assert report.peak_bytes == weights + inputs + weights + report.temp_bytes
    assert (report.forward_flops, report.recompute_flops) == (FORWARD, FORWARD)
    assert report.flops == 2 * FORWARD + BACKWARD
    assert (report.target, report.backend, report.provenance) == ("cpu", "cpu", "compiled")
    assert report.fits == "yes"


def test_the_cpus_own_peak_is_shown_and_not_believed():
    report = analyze(jax.grad(scanned(remat=False)), WEIGHTS, INPUTS, target="cpu")
    assert report.compiler_peak_bytes < report.peak_bytes
    assert warned(report, "leaves out what loops hold")
    assert warned(report, "host_*_bytes are 0 whatever is offloaded")
    assert warned(report, "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")


def test_rematerialisation_shrinks_the_temporaries_of_a_scan():
    none, full = (analyze(jax.grad(scanned(remat=r)), WEIGHTS, INPUTS, target="cpu") for r in (False, True))
    assert full.temp_bytes < none.temp_bytes
    assert (none.recompute_flops, full.recompute_flops) == (0, FORWARD)


def test_recomputation_that_the_compiler_merged_away_is_not_claimed():
    loss = unrolled(remat=True, prevent_cse=False)  # nothing keeps the compiler from merging
    plain, full = (analyze(jax.grad(fn), WEIGHTS, INPUTS) for fn in (unrolled(remat=False), loss))
    assert full.asked_recompute_flops == FORWARD
    assert full.recompute_flops == full.flops - plain.flops < FORWARD
    assert warned(full, "removed") and not warned(plain, "removed")


def test_a_jitted_function_keeps_its_options_and_refuses_new_ones():
    jitted = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert analyze(jitted, VECTOR).alias_bytes == 4000
    with pytest.raises(InputError, match="donate_argnums for '<lambda>', which jax.jit made already"):
        analyze(jitted, VECTOR, donate_argnums=0)


def test_static_arguments_and_options_reach_jit():
    def power(x, n):
        for _ in range(n):
            x = x @ x
        return x

    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    assert analyze(power, square, 3, static_argnames="n").flops == 3 * 2 * 16**3


def test_lowered_and_compiled_programs():
    lowered = jax.jit(jax.grad(scanned(remat=True))).lower(WEIGHTS, INPUTS)
    for stage in (lowered, lowered.compile()):
        report = analyze(stage)
        assert report.flops == 2 * FORWARD + BACKWARD
        assert report.recompute_flops == FORWARD
        assert report.forward_flops is None  # only a trace tells
    assert warned(analyze(lowered, target="cpu"), "MEMORY_OPTIMIZED")


def test_a_traced_program_keeps_its_donation_and_its_flops():
    traced = jax.jit(lambda x, w: x @ w, donate_argnums=0).trace(INPUTS, jnp.eye(INPUTS.shape[1]))
    report = analyze(traced, target="cpu")
    assert report.alias_bytes == 4 * INPUTS.size
    assert report.forward_flops == report.flops == 2 * INPUTS.size * INPUTS.shape[1]
    with pytest.raises(InputError, match="beside a Traced.*got 1 argument"):
        analyze(traced, INPUTS)


def test_kinds_by_path_and_by_position():
    for kinds in ({"tree['w']": "parameters"}, {"tree": "parameters"}, ["parameters"]):
        report = analyze(pick, {"w": VECTOR, "unused": VECTOR}, target="cpu", arg_kinds=kinds)
        assert dict(report.by_kind)["parameters"] == 4 * VECTOR.size
    analyze(lambda *args: args[0], VECTOR, None, target="cpu", arg_kinds={"args[1]": "state", "args": "batch"})


def test_a_program_hands_over_what_is_modelled():
    made = []
    jitted = jax.jit(lambda x: x * 2)
    program = Program(
        name="mine",
        lower=lambda: made.append("lowered") or jitted.lower(VECTOR),
        modelled_flops=JaxprFlops(forward=5, backward=6, recompute=0, notes=("a note",)),
        saved_residual_bytes=lambda: 77,
        remat="full",
        notes=("another",),
    )
    report = analyze(program, target="cpu")
    assert made == ["lowered"]
    assert (report.name, report.forward_flops, report.saved_residual_bytes, report.remat) == ("mine", 5, 77, "full")
    assert {"a note", "another"} <= set(report.warnings)


def test_options_of_a_program_win_over_the_targets():
    option = {"xla_no_such_option": "1"}
    program = Program(name="p", lower=lambda: jax.jit(jnp.sin).lower(VECTOR), compiler_options=option)
    with pytest.raises(Exception, match="xla_no_such_option"):
        analyze(program, target="cpu")


def test_a_donated_buffer_that_no_output_can_use_is_reported():
    def step(a, b):
        return a + 1, (b + 1).astype(jnp.bfloat16)

    report = analyze(step, VECTOR, VECTOR, donate_argnums=(0, 1))
    assert report.alias_bytes == 4000
    assert warned(report, "3.9 KiB of 7.8 KiB donated bytes found no output")
    fine = analyze(step, VECTOR, VECTOR, donate_argnums=0)
    assert not warned(fine, "donated")
    unused = analyze(lambda a, b: a + 1, VECTOR, VECTOR, donate_argnums=(0, 1))
    assert not warned(unused, "donated bytes")


def test_jaxs_own_donation_warning_goes_into_the_report_and_others_go_on():
    # An output of another shape: here JAX itself warns, which is an error in these tests.
    report = analyze(lambda a: jnp.sum(a), VECTOR, donate_argnums=0)
    assert warned(report, "Some donated buffers were not usable")

    def lower():
        import warnings

        warnings.warn("from the user's code", UserWarning, stacklevel=2)
        return jax.jit(jnp.sin).lower(VECTOR)

    with pytest.warns(UserWarning, match="from the user's code"):
        analyze(Program(name="p", lower=lower))


def test_sharded_programs_report_per_device():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    report = analyze(scanned(remat=False), WEIGHTS, INPUTS, in_shardings=(whole, rows), target="cpu")
    one = analyze(scanned(remat=False), WEIGHTS, INPUTS, target="cpu")
    assert report.devices == 4
    assert report.argument_bytes == 4 * (WEIGHTS.size + INPUTS.size // 4)
    assert (report.forward_flops, report.flops) == (FORWARD, FORWARD // 4)
    assert report.capacity_bytes == one.capacity_bytes // 4  # virtual devices share the machine
    assert warned(report, "all 4 devices together")


class Stub:
    """Stands for a compiled program of a backend that tells less."""

    def __init__(self, stats, *, sharded: bool = False):
        self.stats = stats
        compiled = jax.jit(jnp.add).lower(VECTOR, VECTOR).compile()
        self.args_info, self.input_shardings = compiled.args_info, compiled.input_shardings
        self.output_shardings = compiled.output_shardings
        if sharded:
            mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
            specs = (PartitionSpec("x"), PartitionSpec())
            self.input_shardings = (tuple(NamedSharding(mesh, spec) for spec in specs), {})

    def memory_analysis(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats

    def as_text(self):
        return None


FIELDS = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes", "alias_size_in_bytes")


def stats(**values):
    return types.SimpleNamespace(**{**dict.fromkeys(FIELDS, 0), **values})


@pytest.mark.parametrize(
    "given",
    [
        None,
        stats(),
        stats(**dict.fromkeys(FIELDS, -1)),
        stats(argument_size_in_bytes=8000, output_size_in_bytes=4000, temp_size_in_bytes=-1),
        NotImplementedError("no memory analysis here"),
    ],
)
def test_case_33_no_memory_analysis_is_never_zero_bytes_that_fit(given):
    report = analyze(Stub(given))
    assert report.fits == "uncertain"
    assert (report.peak_bytes, report.temp_bytes, report.output_bytes, report.alias_bytes) == (None,) * 4
    assert report.argument_bytes == 2 * 4000
    assert report.provenances["argument_bytes"] == "modelled"
    assert warned(report, "Memory analysis is unavailable from cpu")
    assert (report.flops, report.recompute_flops) == (None, None)
    assert json.loads(report.to_json())["peak_bytes"] is None


def test_case_33_arguments_are_counted_per_device():
    report = analyze(Stub(None, sharded=True))
    assert (report.devices, report.argument_bytes) == (4, 4000 // 4 + 4000)


def test_case_33_a_stub_without_any_description():
    report = analyze(types.SimpleNamespace(memory_analysis=lambda: None))
    assert (report.fits, report.argument_bytes) == ("uncertain", None)


def test_a_program_larger_than_the_target_does_not_fit():
    assert analyze(lambda x: x + 1, VECTOR, target=SMALL).fits == "uncertain"  # exactly full
    assert analyze(lambda x, y: x + y, VECTOR, VECTOR, target=SMALL).fits == "no"


def test_json_names_the_provenance_of_each_number():
    fields = json.loads(analyze(jnp.sin, VECTOR, target="cpu").to_json())
    assert fields["provenance"] == "compiled"
    assert fields["provenances"]["forward_flops"] == "modelled"
    assert fields["provenances"]["peak_bytes"] == "compiled"
    numbers = {name for name in fields if name.endswith(("_bytes", "_flops"))} - {"capacity_bytes"} | {
        "flops",
        "by_kind",
        "argument_dtypes",
        "gradient_reductions",
        "step_seconds",
        "compile_seconds",
    }
    assert numbers == set(fields["provenances"])


def test_the_plain_text_has_bytes_and_warnings():
    text = str(analyze(jnp.sin, VECTOR, target="cpu"))
    assert re.search(r"^  arguments +3\.9 KiB$", text, re.MULTILINE)
    assert "\n! XLA:CPU" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: analyze(jnp.sin, VECTOR, arg_kinds=("weights",)), "arg_kinds=.*got {'x': 'weights'}"),
        (lambda: analyze(jnp.sin, VECTOR, arg_kinds={0: "parameters"}), "arg_kinds=.*got {0: 'parameters'}"),
        (lambda: analyze(jnp.sin, VECTOR, arg_kinds=["batch"] * 2), r"each of the 1 argument\(s\); got 2"),
        (lambda: analyze(jnp.dot, VECTOR, VECTOR, arg_kinds=["batch"]), r"each of the 2 argument\(s\); got 1"),
        (lambda: analyze(pick, {"w": VECTOR}, arg_kinds={"tre": "batch"}), r"'tre', which.*There are tree\['w'\]"),
        (lambda: analyze(pick, {"w": VECTOR}, arg_kinds={"tree.w": "batch"}), r"'tree.w', which"),
        (lambda: analyze(jax.jit(jnp.sin).lower(VECTOR), arg_kinds={"x": "batch"}), "beside a Lowered.*got arg_kinds"),
        (lambda: analyze(jnp.sin, VECTOR, target=3), "target's name.*got 3"),
        (lambda: analyze(pick, {"w": VECTOR}, donate_argnums=(7,)), r"fit 'pick'; got donate_argnums=\(7,\)"),
        (lambda: analyze(pick, {"w": VECTOR}, donate_argnums="a"), "fit 'pick'; got donate_argnums='a'"),
        (lambda: analyze(pick, {"w": VECTOR}, static_argnames="no"), "fit 'pick'; got static_argnames='no'"),
        (lambda: analyze(3), "got a int"),
        (lambda: analyze("sin", VECTOR), "got a str"),
        (lambda: analyze(scanned(remat=False), WEIGHTS), "missing a required argument: 'x'"),
        (lambda: analyze(jax.jit(jnp.sin).lower(VECTOR), VECTOR), r"beside a Lowered.*got 1 argument"),
        (lambda: analyze(jax.jit(jnp.sin).lower(VECTOR).compile(), target="cpu"), "compiled already; got 'cpu'"),
        (lambda: analyze(jax.jit(jnp.sin).lower(VECTOR), target=Target(name="t", platform="gpu")), "that is for gpu"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_an_unknown_target_is_refused_before_anything_is_traced():
    def fail(x):
        raise AssertionError("traced")

    with pytest.raises(UnknownTargetError):
        analyze(fail, VECTOR, target="tpu-v99:1x1")


def test_one_product_is_one_product():
    assert analyze(lambda x, w: x @ w, INPUTS, WEIGHTS.update(shape=WEIGHTS.shape[1:])).flops == ONE
