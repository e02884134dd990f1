"""Bad input: one paragraph on stderr, exit code 2, no traceback, nothing written."""

import os

import pytest

from jaxmem._blame import LONGEST_MESSAGE
from jaxmem.cli import _app
from jaxmem.cli._errors import explain
from jaxmem.errors import BatchError
from tests.cli.helpers import LINEAR, assert_refused, run, write

VERBS = {
    "analyze": ("--json", "out.json"),
    "compare": ("--json", "out.json"),
    "train": ("--steps", "3", "--metrics", "out.json"),
}
ALL_VERBS = pytest.mark.parametrize("verb", VERBS)


@pytest.fixture
def refused(capfd, tmp_path, monkeypatch):
    """Runs a verb in an empty directory and checks that it is refused with these words, leaving nothing."""
    monkeypatch.chdir(tmp_path)

    def check(verb, spec, *options, words):
        before = set(os.listdir(tmp_path))
        assert_refused(run(capfd, verb, spec, *options, *VERBS[verb]), *words)
        assert set(os.listdir(tmp_path)) - before <= {"__pycache__"}

    return check


@ALL_VERBS
def test_a_missing_file(refused, verb):
    refused(verb, "nowhere.py", words=["a Python file at nowhere.py", "no such file"])


@ALL_VERBS
def test_a_missing_function(refused, verb, tmp_path):
    write(tmp_path, LINEAR)
    refused(verb, "model.py:gpt3", words=["a function gpt3() in model.py", "workload"])


@ALL_VERBS
def test_not_a_workload(refused, verb, tmp_path):
    write(tmp_path, "def workload():\n    return {}\n")
    refused(verb, "model.py", words=["to return a jaxmem.Workload", "dict"])


@ALL_VERBS
@pytest.mark.parametrize(
    "change, words",
    [
        (("jaxmem.Workload(loss_fn,", "jaxmem.Workload('loss',"), ["loss_fn to be a function", "str"]),
        (("optax.sgd(0.1)", "None"), ["optax.GradientTransformation"]),
        (("batch = jnp.ones((rows, width))", "batch = {'x': 'text'}"), ["a str at batch/x"]),
    ],
)
def test_a_workload_of_the_wrong_shape(refused, verb, change, words, tmp_path):
    write(tmp_path, LINEAR.replace(*change))
    refused(verb, "model.py", words=words)


@ALL_VERBS
def test_a_batch_that_k_does_not_divide(refused, verb, tmp_path):
    write(tmp_path, LINEAR)
    refused(verb, "model.py", "--accumulation-steps", "3", words=["8", "3"])


@ALL_VERBS
def test_an_unknown_policy(refused, verb, tmp_path):
    write(tmp_path, LINEAR)
    refused(verb, "model.py", "--remat", "everything", words=["none, full, dots, dots_no_batch", "'everything'"])


@ALL_VERBS
def test_integer_parameters(refused, verb, tmp_path):
    write(tmp_path, LINEAR.replace("jnp.full((width, width), scale)", "jnp.ones((width, width), 'int32')"))
    refused(verb, "model.py", words=["int32", "layers/0"])


@ALL_VERBS
def test_an_empty_batch(refused, verb, tmp_path):
    write(tmp_path, LINEAR)
    refused(verb, "model.py", "--set", "rows=0", words=["batch"])


def test_nan_weights_of_the_model(refused, tmp_path):
    write(tmp_path, LINEAR)
    refused("train", "model.py", "--set", "scale=float_nan", words=["scale to be a float"])
    write(tmp_path, LINEAR.replace("scale=0.5", "scale=float('nan')"))
    refused("train", "model.py", words=["NaN in 'loss' at step 1", "parameters"])


def test_nan_weights_of_the_objective(refused, tmp_path):
    write(tmp_path, LINEAR.replace("batch.shape[0])", "jnp.nan)"))
    refused("train", "model.py", words=["NaN in 'loss' at step 1", "weight of each WeightedMean"])


def test_no_data(refused, tmp_path):
    source = LINEAR.replace(", data=lambda window: batch", "")
    write(tmp_path, source.replace("jnp.ones((rows, width))", "jax.ShapeDtypeStruct((rows, width), 'float32')"))
    refused("train", "model.py", words=["data=None", "Workload(..., data="])
    write(tmp_path, LINEAR.replace("data=lambda window: batch", "data=[]"), "empty.py")
    refused("train", "empty.py", words=["at least one batch"])


def test_a_loss_that_raises_names_its_line(refused, tmp_path):
    write(tmp_path, LINEAR.replace('params["layers"]', 'params["layer"]'))
    for verb in VERBS:
        refused(verb, "model.py", words=["KeyError: 'layer'", "model.py, line 6, in loss_fn", "--debug"])


@pytest.mark.parametrize(
    "change, words",
    [
        (("optax.sgd(0.1)", "optax.lbfgs()"), ["an optimizer whose update takes", "value_fn"]),
        (("optax.sgd(0.1)", "optax.multi_transform({'a': optax.sgd(0.1)}, 'b')"), ["whose init takes", "'b'"]),
        (("def loss_fn(params, batch, *, memory)", "def loss_fn(params)"), ["loss_fn(params, batch)", "too many"]),
        (("optax.sgd(0.1)", "optax.sgd(0.1), compiler_options={'xla_foo': 1}"), ["compiler_options", "'xla_foo'"]),
    ],
)
def test_what_only_jax_or_optax_would_refuse(refused, change, words, tmp_path):
    """Verbs call the user's parts in different places."""
    write(tmp_path, LINEAR.replace(*change))
    for verb in ("analyze", "train"):
        refused(verb, "model.py", words=words)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float128", "complex64"])
