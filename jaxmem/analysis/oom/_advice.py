"""What to try first, and what it would save, from the evidence that a text holds."""

import math
import re
from collections.abc import Iterable, Sequence

from jaxmem._units import format_bytes
from jaxmem.analysis.oom._records import OomAdvice, OomBuffer, OomExplanation

_SHAPE = re.compile(r"^(\w{1,12})\[([\d,]{0,200})\]$")
_VOCABULARY = 16_384  # a last dimension this large, in float32, is most likely one of logits
_WORTH = 0.02  # share of the listed bytes below which advice is not worth a line
_FEW = 0.1  # share of the bytes below which what may be activations cannot be the cause
_MOST_STEPS = 64
_DEFAULT_SHARE, _MOST_SHARE = 0.75, 0.95  # of a GPU's memory, in JAX's pool


def advise(said: OomExplanation) -> tuple[OomAdvice, ...]:
    """The most promising first: what saves most, then what the text gives no number for."""
    if said.memory in ("vmem", "smem"):
        return tuple(_on_chip(said))
    if said.memory == "host":
        return tuple(_host(said))
    if said.kind in ("gpu_driver", "gpu_library", "gpu_graph"):
        return tuple(_outside_the_pool(said))
    found = [*_logits(said), *_activations(said), *_padding(said), *_arguments(said), *_pool(said)]
    if not found or _perhaps_activations(said):
        found.append(_look(said))
    found += _share(said)
    return tuple(sorted(found, key=lambda advice: -(advice.saves_bytes or 0)))


def _logits(said: OomExplanation) -> Iterable[OomAdvice]:
    found = [b for b in said.buffers if _is_logits(b)]
    if found:
        total = _sum(found)
        yield OomAdvice(
            title="compute the loss in chunks of the sequence",
            how="Wrap the head and the loss of one chunk in jax.checkpoint and lax.scan over 8 chunks, so that only "
            "one chunk of float32 logits exists at a time.",
            saves_bytes=total - total // 8,
            because=f"float32 buffers as wide as a vocabulary: {_named(found)}",
        )


def _activations(said: OomExplanation) -> Iterable[OomAdvice]:
    found = [b for b in said.buffers if _is_activation(b) and not _is_logits(b)]
    total = _sum(found)
    if not found or total < _WORTH * _sum(said.buffers):
        return
    looped = [b for b in found if "while" in b.op_name]
    many = looped or found
    if len(many) > 1:
        yield OomAdvice(
            title="recompute the blocks' activations in the backward pass",
            how="Mark the blocks with memory.block and set remat='full' (or 'dots_no_batch'); "
            "`jaxmem compare` shows what each preset saves and costs.",
            saves_bytes=_sum(many) - max(b.size_bytes for b in many),  # the input of each block stays
            because=f"values of the differentiated pass{' stacked by a loop' if looped else ''}: {_named(many)}",
        )
    steps = _steps_for(said.missing_bytes, total)
    yield OomAdvice(
        title=f"cut the batch into {steps} micro-batches",
        how=f"Set accumulation_steps={steps}: activations shrink by that factor and one accumulator is added.",
        saves_bytes=total - total // steps,
        because=f"{format_bytes(total)} of the listed buffers grow with the batch",
    )
    wide = [b for b in found if b.shape.startswith("f32[")]
    if wide:
        yield OomAdvice(
            title="compute in bfloat16",
            how="Set precision='bfloat16'; parameters stay float32.",
            saves_bytes=_sum(wide) // 2,
            because=f"float32 activations: {_named(wide)}",
        )


def _padding(said: OomExplanation) -> Iterable[OomAdvice]:
    found = [b for b in said.buffers if b.padding_bytes > 0.1 * b.size_bytes]
    wasted = sum(b.padding_bytes for b in found)
    if wasted > _WORTH * _sum(said.buffers):
        yield OomAdvice(
            title="change the shapes that the TPU pads",
            how="A TPU pads the last two dimensions to multiples of 8 and 128: put large ones last.",
            saves_bytes=wasted,
            because=f"padding in {_named(found)}",
        )


