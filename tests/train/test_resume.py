"""A run that was saved and restored goes on as if it had never stopped."""

import json
import os
import shutil
import signal
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import LossOutput, MemoryConfig, WeightedMean, Workload, accumulate, checkpoint, make_train_step
from jaxmem.errors import CheckpointError, InputError, NonFiniteError, WorkloadError
from jaxmem.train._loop import run_loop, train_loop
from jaxmem.train._loop_data import as_json, batches_of

WINDOWS = 6
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def loss(params, batch, *, rng, state):
    """Dropout, and statistics as those of BatchNorm."""
    kept = jax.random.bernoulli(rng, 0.7, batch.shape)
    rows = jnp.sum((jnp.where(kept, batch, 0) @ params["w"] - state["mean"]) ** 2, 1)
    new = {"mean": 0.9 * state["mean"] + 0.1 * batch.mean()}
    return LossOutput(WeightedMean(rows.sum(), rows.size), state=new)


def data(window):
    """Window 2 overflows in float16."""
    return (X + window) * np.float32(1e4 if window == 2 else 1)


def step_of(config, optimizer=None):
    params, state = {"w": jnp.ones((4, 2))}, {"mean": jnp.zeros(())}
    optimizer = optimizer or optax.adam(0.05)
    return make_train_step(Workload(loss, params, X, optimizer, state=state, rng=jax.random.key(3)), config)


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype, path
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def test_case_12_a_resumed_run_draws_the_same_random_numbers(tmp_path):
    """maxtext#4343: a key that is not saved makes dropout repeat its masks. Step 6 is the uninterrupted run's."""
    step = step_of(MemoryConfig(accumulation_steps=2))
    state, losses = step.init(), []
    for _ in range(5):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    checkpoint.save(tmp_path, state, number=5)
    resumed = checkpoint.restore(tmp_path, step)
    (went_on, metrics), (resumed, again) = step(state, X), step(resumed, X)
    assert float(again["loss"]) == float(metrics["loss"]) not in losses
    assert_same_bits(resumed, went_on)


def lines(path):
    """Records without what is measured."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: x for name, x in record.items() if name not in ("seconds", "memory")} for record in records]


@pytest.mark.parametrize(
    "config, optimizer",
    [
        (MemoryConfig(), None),
        (MemoryConfig(accumulation_steps=4), None),
        (MemoryConfig(accumulation_steps=4, precision="float16"), None),
        (MemoryConfig(), accumulate.multi_steps(optax.adam(0.05), 4)),
    ],
    ids=["plain", "accumulated", "float16", "multi_steps"],
)
def test_a_run_killed_at_any_window_ends_bit_identical(tmp_path, config, optimizer):
    """As a run leaves them that is killed later, its metrics run ahead of its checkpoint, and end in half a line."""
    step, log = step_of(config, optimizer), "metrics.jsonl"
    options = {"save_every": 1, "log_every": 2, "progress": False}
    whole = tmp_path / "whole"
    manager = checkpoint.Manager(whole, keep=None)
    end = train_loop(
        step, None, data, WINDOWS, checkpoint=manager, metrics_path=str(tmp_path / log), max_skipped=50, **options
    )
    assert [line["window"] for line in lines(tmp_path / log)] == [0, 1, 3, 5]
    for window in range(1, WINDOWS):
        killed = tmp_path / f"killed-{window}"
        shutil.copytree(whole / str(window), killed / str(window))
        text = (tmp_path / log).read_text()
        (killed / log).write_text(text[: -len(text.splitlines()[-1]) // 2])
        metrics_path = str(killed / log)
        again = train_loop(step, None, data, WINDOWS, checkpoint=killed, metrics_path=metrics_path, **options)
        assert_same_bits(again, end)
        assert lines(killed / log) == lines(tmp_path / log)


class State(NamedTuple):
    step: jax.Array
    window: jax.Array
    total: jax.Array


def new_state():
    return State(jnp.int32(0), jnp.int32(0), jnp.float32(0))


@jax.jit
def add(state, batch):
    """A step whose total tells the order of its batches."""
    total = 1.5 * state.total + jnp.mean(batch)
    return State(state.step + 1, state.window + 1, total), {"loss": total}


def total_of(data, folder, *stops, **options):
    """The total after the last of `stops`; at the others the run begins anew, with new data."""
    for stop in stops:
        state = train_loop(add, new_state, data(), stop, checkpoint=folder, progress=False, **options)
    return float(state.total)


def grain_dataset():
    return grain.MapDataset.source(np.arange(40, dtype=np.float32)).shuffle(seed=3).batch(4)


class Loader:
    """Keeps its state as torchdata's StatefulDataLoader does: it is put back before the loader is iterated."""

    def __init__(self, as_state=lambda position: {"position": position}):
        self._begin, self._position, self._as_state = 0, 0, as_state

    def __iter__(self):
        for position in range(self._begin + 1, 11):
            self._position = position
            yield np.float32(position)

    def state_dict(self):
        return self._as_state(self._position)

    def load_state_dict(self, state):
        self._begin = state["position"]


