"""Cures on the command line name the file, its options and the target, and do what they say."""

import re
import shlex

from jaxmem.cli import analyze
from tests.cli.helpers import run, write

NET = """
    import jax, jax.numpy as jnp, optax, jaxmem

    def loss(params, batch, *, memory):
        for w in params:
            batch = memory.block(lambda w, x: jnp.tanh(jnp.sin(x @ w)))(w, batch)
        return jnp.mean(batch**2)

    def net(*, rows=8):
        params = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 4
        return jaxmem.Workload(loss, params, jax.ShapeDtypeStruct((rows, 128), jnp.float32), optax.sgd(0.1))
"""


def test_a_cure_can_be_pasted(capfd, tmp_path, monkeypatch):
    file = write(tmp_path, NET, "my net.py") + ":net"
    monkeypatch.setenv("COLUMNS", "2000")
    ran = run(capfd, "analyze", file, "--target", "gpu-h100", "--set", "rows=4096")
    commands = re.findall(r"`(jaxmem [^`]+)`", ran.out)
    assert ran.code == 0 and commands[0].split()[1] == "compare"
    assert all("rows=4096 --target gpu-h100" in command for command in commands)
    table = run(capfd, *shlex.split(commands[0])[1:])
    assert table.code == 0 and "auto:" in table.out
    assert re.search(r"cheapest that fits: \S+, \S+ \S+ a step \(estimate\), peak \S+ \S+ \(compiled\)", table.out)


def test_a_cheap_cure_is_compiled_and_not_given_where_it_is_none(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    options = ("analyze", write(tmp_path, NET) + ":net", "--target", "gpu-h100", "--set", "rows=4096")
    monkeypatch.setattr(analyze, "_CHEAP_SECONDS", -1.0)
    asked = run(capfd, *options).out
    assert "--precision bfloat16" in asked and "Not compiled: --cures" in asked and "Compiled: " not in asked
    monkeypatch.setattr(analyze, "_CHEAP_SECONDS", 600.0)
    monkeypatch.setattr(analyze, "_AGAIN", 600.0)
    told = run(capfd, *options).out
    # The model casts nothing itself, so 16 bits are refused.
    assert "--precision bfloat16" not in told and "Not advised, as a compile shows no gain: precision=bfloat16" in told
    assert re.search(r"(Compiled|No help): remat=full ", told) and "what the cures come to" not in told


def test_cures_are_compiled_where_that_is_asked_for(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = ("--target", "gpu-h100", "--set", "rows=4096", "--remat", "full", "--cures")
    ran = run(capfd, "analyze", write(tmp_path, NET) + ":net", *options)
    table = ran.out.partition("what the cures come to")[2]
    assert ran.code == 0 and "cheapest that fits: " in table
    assert {line.split()[0] for line in table.splitlines() if line.startswith(("as asked", "acc"))} == {
        "as",
        "accumulation_steps=2",
    }
