"""Probes that may hang or abort, each in a process of its own: starting JAX, and compiling for chips elsewhere."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from jaxmem._blame import paragraph
from jaxmem._units import format_bytes
from jaxmem.cli._checks import Check

SECONDS = 120  # a busy TPU or a broken driver may hang for good
# One chip of each compiler, and the packages of which one must be there.
TARGETS = {"tpu-v5e": ("libtpu",), "gpu-h100": ("jax-cuda12-plugin", "jax-cuda13-plugin")}

_JAX = """
import collections, json, jax
devices = jax.devices()
stats = devices[0].memory_stats() or {}
memory, of = stats.get("bytes_limit"), "a device"
if memory is None:
    from jaxmem.targets._device_memory import host_memory_bytes
    memory, of = host_memory_bytes(), "of this machine"
kinds = collections.Counter(device.device_kind for device in devices)
found = {"backend": jax.default_backend(), "devices": kinds, "memory_bytes": memory, "memory_of": of}
"""
_COMPILER = """
import json, sys, time
start = time.perf_counter()
try:
    import jax, jax.numpy as jnp
    from jaxmem.targets import compile_on
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    compiled = compile_on(sys.argv[1], lambda x: jnp.tanh(x @ x), x)
    size = compiled.memory_analysis().argument_size_in_bytes
    found = {"seconds": time.perf_counter() - start, "argument_bytes": size}
except Exception as error:
    found = {"error": str(error), "do": getattr(error, "do", "")}
"""
_MARK = "JAXMEM-PROBE "
_REINSTALL = 'Run: pip install -U --force-reinstall "jaxmem[tpu-aot,gpu-aot]"'


def probe_jax() -> dict[str, Any]:
    """Starts JAX: its backend, devices and memory, or `error` with its last words."""
    return _answer(_started(_JAX)) or {"error": f"JAX did not start within {SECONDS} s"}


def probe_compilers(targets: Sequence[str]) -> list[Check]:
    """Compiles a tiny program for each target, all at once: what each took, or what it said."""
    running = {target: _started(_COMPILER, target, JAX_PLATFORMS="cpu") for target in targets}
    return [_check(f"compiling for {target}", _answer(process)) for target, process in running.items()]


def _check(name: str, found: dict[str, Any]) -> Check:
    if not found:
        cure = "Try again on an idle machine; if that does not help, reinstall the compiler."
        return Check(name=name, found=f"not done within {SECONDS} s").warn(cure)
    if "error" in found:
        return Check(name=name, found=paragraph(found["error"])).warn(found.get("do") or _REINSTALL)
    return Check(name=name, found=f"a program of {format_bytes(found['argument_bytes'])} in {found['seconds']:.1f} s")


def _started(program: str, *arguments: str, **settings: str) -> subprocess.Popen:
    # The whole path, in its order: jaxmem may be run from a source tree that was never installed.
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-c", f"{program}print({_MARK!r} + json.dumps(found))", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings, "PYTHONPATH": path},
    )


def _answer(process: subprocess.Popen) -> dict[str, Any]:
    """What a program found; `error` with its last words where it failed; nothing where it did not end in time."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {}
    for line in out.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    words = [line for line in err.splitlines() if line.strip()] or [f"it ended with code {process.returncode}"]
    # XLA's last word carries its log prefix: F1129 20:22:34.724763 8252 parse_flags_from_env.cc:234]
    return {"error": paragraph(re.sub(r"^[IWEF]\d{4} .*?\] ", "", words[-1]))}
