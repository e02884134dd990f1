"""`jaxmem targets`, and verbs for chips that are not here."""

import json

from jaxmem.targets import CHIPS
from tests.cli.helpers import LINEAR, assert_refused, run, write


def test_the_table_names_every_chip_and_fits_a_terminal(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = run(capfd, "targets")
    assert ran.code == 0 and ran.err == ""
    assert all(chip.name in ran.out for chip in CHIPS)
    assert "…" not in ran.out.replace("-…", "")
    assert max(map(len, ran.out.splitlines())) <= 80


def test_the_records_are_those_of_the_chip_table(capfd):
    rows = {row["name"]: row for row in json.loads(run(capfd, "targets", "--json", "-").out)["targets"]}
    assert list(rows) == [chip.name for chip in CHIPS]
    row = rows["gpu-t4"]
    assert row["compute_capability"] == "7.5" and not row["cudnn_attention"] and row["installed"]
    assert row["flops_per_second"]["float16"] == 65e12 and row["source"].startswith("https://")
    assert "16x16" in rows["tpu-v5e"]["topologies"]


def test_analyze_and_compare_for_a_chip_that_is_not_here(tmp_path, capfd):
    path = write(tmp_path, LINEAR)
    report = json.loads(run(capfd, "analyze", path, "--target", "gpu-t4", "--json", "-").out)
    assert (report["target"], report["backend"], report["fits"]) == ("gpu-t4", "gpu", "yes")
    ran = run(capfd, "compare", path, "--remat", "none,full", "--target", "tpu-v5e:1x1", "--json", "-")
    assert [row["backend"] for row in json.loads(ran.out)["rows"]] == ["tpu", "tpu"]
    assert ran.err == ""


def test_a_mesh_of_the_target_may_be_declared(tmp_path, capfd):
    source = """
        import jax, jax.numpy as jnp, optax, jaxmem
        from jax.sharding import NamedSharding, PartitionSpec as P

        def workload(*, mesh, target):
            rows = NamedSharding(mesh, P("data"))
            def loss(w, x):
                return jnp.mean(jax.lax.with_sharding_constraint(x @ w, rows) ** 2)
            batch = jax.ShapeDtypeStruct((8 * target.device_count, 16), jnp.float32, sharding=rows)
            return jaxmem.Workload(loss, jnp.ones((16, 16)), batch, optax.sgd(0.1))
    """
    path = write(tmp_path, source)
    sizes = {}
    for target in ("gpu-t4", "gpu-t4:1x1x8", "cpu"):
        ran = run(capfd, "analyze", path, "--target", target, "--json", "-")
        assert ran.code == 0, ran.err
        sizes[target] = json.loads(ran.out)["argument_bytes"]
    assert sizes["gpu-t4"] == sizes["gpu-t4:1x1x8"]  # as many rows for each device


def test_a_chip_that_does_not_exist_is_one_paragraph(tmp_path, capfd):
    ran = run(capfd, "analyze", write(tmp_path, LINEAR), "--target", "tpu-v5e:3x5")
    assert_refused(ran, "tpu-v5e:3x5", "each 1 or even", "tpu-v5e:4x4")
