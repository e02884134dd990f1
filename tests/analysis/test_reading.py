"""Compiled programs of which a part cannot be read: the rest is reported, and what is missing is said."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem import analyze
from jaxmem.analysis._compiled import compile_program
from jaxmem.targets import resolve_target


class Unreadable:
    """A compiled program, some of whose methods raise as jaxlib's do."""

    def __init__(self, compiled, *parts: str):
        self._compiled, self._parts = compiled, parts

    def __getattr__(self, name):
        if name in self._parts:
            return self._raise
        return getattr(self._compiled, name)

    def _raise(self):
        raise RuntimeError("INTERNAL: RET_CHECK failure async-update\n instruction should have 1 operands but sees 3")


@pytest.fixture
def compiled():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    return jax.jit(step).lower(jnp.ones((64, 64)), jnp.ones((32, 64))).compile()


def test_without_its_text_a_program_has_its_bytes(compiled):
    whole = analyze(compiled)
    report = analyze(Unreadable(compiled, "as_text", "runtime_executable"))
    assert report.peak_bytes == whole.peak_bytes and report.fits == whole.fits
    assert report.by_kind == () and report.flops is None and report.step_seconds is None
    (said,) = [warning for warning in report.warnings if "cannot read this program back" in warning]
    assert "async-update instruction should" in said and "kinds, layers, buffers" in said


def test_without_its_numbered_module_the_buffers_come_from_its_text(compiled):
    report = analyze(Unreadable(compiled, "runtime_executable"))
    assert report.buffer_provenance == "modelled"
    assert sum(size for _, size in report.by_kind) == report.peak_bytes == analyze(compiled).peak_bytes


def test_without_a_memory_analysis_it_has_its_text(compiled):
    report = analyze(Unreadable(compiled, "memory_analysis"))
    assert report.peak_bytes is None and report.flops == analyze(compiled).flops
    assert any("Memory analysis is unavailable" in warning for warning in report.warnings)


def test_buffers_that_cannot_be_read_are_left_out(monkeypatch):
    def broken(self, compiled, module):
        raise ValueError("wanted a line of a buffer assignment")

    monkeypatch.setattr("jaxmem.analysis.assignment.BufferDump.of", broken)
    made = compile_program(jax.jit(jnp.tanh).lower(jnp.ones(8)), resolve_target("cpu"))
    assert made.assignment is None and made.text
    assert "Where the buffers lie cannot be read (wanted a line of a buffer assignment)" in made.notes[0]