def test_a_precision_that_cannot_be_computed_in(refused, dtype, tmp_path):
    write(tmp_path, LINEAR)
    refused("analyze", "model.py", "--precision", dtype, words=["float32, bfloat16, float16, float64", repr(dtype)])


@pytest.mark.parametrize("remat", ["none,none", "none,,full", ""])
def test_a_list_of_presets_that_is_none(refused, remat, tmp_path):
    write(tmp_path, LINEAR)
    refused("compare", "model.py", "--remat", remat, words=["--remat to be a list of different presets"])


@pytest.mark.parametrize(
    "text, words",
    [
        (None, ["a MemoryConfig as JSON in config.json", "No such file"]),
        ("{", ["invalid JSON"]),
        ('{"remat": "full", "zeroes": 1}', ["'zeroes'"]),
        ('{"accumulation_steps": 0}', ["accumulation_steps", "at least 1"]),
    ],
)
def test_a_bad_config(refused, text, words, tmp_path):
    write(tmp_path, LINEAR)
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    refused("analyze", "model.py", "--config", "config.json", words=words)


def test_a_bad_precision_and_target(refused, tmp_path):
    write(tmp_path, LINEAR)
    refused("analyze", "model.py", "--precision", "int8", words=["precision", "'int8'"])
    refused("compare", "model.py", "--target", "abacus", words=["'abacus'"])


def test_an_output_that_cannot_be_written_is_refused_before_the_file_runs(capfd, tmp_path):
    path = write(tmp_path, "raise SystemExit('ran')")
    for arguments in (["analyze", path, "--json"], ["train", path, "--steps", "1", "--metrics"]):
        assert_refused(run(capfd, *arguments, tmp_path / "no" / "out"), "no directory")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["analyse"], ["analyse", "`jaxmem --help`"]),
        (["analyze"], ["FILE", "`jaxmem analyze --help`"]),
        (["analyze", "model.py", "--taget", "cpu"], ["--taget"]),
        (["train", "model.py"], ["--steps"]),
        (["train", "model.py", "--steps", "0"], ["--steps", "1"]),
        (["train", "model.py", "--steps", "many"], ["--steps", "integer"]),
        (["train", "model.py", "--steps", "1", "--seed", str(2**70)], ["--seed"]),
        (["train", "model.py", "--steps", "1", "--metrics", "-"], ["--metrics"]),
    ],
)
def test_usage(capfd, arguments, words):
    assert_refused(run(capfd, *arguments), *words)


@ALL_VERBS
def test_a_file_that_ends_the_program_late_is_no_success(refused, verb, tmp_path):
    """A loss or a data function is called after the file has been loaded."""
    write(tmp_path, LINEAR.replace("block = memory", "raise SystemExit(0)\n        block = memory"))
    refused(verb, "model.py", words=["SystemExit: 0", "model.py, line 5, in loss_fn"])


def test_a_broken_pipe_of_the_users_is_not_that_of_stdout(refused, tmp_path):
    source = LINEAR.replace("data=lambda window: batch", "data=worker")
    source += "\n    def worker(window):\n        raise BrokenPipeError(32, 'worker died')\n"
    write(tmp_path, source)
    refused("train", "model.py", words=["worker died", "in worker"])


def test_debug_adds_the_traceback_and_the_cause(capfd, tmp_path):
    ran = run(capfd, "analyze", write(tmp_path, "1 / 0"), "--debug")
    assert ran.code == 2
    assert "Traceback" in ran.err and "ZeroDivisionError" in ran.err
    assert ran.err.splitlines()[-1].startswith("jaxmem: error: ")


def test_a_fault_of_jaxmem_itself_is_exit_code_3(capfd, monkeypatch):
    def fail():
        raise AssertionError("a\n  long\nstory" + "x" * 5000)

    monkeypatch.setattr(_app._environment, "apply_defaults", lambda: None)
    monkeypatch.setattr("jaxmem.cli.doctor.examine", fail)
    # The test stands for jaxmem's own code here, so its frame must not be taken for the user's.
    monkeypatch.setattr("jaxmem._blame.is_users", lambda filename: False)
    ran = run(capfd, "doctor")
    assert ran.code == 3
    assert ran.err.startswith("jaxmem: internal error: AssertionError: a long story")
    assert ran.err.count("\n") == 1 and len(ran.err) < LONGEST_MESSAGE + 200


def test_running_out_of_memory_is_exit_code_1():
    problem = explain(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes"))
    assert problem.exit_code == 1 and problem.text.startswith("jaxmem: does not fit: ")


def test_a_message_of_several_lines_becomes_one_paragraph():
    assert explain(BatchError(wanted="a\nb", got="c", do="d\n\ne")).text == "jaxmem: error: Wanted a b; got c. d e"