KEPT = {
    "a grain dataset": grain_dataset,
    "a grain iterator": lambda: iter(grain_dataset().repeat().to_iter_dataset(grain.ReadOptions(num_threads=1))),
    "grain's old loader": lambda: grain.DataLoader(
        data_source=np.arange(10, dtype=np.float32), sampler=grain.samplers.SequentialSampler(num_records=10)
    ),
    "a loader with a state": Loader,
}


class Tensor:
    """As torch's, it raises a RuntimeError where a number is wanted of several elements."""

    shape = (2,)

    def item(self):
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


SKIPPED = {
    "a list": lambda: [np.float32(x) for x in range(10)],
    "a generator": lambda: (np.float32(x) for x in range(10)),
    "a state that is no JSON": lambda: Loader(lambda position: {"position": np.arange(position)}),
    "a state of tensors": lambda: Loader(lambda position: {"position": Tensor()}),
    "a state of one-element arrays": lambda: Loader(lambda position: {"position": np.array([position])}),
}


@pytest.mark.parametrize("name", [*KEPT, *SKIPPED])
def test_the_data_goes_on_where_it_was(tmp_path, name, capsys):
    made = (KEPT | SKIPPED)[name]
    expected = total_of(made, tmp_path / "whole", 8)
    assert total_of(made, tmp_path / "stopped", 3, 4, 8, save_every=3) == expected
    assert ("skipping the 3 batches" in capsys.readouterr().err) == (name in SKIPPED)


def test_what_is_fetched_ahead_is_not_lost():
    """grain's threads read on; the state is that after the batch that was taken last."""
    batches = batches_of(grain_dataset(), 0)
    first = [next(batches) for _ in range(3)]
    position = json.loads(json.dumps(batches.position()))
    rest = [next(batches) for _ in range(3)]
    resumed = batches_of(grain_dataset(), 3, position)
    np.testing.assert_array_equal([next(resumed) for _ in range(3)], rest)
    assert position["batches"] == 3 and not np.array_equal(first, rest)
    assert resumed.position()["batches"] == 6


def test_data_that_cannot_be_brought_back_is_bad_input(tmp_path):
    train_loop(add, new_state(), Loader(), 3, checkpoint=tmp_path)
    with pytest.raises(WorkloadError, match=r"the 3 batches .* before window 3; got an end after 2.* of window 3, "):
        train_loop(add, new_state, [1.0, 2.0], 5, checkpoint=tmp_path)
    refusing = Loader()
    refusing.load_state_dict = lambda state: [][1]
    with pytest.raises(WorkloadError, match="takes back the state .* got IndexError"):
        train_loop(add, new_state, refusing, 5, checkpoint=tmp_path)


def test_data_that_is_over_stays_over(tmp_path, capsys):
    for _ in range(2):
        result = run_loop(add, new_state, [1.0, 2.0], 5, checkpoint=tmp_path, progress=False)
        assert (result.stopped, result.window, result.checkpoint.number) == ("data ended", 2, 2)
    assert result.windows == 0 and capsys.readouterr().err.count("data ended after 2 of 5 windows") == 2


