"""What the processes of one program agree on: JAX's coordinator carries a few words, no device takes part.

So it also works from a thread beside a running step, whose collectives must not be mixed with others.
"""

import json
import time
from collections.abc import Callable

import jax

from jaxmem import _compat
from jaxmem.errors import CheckpointError, DamagedCheckpointError

_PATIENCE_SECONDS = 1200.0  # what Orbax waits for a save
_FAILED = "failed"


class Together:
    """One conversation; every process makes it under the same name, and no name is used twice.

    With one process nothing is sent.
    """

    def __init__(self, name: str):
        self._prefix, self._count = f"jaxmem/{name}", 0
        self.process, self.processes = jax.process_index(), jax.process_count()

    @property
    def first(self) -> bool:
        """Whether this process writes what only one may write."""
        return self.process == 0

    def gather(self, text: str = "", *, key: str | None = None, seconds: float = _PATIENCE_SECONDS) -> list[str]:
        """What every process said at this point, by process.

        Raises:
          CheckpointError: one of them has failed instead, or does not come.
        """
        self._count += 1
        if self.processes == 1:
            return [text]
        client, point = _compat.coordinator(), f"{self._prefix}/{self._count if key is None else key}"
        client.key_value_set(f"{point}/{self.process}", text)
        until = time.monotonic() + seconds
        while True:
            said = {int(name.rpartition("/")[2]): value for name, value in client.key_value_dir_get(point + "/")}
            if len(said) == self.processes:
                return [said[process] for process in range(self.processes)]
            failed = client.key_value_dir_get(f"{self._prefix}/{_FAILED}/")
            if failed:
                raise _rebuilt(failed[0][1])
            if time.monotonic() > until:
                missing = sorted(set(range(self.processes)) - set(said))
                raise CheckpointError(
                    wanted=f"all {self.processes} processes to take part",
                    got=f"no word of process {missing[0]} for {seconds:.0f} seconds",
                    do="Look at that process's own output; all must save and restore in the same order.",
                )
            time.sleep(0.005 * self.processes)

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """`gather` as Orbax calls it, so that a failure elsewhere ends its wait."""
        self.gather(key=key.replace("/", ":"), seconds=timeout_ms / 1000)

    def forget(self, name: str) -> None:
        """Removes what was said in a conversation that all processes have left."""
        if self.processes > 1 and self.first:
            _compat.coordinator().key_value_delete(f"jaxmem/{name}/")

    def fail(self, error: CheckpointError) -> None:
        """Tells those who wait, or will, that this process has failed."""
        if self.processes > 1:
            _compat.coordinator().key_value_set(f"{self._prefix}/{_FAILED}/{self.process}", self._written(error))

    def all_do(self, act: Callable[[], str | None]) -> list[str]:
        """What `act` gives in every process; an error in one is an error in all."""
        error = None
        try:
            text = " " + (act() or "")
        except Exception as raised:
            error = raised
            text = "!" + self._written(raised)
        said = self.gather(text)
        if error is not None:
            raise error
        for other in said:
            if other.startswith("!"):
                raise _rebuilt(other[1:])
        return [other[1:] for other in said]

    def first_does(self, act: Callable[[], str | None]) -> str:
        """What `act` gives in process 0, which alone calls it."""
        return self.all_do(lambda: act() if self.first else None)[0]

    def _written(self, error: Exception) -> str:
        told = [str(getattr(error, part, "")) for part in ("wanted", "got", "do")]
        if not isinstance(error, CheckpointError):
            told = ["all processes to do the same", f"{type(error).__name__}: {error}", "Look at its own output."]
        return json.dumps([isinstance(error, DamagedCheckpointError), self.process, *told])


def _rebuilt(text: str) -> CheckpointError:
    damaged, process, wanted, got, do = json.loads(text)
    kind = DamagedCheckpointError if damaged else CheckpointError
    return kind(wanted=wanted, got=f"{got} (process {process})", do=do)
