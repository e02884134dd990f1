"""The verbs on a small workload: what they print, write and return."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

from jaxmem.config import MemoryConfig
from jaxmem.errors import MissingCompilerError
from tests.cli.helpers import LINEAR, run, write

ROW_FIELDS = (
    "name target provenance peak_bytes argument_bytes output_bytes temp_bytes alias_bytes host_temp_bytes "
    "saved_residual_bytes forward_flops recompute_flops step_seconds fits warnings"
).split()


@pytest.fixture
def model(tmp_path):
    return write(tmp_path, LINEAR)


def test_analyze_prints_a_report(capfd, model):
    ran = run(capfd, "analyze", model, "--target", "cpu")
    assert ran.code == 0 and ran.err == ""
    assert "peak" in ran.out and "fits: yes" in ran.out


def test_analyze_writes_json_with_every_override_applied(capfd, model, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(MemoryConfig(accumulation_steps=2, remat="dots").to_json())
    plain = json.loads(run(capfd, "analyze", model, "--json", "-").out)
    ran = run(capfd, "analyze", model, "--config", config, "--set", "rows=16", "--remat", "full", "--json", "-")
    report = json.loads(ran.out)
    assert ran.code == 0
    assert report["remat"] == "full"
    assert report["forward_flops"] == 2 * plain["forward_flops"]
    told = {each["name"]: each["value"] for each in report["settings"]}
    assert (told["remat"], told["accumulation_steps"], told["--set rows"]) == ("full", "2", "16")


def test_compare_has_a_row_for_each_preset_in_the_order_asked(capfd, model, tmp_path):
    out = tmp_path / "table.json"
    ran = run(capfd, "compare", model, "--remat", "full,none", "--target", "cpu", "--json", out)
    rows = json.loads(out.read_text())["rows"]
    assert ran.code == 0
    assert [row["name"] for row in rows] == ["full", "none"]
    assert all(field in row for row in rows for field in ROW_FIELDS)
    assert rows[0]["saved_residual_bytes"] < rows[1]["saved_residual_bytes"]
    assert rows[0]["recompute_flops"] >= rows[1]["recompute_flops"]
    assert "full" in ran.out and "none" in ran.out
    assert set(os.listdir(tmp_path)) - {"__pycache__"} == {"model.py", "table.json"}


def test_compare_takes_several_targets(capfd, model, tmp_path):
    page = tmp_path / "page.html"
    options = ("--remat", "full,none", "--target", "cpu,gpu-t4", "--json", "-", "--html", page)
    ran = run(capfd, "compare", model, *options)
    assert ran.code == 0, ran.err
    table = json.loads(ran.out)
    names = [(row["target"], row["name"]) for row in table["rows"]]
    assert names == [("cpu", "full"), ("cpu", "none"), ("gpu-t4", "full"), ("gpu-t4", "none")]
    assert table["target"] == "cpu,gpu-t4"
    assert "full on gpu-t4" in page.read_text()
    ran = run(capfd, "compare", model, "--target", "cpu,cpu")
    assert ran.code == 2 and "cpu more than once" in ran.err


def test_compare_without_a_target_takes_one_that_shows_what_remat_saves(capfd, model, monkeypatch):
    def target(*options):
        (row,) = json.loads(run(capfd, "compare", model, "--remat", "none", "--json", "-", *options).out)["rows"]
        assert row["warnings"][0].startswith(f"No target was named, so this is {row['target']}: ")
        return row["target"]

    assert target("--verify") == "cpu"  # whose steps can be run
    assert target() == "gpu-h100"
    missing = MissingCompilerError(wanted="a", got="b", do="c")
    monkeypatch.setattr("jaxmem.targets._at_hand.check_installed", lambda name: (_ for _ in ()).throw(missing))
    monkeypatch.setattr("jaxmem.targets._at_hand.version", lambda name: None)
    assert target() == "cpu"


def test_a_preset_without_effect_costs_one_row_and_exit_code_2(capfd, tmp_path):
    source = LINEAR.replace("block = memory.block(", "block = (")
    ran = run(capfd, "compare", write(tmp_path, source), "--remat", "none,full", "--target", "cpu")
    assert ran.code == 2 and ran.err == ""
    assert "none  " in ran.out and "full: refused. Wanted a loss that marks its blocks" in ran.out


def test_what_the_file_prints_does_not_reach_the_json(capfd, tmp_path):
    source = LINEAR + "\n    def chatty():\n        print('hello')\n        return workload()\n"
    ran = run(capfd, "compare", f"{write(tmp_path, source)}:chatty", "--remat", "none", "--json", "-")
    assert ran.code == 0
    assert [row["name"] for row in json.loads(ran.out)["rows"]] == ["none"]
    assert "hello" in ran.err


def test_what_does_not_fit_is_exit_code_1(capfd, tmp_path):
    source = LINEAR.replace("jnp.full((width, width), scale)", "jax.ShapeDtypeStruct((width, width), 'float32')")
    source = source.replace("jnp.ones((rows, width))", "jax.ShapeDtypeStruct((rows, width), 'float32')")
    path = write(tmp_path, source)
    ran = run(capfd, "analyze", path, "--set", "width=2_000_000", "--json", "-")
    assert ran.code == 1 and json.loads(ran.out)["fits"] == "no"
    assert run(capfd, "compare", path, "--set", "width=2_000_000", "--remat", "none,full").code == 1


def test_train_writes_metrics_and_says_how_it_ended(capfd, model, tmp_path):
    path = tmp_path / "metrics.jsonl"
    ran = run(capfd, "train", model, "--steps", "6", "--log-every", "4", "--metrics", path, "--accumulation-steps", "2")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert ran.code == 0
    assert [record["step"] for record in records] == [1, 4, 6]
    assert records[-1]["loss"] < records[0]["loss"]
    assert ran.out.startswith("6 of 6 steps, loss ")
    assert ran.err.startswith("step 1 loss ")


HALF = LINEAR.replace(", *, memory", "").replace("memory.block(", "(").replace("jnp.sum(batch**2)", "(batch**2).sum()")
HALF = HALF.replace("data=lambda window: batch", "data=lambda window: batch * (1e5 if window in BAD else 1)")


def test_train_in_float16_shows_the_scale_and_goes_on_after_an_overflow(capfd, tmp_path):
    path, metrics = write(tmp_path, HALF + "\n    BAD = {1}\n"), tmp_path / "metrics.jsonl"
    ran = run(capfd, "train", path, "--steps", "4", "--log-every", "1", "--precision", "float16", "--metrics", metrics)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert ran.code == 0 and [record["step"] for record in records] == [1, 1, 2, 3]
    assert [record["loss_scale"] for record in records] == [2**15, 2**15, 2**14, 2**14]
    assert "loss_scale 16384 skipped 1" in ran.err
    assert " after step 3, 1 skipped (gradients not finite), " in ran.out


def test_a_run_in_which_every_window_overflows_ends_with_a_cure(capfd, tmp_path):
    path = write(tmp_path, HALF + "\n    BAD = range(1000)\n")
    ran = run(capfd, "train", path, "--steps", "80", "--precision", "float16")
    assert ran.code == 2 and "skipped in a row at step 0" in ran.err and "the loss scale down to 1" in ran.err
    assert "bfloat16" in ran.err and "Traceback" not in ran.err


def test_the_seed_decides_the_parameters(capfd, tmp_path):
    source = LINEAR + "\n    import dataclasses\n    def drawn():\n"
    source += "        params = lambda key: {'layers': [jax.random.normal(key, (4, 4))]}\n"
    source += "        return dataclasses.replace(workload(), params=params)\n"
    spec = f"{write(tmp_path, source)}:drawn"
    losses = [run(capfd, "train", spec, "--steps", "1", "--seed", seed).out.split(",")[1] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_a_workload_without_data_trains_on_its_batch_and_says_so(capfd, tmp_path):
    path = write(tmp_path, LINEAR.replace(", data=lambda window: batch", ""))
    ran = run(capfd, "train", path, "--steps", "2")
    assert ran.code == 0 and "training on its example batch over and over" in ran.err


def test_warnings_of_training_are_paragraphs_and_memory_is_told(capfd, tmp_path):
    path = write(tmp_path, LINEAR.replace("jnp.tanh(jnp.sin(x @ w))", "x @ w"))
    metrics = tmp_path / "metrics.jsonl"
    ran = run(capfd, "train", path, "--steps", "2", "--remat", "full", "--metrics", metrics)
    assert ran.code == 0 and "RematWarning" not in ran.err and "warnings.warn" not in ran.err
    (warned,) = [line for line in ran.err.splitlines() if line.startswith("jaxmem: warning: ")]
    assert "nothing to recompute" in warned
    assert "jaxmem: peak memory: " in ran.err and " predicted (compiled)" in ran.err
    memory = json.loads(metrics.read_text().splitlines()[-1])["memory"]
    assert memory["measured_by"] == "resident memory" and memory["predicted_bytes"] > 0


def test_data_that_ends_early_is_no_error(capfd, tmp_path):
    path = write(tmp_path, LINEAR.replace("data=lambda window: batch", "data=[batch] * 3"))
    ran = run(capfd, "train", path, "--steps", "5")
    assert ran.code == 0
    assert "data ended after 3 of 5 windows" in ran.err and ran.out.rstrip().endswith("; data ended")


def test_ctrl_c_stops_with_130_and_no_traceback(tmp_path):
    source = LINEAR.replace("data=lambda window: batch", "data=slowly")
    source += "\n    import time\n    def slowly(window):\n        time.sleep(0.05)\n        return jnp.ones((8, 4))\n"
    metrics = tmp_path / "metrics.jsonl"
    command = [sys.executable, "-m", "jaxmem", "train", write(tmp_path, source), "--steps", "100000"]
    process = subprocess.Popen(
        [*command, "--metrics", str(metrics), "--log-every", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(2)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Finishing the current step" in err and "Traceback" not in err
    assert "; interrupted" in out
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == int(out.split("after step ")[1].split(",")[0])


def test_help_and_version_import_no_jax():
    """With the rest of the package out of the way: `jaxmem/__init__.py` decides for itself."""
    program = """
    import os, sys, types
    package = types.ModuleType("jaxmem")
    package.__path__, package.__version__ = [os.path.abspath("jaxmem")], "0"
    sys.modules["jaxmem"] = package
    from jaxmem.cli import main
    codes = [main(["--help"]), main(["compare", "--help"]), main(["--version"])]
    assert codes == [0, 0, 0], codes
    heavy = {"jax", "flax", "optax", "numpy"} & set(sys.modules)
    assert not heavy, heavy
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "analyze" in done.stdout and "--remat" in done.stdout


