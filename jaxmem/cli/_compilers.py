"""Whether the compilers of chips that are not here work: a tiny program for each, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from jaxmem._blame import paragraph
from jaxmem.cli._checks import Check

# One chip of each compiler, and the package without which there is nothing to try.
TARGETS = {"tpu-v5e": ("libtpu",), "gpu-h100": ("jax-cuda12-plugin", "jax-cuda13-plugin")}
COMPILE_SECONDS = 120
_PROBE = """
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
print("JAXMEM-PROBE " + json.dumps(found))
"""


def compile_checks(targets: Sequence[str]) -> list[Check]:
    """Compiles a tiny program for each target, all at once: what each took, or what it said."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = {
        target: subprocess.Popen(
            [sys.executable, "-c", _PROBE, target],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for target in targets
    }
    return [_check(target, process) for target, process in running.items()]


def _check(target: str, process: subprocess.Popen) -> Check:
    name = f"compiling for {target}"
    try:
        out, err = process.communicate(timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        cure = "Try again on an idle machine; if that does not help, reinstall the compiler."
        return Check(name=name, found=f"not done within {COMPILE_SECONDS} s", status="warn", cure=cure)
    for line in out.splitlines():
        if line.startswith("JAXMEM-PROBE "):
            found = json.loads(line.removeprefix("JAXMEM-PROBE "))
            if "error" in found:
                return Check(name=name, found=paragraph(found["error"]), status="warn", cure=found["do"] or _REINSTALL)
            return Check(name=name, found=f"a program of {found['argument_bytes']} bytes in {found['seconds']:.1f} s")
    words = [line for line in err.splitlines() if line.strip()] or [f"it ended with code {process.returncode}"]
    return Check(name=name, found=paragraph(words[-1]), status="warn", cure=_REINSTALL)


_REINSTALL = 'Run: pip install -U --force-reinstall "jaxmem[tpu-aot,gpu-aot]"'
