"""Running the command line in this process, and files for it to run on."""

import textwrap
from typing import NamedTuple

from jaxmem.cli import main

LINEAR = """
    import jax, jax.numpy as jnp, numpy as np, optax, jaxmem

    def loss_fn(params, batch, *, memory):
        block = memory.block(lambda w, x: jnp.tanh(jnp.sin(x @ w)))
        for w in params["layers"]:
            batch = block(w, batch)
        return jaxmem.WeightedMean(jnp.sum(batch**2), batch.shape[0])

    def workload(*, rows=8, width=4, depth=2, scale=0.5, name="linear"):
        params = {"layers": [jnp.full((width, width), scale) for _ in range(depth)]}
        batch = jnp.ones((rows, width))
        return jaxmem.Workload(loss_fn, params, batch, optax.sgd(0.1), data=lambda window: batch)
"""


class Ran(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def write(directory, source, name="model.py"):
    """The path of a file with `source`, dedented."""
    path = directory / name
    path.write_text(textwrap.dedent(source))
    return str(path)


def run(capfd, *arguments):
    """Exit code, stdout and stderr of `jaxmem ARGUMENTS`, run in this process."""
    capfd.readouterr()
    code = main([str(argument) for argument in arguments])
    return Ran(code, *capfd.readouterr())


def assert_refused(ran, *words):
    """Bad input: exit code 2, one paragraph on stderr with these words, nothing on stdout, no traceback."""
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.startswith("jaxmem: error: ")
    assert ran.err.count("\n") == 1 and ran.err.endswith("\n"), ran.err
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err, ran.err
