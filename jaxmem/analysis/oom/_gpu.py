"""What XLA's GPU allocator, its buffer assignment, and the CUDA libraries say."""

import functools
import re

from jaxmem.analysis.oom._formats import Headline, number

_gpu = functools.partial(Headline, backend="gpu", memory="hbm", when="run")

ALLOCATOR = "ran out of memory trying"
"""What the allocator itself says, before it dumps its state."""

HEADLINES = (
    _gpu(
        kind="gpu_bfc",
        trigger=ALLOCATOR,
        pattern=re.compile(r"Allocator \([^)\n]{1,40}\) ran out of memory trying to allocate \d"),
    ),
    _gpu(
        kind="gpu_bfc",
        trigger="ut of memory while trying to allocate",
        pattern=re.compile(r"ut of memory while trying to allocate \d"),
    ),
    _gpu(
        kind="gpu_bfc",
        trigger="Failed to allocate request for",
        pattern=re.compile(r"Failed to allocate request for \d"),
    ),
    _gpu(
        kind="gpu_graph",
        trigger="Underlying backend ran out of memory",
        pattern=re.compile(r"Underlying backend ran out of memory trying to instantiate"),
    ),
    _gpu(
        kind="gpu_driver",
        trigger="CUDA_ERROR_OUT_OF_MEMORY",
        pattern=re.compile(r"CUDA_ERROR_OUT_OF_MEMORY"),
    ),
    _gpu(
        kind="gpu_driver",
        trigger="cuMemAllocAsync failed to allocate",
        pattern=re.compile(r"cuMemAllocAsync failed to allocate \d"),
    ),
    _gpu(
        kind="gpu_library",
        trigger="scratch",
        pattern=re.compile(r" to allocate (?<=(?:ailed|nable) to allocate )[\w\- ]{0,60}scratch"),
    ),
    _gpu(
        kind="gpu_library",
        trigger="_STATUS_ALLOC_FAILED",
        pattern=re.compile(r"_STATUS_ALLOC_FAILED(?<=[A-Z]_STATUS_ALLOC_FAILED)"),  # of cuDNN, cuBLAS, cuSOLVER, ...
    ),
    # NCCL: its CUDA calls, its own allocations, and PyTorch's and XLA's words for what it returned.
    _gpu(
        kind="gpu_library",
        trigger="out of memory",
        pattern=re.compile(r"Cuda failure[^'(\n]{0,20}['(]out of memory"),
    ),
    _gpu(
        kind="gpu_library",
        trigger="CUDA error",
        pattern=re.compile(r"CUDA error[ \d:]{0,8}['(]?out of memory"),
    ),
    _gpu(
        kind="gpu_library",
        trigger="Failed to CUDA ",
        pattern=re.compile(r"Failed to CUDA (?:c|m|host )alloc\b"),
    ),
    _gpu(
        kind="gpu_driver",
        trigger="cudaErrorMemoryAllocation",
        pattern=re.compile(r"cudaErrorMemoryAllocation"),
    ),
)

NUMBERS = (
    number("requested", r"ran out of memory trying to allocate SIZE"),
    number("requested", r"ut of memory while trying to allocate SIZE"),
    number("requested", r"Failed to allocate request for SIZE"),
    number("requested", r"failed to allocate \S{1,20} \(SIZE\) from device"),
    number("requested", r"cuMemAllocAsync failed to allocate SIZE"),
    number("requested", r"ailed to allocate (?:a )?SIZE[\w\- ]{0,30}scratch"),
    number("requested", r"Failed to CUDA (?:calloc|malloc|host alloc) (?:async )?SIZE"),
    number("limit", r"(?:^\W{0,40}|Stats: {1,8}|\[rank\d{1,5}\]: {1,4})Limit: {1,40}SIZE"),
    number("in_use", r"(?:^|[\s,;])InUse: {1,40}SIZE"),
    number("most_in_use", r"(?:^|[\s,;])MaxInUse: {1,40}SIZE"),
    number("largest_allocation", r"(?:^|[\s,;])MaxAllocSize: {1,40}SIZE"),
    number("limit", r"memory_limit_: SIZE"),
    number("in_use", r"Sum Total of in-use chunks: SIZE"),
    number("arguments", r"parameter allocation: {1,40}SIZE"),
    number("constants", r"constant allocation: {1,40}SIZE"),
    number("outputs", r"maybe_live_out allocation: {1,40}SIZE"),
    number("temporaries", r"preallocated temp allocation: {1,40}SIZE"),
    number("total", r"total allocation: {1,40}SIZE"),
    number("fragmentation", r"total fragmentation: {1,40}SIZE"),
)

STATISTICS = tuple(n for n in NUMBERS if n.name in ("limit", "in_use", "most_in_use", "largest_allocation"))
"""The allocator's own, which it prints before XLA reports the error."""

PROGRAMS = (
    re.compile(r"[Ee]xecut(?:ion of|ing|able) (?:module|program) '?(jit_[\w.]{1,200})"),
    re.compile(r"HLO module: ([\w.<>\-]{1,200}?)[.]?(?:\s|$)"),
)
