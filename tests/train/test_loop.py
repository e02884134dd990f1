"""The training loop against a small hand-made step: order, readings, stops and refusals."""

import json
import os
import signal
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxmem.errors import InputError, MetricError, NonFiniteError, WorkloadError
from jaxmem.train._loop import WINDOWS_IN_FLIGHT, run_loop, train_loop


class State(NamedTuple):
    step: jax.Array
    window: jax.Array
    total: jax.Array


def new_state(window=0):
    return State(jnp.int32(window), jnp.int32(window), jnp.float32(0))


@jax.jit
def add(state, batch):
    """A step that sums its batches; its loss is the batch itself."""
    return State(state.step + 1, state.window + 1, state.total + batch), {"loss": batch, "double": 2 * batch}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_function_of_the_window_resumes_exactly():
    seen = []

    def data(window):
        seen.append(window)
        return jnp.float32(window)

    state = train_loop(add, new_state(), data, 3)
    state = train_loop(add, state, data, 2)
    assert seen == [0, 1, 2, 3, 4]
    assert float(state.total) == 10 and int(state.window) == 5


def test_an_iterator_is_not_read_past_the_last_window():
    source = iter(map(jnp.float32, range(10)))
    train_loop(add, new_state(), source, 4)
    assert float(next(source)) == 4


def test_readings_are_the_first_every_nth_and_the_last_window(tmp_path):
    records = []
    path = tmp_path / "metrics.jsonl"
    train_loop(add, new_state(), jnp.float32, 8, log_every=3, metrics_path=str(path), on_metrics=records.append)
    assert [record["window"] for record in records] == [0, 2, 5, 7]
    assert [record["step"] for record in records] == [1, 3, 6, 8]
    assert lines(path) == records
    assert list(records[1]) == ["step", "window", "loss", "double", "seconds"]
    assert (records[1]["loss"], records[1]["double"]) == (2.0, 4.0)
    assert records[0]["seconds"] < records[-1]["seconds"]


def test_a_resumed_run_appends_and_a_new_one_starts_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        state = train_loop(add, new_state(), jnp.float32, 1, metrics_path=str(path))
    train_loop(add, state, jnp.float32, 1, metrics_path=str(path))
    assert [line["window"] for line in lines(path)] == [0, 1]


def test_the_device_is_waited_for_at_readings_only_and_few_windows_are_under_way(monkeypatch):
    waited = []
    real = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: waited.append("read") or real(tree))
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: waited.append(float(tree["loss"])))
    train_loop(add, new_state(), jnp.float32, 12, log_every=10)
    # Between the readings of windows 0, 9 and 11, only results WINDOWS_IN_FLIGHT - 1 windows old are waited for.
    assert waited == ["read", *(float(w) for w in range(1, 9 - WINDOWS_IN_FLIGHT + 1)), "read", "read"]


def test_an_iterable_that_ends_early_is_a_stop_and_its_last_window_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    result = run_loop(add, new_state(), list(map(jnp.float32, range(3))), 10, metrics_path=str(path))
    assert (result.stopped, result.windows) == ("data ended", 3)
    assert [line["window"] for line in lines(path)] == [0, 2]


