"""What processes agree on, with threads for processes and a dict for JAX's coordinator."""

import concurrent.futures

import jax
import pytest

from jaxmem import _compat, _processes
from jaxmem._processes import Together
from jaxmem.errors import BudgetInfeasible, DamagedCheckpointError, ProcessError


class _Coordinator(dict):
    def key_value_set(self, key, text):
        self[key] = text

    def key_value_dir_get(self, key):
        return [(name, text) for name, text in list(self.items()) if name.startswith(key)]


@pytest.fixture
def pair(monkeypatch):
    """Makes two processes' sides of a conversation."""
    coordinator = _Coordinator()
    monkeypatch.setattr(_compat, "coordinator", lambda: coordinator)
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def make(*whats):
        sides = []
        for process, what in enumerate(whats):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            sides.append(Together("test", what=what))
        return sides

    return make


def _both(sides, act):
    """What each side gives, or raises."""

    def of(side):
        try:
            return act(side)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(of, sides))


def test_all_hear_all_and_the_first(pair):
    sides = pair("", "")
    assert _both(sides, lambda side: side.gather({"i": side.process})) == [[{"i": 0}, {"i": 1}]] * 2
    assert _both(sides, lambda side: side.first_does(lambda: [1, None])) == [[1, None]] * 2
    assert _both(sides, lambda side: side.all_do(lambda: side)) == sides


@pytest.mark.parametrize("kind", [BudgetInfeasible, DamagedCheckpointError])
def test_an_error_of_ours_keeps_its_kind(pair, kind):
    own = kind(wanted="a", got="b", do="C.")

    def fails():
        raise own

    first, other = _both(pair("", ""), lambda side: side.first_does(fails))
    assert first is own and type(other) is kind and str(other) == "Wanted a; got b (process 0). C."


def test_another_error_is_told(pair):
    def fails():
        raise OSError(28, "No space left on device")

    first, other = _both(pair("", ""), lambda side: side.first_does(fails))
    assert isinstance(first, OSError) and isinstance(other, ProcessError)
    assert "No space left on device (process 0)" in str(other)


def test_a_failure_elsewhere_ends_the_wait(pair):
    one, other = pair("", "")
    other.fail(DamagedCheckpointError(wanted="a", got="b", do="C."))
    with pytest.raises(DamagedCheckpointError, match=r"b \(process 1\)"):
        one.gather()


def test_processes_at_different_things(pair):
    for error in _both(pair("comparing", "resuming"), lambda side: side.gather()):
        assert isinstance(error, ProcessError)
    assert str(error).startswith("Wanted all processes to do the same, as process 1 does: resuming; got process 0 at c")


def test_who_does_not_come_is_named(pair, monkeypatch, capsys):
    with pytest.raises(ProcessError, match="no word of process 1 for 0 seconds"):
        pair("", "")[0].gather(seconds=0)
    monkeypatch.setattr(_processes, "_LATE_SECONDS", 0)
    sides = pair("starting", "starting")
    monkeypatch.setattr(_processes.time, "sleep", lambda seconds: sides[1].gather())
    sides[0].gather()
    assert "jaxmem: starting: waiting for process 1 since 0 s\n" in capsys.readouterr().err
