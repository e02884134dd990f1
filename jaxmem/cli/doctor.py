"""`jaxmem doctor`: what is installed, what JAX starts, and what to do about it."""

import importlib.metadata
import json
import os
import sys

import typer

from jaxmem._installed import version
from jaxmem._status import stages
from jaxmem.cli import _checks, _environment, _probes
from jaxmem.cli._errors import DOES_NOT_FIT
from jaxmem.cli._options import Debug, JsonOut
from jaxmem.cli._output import Outputs, clean_stdout

_COLOURS = {"ok": "green", "warn": "yellow", "broken": "red"}


def doctor(json_out: JsonOut = None, debug: Debug = False):
    """Check Python, JAX, the compilers of TPU and GPU targets, and the settings that matter."""
    outputs = Outputs({"--json": json_out})
    outputs.check()
    with clean_stdout(outputs.to_stdout) as stdout:
        with stages("starting JAX and the compilers"):
            checks = examine()
        outputs.write(stdout, {"--json": lambda: json.dumps({"checks": [vars(check) for check in checks]}, indent=2)})
    outputs.show(_table(checks))
    if any(check.status == "broken" for check in checks):
        raise typer.Exit(DOES_NOT_FIT)


def examine() -> list[_checks.Check]:
    """All checks, in the order in which they are shown."""
    versions = {name: version(name) for name in (*_checks.PACKAGES, "libtpu", *_checks.GPU_AOT_PACKAGES)}
    requirements = importlib.metadata.requires("jax") or [] if versions["jax"] else []
    here = versions["jax"] and versions["jaxlib"]
    installed = [target for target, packages in _probes.TARGETS.items() if any(map(version, packages))]
    return [
        _checks.check_python(sys.version_info[:3]),
        *_checks.check_packages(versions),
        *_checks.check_backend(
            _probes.probe_jax() if here else {"error": "jax is not installed"}, _environment.accelerator_files()
        ),
        _checks.check_tpu_compiler(versions, _checks.pinned_libtpu(requirements)),
        _checks.check_gpu_compiler(versions),
        *_probes.probe_compilers(installed),
        *_checks.check_settings(os.environ, _environment.applied_defaults()),
    ]


def _table(checks: list[_checks.Check]):
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        colour = _COLOURS[check.status]
        cure = f"\n[{colour}]{escape(check.cure)}[/]" if check.cure else ""
        table.add_row(f"[{colour}]{check.status}[/]", escape(check.name), f"{escape(check.found)}{cure}")
    return table