def test_residuals_before_and_after(capfd, model):
    """Rows by source line; nothing is compiled, and the JSON has both tables."""
    ran = run(capfd, "residuals", model, "--remat", "full")
    assert ran.code == 0 and ran.err == ""
    assert ran.out.split()[:2] == ["before", "after"] and "model.py:" in ran.out and "total" in ran.out
    table = json.loads(run(capfd, "residuals", model, "--remat", "full", "--json", "-").out)
    plain = json.loads(run(capfd, "residuals", model, "--json", "-").out)
    assert table["before"]["rows"] == plain["rows"] and "before" not in plain
    assert table["total_bytes"] < plain["total_bytes"] == sum(row["size_bytes"] for row in plain["rows"])


def test_a_preset_whose_names_the_model_lacks_is_bad_input(capfd, model):
    ran = run(capfd, "residuals", model, "--remat", "minimal")
    assert ran.code == 2 and "query_proj" in ran.err and "checkpoint_name" in ran.err


def test_budgets_stand_beside_presets(capfd, model):
    ran = run(capfd, "compare", model, "--remat", "none,full,auto:0.5,auto:1GiB", "--target", "cpu", "--json", "-")
    assert ran.code == 0, ran.err
    rows = {row["name"]: row for row in json.loads(ran.out)["rows"]}
    kept = {name: row["saved_residual_bytes"] for name, row in rows.items()}
    assert kept["full"] <= kept["auto:0.5"] <= 0.5 * kept["none"]
    assert rows["auto:1GiB"]["peak_bytes"] <= 2**30
    ran = run(capfd, "residuals", model, "--remat", "auto:0.5", "--json", "-")
    assert json.loads(ran.out)["total_bytes"] == kept["auto:0.5"]


