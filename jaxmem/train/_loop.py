"""The training loop: data in, metrics out, and a clean stop."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxmem._blame import warn
from jaxmem._cell import shortening
from jaxmem._processes import say
from jaxmem.checkpoint import Checkpoint
from jaxmem.errors import InputError, SettingWarning, StateError, WorkloadError
from jaxmem.train._hosts import agreeing_windows, check_same_batch, check_same_step, failing_together
from jaxmem.train._loop_checkpoint import Checkpoints
from jaxmem.train._loop_data import batches_of, check_data
from jaxmem.train._loop_io import LINE_SECONDS, Interrupts, MetricsFile, Progress
from jaxmem.train._loop_memory import LoopMemory, Watch
from jaxmem.train._loop_readings import Readings
from jaxmem.train._state import check_alive

# Windows dispatched ahead of the device. Each holds its batch in device memory, and Ctrl-C waits for
# all of them; a few are enough to keep the device busy.
WINDOWS_IN_FLIGHT = 4
# In a row. From its default maximum, 2**24, a loss scale is halved 24 times until it is 1: what still overflows after
# twice as many windows is not the scale's doing.
MAX_SKIPPED = 50
SAVE_EVERY = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopResult:
    """What a loop did.

    Args:
      state: the TrainState after the last window.
      windows: how many windows were trained.
      stopped: why it ended: all of them done, the data ended, Ctrl-C, or SIGTERM or SIGHUP.
      metrics: the last record of metrics; empty where no window was trained.
      memory: the peak of training, measured, beside the compiled one; None of a step that cannot be compiled ahead.
      window: windows trained in all, those before this loop included.
      checkpoint: the newest one; None for a loop that saves none.
    """

    state: Any
    windows: int
    stopped: Literal["done", "data ended", "interrupted", "terminated"]
    metrics: Mapping[str, Any]
    memory: LoopMemory | None = None
    window: int = 0
    checkpoint: Checkpoint | None = None


@shortening()
def train_loop(
    step,
    state,
    data: Callable[[int], Any] | Iterable | None,
    num_steps: int,
    *,
    checkpoint: Any = None,
    save_every: int = SAVE_EVERY,
    cast: str | Sequence[str] = (),
    log_every: int = 10,
    metrics_path: str | None = None,
    progress: bool = True,
    on_metrics: Callable[[dict], None] | None = None,
    max_skipped: int = MAX_SKIPPED,
):
    """Trains `num_steps` windows from `state` and returns the new state; `state` itself is donated.

    With a `checkpoint` training resumes by itself: the newest good checkpoint in the folder is restored, training goes
    on until `num_steps` windows are trained in all, and ends in the very state that it would have without a stop. The
    state is saved every `save_every` windows, in the end, and at a stop.

    The device is waited for where metrics are read (the first window, every `log_every`-th, the
    last), at saves, and otherwise only so that no more than `WINDOWS_IN_FLIGHT` windows are under way.
    Ctrl-C, and with a `checkpoint` SIGTERM and SIGHUP (a closed terminal), finishes the windows under way, writes
    their metrics, saves and returns; a Ctrl-C after that aborts.

    Training tells the truth about its memory: its peak is measured (on a CPU, by the growth of the process) beside the
    compiled step's, which is shown at the end. A MemoryWarning says where they contradict each other.

    Args:
      step: what `make_train_step` returns: `step(state, batch) -> (state, metrics)`.
      state: a TrainState; its `window` says where to go on. Or a function that makes one; None is `step.init`. Where a
        checkpoint is restored, the function is not called, and the arrays of a state are deleted before; a state that
        is ahead of the checkpoint is refused.
      data: a function of the window index, called with `state.window` and up, so that a restored
        state resumes exactly; or an iterable of batches, which starts wherever it stands. One that
        ends early stops the loop with a message. With a `checkpoint`, an iterator's state is saved and put back if it
        has `get_state` and `set_state` (grain's) or `state_dict` and `load_state_dict`, and JSON can hold it. Of
        another iterable, the batches that were trained on are skipped: it must begin anew in each run, as a generator
        does that a new process makes, and one that was used before in the same process does not.
      num_steps: how many windows to train in this call; with a `checkpoint`, in all.
      checkpoint: a folder, or a `jaxmem.checkpoint.Manager`, which stays open. None saves nothing.
      save_every: windows between two saves. A save makes the loop wait while arrays are copied from the device.
      cast: what may be restored in another dtype than it was saved in, such as "opt_state"; of `Manager.restore`.
      log_every: windows between two readings of metrics.
      metrics_path: file for one JSON line a reading: step, window, loss, every metric, seconds since
        the loop began, and the memory of a `TrainStep` as `LoopMemory.to_dict()`. An infinite metric is written as
        null, and so is NaN in a window that was skipped for it. A state past its first window appends. Where a
        checkpoint is restored, lines of later windows are dropped first, so that the lines are in the end those of a
        run without a stop.
      progress: whether to show on stderr how far training is: a bar on a terminal, elsewhere a line now and then;
        and the peak of memory at the end.
      on_metrics: called with each record.
      max_skipped: how many windows in a row a step with a loss scale may skip, looked at where metrics are read.

    Raises:
      CheckpointError: the folder cannot be used, a save failed, or the checkpoint is of another model.
      NonFiniteError: the loss is NaN or infinite, or another metric is NaN, in a window that was not skipped for
        it; that window is neither logged nor saved.
      TooManySkippedWindows: more than `max_skipped` in a row.
      WorkloadError: no data, or an iterable without a single batch, or without those that were trained on before.

    >>> import jax.numpy as jnp, optax, jaxmem
    >>> loss = lambda params, batch: jnp.mean((batch @ params) ** 2)
    >>> workload = jaxmem.Workload(loss, jnp.ones(2), jnp.ones((4, 2)), optax.sgd(0.1))
    >>> step = jaxmem.make_train_step(workload)
    >>> state = train_loop(step, step.init(), lambda window: jnp.ones((4, 2)), 3)
    >>> int(state.window)
    3

    The second call goes on where the first one ended:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for total in (3, 5):
    ...         state = train_loop(step, step.init, lambda window: jnp.ones((4, 2)), total, checkpoint=folder)
    >>> int(state.window)
    5
    """
    result = run_loop(
        step,
        state,
        data,
        num_steps,
        checkpoint=checkpoint,
        save_every=save_every,
        cast=cast,
        log_every=log_every,
        metrics_path=metrics_path,
        progress=progress,
        on_metrics=on_metrics,
        max_skipped=max_skipped,
        terminate=checkpoint is not None,
    )
    if result.stopped == "done" and not result.windows:
        say(f"{result.window} windows are trained already, of {num_steps}: nothing to do")
    elif result.stopped in ("interrupted", "terminated"):
        saved = "" if result.checkpoint is None else f", saved in {result.checkpoint.path}"
        say(f"{result.stopped} after {result.window} windows{saved}")
    return result.state


def run_loop(
    step,
    state,
    data,
    num_steps: int,
    *,
    checkpoint=None,
    save_every=SAVE_EVERY,
    cast=(),
    log_every=10,
    metrics_path=None,
    progress=True,
    on_metrics=None,
    max_skipped=MAX_SKIPPED,
    line_seconds=LINE_SECONDS,
    terminate=True,
) -> LoopResult:
    """`train_loop`, saying also how it ended.

    Args:
      line_seconds: between two lines of progress where there is no terminal; 0 for a line a reading.
      terminate: whether SIGTERM and SIGHUP stop the loop as Ctrl-C does.
    """
    _check_counts(num_steps=num_steps, log_every=log_every, max_skipped=max_skipped, save_every=save_every)
    _check_step(step, state)
    check_data(data)
    saving = checkpoint is not None
    with failing_together(), Checkpoints(checkpoint, step, every=save_every, cast=cast, shown=progress) as saves:
        check_same_step(step)
        state = saves.start(state)
        step = saves.step
        _check_state(step, state, max_skipped)
        first = int(state.window)
        begin = 0 if saving else first  # what num_steps counts from
        end = begin + num_steps
        if first >= end:
            return LoopResult(
                state=state, windows=0, stopped="done", metrics={}, window=first, checkpoint=saves.finish()
            )
        batches = batches_of(data, first, saves.position)
        resumed = saves.restored is not None
        in_flight, metrics, window, stopped = collections.deque(), {}, first - 1, ""
        windows = agreeing_windows(first)
        with Interrupts(terminate=terminate) as signals:
            with (
                Progress(num_steps, before=first - begin, shown=progress, line_seconds=line_seconds) as bar,
                MetricsFile(metrics_path, append=first > 0, trim=(first, log_every) if resumed else None) as log,
            ):
                readings = Readings(
                    first=first,
                    resumed=resumed,
                    log_every=log_every,
                    max_skipped=max_skipped,
                    sinks=(log.write,) if on_metrics is None else (log.write, on_metrics),
                    show=bar.show,
                )
                for window, batch in enumerate(batches, start=first):
                    if window == first:
                        check_same_batch(step, batch)
                        readings.watch = Watch.of(step, state, batch, in_flight=WINDOWS_IN_FLIGHT, saves=saving)
                    state, metrics = step(state, batch)
                    bar.advance()
                    in_flight.append(metrics)
                    if window + 1 == end:
                        stopped = "done"
                        break
                    if readings.due(window) or saves.due(window):
                        readings.take(window, state, metrics)
                        in_flight.clear()
                    elif len(in_flight) >= WINDOWS_IN_FLIGHT:
                        jax.block_until_ready(in_flight.popleft())
                    if stopped := windows.stop(window, signals.stopped):
                        break
                    if saves.due(window):
                        bar.saving()
                        saves.save(window, state, batches, readings.record)
                else:
                    stopped = windows.ended(window)
                if window >= first:
                    readings.take(window, state, metrics, last=True)
                    saves.save(window, state, batches, readings.record)
                elif not resumed:
                    raise WorkloadError(
                        wanted="data with at least one batch",
                        got="an iterable that yields none",
                        do="Check where it reads from.",
                    )
            newest = saves.finish()
    if stopped == "data ended":
        say(f"data ended after {window + 1 - begin} of {num_steps} windows")
    if progress and readings.memory is not None:
        say(str(readings.memory))
    return LoopResult(
        state=state,
        windows=window - first + 1,
        stopped=stopped,
        metrics=readings.record,
        memory=readings.memory,
        window=window + 1,
        checkpoint=newest,
    )


def _check_step(step: Any, state: Any) -> None:
    makes = (state is None and hasattr(step, "init")) or callable(state)
    if not callable(step) or not (makes or hasattr(state, "window")):
        raise StateError(
            wanted="train_loop(step, state, data, num_steps): a step of make_train_step, a state of step.init()",
            got=f"a {type(step).__name__} and a {type(state).__name__}",
            do="Write step = make_train_step(workload); train_loop(step, step.init(), workload.data, 100).",
        )


def _check_state(step: Any, state: Any, max_skipped: int) -> None:
    _check_step(step, state)
    check_alive(state)
    if max_skipped != MAX_SKIPPED and getattr(state, "loss_scale", None) is None:
        message = f"max_skipped={max_skipped} does nothing, as windows are skipped under a loss scale only."
        warn(message, SettingWarning)


def _check_counts(**counts):
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise InputError(
                wanted=f"{name} to be a whole number of at least 1", got=repr(value), do=f"Choose another {name}."
            )