def _arguments(said: OomExplanation) -> Iterable[OomAdvice]:
    facts = {fact.name: fact for fact in reversed(said.facts)}
    argument, total = facts.get("arguments"), facts.get("total") or facts.get("used")
    if argument is None or total is None or argument.size_bytes < 0.4 * total.size_bytes:
        return
    outputs = facts.get("outputs")
    yield OomAdvice(
        title="donate what the step replaces, or shard it",
        how="jax.jit(..., donate_argnums=...) lets new parameters and optimizer state take the place of the old ones; "
        "jaxmem's train step donates its state. Sharding them over N devices divides the rest by N.",
        saves_bytes=min(argument.size_bytes, outputs.size_bytes) if outputs else None,
        because=f"arguments are {format_bytes(argument.size_bytes)} of {format_bytes(total.size_bytes)} "
        f"(line {argument.line})",
    )


def _pool(said: OomExplanation) -> Iterable[OomAdvice]:
    if said.kind == "tpu_load":
        yield OomAdvice(
            title="free device arrays before this program is loaded",
            how="Delete arrays, or drop compiled functions, that are no longer used; jax.live_arrays() lists them.",
            because=f"the program has to find its memory in one piece (line {said.line})",
        )
    if said.kind != "gpu_bfc":
        return
    if said.requested_bytes is not None and said.free_bytes is not None and said.requested_bytes <= said.free_bytes:
        yield OomAdvice(
            title="the pool is fragmented",
            how="Set XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async (or platform, slower) before JAX starts.",
            because=f"{format_bytes(said.free_bytes)} are free, but not in one piece for "
            f"{format_bytes(said.requested_bytes)} (line {said.line})",
        )


def _share(said: OomExplanation) -> Iterable[OomAdvice]:
    """A larger pool, unless the text shows that no pool on this GPU would be large enough."""
    if said.kind != "gpu_bfc":
        return
    gain = _most_gain(said)
    if gain is not None and (said.missing_bytes or 0) > gain:
        return
    if said.limit_bytes is None:
        because = "the text does not state the pool's limit"
    else:
        because = f"the limit is that of JAX's pool, {format_bytes(said.limit_bytes)}, not of the GPU"
        if said.missing_bytes and gain is not None:
            because += (
                f"; {format_bytes(said.missing_bytes)} are missing, and up to {format_bytes(gain)} would be added"
            )
    yield OomAdvice(
        title="give JAX a larger share of the GPU",
        how="JAX takes 75 % of it by default; XLA_PYTHON_CLIENT_MEM_FRACTION=0.95, set before JAX starts, gives more. "
        "See with nvidia-smi that no other process holds memory.",
        because=because,
    )


def _most_gain(said: OomExplanation) -> int | None:
    """Bytes that a share of 95 % adds to a pool of the default size."""
    return None if said.limit_bytes is None else int(said.limit_bytes * (_MOST_SHARE / _DEFAULT_SHARE - 1))


def _outside_the_pool(said: OomExplanation) -> Iterable[OomAdvice]:
    yield OomAdvice(
        title="leave more of the GPU to what allocates outside JAX's pool",
        how="Set XLA_PYTHON_CLIENT_MEM_FRACTION lower than its 0.75, or XLA_PYTHON_CLIENT_PREALLOCATE=false, before "
        "JAX starts; see with nvidia-smi that no other process holds memory.",
        because=f"the CUDA driver or a library asked for the memory, not XLA's allocator (line {said.line})",
    )
    if said.kind == "gpu_graph":
        yield OomAdvice(
            title="turn CUDA graphs off",
            how="Set XLA_FLAGS=--xla_gpu_enable_command_buffer= (empty).",
            because=f"it failed while a command buffer was instantiated (line {said.line})",
        )


def _on_chip(said: OomExplanation) -> Iterable[OomAdvice]:
    where = f"{format_bytes(said.requested_bytes)} wanted, {format_bytes(said.limit_bytes)} there (line {said.line})"
    if said.memory == "smem":
        how = "SMEM is for scalars: move the array to VMEM or HBM (memory_space of its BlockSpec or scratch shape)."
    else:
        how = "Choose smaller block shapes or scratch arrays; where the chip has more, raise vmem_limit_bytes in "
        how += "pltpu.CompilerParams, or --xla_tpu_scoped_vmem_limit_kib."
    yield OomAdvice(title=f"make the kernel need less {said.memory}", how=how, because=where)