def test_a_budget_that_nothing_stays_within_loses_no_other_row(capfd, model):
    for verify in ((), ("--verify",)):
        ran = run(capfd, "compare", model, "--remat", "auto:16B,none", "--target", "cpu", "--json", "-", *verify)
        assert ran.code == 0, ran.err
        table = json.loads(ran.out)
        assert [row["name"] for row in table["rows"]] == ["none"]
        assert list(table["refused"]) == ["auto:16B"] and "smallest" in table["refused"]["auto:16B"]
    ran = run(capfd, "compare", model, "--remat", "auto:0.0001,none", "--target", "cpu")
    assert ran.code == 0 and "auto:0.0001: does not fit. Wanted at most 0.0001 of the residuals" in ran.out


def test_what_jax_or_a_preset_refuses_loses_no_other_row(capfd, tmp_path):
    source = """
import jax, jax.numpy as jnp, optax, jaxmem
def layer(x, w): return jnp.tanh((x @ (w + 1j * w)).real) + x, None
def loss(ws, x): return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)
def workload(): return jaxmem.Workload(loss, jnp.ones((3, 8, 8)), jnp.ones((4, 8)), optax.adam(0.1))
"""
    path = tmp_path / "fourier.py"
    path.write_text(source)
    refused = ("compare", path, "--remat", "dots,minimal,auto:8B,full", "--target", "cpu")
    ran = run(capfd, *refused, "--json", "-")
    assert ran.code == 0, ran.err
    table = json.loads(ran.out)
    assert [row["name"] for row in table["rows"]] == ["full"]
    why = table["refused"]
    assert "reduce_precision" in why["dots"] and "query_proj" in why["minimal"] and "smallest" in why["auto:8B"]
    ran = run(capfd, *refused)
    assert "dots: refused. TypeError" in ran.out and "auto:8B: does not fit. " in ran.out
    ran = run(capfd, "compare", path, "--remat", "dots", "--target", "cpu")
    assert ran.code == 2 and "reduce_precision" in ran.err and "internal" not in ran.err


def test_a_target_that_a_budget_is_too_small_for_loses_no_other(capfd, model):
    ran = run(capfd, "compare", model, "--remat", "none", "--target", "local,cpu", "--json", "-")
    local, cpu = (row["peak_bytes"] for row in json.loads(ran.out)["rows"])
    if cpu < local:  # before JAX 0.12 the default scheduler needs more
        ran = run(capfd, "compare", model, "--remat", f"auto:{(cpu + local) // 2}", "--target", "local,cpu")
        assert ran.code == 0 and ran.err.startswith("jaxmem: does not fit: ") and "on local" in ran.err
        assert "target cpu" in ran.out


def test_a_budget_that_nothing_stays_within_does_not_fit(capfd, model):
    ran = run(capfd, "compare", model, "--remat", "auto:16B", "--target", "cpu")
    assert ran.code == 1
    assert ran.err.startswith("jaxmem: does not fit: ") and "smallest" in ran.err and ran.err.count("\n") == 1
