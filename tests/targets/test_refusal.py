"""A program that is too large: a TPU's compiler refuses it, a GPU's does not; both end in `fits: no`, exit code 1."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.errors import DoesNotFitError
from jaxmem.targets import compile_on, compile_oom, find_chip
from tests.cli.helpers import run, write

LARGE = """
    import jax, jax.numpy as jnp, optax, jaxmem

    def workload(*, rows=2**20):
        batch = jax.ShapeDtypeStruct((rows, 4096), jnp.float32)
        return jaxmem.Workload(lambda w, x: jnp.mean((x @ w) ** 2), jnp.ones((4096, 8)), batch, optax.sgd(0.1))
"""


def test_the_refusal_of_a_tpus_compiler_is_a_report():
    report = jaxmem.analyze(jnp.sin, jax.ShapeDtypeStruct((1024, 1024, 2500), jnp.float32), target="tpu-v5e")
    assert report.fits == "no"
    assert report.peak_bytes == pytest.approx(2 * 4 * 1024 * 1024 * 2500, rel=0.01)
    assert report.capacity_bytes == find_chip("tpu-v5e").usable_bytes
    assert "needs 19.53 GiB, which exceeds the 15.75 GiB" in report.fits_reason


def test_a_gpu_too_small_is_told_by_comparison():
    report = jaxmem.analyze(jnp.sin, jax.ShapeDtypeStruct((1024, 1024, 2500), jnp.float32), target="gpu-t4")
    assert report.fits == "no" and "19.53 GiB, exceeds the 11.06 GiB" in report.fits_reason


def test_compare_goes_on_after_a_row_that_was_refused():
    variants = {"large": lambda x: jnp.zeros(2**35, jnp.int8) + x[0], "small": lambda x: x + x[0]}
    large, small = jaxmem.compare(variants, jax.ShapeDtypeStruct((8,), jnp.int8), target="tpu-v6e").rows
    assert (large.fits, small.fits) == ("no", "yes")
    assert large.peak_bytes >= 2**35


def test_compiling_it_raises_and_says_how_much():
    with pytest.raises(DoesNotFitError, match="Try more accumulation steps") as caught:
        compile_on("tpu-v6e", jnp.sin, jax.ShapeDtypeStruct((2**40,), jnp.int8))
    assert caught.value.available_bytes == find_chip("tpu-v6e").usable_bytes
    assert "exceeds available HBM" in caught.value.text


@pytest.mark.parametrize("target", ["tpu-v5e", "gpu-t4"])
def test_the_command_line_exits_with_1(tmp_path, capfd, target):
    ran = run(capfd, "analyze", write(tmp_path, LARGE), "--target", target, "--json", "-")
    report = json.loads(ran.out)
    assert ran.code == 1 and report["fits"] == "no"
    assert report["peak_bytes"] > 2**34 > report["capacity_bytes"]


@pytest.mark.parametrize(
    ("text", "needed", "available"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.59G of 15.75G hbm. Exceeded by 2.8G.",
         round(18.59 * 2**30), round(15.75 * 2**30)),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 900.00M of 512.00M hbm", 900 * 2**20, 512 * 2**20),
        ("Compilation failure: Aborting compilation early because it's unlikely to have enough device memory. Requires "
         "2.50E, has 31.25G available.", round(2.5 * 2**60), round(31.25 * 2**30)),
        ("RESOURCE_EXHAUSTED: something else", None, None),
    ],
)  # fmt: skip
def test_older_words_for_it(text, needed, available):
    oom = compile_oom(text)
    assert (oom.needed_bytes, oom.available_bytes) == (needed, available)


def test_other_errors_are_not_about_memory():
    assert compile_oom("INVALID_ARGUMENT: hbm (1.0G) exceeds available HBM (2.0G)") is None
    assert compile_oom("RESOURCE_EXHAUSTED: " + "(" * 200_000).needed_bytes is None


def test_a_refusal_that_nobody_made_a_report_of_still_exits_with_1(tmp_path, capfd):
    source = """
        import jax, jax.numpy as jnp
        from jaxmem.targets import compile_on

        def workload():
            compile_on("tpu-v5e", jnp.sin, jax.ShapeDtypeStruct((2**40,), jnp.int8))
    """
    ran = run(capfd, "analyze", write(tmp_path, source), "--target", "cpu")
    assert ran.code == 1 and ran.err.startswith("jaxmem: does not fit: Wanted a program that fits a device of tpu-v5e")
