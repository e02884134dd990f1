"""The batches of a training loop, and where in its data it is: what a checkpoint remembers of that."""

import base64
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxmem._blame import named
from jaxmem._processes import say
from jaxmem.errors import WorkloadError
from jaxmem.train._loop_io import LINE_SECONDS

# Of grain's iterators, and of torchdata's loaders.
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class Batches:
    """The batches of a run from one window on. None is fetched before it is asked for.

    Args:
      source: gives them one after the other.
      taken: how many batches the run has taken before, over all its processes.
      state: tells where the source stands; None for a source that cannot.
    """

    def __init__(self, source: Iterator, *, taken: int, state: Callable[[], Any] | None = None):
        self._source, self._taken, self._state = source, taken, state

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        batch = next(self._source)
        self._taken += 1
        return batch

    def position(self) -> dict[str, Any]:
        """Where the data stands after the last batch, as JSON: "batches", and "state" where the source tells it."""
        state = {} if self._state is None else as_json(self._state())
        return {"batches": self._taken, **state}


def batches_of(data: Any, first: int, position: Mapping[str, Any] | None = None) -> Batches:
    """The batches of windows `first`, `first + 1`, ….

    Args:
      data: a function of the window index, or an iterable; see `check_data`.
      first: the first window.
      position: what `Batches.position` told when the state was saved that training goes on from. None: an iterable
        is taken as it stands.

    Raises:
      WorkloadError: it cannot be brought to `position`.
    """
    if not _is_iterable(data):
        return Batches((data(window) for window in itertools.count(first)), taken=first)
    told = position or {}
    methods = _methods(data)
    if methods is not None and "state" in told:  # torchdata's loader is put back before it is iterated
        _put_back(methods[1], told)
    source = iter(data)
    if methods is None:
        methods = _methods(source)
        if methods is not None and "state" in told:
            _put_back(methods[1], told)
    taken = 0 if position is None else told.get("batches", first)
    if taken and (methods is None or "state" not in told):
        _skip(source, taken, first)
    return Batches(source, taken=taken, state=methods and methods[0])


def check_data(data: Any) -> None:
    """WorkloadError for what gives no batches."""
    if data is None:
        raise WorkloadError(
            wanted="data to train on: an iterable of batches, or a function window_index -> batch",
            got="None",
            do="Pass Workload(..., data=...), or the data argument of train_loop.",
        )
    if isinstance(data, (Mapping, str, bytes)):  # iterating over one gives its keys
        do = "To train on one batch over and over, pass lambda window: batch."
    elif not _is_iterable(data) and not callable(data):
        do = "Wrap it in one of these."
    else:
        return
    raise WorkloadError(
        wanted="data to be an iterable of batches or a function window_index -> batch",
        got=f"a {type(data).__name__}",
        do=do,
    )


def _is_iterable(data: Any) -> bool:
    return hasattr(data, "__iter__") or hasattr(data, "__next__")


def _methods(source: Any) -> tuple[Callable, Callable] | None:
    """Those by which a source tells its state and takes it back."""
    for get, put in _METHODS:
        if callable(getattr(source, get, None)) and callable(getattr(source, put, None)):
            return getattr(source, get), getattr(source, put)
    return None


def as_json(state: Any) -> dict[str, Any]:
    """A state as what JSON can hold and give back; nothing of one that it cannot.

    >>> as_json({"next_index": 3}), as_json(b"ab"), as_json({"index": (1, 2)})
    ({'state': {'next_index': 3}}, {'state': 'YWI=', 'encoding': 'base64'}, {})
    """
    if state is None:
        return {}
    if isinstance(state, bytes):  # of grain's DataLoader
        return {"state": base64.b64encode(state).decode(), "encoding": "base64"}
    try:
        plain = json.loads(json.dumps(state, default=_scalar))
        return {"state": plain} if bool(plain == state) else {}
    except Exception:  # tensors, arrays, objects, whose own errors may be of any class
        return {}


def _scalar(value: Any) -> Any:
    """A number of NumPy or torch; an array of one element is none, since it would come back as a number."""
    if value.shape:
        raise TypeError("an array")
    return value.item()


def _put_back(put: Callable[[Any], Any], position: Mapping[str, Any]) -> None:
    state = position["state"]
    try:
        put(base64.b64decode(state) if position.get("encoding") == "base64" else state)
    except Exception as error:
        raise WorkloadError(
            wanted="data that takes back the state which the checkpoint holds of it",
            got=named(error, 400),
            do="Give the data that the run was trained on, or begin in another folder.",
        ) from error


def _skip(source: Iterator, count: int, window: int) -> None:
    """Takes the batches that were trained on before."""
    say(
        f"the data does not tell where it stands, or not as JSON: skipping the {count} batches before window {window}. "
        "A function of the window, or an iterator with get_state and set_state, such as grain's, goes on without."
    )
    said = time.monotonic()
    for index in range(count):
        try:
            next(source)
        except StopIteration:
            raise WorkloadError(
                wanted=f"data with the {count} batches that the run was trained on before window {window}",
                got=f"an end after {index}",
                do="Give the data that the run began with, from its first batch on; an iterator that was used before "
                "stands elsewhere.",
            ) from None
        if time.monotonic() - said > LINE_SECONDS:
            said = time.monotonic()
            say(f"skipped {index + 1} of {count} batches")