def test_an_early_end_is_said(capsys):
    train_loop(add, new_state(), list(map(jnp.float32, range(3))), 10)
    assert "data ended after 3 of 10" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data, what",
    [
        (None, "Workload(..., data=...)"),
        ([], "an iterable that yields none"),
        (3, "a int"),
        ({"x": 1}, "a dict"),
        ("ab", "a str"),
    ],
)
def test_no_batch_is_an_error(data, what, tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(WorkloadError) as caught:
        train_loop(add, new_state(), data, 2, metrics_path=str(path))
    assert what in str(caught.value)
    assert not path.exists()


@pytest.mark.parametrize("bad, kind", [(jnp.nan, "NaN"), (jnp.inf, "infinity")])
def test_a_loss_that_is_not_finite_at_the_first_window_blames_the_input(bad, kind, tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(NonFiniteError, match=f"{kind} in 'loss' at step 1 .*weight of each WeightedMean"):
        train_loop(add, new_state(), lambda window: jnp.float32(bad), 20, metrics_path=str(path))
    assert not path.exists()


def test_a_later_one_says_when_it_was_still_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(NonFiniteError, match="at step 10 .*still finite at window 4: lower the learning rate"):
        train_loop(
            add, new_state(), lambda w: jnp.float32(jnp.nan if w > 6 else w), 20, log_every=5, metrics_path=str(path)
        )
    assert [line["window"] for line in lines(path)] == [0, 4]


def test_the_last_window_is_always_checked():
    with pytest.raises(NonFiniteError, match="at step 7"):
        train_loop(add, new_state(), lambda w: jnp.float32(jnp.nan if w == 6 else w), 7, log_every=100)


def with_metric(value):
    def step(state, batch):
        state, metrics = add(state, batch)
        return state, {**metrics, "extra": value}

    return step


def test_nan_in_another_metric_is_an_error_and_infinity_is_written_as_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(NonFiniteError, match="NaN in 'extra' at step 1"):
        train_loop(with_metric(jnp.nan), new_state(), jnp.float32, 2)
    train_loop(with_metric(jnp.array([1.0, jnp.inf])), new_state(), jnp.float32, 1, metrics_path=str(path))
    assert lines(path)[0]["extra"] == [1.0, None]


def test_a_metric_may_not_take_the_name_of_a_column():
    def step(state, batch):
        state, metrics = add(state, batch)
        return state, {**metrics, "window": batch}

    with pytest.raises(MetricError, match="'window'"):
        train_loop(step, new_state(), jnp.float32, 1)


@pytest.mark.parametrize("counts", [{"num_steps": 0}, {"num_steps": 1, "log_every": 0}, {"num_steps": True}])
def test_counts_must_be_positive(counts):
    with pytest.raises(InputError, match="at least 1"):
        train_loop(add, new_state(), jnp.float32, **counts)


def interrupting(at):
    """Data that presses Ctrl-C when it is asked for a window of `at`."""

    def data(window):
        if window in at:
            os.kill(os.getpid(), signal.SIGINT)
        return jnp.float32(window)

    return data


def test_ctrl_c_finishes_the_step_writes_its_metrics_and_puts_the_handler_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = signal.getsignal(signal.SIGINT)
    result = run_loop(add, new_state(), interrupting({3}), 100, log_every=50, metrics_path=str(path))
    assert (result.stopped, result.windows, int(result.state.window)) == ("interrupted", 4, 4)
    assert [line["window"] for line in lines(path)] == [0, 3]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_aborts():
    def data(window):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return jnp.float32(window)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_loop(add, new_state(), data, 5)
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_trains_without_touching_signals():
    results = []
    thread = threading.Thread(target=lambda: results.append(train_loop(add, new_state(), jnp.float32, 2)))
    thread.start()
    thread.join()
    assert int(results[0].window) == 2


def test_the_progress_bar_shows_on_a_terminal_only(monkeypatch, capsys):
    train_loop(add, new_state(), jnp.float32, 3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    train_loop(add, new_state(), jnp.float32, 3, log_every=1)
    shown = capsys.readouterr().err
    assert "loss 2" in shown and "steps/s" in shown and "3/3" in shown
    train_loop(add, new_state(), jnp.float32, 3, progress=False)
    assert capsys.readouterr().err == ""


def test_lines_show_the_progress_where_there_is_no_terminal(capsys):
    run_loop(add, new_state(), jnp.float32, 6, log_every=3, line_seconds=0)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("step 1 loss 0 double 0 (") and "left" not in first
    assert last.startswith("step 6 loss 5 double 10 (") and "steps/s, 0:00 left)" in last


def test_nested_metrics_are_written_by_their_paths(tmp_path):
    def step(state, batch):
        state, metrics = add(state, batch)
        return state, {**metrics, "accuracy": {"top": [batch, batch + 1]}}

    path = tmp_path / "metrics.jsonl"
    train_loop(step, new_state(), jnp.float32, 1, metrics_path=str(path))
    assert lines(path)[0]["accuracy/top/1"] == 1.0
