"""What to try first, and what it would save, from the evidence that a text holds."""

import collections
import re
from collections.abc import Iterable, Sequence

from jaxmem._units import format_bytes
from jaxmem.analysis import _cures
from jaxmem.analysis.oom._advice_memory import (
    fragmented,
    held_elsewhere,
    is_small,
    larger_share,
    most_gain,
    on_chip,
    on_host,
    outside_the_pool,
)
from jaxmem.analysis.oom._buffers import CHUNKS
from jaxmem.analysis.oom._records import OomAdvice, OomBuffer, OomExplanation
from jaxmem.config import MemoryConfig

_SHAPE = re.compile(r"^(\w{1,12})\[([\d,]{0,200})\]$")
_WORTH = 0.02  # share of the listed bytes below which advice is not worth a line
_FEW = 0.1  # share of the bytes below which what may be activations cannot be the cause


def advise(said: OomExplanation) -> tuple[OomAdvice, ...]:
    """The most promising first: what saves most, then what the text gives no number for."""
    if said.memory in ("vmem", "smem"):
        return tuple(on_chip(said))
    if said.memory == "host":
        return tuple(on_host(said))
    if said.kind in ("gpu_driver", "gpu_library", "gpu_graph"):
        return tuple(outside_the_pool(said))
    elsewhere = [*fragmented(said), *held_elsewhere(said)]
    if said.when == "run" and is_small(said):
        return tuple(elsewhere)
    found = [*_logits(said), *_activations(said), *_padding(said), *_arguments(said)]
    if not (found or elsewhere) or _perhaps_activations(said):
        found.append(_look(said))
    return (*elsewhere, *sorted(found, key=lambda advice: -(advice.saves_bytes or 0)), *larger_share(said))


def _logits(said: OomExplanation) -> Iterable[OomAdvice]:
    found = [b for b in said.buffers if _is_logits(b)]
    if found:
        total = _sum(found)
        yield OomAdvice(
            title="compute the loss in chunks of the sequence",
            how=_cures.IN_SLICES,
            saves_bytes=total - total // 8,
            because=f"float32 buffers as wide as a vocabulary: {_named(found)}",
        )


def _activations(said: OomExplanation) -> Iterable[OomAdvice]:
    found = [b for b in said.buffers if _is_activation(b) and not _is_logits(b)]
    total = _sum(found)
    if not found or total < _WORTH * _sum(said.buffers):
        return
    looped = [b for b in found if "while" in b.op_name]
    many, asked = looped or found, _asked(said)
    saves = _sum(many) - max(b.size_bytes for b in many)  # the input of each block stays
    if len(many) > 1:
        yield OomAdvice(
            title="recompute the blocks' activations in the backward pass",
            how=_cures.recompute(asked, saves).shell,
            saves_bytes=saves,
            because=f"values of the differentiated pass{' stacked by a loop' if looped else ''}: {_named(many)}",
        )
    rows = _rows(found)
    if steps := _steps(said, total, rows):
        of_rows = f", of {rows} rows as their shapes say" if rows else ""
        yield OomAdvice(
            title=f"cut the batch into {steps} micro-batches",
            how=f"Set accumulation_steps={steps}: activations shrink by that factor and one accumulator is added.",
            saves_bytes=total - total // steps,
            because=f"{format_bytes(total)} of the listed buffers grow with the batch{of_rows}",
        )
    wide = [b for b in found if b.shape.startswith("f32[")]
    if wide:
        yield OomAdvice(
            title=f"compute in {_cures.narrow_dtype(asked)}",
            how=_cures.compute_narrow(asked).shell,
            saves_bytes=None if asked.draws_and_recomputes else _sum(wide) // 2,
            because=f"float32 activations: {_named(wide)}",
        )


def _rows(activations: Sequence[OomBuffer]) -> int | None:
    """Rows of the batch on a device: the leading size that most bytes have, after an axis that a loop stacks along."""
    sizes: collections.Counter[int] = collections.Counter()
    for buffer in activations:
        if match := _SHAPE.match(buffer.shape):
            shape = [int(size) for size in match[2].split(",") if size]
            stacked = "while" in buffer.op_name and len(shape) > 3
            if len(shape) > 1 and shape[stacked]:
                sizes[shape[stacked]] += buffer.size_bytes
    return sizes.most_common(1)[0][0] if sizes else None


def _steps(said: OomExplanation, listed: int, rows: int | None) -> int | None:
    """The least number of micro-batches that saves what is missing, at most one a row; None for a single row.

    Where the listed activations are fewer than that, the list is partial, and all temporaries are taken for them.
    """
    missing = said.missing_bytes or 0
    temporaries = next((fact.size_bytes for fact in said.facts if fact.name == "temporaries"), 0)
    return _cures.fitting_steps(missing, next((size for size in (listed, temporaries) if size > missing), 0), rows)


