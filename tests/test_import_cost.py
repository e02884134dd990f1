"""`import jaxmem` is cheap: people import it in every file, and the command line pays it on every call."""

import json
import os
import subprocess
import sys

HEAVY = ("flax", "optax", "orbax", "chex", "rich", "typer", "plotly", "jinja2", "scipy.optimize", "jaxmem.cli")
LIMIT_SECONDS = 0.060
RUNS = 3

# CPU seconds of one process: what other processes take of the machine meanwhile does not count.
PROGRAM = f"""
import json, sys, time
import jax
before = set(sys.modules)
start = time.process_time()
import jaxmem
seconds = time.process_time() - start
heavy = sorted(name for name in {HEAVY!r} if name in sys.modules and name not in before)
print(json.dumps(dict(seconds=seconds, heavy=heavy)))
"""

# A platform that does not exist: whatever starts a device fails.
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "nothing"}


def _import_once() -> dict:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, f"importing must start no device: {done.stderr}"
    return json.loads(done.stdout)


def test_importing_jaxmem_costs_little_more_than_jax():
    runs = [_import_once() for _ in range(RUNS)]
    assert all(run["heavy"] == [] for run in runs), runs[0]["heavy"]
    # The least of a few runs: noise only ever adds, and the first one may compile bytecode.
    assert min(run["seconds"] for run in runs) <= LIMIT_SECONDS, [run["seconds"] for run in runs]
