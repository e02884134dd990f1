"""`jaxmem doctor`: what is installed, what JAX starts, and what to do about it."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from typing import Any

import typer

from jaxmem._blame import paragraph
from jaxmem._installed import version
from jaxmem.cli import _checks, _compilers, _environment
from jaxmem.cli._errors import DOES_NOT_FIT
from jaxmem.cli._options import Debug, JsonOut
from jaxmem.cli._output import STDOUT, check_writable, clean_stdout, write_json
from jaxmem.cli._status import stages

PROBE_SECONDS = 120  # a busy TPU or a broken driver may hang for good

# JAX starts in a process of its own: an unknown name in XLA_FLAGS, for one, aborts the process.
_PROBE = """
import collections, json, os, jax
devices = jax.devices()
stats = devices[0].memory_stats() or {}
memory, of = stats.get("bytes_limit"), "a device"
if memory is None:
    from jaxmem.targets._device_memory import host_memory_bytes
    memory, of = host_memory_bytes(), "of this machine"
kinds = collections.Counter(device.device_kind for device in devices)
print("JAXMEM-PROBE " + json.dumps(
    {"backend": jax.default_backend(), "devices": kinds, "memory_bytes": memory, "memory_of": of}
))
"""
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu", *_checks.GPU_AOT_PACKAGES)


def doctor(json_out: JsonOut = None, debug: Debug = False):
    """Check Python, JAX, the compilers of TPU and GPU targets, and the settings that matter."""
    check_writable(json_out, "--json")
    with clean_stdout(json_out == STDOUT) as stdout:
        with stages("starting JAX and the compilers"):
            checks = examine()
        if json_out is not None:
            write_json(json_out, json.dumps({"checks": [vars(check) for check in checks]}, indent=2), stdout)
    if json_out != STDOUT:
        _print_table(checks)
    if any(check.status == "broken" for check in checks):
        raise typer.Exit(DOES_NOT_FIT)


def examine() -> list[_checks.Check]:
    """All checks, in the order in which they are shown."""
    versions = {name: version(name) for name in _PACKAGES}
    requirements = importlib.metadata.requires("jax") or [] if versions["jax"] else []
    probe = probe_jax() if versions["jax"] and versions["jaxlib"] else {"error": "jax is not installed"}
    installed = [target for target, packages in _compilers.TARGETS.items() if any(map(version, packages))]
    return [
        _checks.check_python(sys.version_info[:3]),
        *_checks.check_packages(versions),
        *_checks.check_backend(probe, _environment.accelerator_files()),
        _checks.check_tpu_compiler(versions, _checks.pinned_libtpu(requirements)),
        _checks.check_gpu_compiler(versions),
        *_compilers.compile_checks(installed),
        *_checks.check_settings(os.environ, _environment.applied_defaults()),
    ]


def probe_jax() -> dict[str, Any]:
    """Starts JAX in another process: its backend, devices and memory, or `error` with the last words."""
    try:
        # The whole path, in its order: jaxmem may be run from a source tree that was never installed.
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"JAX did not start within {PROBE_SECONDS} s"}
    for line in done.stdout.splitlines():
        if line.startswith("JAXMEM-PROBE "):
            return json.loads(line.removeprefix("JAXMEM-PROBE "))
    words = [line for line in done.stderr.splitlines() if line.strip()] or [f"it ended with code {done.returncode}"]
    # XLA's last word carries its log prefix: F1129 20:22:34.724763 8252 parse_flags_from_env.cc:234]
    return {"error": paragraph(re.sub(r"^[IWEF]\d{4} .*?\] ", "", words[-1]))}


def _print_table(checks: list[_checks.Check]):
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {"ok": "green", "warn": "yellow", "broken": "red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        colour = colours[check.status]
        cure = f"\n[{colour}]{escape(check.cure)}[/]" if check.cure else ""
        table.add_row(f"[{colour}]{check.status}[/]", escape(check.name), f"{escape(check.found)}{cure}")
    Console().print(table)
