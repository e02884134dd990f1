"""Forms of a model's step, each compiled once: the cells of `benchmarks.order_and_roll`, and their file."""

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

from benchmarks._order_and_roll_models import MODELS, Model
from jaxmem import MemoryConfig
from jaxmem._settled import Settled
from jaxmem.analysis import Program, compiled_program, peak_and_seconds
from jaxmem.errors import JaxmemError
from jaxmem.targets import on_target, place, resolve_target
from jaxmem.train._peaks import versions
from jaxmem.train._program import content, trace_for
from jaxmem.train._spec import StepSpec

ROOT = Path(__file__).parent.parent
REMATS = ("none", "full", "dots")
BY_HAND = "by hand"
AUTO = "auto"
PLAIN = "plain"


class Cell(NamedTuple):
    """One program: a model's step on a target, with a remat setting, in a form."""

    model: str
    target: str
    remat: str
    form: str


def form_of(name: str) -> tuple[Settled | None, str]:
    """The form that a name says, None for what "auto" chooses, and the generator.

    >>> form_of("tied rolled rbg")
    (Settled(order='tied', roll=True, random='free'), 'rbg')
    """
    words = set(name.split())
    generator = "rbg" if "rbg" in words else "given"
    if AUTO in words:
        return None, generator
    fields: dict[str, Any] = {"order": order} if (order := _order(words)) else {}
    fields |= {"roll": True} if "rolled" in words else {}
    fields |= {"random": "fenced"} if "fenced" in words else {}
    return Settled(**fields), generator


def _order(words: set[str]) -> str | None:
    return next((order for order in ("tied", "head") if order in words), None)


def forms(model: Model, remat: str) -> list[list[str]]:
    """Names of a model's forms, the plain one first, in order of worth: one lever at a time, then several."""
    one, several = ["tied", "head"], []
    if model.unrolled:
        one.append("rolled")
        several.append("tied rolled")
    if model.draws:
        one.append("fenced")
        several += ["tied fenced", "head fenced"]
    if model.unrolled and model.draws:
        several += ["rolled fenced", "tied rolled fenced"]
    if model.draws and remat == "full":
        one.append("rbg")
        several += ["rolled rbg"] * model.unrolled
    by_hand = [BY_HAND] if model.by_hand and remat == "full" else []
    return [[PLAIN], [AUTO], [*by_hand, *one], several]


def lowered(cell: Cell):
    """A cell's program, and the StepSpec whose compiler options it is compiled with."""
    model, target = MODELS[cell.model], resolve_target(cell.target)
    if cell.form == BY_HAND:
        return _by_hand(model, target)
    settled, generator = form_of(cell.form)
    config = MemoryConfig(remat=cell.remat, precision=model.precision, generator=generator)
    spec = StepSpec.of(model.make(), config).in_form(settled)
    return spec, trace_for(spec, target).lower()


def _by_hand(model: Model, target):
    assert model.by_hand is not None
    workload = model.make()
    spec = StepSpec.of(workload)
    params, state, rng = spec.abstract_model()
    optimizer, loss = workload.optimizer, model.by_hand

    def step(params, moments, state, batch, rng):
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, rng, state)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, rest, value

    moments = jax.eval_shape(optimizer.init, params)
    placed = place((params, moments, state, spec.abstract_batch(), rng), target)
    with on_target(placed.target):
        return spec, jax.jit(step, donate_argnums=(0, 1, 2)).trace(*placed.args).lower()


class Forms:
    """Records of cells, remembered by the content of their programs: the same program is compiled once.

    A cell's content is remembered, too, while no source that it may depend on changes; else it is lowered again.

    Args:
      path: of the JSON file; None remembers nothing.
      limit_seconds: after which nothing more is compiled; None for no limit.
    """

    def __init__(self, path: Path | None = None, limit_seconds: float | None = None):
        self.path, self.made = path, 0
        self._ends = None if limit_seconds is None else time.monotonic() + limit_seconds
        self._read()
        self._sources = _sources()

    def _read(self) -> None:
        known = json.loads(self.path.read_text()) if self.path and self.path.exists() else {}
        self.contents: dict[str, str] = known.get("contents", {})
        self.programs: dict[str, dict] = known.get("programs", {})

    def get(self, cell: Cell) -> dict | None:
        """The record of a cell, None where the time is up and it was not made before."""
        name = " ".join((*cell, self._sources))
        record = self.programs.get(self.contents.get(name, ""))
        if record is not None:
            return record
        if self._ends is not None and time.monotonic() >= self._ends:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # settings without effect: the cell shows it
            try:
                spec, program = lowered(cell)
            except JaxmemError as error:
                made = {"refused": f"{type(error).__name__}: {error}"[:300]}
                return self._remember(name, f"refused {name}", made)
            key = content(spec, program, resolve_target(cell.target))
            if key in self.programs:
                return self._remember(name, key, self.programs[key])
            record = compiled(spec, program, cell.target)
        self.made += 1
        print(" ".join(cell), record, file=sys.stderr, flush=True)
        return self._remember(name, key, record)

    def _remember(self, name: str, key: str, record: dict) -> dict:
        self._read()  # what another process made meanwhile
        self.contents[name], self.programs[key] = key, record
        if self.path is not None:
            half = self.path.with_suffix(self.path.suffix + ".part")
            half.write_text(json.dumps({"contents": self.contents, "programs": self.programs}, indent=1))
            os.replace(half, self.path)
        return record


def compiled(spec: StepSpec, program: jax.stages.Lowered, target_name: str) -> dict:
    """What the target's compiler makes of a program; CPU seconds to compile and read it, whatever else runs."""
    target = resolve_target(target_name)
    options = spec.compiler_options(target.platform)
    start = sum(os.times()[:4])
    try:
        known = compiled_program(Program(name="step", lower=program, compiler_options=options), target)
    except JaxmemError as error:
        return {"refused": f"{type(error).__name__}: {error}"[:300]}
    spent = sum(os.times()[:4]) - start
    peak, seconds = peak_and_seconds(known, target)
    made = known.made
    assert made is not None
    return {
        "peak_bytes": peak,
        "temp_bytes": made.compiled.memory_analysis().temp_size_in_bytes if made.compiled is not None else None,
        "step_seconds": seconds,
        "fits": made.refusal is None,
        "compile_seconds": round(spent, 2),
        "versions": " ".join(f"{name}={version}" for name, version in versions() if version),
    }


def _sources() -> str:
    """All that a cell's program may depend on here, as one word."""
    files = [*(ROOT / "jaxmem").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    files += (ROOT / "benchmarks" / f"{name}.py" for name in ("_forms", "_by_hand", "_order_and_roll_models"))
    files += (ROOT / "benchmarks" / f"{name}.py" for name in ("_stacks", "_vit_stack", "_real_models"))
    text = b"".join(path.read_bytes() for path in sorted(files))
    return hashlib.sha256(text + repr(versions()).encode()).hexdigest()[:12]


def design(models: Iterable[str], targets: Iterable[str]) -> list[Cell]:
    """The cells, those of worth first; under dots, which lies between none and full, one lever at a time."""
    early: list[list[Cell]] = [[], [], [], []]
    late: list[list[Cell]] = [[], [], []]
    for target in targets:
        for name in models:
            for remat in REMATS:
                passes = late if remat == "dots" else early
                for cells, group in zip(passes, forms(MODELS[name], remat), strict=False):
                    cells += [Cell(name, target, remat, form) for form in group]
    return [cell for cells in (*early, *late) for cell in cells]
