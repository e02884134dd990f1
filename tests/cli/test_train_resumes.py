"""`jaxmem train --checkpoint-dir`: stops, goes on, and says so."""

import json
import signal

import pytest

from tests.cli.helpers import LINEAR, assert_refused, run, write

STOPPING = """
    import os
    import jax.numpy as jnp, optax, jaxmem

    def loss_fn(params, batch):
        return jnp.mean((batch @ params) ** 2)

    def workload(*, stop=-1, number=15):
        def data(window):
            if window == stop:
                os.kill(os.getpid(), number)
            return jnp.full((8, 4), 1.0 + window)

        return jaxmem.Workload(loss_fn, jnp.full((4, 4), 0.5), jnp.ones((8, 4)), optax.adam(0.01), data=data)
"""


@pytest.fixture
def model(tmp_path):
    return write(tmp_path, STOPPING)


def lines(path):
    return [(line["window"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())]


@pytest.mark.parametrize("number, code, how", [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")])
def test_a_run_that_a_signal_stops_goes_on_by_the_same_command(capfd, model, tmp_path, number, code, how):
    def train(folder, *options):
        options = ("--checkpoint-dir", folder, "--save-every", 3, "--keep", 2, "--log-every", 2, *options)
        return run(capfd, "train", model, "--steps", 9, "--metrics", f"{folder}.jsonl", *options)

    stopped = train(tmp_path / "stopped", "--set", f"stop=4,number={int(number)}")
    assert stopped.code == code and stopped.err.endswith(f"jaxmem: stopped by {how}\n")
    assert stopped.out.startswith("5 of 9 steps, loss ")
    assert stopped.out.endswith(f"\nsaved in {tmp_path / 'stopped' / '5'}; the same command goes on from there\n")
    again, whole = train(tmp_path / "stopped"), train(tmp_path / "whole")
    assert again.code == whole.code == 0
    assert f"jaxmem: resumed at window 5 from {tmp_path / 'stopped' / '5'}\n" in again.err
    assert again.out.startswith("9 of 9 steps, 4 of them now, loss ")
    assert again.out.endswith(f"\nsaved in {tmp_path / 'stopped' / '9'}\n")
    assert lines(tmp_path / "stopped.jsonl") == lines(tmp_path / "whole.jsonl")
    assert sorted(path.name for path in (tmp_path / "whole").glob("[0-9]*")) == ["6", "9"]


def test_a_seed_that_does_nothing_is_said(capfd, model, tmp_path):
    command = ("train", model, "--checkpoint-dir", tmp_path / "run", "--steps")
    first, same, other = (run(capfd, *command, n, "--seed", seed) for n, seed in ((1, 3), (2, 3), (3, 4)))
    assert "--seed" not in first.err + same.err
    assert f"jaxmem: --seed 4 did nothing: the run in {tmp_path / 'run'} began with another key\n" in other.err


def test_a_run_at_its_end_has_nothing_to_do(capfd, model, tmp_path):
    command = ("train", model, "--checkpoint-dir", tmp_path / "run", "--steps")
    assert run(capfd, *command, 2).code == 0
    again = run(capfd, *command, 2)
    assert again.code == 0 and again.out.startswith("nothing to do: 2 steps were trained before, of 2\nsaved in ")


def test_nan_names_the_last_checkpoint(capfd, tmp_path):
    path = write(tmp_path, LINEAR.replace("data=lambda window: batch", "data=lambda w: batch / (w < 3)"))
    options = ("--steps", 9, "--checkpoint-dir", tmp_path / "run", "--save-every", 2)
    ran = run(capfd, "train", path, *options)
    assert ran.code == 2 and "NaN in 'loss' at step 4" in ran.err
    assert ran.err.endswith(f"The last checkpoint is that of window 2, {tmp_path / 'run' / '2'}.\n")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--save-every", "5"], ["--checkpoint-dir with --save-every"]),
        (["--keep", "5"], ["--checkpoint-dir with --keep"]),
        (["--cast", "params"], ["--checkpoint-dir with --cast"]),
        (["--checkpoint-dir", "gs://bucket/run"], ["gs://bucket/run", "Only folders are supported now"]),
        (["--checkpoint-dir", "model.py"], ["model.py"]),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(capfd, model, monkeypatch, tmp_path, options, words):
    monkeypatch.chdir(tmp_path)
    assert_refused(run(capfd, "train", model, "--steps", "3", *options), *words)
