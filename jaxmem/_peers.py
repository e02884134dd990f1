"""The watch of the other processes of a program: where one fails, or is gone, all end and say why."""

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import jax

from jaxmem import _compat
from jaxmem._last_window import Windows
from jaxmem._processes import conversation

# Of a process that is killed JAX's coordinator hears nothing more, and a collective waits for it for ever.
GONE_SECONDS = 30.0
LOST = 3  # the exit code of a process that cannot go on without another
_POLL_SECONDS = 0.5
_LEFT = "left"
_ROOT = "jaxmem/processes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a process cannot go on.

    Args:
      text: one paragraph, as it is said.
      code: the exit code.
    """

    text: str
    code: int


class Peers:
    """Watches the other processes from a thread; where one fails or is gone, this process says so and exits.

    Nothing less ends it: its main thread may hang in a collective that only all processes together can finish.
    """

    def __init__(self):
        self.process, self.count = jax.process_index(), jax.process_count()
        self._client = _compat.coordinator()
        self.who = conversation("starting").gather(f"{socket.gethostname()}, pid {os.getpid()}")
        self.is_reported = False  # whether someone calls `fail` for whatever error ends this process
        self.last_words: Callable[[], str] = lambda: "Start all processes again with the same command."
        self._ended = threading.Event()
        self._leaving = threading.Lock()
        self._windows: dict[int, Windows] = {}
        self._beats: dict[int, tuple[str, float]] = {}
        _compat.on_abort(self._aborted)
        self._thread = threading.Thread(target=self._watch, name="jaxmem-peers", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # before JAX's own, which comes first, disconnects

    # -- ends --------------------------------------------------------------------------------------

    def end(self) -> None:
        """Waits until all processes have ended well; then they are watched no more."""
        conversation("the end").gather()
        self._stop()

    def _stop(self) -> None:
        """Watches no more, and is not missed."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(10 * _POLL_SECONDS)
            with contextlib.suppress(Exception):  # the coordinator may be gone
                self._set(f"beat/{self.process}", _LEFT)

    def tell(self, failure: Failure) -> None:
        """Tells the others that this process has failed; they say so and exit."""
        self._set(f"news/failed/{self.process}", json.dumps(dataclasses.asdict(failure)))
        self._set(f"heard/{self.process}", "")
        if self.process == 0:
            self._wait_for_ears()

    def fail(self, failure: Failure, *, told_by_jax: bool = False) -> None:
        """Tells the others that this process has failed, says why, and exits.

        Args:
          failure: why.
          told_by_jax: it may be that another process is gone, and that JAX noticed first: the watch is waited for.
        """
        if told_by_jax:
            self._wait_for_signs()
        sys.stdout.flush()
        self._leaving.acquire()  # whatever happens from here on, this is what is said
        self._set(f"news/failed/{self.process}", json.dumps(dataclasses.asdict(failure)))
        # What process 0 says word for word need not be read twice.
        self._exit("" if self._is_of_main(failure) else failure.text, failure.code)

    def _wait_for_signs(self) -> None:
        """Returns when all others live on; where one does not, the watch ends this process."""
        silent, known = set(range(self.count)) - {self.process}, None
        while silent and not self._ended.wait(_POLL_SECONDS):
            with contextlib.suppress(Exception):  # the coordinator may be gone, which the watch sees
                beats = self._signs()
                known = beats if known is None else known
                silent -= {process for process, beat in beats.items() if beat != known.get(process)}

    def _is_of_main(self, failure: Failure) -> bool:
        if self.process == 0:
            return False
        told, until = {}, time.monotonic() + 2 * _POLL_SECONDS
        while not told and time.monotonic() < until:
            time.sleep(0.05)
            told = {name.rpartition("/")[2]: text for name, text in self._dir("news/failed")}
            told = json.loads(told["0"]) if "0" in told else {}
        self._set(f"heard/{self.process}", "")
        return told.get("text") == failure.text

    def _leave(self, text: str, code: int) -> None:
        if not self._leaving.acquire(blocking=False):  # another thread does
            time.sleep(60)
        self._exit(text, code)

    def _exit(self, text: str, code: int) -> None:
        if text:
            shown = b"\n\x1b[?25h" if os.isatty(2) else b""  # a bar may have been drawn, and the cursor be hidden
            os.write(2, shown + text.encode() + b"\n")
        if self.process == 0:  # the coordinator lives here: the others must have heard before it goes
            self._wait_for_ears()
        os._exit(code)

    def _wait_for_ears(self) -> None:
        silent, until = set(range(1, self.count)), time.monotonic() + 5
        while silent and time.monotonic() < until:
            for kind in ("heard", "news/gone"):
                silent -= {int(name.rpartition("/")[2]) for name, _ in self._dir(kind)}
            time.sleep(0.1)

    def _aborted(self) -> None:
        """XLA aborts this process: its connection to process 0 broke, or there is a fault of its own."""
        if self._ended.is_set():  # while it exits, after it failed or all was done
            os._exit(LOST)
        until, gone = time.monotonic() + 3, False
        while self.process and not gone and time.monotonic() < until:  # a system takes a moment to bury a process
            gone = not _answers(_compat.coordinator_address())
            time.sleep(0.1)
        if gone:
            self._leave(self._gone(0, "its coordinator does not answer"), LOST)
        self._leave(
            f"jaxmem: process {self.process} ({self.who[self.process]}) was aborted by XLA. "
            f"Set TF_CPP_MIN_LOG_LEVEL=0 to see why. {self._hope()}",
            LOST,
        )

    def _gone(self, process: int, sign: str) -> str:
        return (
            f"jaxmem: process {process} of {self.count} ({self.who[process]}) is gone: {sign}. "
            f"The others cannot go on without it. {self._hope()}"
        )

    def _hope(self) -> str:
        """`last_words`; nothing where they fail, or hang as a folder of another host may."""
        said: list[str] = []
        asking = threading.Thread(target=lambda: said.append(self.last_words()), daemon=True)
        with contextlib.suppress(Exception):
            asking.start()
            asking.join(3)
        return said[0] if said else ""

    # -- the thread --------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, heard = time.monotonic(), time.monotonic()
        for beat in itertools.count():
            if self._ended.wait(_POLL_SECONDS):
                return
            # Not counted is a time in which this process itself stood still.
            passed, seen = min(time.monotonic() - seen, 4 * _POLL_SECONDS), time.monotonic()
            try:
                self._set(f"beat/{self.process}", str(beat))
                self._hear()
                if self.process == 0:
                    self._look_for_gone(passed)
                for windows in list(self._windows.values()):
                    windows.settle(self)
                heard = time.monotonic()
            except Exception:  # of the connection to the coordinator, of which JAX has no own class
                if self._ended.is_set():
                    return
                if not _answers(_compat.coordinator_address()) or time.monotonic() - heard > GONE_SECONDS:
                    self._leave(self._gone(0, "its coordinator does not answer"), LOST)

    def _hear(self) -> None:
        for name, told in self._dir("news"):
            kind, process = name.split("/")[-2:]
            if kind == "failed" and int(process) != self.process:
                failure = Failure(**json.loads(told))
                self._set(f"heard/{self.process}", "")
                said = failure.text.removeprefix("jaxmem: ").removeprefix("error: ")
                who = f"process {process} of {self.count} ({self.who[int(process)]})"
                self._leave(f"jaxmem: {who} failed: {said}", failure.code)
            elif kind == "gone":
                self._set(f"heard/{self.process}", "")
                self._leave(self._gone(int(process), told), LOST)

    def _look_for_gone(self, passed: float) -> None:
        signs = self._signs()
        for process in range(self.count):  # one that was killed before its first beat, too
            beat = signs.get(process, "")
            last, silent = self._beats.get(process, ("", 0.0))
            silent = silent + passed if beat == last else 0.0
            self._beats[process] = beat, silent
            if silent > GONE_SECONDS and beat != _LEFT and process != self.process:
                self._set(f"news/gone/{process}", f"no sign of it for {silent:.0f} s")

    def _signs(self) -> dict[int, str]:
        """The last beat of each process that has given one."""
        return {int(name.rpartition("/")[2]): beat for name, beat in self._dir("beat")}

    # -- words -------------------------------------------------------------------------------------

    def windows(self, first: int) -> "Windows":
        """A run of windows that all processes train, from the same window on."""
        made = Windows(len(self._windows), first)
        self._windows[made.number] = made
        return made

    def _set(self, key: str, text: str) -> None:
        self._client.key_value_set(f"{_ROOT}/{key}", text, allow_overwrite=True)

    def _dir(self, key: str) -> list[tuple[str, str]]:
        return self._client.key_value_dir_get(f"{_ROOT}/{key}/")


_watching: list[Peers] = []


def peers() -> Peers | None:
    """The watch of the other processes, which begins with the first call; None with one process."""
    if jax.process_count() == 1:
        return None
    if not _watching:
        _watching.append(Peers())
    return _watching[0]


def _answers(address: str | None) -> bool:
    """Whether someone listens at an address."""
    if not address:
        return True
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
    except OSError:
        return False
