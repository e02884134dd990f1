"""What to try where it is not the program's own buffers: memory in pieces, held elsewhere, on chip, or the host's."""

from collections.abc import Iterable

from jaxmem._units import format_bytes
from jaxmem.analysis import _cures
from jaxmem.analysis.oom._records import OomAdvice, OomExplanation

_SMALL = 0.02  # share of the memory below which a request, or a program, cannot have filled it
_SMALLEST = 2**32  # memory of an accelerator, where the text does not say
_DEFAULT_SHARE = 0.75  # of a GPU's memory, in JAX's pool


def fragmented(said: OomExplanation) -> Iterable[OomAdvice]:
    """Enough is free, but not in one piece: as the text says, or as the request shows."""
    largest = next((fact for fact in said.facts if fact.name in ("largest_free", "reservable")), None)
    if said.requested_bytes is None or said.free_bytes is None or said.requested_bytes > said.free_bytes:
        return
    if largest is not None and largest.size_bytes >= said.requested_bytes:
        return
    if said.backend == "gpu":
        how = "Set XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async (or platform, slower) before JAX starts."
    else:
        how = "Allocate what stays first, and donate what is replaced, so that no new array is made beside an old one; "
        how += "delete and restore the state (jax.clear_caches() drops loaded programs) to begin with one free piece."
    piece = f"; the largest piece is {format_bytes(largest.size_bytes)}" if largest else ""
    yield OomAdvice(
        title="the pool is fragmented" if said.backend == "gpu" else "the memory is fragmented",
        how=how,
        because=f"{format_bytes(said.free_bytes)} are free, but not in one piece for "
        f"{format_bytes(said.requested_bytes)}{piece} (line {said.line})",
    )


def held_elsewhere(said: OomExplanation) -> Iterable[OomAdvice]:
    """A small request found the memory full, or a program found no room beside what is held."""
    if said.kind == "tpu_load":
        yield OomAdvice(
            title="free device arrays before this program is loaded",
            how="Delete arrays, or drop compiled functions, that are no longer used; jax.live_arrays() lists them.",
            because=f"the program has to find its memory in one piece (line {said.line})",
        )
    elif said.when == "run" and is_small(said):
        how = "jax.live_arrays() lists what this process holds: delete what is no longer used, and keep one state."
        if said.backend == "gpu":
            how += " See with nvidia-smi that no other process holds memory; where one must, set "
            how += "XLA_PYTHON_CLIENT_PREALLOCATE=false, or a lower XLA_PYTHON_CLIENT_MEM_FRACTION, in both."
        yield OomAdvice(
            title="free what else holds the memory",
            how=how,
            because=f"only {format_bytes(said.requested_bytes)} were asked for (line {said.line}): "
            "the memory was full before",
        )


def is_small(said: OomExplanation) -> bool:
    """Whether neither the request nor the program that made it can have filled the memory."""
    sizes = {fact.name: fact.size_bytes for fact in said.facts}
    program = max(said.requested_bytes or 0, sizes.get("total", 0), sizes.get("temporaries", 0))
    whole = max(said.limit_bytes or 0, said.used_bytes or 0) or _SMALLEST
    return said.requested_bytes is not None and program < _SMALL * whole


def larger_share(said: OomExplanation) -> Iterable[OomAdvice]:
    """A larger pool, unless the text shows that no pool on this GPU would be large enough."""
    if said.kind != "gpu_bfc":
        return
    gain = most_gain(said)
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
        how=f"JAX takes {_DEFAULT_SHARE:.0%} of it by default. {_cures.larger_share(_cures.Asked(target=None)).python}",
        because=because,
    )


def most_gain(said: OomExplanation) -> int | None:
    """Bytes that a share of 95 % adds to a pool of the default size."""
    return None if said.limit_bytes is None else int(said.limit_bytes * (_cures.MOST_SHARE / _DEFAULT_SHARE - 1))


def outside_the_pool(said: OomExplanation) -> Iterable[OomAdvice]:
    """The driver or a library found the GPU full: of JAX's own pool, or of another process."""
    if said.kind == "gpu_driver":
        yield OomAdvice(
            title="see which other process holds the GPU's memory",
            how="nvidia-smi lists them: end what is left over; to share the GPU set XLA_PYTHON_CLIENT_MEM_FRACTION in "
            "each so that they add up to less than 0.95, or XLA_PYTHON_CLIENT_PREALLOCATE=false.",
            because=f"the driver had no {format_bytes(said.requested_bytes)} left (line {said.line})"
            if said.requested_bytes
            else f"the driver had no memory left (line {said.line})",
        )
    yield OomAdvice(
        title="leave more of the GPU to what allocates outside JAX's pool",
        how="Set XLA_PYTHON_CLIENT_MEM_FRACTION lower than its 0.75, or XLA_PYTHON_CLIENT_PREALLOCATE=false, before "
        "JAX starts.",
        because=f"the CUDA driver or a library asked for the memory, not XLA's allocator (line {said.line})",
    )
    if said.kind == "gpu_graph":
        yield OomAdvice(
            title="turn CUDA graphs off",
            how="Set XLA_FLAGS=--xla_gpu_enable_command_buffer= (empty).",
            because=f"it failed while a command buffer was instantiated (line {said.line})",
        )


def on_chip(said: OomExplanation) -> Iterable[OomAdvice]:
    """A kernel's VMEM or SMEM."""
    wanted = said.requested_bytes if said.requested_bytes is not None else said.used_bytes
    where = f"the text does not say how much (line {said.line})"
    if wanted is not None and said.limit_bytes is not None:
        where = f"{format_bytes(wanted)} wanted, {format_bytes(said.limit_bytes)} there (line {said.line})"
    if said.memory == "smem":
        how = "SMEM is for scalars: move the array to VMEM or HBM (memory_space of its BlockSpec or scratch shape)."
    else:
        how = "Choose smaller block shapes or scratch arrays; where the chip has more, raise vmem_limit_bytes in "
        how += "pltpu.CompilerParams, or --xla_tpu_scoped_vmem_limit_kib."
    yield OomAdvice(title=f"make the kernel need less {said.memory}", how=how, because=where)


_HOST = {
    "cpu_xla": (
        "make the program need less",
        "Try accumulation_steps=2 or more, remat='full' or precision='bfloat16'; `jaxmem compare --target cpu` "
        "shows the bytes of each before anything runs.",
        "the program's buffers on the CPU come from host memory",
    ),
    "nccl_shm": (
        "give the container more shared memory",
        "Start it with --shm-size=1g or more (docker), or mount an emptyDir of medium Memory at /dev/shm (Kubernetes).",
        "NCCL could not make its segment in /dev/shm",
    ),
    "pinned": (
        "pin less of the host's memory, or allow more",
        "Offload less, or in smaller arrays. Raise what may be pinned: XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB for JAX's "
        "pool, `ulimit -l unlimited` and the container's memory for the system; under WSL half of the RAM is the most.",
        "the driver could not pin host memory; the device's own is not what ran out",
    ),
}


_PLAIN_HOST = (
    "hold less in the host's memory",
    "Stream the data set (memory-map or read in parts), use fewer or smaller data workers, and restore checkpoints "
    "straight to their shards; or ask for more memory for the job.",
    "host memory ran out, not the accelerator's",
)


def on_host(said: OomExplanation) -> Iterable[OomAdvice]:
    """The host's memory, plain, pinned or shared."""
    title, how, because = _HOST.get(said.kind, _PLAIN_HOST)
    yield OomAdvice(title=title, how=how, because=f"{because} (line {said.line})")
