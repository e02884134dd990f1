"""Compiled here and now: places and live ranges of three compilers' programs, and no file left behind."""

import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxmem.analysis.assignment import BufferDump, liveness
from jaxmem.analysis.attribution._frames import Frames
from jaxmem.analysis.hlo._parse import parse_hlo
from tests.analysis.assignment.programs import lower, program

GOLDENS = Path(__file__).parent / "goldens"


@pytest.mark.parametrize("target", ["cpu", "gpu-h100", "tpu-v5e:1x1"])
def test_places_and_the_fallback_reproduce_the_temporaries(target, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    platform = target.partition("-")[0]
    lowered, options = lower(target, *program(platform))
    with BufferDump(options, platform=platform) as dump:
        compiled = lowered.compile(compiler_options=dump.options)
        assignment, dumped = dump.of(compiled, compiled.as_text()), dump.text()
    temps = compiled.memory_analysis().temp_size_in_bytes
    assert assignment is not None
    assert assignment.source == ("proto" if platform == "cpu" else "text")
    assert assignment.used_temp_bytes == pytest.approx(temps, rel=0.01)
    fallback = liveness(compiled.as_text(), platform=platform)
    assert fallback.source == "liveness"
    assert fallback.temp_bytes == pytest.approx(temps, rel=0.02)
    assert fallback.temp_sweep.peak_bytes == pytest.approx(assignment.temp_sweep.peak_bytes, rel=0.02)
    assert list(tmp_path.iterdir()) == []
    # A value inside an asynchronous computation, which the program's text does not show, begins where that starts.
    text = compiled.as_text()
    at = assignment.temp_sweep.positions[assignment.temp_sweep.peak]
    for value in (v for a in assignment.temps for v in a.values if v.start <= at <= v.end):
        names = (value.name, assignment.schedule[value.start])
        assert any(f"%{name} = " in text for name in names), value
    assert dumped is None or platform == "gpu"
    if dumped is not None:  # what the program says of itself, but for the numbers of its source lines
        assert parse_hlo(dumped).output_aliases == parse_hlo(text).output_aliases
        assert _lines(dumped) == _lines(text)


def _lines(text: str) -> list[tuple[str, ...]]:
    """Name, type, operation, attributes and source line of every instruction."""
    frames = Frames(text)
    instructions = [i for c in parse_hlo(text).computations.values() for i in c.instructions.values()]
    number = re.compile(r"stack_frame_id=\d+")
    return [(i.name, i.type, i.opcode, number.sub("", i.rest), str(frames.of(i.rest))) for i in instructions]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_stays_when_compiling_ends_early(error, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def compile_halfway():
        with BufferDump({}, platform="gpu") as dump:
            (Path(dump.options["xla_dump_to"]) / "module_0001.jit_step.ptx").write_text("half a file")
            raise error

    with pytest.raises(error):
        compile_halfway()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--xla_dump_to={}", "--xla_foo=1 --xla_dump_to='{}' --xla_bar"])
def test_a_dump_that_the_user_asked_for_stays_and_is_read(flag, tmp_path, monkeypatch):
    """XLA reads its flags once, when it first compiles, so here a dump of earlier plays the compiler's part."""
    compiled = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((), "float32")).compile()
    monkeypatch.setenv("XLA_FLAGS", flag.format(tmp_path))
    for kind in ("buffer-assignment", "live-range"):  # of another program, and old
        (tmp_path / f"module_0001.jit_step.gpu_after_optimizations-{kind}.txt").write_text("")
    with BufferDump({"xla_gpu_autotune_level": 0}, platform="cuda") as dump:
        assert "xla_dump_to" not in dump.options  # theirs is not overruled
        for kind in ("buffer-assignment", "live-range"):
            text = (GOLDENS / f"gpu-0.10.2-{kind}.txt").read_text()
            (tmp_path / f"module_0002.jit_sin.gpu_after_optimizations-{kind}.txt").write_text(text)
            # A larger module that is compiled on the way, under another name.
            (tmp_path / f"module_0003.jit_fn.gpu_after_optimizations-{kind}.txt").write_text(text + text)
        found = dump.of(compiled, compiled.as_text())
    assert found is not None
    assert (found.source, found.platform, len(found.allocations)) == ("text", "gpu", 18)
    assert len(list(tmp_path.iterdir())) == 6


def test_without_a_dump_the_program_itself_is_read():
    """As for a program that came from the compilation cache: here a CPU's, without its message."""
    compiled = jax.jit(lambda x: jnp.sort(x @ x) @ x).lower(jax.ShapeDtypeStruct((64, 64), "float32")).compile()

    class WithoutMessage:
        def memory_analysis(self):
            return None

    found = BufferDump({}, platform="gpu").of(WithoutMessage(), compiled.as_text())
    assert found is not None
    assert found.source == "liveness"
    assert found.temp_bytes == pytest.approx(compiled.memory_analysis().temp_size_in_bytes, rel=0.02)
