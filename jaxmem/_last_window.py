"""After which window the processes that train together stop."""

import json
import threading
from typing import Any

import jax

from jaxmem.errors import ProcessError


class Windows:
    """After which window all processes stop, once one of them has to.

    A process that has dispatched a window waits in its collectives for the others. So all must dispatch the same ones,
    and the last is the furthest that any has committed itself to.

    Args:
      number: how many runs there were before.
      first: the first window, which is dispatched in any case.
    """

    def __init__(self, number: int, first: int):
        self.number, self._committed, self._exact = number, first, False
        self._reason, self._frozen, self._last = "", False, None
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def stop(self, window: int, reason: str) -> str:
        """Why all stop after `window`; "" to go on with the next one.

        Args:
          window: was dispatched.
          reason: why this process wants to stop; "" if it does not.
        """
        with self._changed:
            self._reason = self._reason or reason
            self._changed.wait_for(lambda: not self._frozen or self._last is not None or self._error is not None)
            return self._outcome(window, exact=False)

    def ended(self, window: int) -> str:
        """Why all stop after `window`, after which the data of this process ends."""
        with self._changed:
            self._reason = self._reason or "data ended"
            if not self._frozen:
                self._committed = window
            self._exact = True
            self._changed.wait_for(lambda: self._last is not None or self._error is not None)
            return self._outcome(window, exact=True)

    def _outcome(self, window: int, *, exact: bool) -> str:
        if self._error is not None:
            raise self._error
        if self._last is None or window < self._last:
            if exact:
                raise _ends_early(f"the data of process {jax.process_index()}", window, self._last)
            self._committed = max(self._committed, window + 1)
            return ""
        return self._reason

    def settle(self, peers: Any) -> None:
        """What the watch (`Peers`) does for it: tells and hears who wants to stop, and where all can."""
        key = f"stop/{self.number}"
        with self._changed:
            if self._last is not None:
                return
            if self._reason:
                peers._set(f"{key}/asked/{peers.process}", self._reason)
            asked = peers._dir(f"{key}/asked")
            if not asked:
                return
            self._frozen = True
            peers._set(f"{key}/at/{peers.process}", json.dumps([self._committed, self._exact, self._reason]))
            at = {int(name.rpartition("/")[2]): json.loads(told) for name, told in peers._dir(f"{key}/at")}
            if len(at) < peers.count:
                return
            self._last = max(window for window, _, _ in at.values())
            self._reason = next(reason for _, (_, _, reason) in sorted(at.items()) if reason)
            for process, (window, exact, _) in sorted(at.items()):
                if exact and window < self._last:
                    self._error = _ends_early(f"the data of process {process}", window, self._last)
            self._changed.notify_all()


def _ends_early(what: str, window: int, last: int | None) -> ProcessError:
    return ProcessError(
        wanted="data that ends after the same window in all processes",
        got=f"{what}, which ends after window {window}, where others went on to {'more' if last is None else last}",
        do="Give every process as many batches; a function of the window never ends.",
    )