def _padding(said: OomExplanation) -> Iterable[OomAdvice]:
    found = [b for b in said.buffers if b.padding_bytes > 0.1 * b.size_bytes]
    wasted = sum(b.padding_bytes for b in found)
    if wasted > _WORTH * _sum(said.buffers):
        yield OomAdvice(
            title="change the shapes that the TPU pads",
            how=_cures.WHOLE_TILES,
            saves_bytes=wasted,
            because=f"padding in {_named(found)}",
        )


def _arguments(said: OomExplanation) -> Iterable[OomAdvice]:
    facts = {fact.name: fact for fact in said.facts}
    argument, total = facts.get("arguments"), facts.get("total") or facts.get("used")
    if argument is None or total is None or argument.size_bytes < 0.4 * total.size_bytes:
        return
    outputs = facts.get("outputs")
    yield OomAdvice(
        title="donate what the step replaces, or shard it",
        how="jax.jit(step, donate_argnums=(0,)) lets a new state, as argument 0, take the place of the old; jaxmem's "
        "train step donates its own. Sharding it over N devices divides the rest by N.",
        saves_bytes=min(argument.size_bytes, outputs.size_bytes) if outputs else None,
        because=f"arguments are {format_bytes(argument.size_bytes)} of {format_bytes(total.size_bytes)} "
        f"(line {argument.line})",
    )


def _look(said: OomExplanation) -> OomAdvice:
    """What the bytes are is not told: how to see it, and what cuts activations; no saving is claimed."""
    asked = _asked(said)
    target = "gpu-h100" if said.backend == "gpu" else "tpu-v5e"
    analyze, compare = (
        command.replace("--target T", f"--target {target}")
        for command in (asked.command("analyze"), asked.command("compare", remat="none,full,dots"))
    )
    return OomAdvice(
        title="see where the bytes go, and cut activations if it is them",
        how=f"{analyze} compiles the step without the device; `jaxmem targets` lists others. Then try "
        f"MemoryConfig(accumulation_steps=2) or more and precision={_cures.narrow_dtype(asked)!r}; {compare} shows "
        "bytes and time of each before anything runs.",
        because=_wanted(said) + f"the text does not say what the bytes are (line {said.line})",
    )


def _asked(said: OomExplanation) -> _cures.Asked:
    """What was run, as far as the text says."""
    return _cures.Asked(
        target=None,
        platform=said.backend,
        config=MemoryConfig(),
        peak_bytes=None if said.limit_bytes is None else said.limit_bytes + (said.missing_bytes or 0),
        capacity_bytes=said.limit_bytes,
        draws=any(_cures.is_random(b.op_name) for b in said.buffers),
        recomputes=any("rematted_computation" in b.op_name for b in said.buffers),
        rows=1,  # micro-batches have an advice of their own
    )


def _wanted(said: OomExplanation) -> str:
    if said.requested_bytes is None:
        return ""
    wanted = f"{format_bytes(said.requested_bytes)} were wanted in one piece"
    if said.free_bytes is not None:
        wanted += f" and {format_bytes(said.free_bytes)} free"
    gain = most_gain(said) if said.kind == "gpu_bfc" else None
    if gain is not None and (said.missing_bytes or 0) > gain:
        wanted += f"; a larger share of the GPU would add too little, at most {format_bytes(gain)}"
    return wanted + "; "


def _perhaps_activations(said: OomExplanation) -> bool:
    """Whether activations may have filled the device's memory, for all that the text says, and it lists none."""
    if said.backend != "gpu" and said.kind != "tpu_run":
        return False
    sizes = {fact.name: fact.size_bytes for fact in said.facts}
    whole = max(sizes.get("total", 0), said.requested_bytes or 0)
    if sizes.get("temporaries", whole) < _FEW * whole:
        return False
    listed = [b for b in said.buffers if b.allocation != CHUNKS]
    if not listed:
        return True
    nameless = [b for b in listed if not b.op_name and not _is_argument(b)]
    return not any(_is_activation(b) for b in listed) and _sum(nameless) >= _FEW * _sum(listed)


def _is_logits(buffer: OomBuffer) -> bool:
    match = _SHAPE.match(buffer.shape)
    if not match or match[1] != "f32" or buffer.allocation.lower().startswith("argument"):
        return False
    sizes = [int(size) for size in match[2].split(",") if size]
    return len(sizes) >= 2 and sizes[-1] >= _cures.VOCABULARY and "jvp" in buffer.op_name


def _is_activation(buffer: OomBuffer) -> bool:
    return "jvp(" in buffer.op_name and not _is_argument(buffer)


def _is_argument(buffer: OomBuffer) -> bool:
    return buffer.allocation.lower().startswith(("argument", "parameter"))


def _sum(buffers: Sequence[OomBuffer]) -> int:
    return sum(b.size_bytes for b in buffers)


def _named(buffers: Sequence[OomBuffer]) -> str:
    first = ", ".join(f"{b.shape or format_bytes(b.size_bytes)} (line {b.line})" for b in buffers[:3])
    return first + (f" and {len(buffers) - 3} more" if len(buffers) > 3 else "")