def _host(said: OomExplanation) -> Iterable[OomAdvice]:
    if said.kind == "cpu_xla":
        yield OomAdvice(
            title="make the program need less",
            how="Try accumulation_steps=2 or more, remat='full' or precision='bfloat16'; `jaxmem compare --target cpu` "
            "shows the bytes of each before anything runs.",
            because=f"the program's buffers on the CPU come from host memory (line {said.line})",
        )
        return
    if said.kind == "nccl_shm":
        yield OomAdvice(
            title="give the container more shared memory",
            how="Start it with --shm-size=1g or more (docker), or mount an emptyDir of medium Memory at /dev/shm "
            "(Kubernetes).",
            because=f"NCCL could not make its segment in /dev/shm (line {said.line})",
        )
        return
    yield OomAdvice(
        title="hold less in the host's memory",
        how="Stream the data set (memory-map or read in parts), use fewer or smaller data workers, and restore "
        "checkpoints straight to their shards; or ask for more memory for the job.",
        because=f"host memory ran out, not the accelerator's (line {said.line})",
    )


def _look(said: OomExplanation) -> OomAdvice:
    """What the bytes are is not told: how to see it, and what cuts activations; no saving is claimed."""
    target, others = ("gpu-h100", "; `jaxmem targets` lists other GPUs") if said.backend == "gpu" else ("...", "")
    return OomAdvice(
        title="see where the bytes go, and cut activations if it is them",
        how=f"`jaxmem analyze FILE --target {target}` compiles the step without the device{others}. Then try "
        "accumulation_steps=2 or more, remat='full' (or 'dots_no_batch') and precision='bfloat16'; `jaxmem compare` "
        "shows the bytes of each before anything runs.",
        because=_wanted(said) + f"the text does not say what the bytes are (line {said.line})",
    )


def _wanted(said: OomExplanation) -> str:
    if said.requested_bytes is None:
        return ""
    wanted = f"{format_bytes(said.requested_bytes)} were wanted in one piece"
    if said.free_bytes is not None:
        wanted += f" and {format_bytes(said.free_bytes)} free"
    gain = _most_gain(said) if said.kind == "gpu_bfc" else None
    if gain is not None and (said.missing_bytes or 0) > gain:
        wanted += f"; a larger share of the GPU would add too little, at most {format_bytes(gain)}"
    return wanted + "; "


def _perhaps_activations(said: OomExplanation) -> bool:
    """Whether activations may have filled the device's memory, for all that the text says, and it lists none."""
    if said.backend != "gpu" and said.kind != "tpu_run":
        return False
    sizes = {fact.name: fact.size_bytes for fact in reversed(said.facts)}
    whole = max(sizes.get("total", 0), said.requested_bytes or 0)
    if sizes.get("temporaries", whole) < _FEW * whole:
        return False
    if not said.buffers:
        return True
    nameless = [b for b in said.buffers if not b.op_name and not _is_argument(b)]
    return not any(_is_activation(b) for b in said.buffers) and _sum(nameless) >= _FEW * _sum(said.buffers)


def _is_logits(buffer: OomBuffer) -> bool:
    match = _SHAPE.match(buffer.shape)
    if not match or match[1] != "f32" or buffer.allocation.lower().startswith("argument"):
        return False
    sizes = [int(size) for size in match[2].split(",") if size]
    return len(sizes) >= 2 and sizes[-1] >= _VOCABULARY and "jvp" in buffer.op_name


def _is_activation(buffer: OomBuffer) -> bool:
    return "jvp(" in buffer.op_name and not _is_argument(buffer)


def _is_argument(buffer: OomBuffer) -> bool:
    return buffer.allocation.lower().startswith(("argument", "parameter"))


def _steps_for(missing: int | None, activations: int) -> int:
    """The least power of two that saves `missing`; 2 where that is unknown."""
    if missing is None or missing >= activations:
        return 2 if missing is None else _MOST_STEPS
    needed = activations / (activations - missing)
    return min(max(2 ** math.ceil(math.log2(needed)), 2), _MOST_STEPS)


def _sum(buffers: Sequence[OomBuffer]) -> int:
    return sum(b.size_bytes for b in buffers)


def _named(buffers: Sequence[OomBuffer]) -> str:
    first = ", ".join(f"{b.shape or format_bytes(b.size_bytes)} (line {b.line})" for b in buffers[:3])
    return first + (f" and {len(buffers) - 3} more" if len(buffers) > 3 else "")
