"""What the processes of one program agree on.

JAX's coordinator, which lives in process 0, carries the words; no device takes part. So it also works from a thread
beside a running step, whose collectives must not be mixed with others.
"""

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from jaxmem import _compat, errors
from jaxmem.errors import JaxmemError, ProcessError

_PATIENCE_SECONDS = 1200.0  # what Orbax waits for a save
_LATE_SECONDS = 20.0  # before it is said who is waited for
_MOST_PAUSE_SECONDS = 0.1
_points = itertools.count()
T = TypeVar("T")


def is_main() -> bool:
    """Whether this process is the one of several that speaks and writes for all."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """One line on stderr, by one of several processes."""
    if is_main():
        print(f"jaxmem: {text}", file=sys.stderr, flush=True)


class Together:
    """One conversation; every process makes it under the same name, and no name is used twice.

    What is said is JSON. With one process nothing is sent.

    Args:
      name: of the conversation.
      what: in words, what all are at; others at something else are an error. Whoever is late is then waited for without
        an end, since `Peers` notices who is gone, and is named on stderr. Without it the wait is limited and silent.
    """

    def __init__(self, name: str, *, what: str = ""):
        self._prefix, self._count, self._what = f"jaxmem/{name}", 0, what
        self.process, self.processes = jax.process_index(), jax.process_count()

    @property
    def first(self) -> bool:
        """Whether this process writes what only one may write."""
        return self.process == 0

    def gather(self, value: Any = None, *, key: str | None = None, seconds: float = _PATIENCE_SECONDS) -> list[Any]:
        """What every process said at this point, by process.

        Raises:
          JaxmemError: one of them has failed instead, does not come, or is at something else.
        """
        self._count += 1
        if self.processes == 1:
            return [value]
        point = f"{self._prefix}/{self._count if key is None else key}"
        _compat.coordinator().key_value_set(f"{point}/{self.process}", json.dumps([self._what, value]))
        said = self._all_at(point, seconds)
        for process, (what, _) in said.items():
            if what != self._what:
                raise ProcessError(
                    wanted=f"all processes to do the same, as process {self.process} does: {self._what}",
                    got=f"process {process} at {what}",
                    do="Run the same program, with the same arguments, in every process.",
                )
        return [said[process][1] for process in range(self.processes)]

    def _all_at(self, point: str, seconds: float) -> dict[int, Any]:
        """What all said at a point, by process, once they did."""
        began = spoke = time.monotonic()
        pause = 0.005 * self.processes
        while len(said := _said(point)) < self.processes:
            for failure in _said(f"{self._prefix}/failed").values():
                raise _rebuilt(failure)
            late, now = min(set(range(self.processes)) - set(said)), time.monotonic()
            if self._what and now - spoke > _LATE_SECONDS:
                spoke = now
                text = f"jaxmem: {self._what}: waiting for process {late} since {now - began:.0f} s"
                print(text, file=sys.stderr, flush=True)
            if not self._what and now - began > seconds:
                raise ProcessError(
                    wanted=f"all {self.processes} processes to take part",
                    got=f"no word of process {late} for {seconds:.0f} seconds",
                    do="Look at that process's own output; all must save and restore in the same order.",
                )
            time.sleep(pause)
            pause = max(pause, min(2 * pause, _MOST_PAUSE_SECONDS))
        return said

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """`gather` as Orbax calls it, so that a failure elsewhere ends its wait."""
        self.gather(key=key.replace("/", ":"), seconds=timeout_ms / 1000)

    def forget(self, name: str) -> None:
        """Removes what was said in a conversation that all processes have left."""
        if self.processes > 1 and self.first:
            _compat.coordinator().key_value_delete(f"jaxmem/{name}/")

    def fail(self, error: JaxmemError) -> None:
        """Tells those who wait, or will, that this process has failed."""
        if self.processes > 1:
            told = json.dumps(_told(error, self.process))
            _compat.coordinator().key_value_set(f"{self._prefix}/failed/{self.process}", told)

    def all_do(self, act: Callable[[], T]) -> T:
        """What `act` gives in this process; an error in one is an error in all."""
        value, _ = self._done(act, tell=False)
        return value

    def first_does(self, act: Callable[[], Any]) -> Any:
        """What `act` gives in process 0, which alone calls it; an error there is an error in all."""
        _, said = self._done(lambda: act() if self.first else None, tell=True)
        return said[0]

    def _done(self, act: Callable[[], T], *, tell: bool) -> tuple[T, list[Any]]:
        try:
            value = act()
        except BaseException as error:
            self.gather([_told(error, self.process), None])
            raise
        said = self.gather([None, value if tell else None])
        for failure, _ in said:
            if failure is not None:
                raise _rebuilt(failure)
        return value, [told for _, told in said]


def conversation(what: str) -> Together:
    """The next one of main threads, which all come to these in the same order.

    Args:
      what: as of `Together`.
    """
    return Together(f"said/{next(_points)}", what=what)


def check_same(things: Mapping[str, str], *, do: str = "Give every process the same.") -> None:
    """ProcessError unless all processes have the same texts under the same names, which it names.

    Args:
      things: name ("the file gpt.py") → text; of a long one a hash is sent and shown.
      do: what helps.
    """
    said = conversation("comparing").gather({name: _short(text) for name, text in things.items()})
    for process, other in enumerate(said):
        for name in {**said[0], **other}:
            first, here = said[0].get(name, "nothing"), other.get(name, "nothing")
            if first != here:
                raise ProcessError(
                    wanted=f"{name} to be the same in all {len(said)} processes",
                    got=f"{first} in process 0 and {here} in process {process}",
                    do=do,
                )


def _said(point: str) -> dict[int, Any]:
    """What was said at a point so far, by process."""
    found = _compat.coordinator().key_value_dir_get(point + "/")
    return {int(name.rpartition("/")[2]): json.loads(text) for name, text in found}


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _told(error: BaseException, process: int) -> list[Any]:
    if isinstance(error, JaxmemError):
        return [type(error).__name__, process, error.wanted, error.got, error.do]
    got = f"{type(error).__name__}: {error}"
    return ["ProcessError", process, "all processes to do the same", got, "Look at its own output."]


def _rebuilt(told: list[Any]) -> JaxmemError:
    """The error of another process."""
    kind, process, wanted, got, do = told
    return getattr(errors, kind, ProcessError)(wanted=wanted, got=f"{got} (process {process})", do=do)