@pytest.mark.parametrize("number", [1, 9])
def test_a_state_under_the_number_of_another_window_is_refused(tmp_path, number):
    """Under 9, what is trained from window 3 on would never be the newest again."""
    checkpoint.save(tmp_path, train_loop(add, new_state(), jnp.float32, 3), number=number)
    with pytest.raises(CheckpointError, match=f"the state after window {number} .* the one after window 3, saved"):
        train_loop(add, new_state, jnp.float32, 5, checkpoint=tmp_path)


def test_what_json_gives_back_as_something_else_is_no_state_of_data():
    assert as_json(None) == as_json({"index": np.ones(1)}) == as_json({1: 2}) == {}
    assert as_json({"index": np.int64(3)}) == {"state": {"index": 3}}


def test_a_state_is_made_only_if_none_is_restored_and_the_given_one_is_freed(tmp_path):
    made = []

    def make():
        state = new_state()
        made.append(isinstance(state.total, jax.core.Tracer))  # for its shapes only
        return state

    for stop in (2, 4):
        train_loop(add, make, jnp.float32, stop, checkpoint=tmp_path)
    given = new_state()
    state = train_loop(add, given, jnp.float32, 6, checkpoint=tmp_path)
    assert made == [False, True] and int(state.window) == 6 and given.total.is_deleted()


def test_a_run_at_its_end_says_so_and_trains_nothing(tmp_path, capsys):
    train_loop(add, new_state(), jnp.float32, 4, checkpoint=tmp_path, save_every=3)
    assert sorted(path.name for path in tmp_path.glob("[0-9]*")) == ["3", "4"]
    result = run_loop(add, new_state(), jnp.float32, 4, checkpoint=tmp_path)
    assert (result.windows, result.window, result.stopped, result.checkpoint.number) == (0, 4, "done", 4)
    said = capsys.readouterr().err
    assert f"no checkpoint in {tmp_path} yet; one is saved every 3 windows\n" in said and "already" not in said
    train_loop(add, new_state(), jnp.float32, 4, checkpoint=tmp_path)
    assert "4 windows are trained already, of 4" in capsys.readouterr().err


def test_where_a_run_goes_on_and_what_differs_is_said(tmp_path, capsys):
    one, two = step_of(MemoryConfig()), step_of(MemoryConfig(accumulation_steps=2))
    train_loop(one, one.init(), data, 1, checkpoint=tmp_path, progress=False)
    train_loop(two, two.init(), data, 2, checkpoint=tmp_path, progress=False)
    assert capsys.readouterr().err == f"jaxmem: resumed at window 1 from {tmp_path / '1'} (accumulation_steps 1 → 2)\n"
    record = checkpoint.latest(tmp_path).record
    assert record["config"]["accumulation_steps"] == 2 and record["data"] == {"batches": 2}


def sending(signals):
    """Data that gets the signals of a window when it is asked for that."""

    def data(window):
        for number in signals.get(window, ()):
            os.kill(os.getpid(), number)
        return jnp.float32(window)

    return data


STOPS = [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "terminated")]


