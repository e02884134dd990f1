"""Whose fault an exception is, told from where it was raised."""

import concurrent.futures
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import objective
from jaxmem._blame import is_jax_refusal, is_own_fault, reason, whole_tracebacks
from jaxmem.errors import BudgetInfeasible, ConfigError


def raised(fn) -> Exception:
    with whole_tracebacks():
        return raised_anyhow(fn)


def raised_anyhow(fn) -> Exception:
    try:
        fn()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def own(fail):
    """A function that lies in jaxmem and calls `fail`."""
    space = {"fail": fail}
    exec(compile("def call(): return fail()", objective.__file__, "exec"), space)
    return space["call"]


def refused_by_jax():
    jax.jit(lambda x: jnp.dot(x, jnp.ones(3)))(jnp.ones(2))


def test_what_jax_refuses_is_no_fault_of_its_caller():
    for fn in (refused_by_jax, own(refused_by_jax), own(lambda: jax.lax.reduce_precision(1j * jnp.ones(2), 8, 7))):
        error = raised(fn)
        assert is_jax_refusal(error) and not is_own_fault(error)


def test_a_fault_in_jaxmem_is_one_also_inside_of_jax_and_of_numpy():
    broken = own({}.popitem)
    for fn in (broken, jax.jit(broken), own(np.linalg.inv)):  # the last is not given its matrix
        error = raised(fn)
        assert is_own_fault(error) and not is_jax_refusal(error)


def test_the_users_code_is_the_users():
    error = raised(own(lambda: {}["missing"]))
    assert not is_own_fault(error) and not is_jax_refusal(error)


@pytest.fixture
def filtered():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "quiet_remove_frames")
    yield
    jax.config.update("jax_traceback_filtering", before)


def test_reasons_are_one_bounded_paragraph():
    assert reason(KeyError("x")) == "refused. KeyError: 'x'"
    assert reason(ConfigError(wanted="a", got="b", do="c.")) == "refused. Wanted a; got b. c."
    assert reason(BudgetInfeasible(wanted="a", got="b", do="c.")) == "does not fit. Wanted a; got b. c."
    assert len(reason(ValueError("long\n " * 5000))) < 1300


def test_tracebacks_are_as_before_afterwards_and_in_other_threads(filtered):
    frames = lambda error: len(traceback.extract_tb(error.__traceback__))  # noqa: E731
    few = frames(raised_anyhow(refused_by_jax))
    with whole_tracebacks(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        there = pool.submit(raised_anyhow, refused_by_jax).result()
        here = raised_anyhow(refused_by_jax)
    assert frames(there) <= few < frames(here)
    assert frames(raised_anyhow(refused_by_jax)) == few
