"""What the processes of one program agree on.

JAX's coordinator, which lives in process 0, carries the words; no device takes part.
"""

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Mapping

import jax

from jaxmem import _compat
from jaxmem.errors import ProcessError

_PATIENCE_SECONDS = 20.0  # before it is said who is waited for
_points = itertools.count()


def is_main() -> bool:
    """Whether this process is the one of several that speaks and writes for all."""
    return jax.process_index() == 0


def gather(what: str, text: str) -> list[str]:
    """What every process says, by process; all call it in the same order.

    Args:
      what: names it; it is an error if others are at something else.
      text: of any length.
    """
    if jax.process_count() == 1:
        return [text]
    client, me, point = _compat.coordinator(), jax.process_index(), f"jaxmem/said/{next(_points)}"
    client.key_value_set(f"{point}/{me}", json.dumps([what, text]))
    said, asked = {}, time.monotonic()
    for process in range(jax.process_count()):
        said[process] = json.loads(_waited(client, f"{point}/{process}", process, what, asked))
    others = {process: at for process, (at, _) in said.items() if at != what}
    if others:
        process, at = next(iter(others.items()))
        raise ProcessError(
            wanted=f"all processes to do the same, as process {me} does: {what}",
            got=f"process {process} at {at}",
            do="Run the same program, with the same arguments, in every process.",
        )
    return [said[process][1] for process in sorted(said)]


def _waited(client, key: str, process: int, what: str, since: float) -> str:
    """A value when it is there. Who does not come is noticed elsewhere, by `Peers`; here it is said who is slow."""
    while True:
        try:
            return client.blocking_key_value_get(key, int(1000 * _PATIENCE_SECONDS))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            seconds = time.monotonic() - since
            print(f"jaxmem: {what}: waiting for process {process} since {seconds:.0f} s", file=sys.stderr, flush=True)


def agree(text: str, what: str = "a decision") -> str:
    """The text of process 0, in all processes."""
    return gather(what, text if is_main() else "")[0]


def check_same(things: Mapping[str, str], *, do: str = "Give every process the same.") -> None:
    """ProcessError unless all processes have the same texts under the same names, which it names.

    Args:
      things: name ("the file gpt.py") → text; of a long one a hash is sent and shown.
      do: what helps.
    """
    said = [json.loads(each) for each in gather("comparing", json.dumps({k: _short(v) for k, v in things.items()}))]
    for process, other in enumerate(said):
        for name in {**said[0], **other}:
            first, here = said[0].get(name, "nothing"), other.get(name, "nothing")
            if first != here:
                raise ProcessError(
                    wanted=f"{name} to be the same in all {len(said)} processes",
                    got=f"{first} in process 0 and {here} in process {process}",
                    do=do,
                )


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
