"""Random programs with layers in them (`benchmarks._random_programs`), rolled and as they are."""

import jax
import pytest

from benchmarks._random_programs import random_program
from benchmarks.budget_fuzz import TOLERANCE, differentiated, relative_error
from jaxmem.remat.roll import rolled, what_rolls


def layers_of(seed):
    program = random_program(seed)
    *arrays, scale = program.args
    return what_rolls(jax.make_jaxpr(lambda *args: program.fn(*args, scale))(*arrays)).layers


SEEDS = (33, 43, 44)  # quick ones among those that have layers


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_compute_the_same(seed):
    assert layers_of(seed)
    program = random_program(seed)
    want, got = (differentiated(program, fn, False) for fn in (program.fn, rolled(program.fn)))
    assert relative_error(got, want) <= (TOLERANCE[True] if program.low_precision else 1e-5)
