"""`jaxmem compare --verify` runs every row's step, and fails where one breaks its promise."""

import json

from tests.cli.helpers import LINEAR, assert_refused, run, write

# A mean of means: micro-batches whose masks differ count alike.
SABOTAGED = LINEAR.replace(
    "return jaxmem.WeightedMean(jnp.sum(batch**2), batch.shape[0])",
    "mask = jnp.sum(jnp.abs(batch), axis=1) > 0.5\n"
    "        return jnp.sum(jnp.sum(batch**2, axis=1) * mask) / jnp.maximum(1, jnp.sum(mask))",
).replace(
    "batch = jnp.ones((rows, width))", "batch = jnp.ones((rows, width)) * jnp.array([1, 0.01, 0.9, 1.2] * 2)[:, None]"
)


def test_every_row_is_verified_and_the_json_says_so(capfd, tmp_path):
    path = write(tmp_path, LINEAR)
    ran = run(capfd, "compare", path, "--verify", "--target", "cpu", "--remat", "none,full", "--json", "-")
    assert ran.code == 0, ran
    found = {row["name"]: row["verification"] for row in json.loads(ran.out)["rows"]}
    verdicts = {name: {check["name"]: check["verdict"] for check in row["checks"]} for name, row in found.items()}
    assert verdicts["none"] == {"gradients": "pass", "loss": "pass"} and found["none"]["verdict"] == "pass"
    assert set(verdicts["full"]) == {"gradients", "loss", "residuals", "temps", "recompute"}
    assert "fail" not in verdicts["full"].values()  # XLA:CPU may merge the recomputation of so small a model
    assert verdicts["full"]["gradients"] == verdicts["full"]["residuals"] == "pass"
    assert found["full"]["residual_bytes"] < found["full"]["reference_residual_bytes"]


def test_a_broken_promise_is_exit_code_1_and_printed(capfd, tmp_path):
    path = write(tmp_path, SABOTAGED)
    once = ("compare", path, "--verify", "--target", "cpu", "--remat", "none")
    assert run(capfd, *once).code == 0
    ran = run(capfd, *once, "--accumulation-steps", "2")
    assert ran.code == 1 and ran.err == ""
    assert "verdict" in ran.out and "fail" in ran.out and "Relative distance" in " ".join(ran.out.split())


def test_without_the_option_nothing_is_run(capfd, tmp_path):
    ran = run(
        capfd, "compare", write(tmp_path, SABOTAGED), "--remat", "none", "--accumulation-steps", "2", "--json", "-"
    )
    assert ran.code == 0 and "verification" not in json.loads(ran.out)["rows"][0]


def test_parameters_that_are_only_shapes_are_bad_input(capfd, tmp_path):
    source = LINEAR.replace("jnp.full((width, width), scale)", "jax.ShapeDtypeStruct((width, width), 'float32')")
    assert_refused(run(capfd, "compare", write(tmp_path, source), "--verify", "--remat", "none"), "real parameters")