@pytest.mark.parametrize("number, how", STOPS)
def test_the_first_signal_saves_and_returns(tmp_path, monkeypatch, number, how):
    monkeypatch.setattr(os, "isatty", lambda file: False)  # else SIGHUP silences the terminal of this test
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    metrics = str(tmp_path / "metrics.jsonl")
    options = {"checkpoint": tmp_path, "log_every": 3, "metrics_path": metrics, "progress": False}
    result = run_loop(add, new_state(), sending({3: [number, signal.SIGTERM]}), 9, **options)
    assert (result.stopped, result.window, result.checkpoint.number) == (how, 4, 4)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    again = run_loop(add, new_state(), jnp.float32, 9, **options)
    assert (again.stopped, again.windows, again.window) == ("done", 5, 9)
    assert float(again.state.total) == total_of(lambda: jnp.float32, tmp_path / "whole", 9)
    assert [line["window"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 2, 5, 8]


def test_without_a_checkpoint_sigterm_is_the_callers():
    caught = []
    before = signal.signal(signal.SIGTERM, lambda *_: caught.append(True))
    try:
        state = train_loop(add, new_state(), sending({1: [signal.SIGTERM]}), 3)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught == [True] and int(state.window) == 3


def test_a_second_ctrl_c_aborts_and_what_was_saved_stays(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        train_loop(add, new_state(), sending({5: [signal.SIGINT] * 2}), 9, checkpoint=tmp_path, save_every=4)
    assert "the last checkpoint is that of window 4" in capsys.readouterr().err
    assert checkpoint.latest(tmp_path).number == 4
    train_loop(add, new_state(), sending({5: [signal.SIGINT]}), 9, checkpoint=tmp_path, progress=False)
    assert f"interrupted after 6 windows, saved in {tmp_path / '6'}\n" in capsys.readouterr().err


def test_an_error_names_the_last_checkpoint_and_saves_nothing(tmp_path, capsys):
    def bad(window):
        return jnp.float32(jnp.nan if window > 4 else 1)

    def failing(window):
        return jnp.float32(1) if window < 5 else {}["missing"]

    options = {"checkpoint": tmp_path, "save_every": 3, "log_every": 100}
    with pytest.raises(NonFiniteError, match=r"\(window 5\).*The last checkpoint is that of window 3, .*3\.$"):
        train_loop(add, new_state(), bad, 9, **options)
    with pytest.raises(KeyError, match="missing"):
        train_loop(add, new_state(), failing, 9, **options)
    assert "the last checkpoint is that of window 3" in capsys.readouterr().err
    assert checkpoint.latest(tmp_path).number == 3


class FullDisk(checkpoint.Manager):
    """The save of window 6 fails, which `save` or a later `wait` tells."""

    told_by = "save"
    failed = False

    def save(self, state, *, number, **options):
        if number < 6:
            return super().save(state, number=number, **options)
        self.failed = True
        if self.told_by == "save":
            self.wait()

    def wait(self):
        super().wait()
        if self.failed:
            self.failed = False
            raise CheckpointError(wanted="room for 6", got="a full disk", do="Free some.")


@pytest.mark.parametrize("told_by, trained", [("save", 6), ("wait", 8)])
def test_a_save_that_fails_ends_training(tmp_path, told_by, trained):
    seen, manager = [], FullDisk(tmp_path)
    manager.told_by = told_by
    with pytest.raises(CheckpointError, match=r"a full disk. Free some. The last checkpoint is that of window 3, "):
        train_loop(add, new_state(), lambda window: seen.append(window) or 1.0, 8, checkpoint=manager, save_every=3)
    assert len(seen) == trained


def test_a_save_that_fails_behind_another_error_does_not_hide_it(tmp_path, capsys):
    manager = FullDisk(tmp_path)
    manager.told_by = "wait"
    with pytest.raises(KeyError, match="missing"):
        train_loop(
            add, new_state(), lambda window: 1.0 if window < 7 else {}["missing"], 9, checkpoint=manager, save_every=3
        )
    said = capsys.readouterr().err
    assert "the checkpoint of window 6 was not completed: CheckpointError: Wanted room for 6" in said
    assert "the last checkpoint is that of window 3" in said


@pytest.mark.parametrize(
    "options, what",
    [
        ({"checkpoint": "gs://bucket/run"}, "gs://bucket/run.*Only folders"),
        ({"checkpoint": 3}, "got a int"),
        ({"checkpoint": "folder", "save_every": 0}, "save_every .* at least 1"),
    ],
)
def test_bad_options_are_refused(options, what):
    with pytest.raises(InputError, match=what):
        train_loop(add, new_state(), jnp.float32, 3, **options)


def test_a_state_that_is_not_restored_over_is_kept(tmp_path):
    train_loop(add, new_state(), jnp.float32, 2, checkpoint=tmp_path)
    ahead, other = new_state()._replace(window=jnp.int32(3)), new_state()._replace(total=jnp.zeros(2))
    with pytest.raises(CheckpointError, match=r"one of window 3, and checkpoint .*2\. To go back there"):
        train_loop(add, ahead, jnp.float32, 9, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="another shape: total"):
        train_loop(add, other, jnp.float32, 9, checkpoint=tmp_path)
    assert (int(ahead.window), int(other.window)) == (3, 0)
    assert int(train_loop(add, lambda: ahead, jnp.float32, 4, checkpoint=tmp_path).window) == 4
