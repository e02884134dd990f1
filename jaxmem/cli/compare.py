"""`jaxmem compare`: one training step under several remat presets, side by side."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxmem._status import counted, stages
from jaxmem.cli._completion import complete_target
from jaxmem.cli._errors import BAD_INPUT, DOES_NOT_FIT, INTERNAL, explain
from jaxmem.cli._fields import NONE_GIVEN, Fields, sets_fields, split_list
from jaxmem.cli._options import Debug, File, HtmlOut, JsonOut, Settings
from jaxmem.cli._output import Outputs, clean_stdout
from jaxmem.errors import InputError, RematWithoutEffect

if TYPE_CHECKING:
    from jaxmem.analysis import Comparison
    from jaxmem.train import Verification


@sets_fields(several=True)
def compare(
    file: File,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="LIST",
            help="What to compile for, one or several separated by commas: local, cpu, tpu-v5e:2x2, gpu-h100, ...; "
            "`jaxmem targets` lists them. If not given, what shows what remat saves: an accelerator of this machine; "
            "else, without --verify, gpu-h100 or tpu-v5e if its compiler is installed; else cpu.",
            show_default=False,
            autocompletion=complete_target,
        ),
    ] = None,
    settings: Settings = None,
    fields: Fields = NONE_GIVEN,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Also run each step here: are its gradients the plain step's, and did bytes move as promised?",
        ),
    ] = False,
    try_forms: Annotated[
        bool,
        typer.Option(
            "--try-forms",
            help="Also compile each other order, roll and masks that may win on the target, where they are auto.",
        ),
    ] = False,
    json_out: JsonOut = None,
    html_out: HtmlOut = None,
    debug: Debug = False,
):
    """Compile one training step under each remat preset, and compare bytes and recomputation.

    A variant that is refused, for a preset's names, by JAX or by a target's compiler, is named below the rows of the
    others. Exit code 1 says that none of them fits, or that one failed --verify; 2 that a preset changes nothing. For
    a target that is not here --verify can only say "uncertain": the gradients it compares are of the program compiled
    for this machine.
    """
    from jaxmem.cli._environment import start_jax

    outputs = Outputs({"--json": json_out, "--html": html_out})
    outputs.check(inputs=(file, fields.path))
    if verify and try_forms:
        do = "Name the forms to verify: --order free,tied."
        raise InputError(wanted="--verify or --try-forms", got="both", do=do)
    targets = split_list(target, "--target", "different targets, such as cpu,gpu-h100") if target else [None]
    start_jax()
    from jaxmem.analysis import join_comparisons
    from jaxmem.cli._load import load_workload
    from jaxmem.targets import resolve_target
    from jaxmem.train import compare as compare_configs
    from jaxmem.train import target_for

    for name in targets:
        resolve_target(name)  # an unknown name is said before the file runs
    variants = fields.variants()
    comparisons, verified = [], []
    with clean_stdout(outputs.to_stdout) as stdout:
        with stages(f"loading {file}") as stage:
            for number, name in enumerate(targets):
                workload = load_workload(file, target=name, settings=settings or ())
                on = target_for(workload, runs=verify) if name is None else resolve_target(name)
                before, total = number * len(variants), len(targets) * len(variants)
                tell = counted(list(variants), stage, of=f" for {on.name}", before=before, total=total)
                try:
                    options: dict[str, Any] = {"without_effect": "refuse", "forms": "try" if try_forms else "settled"}
                    comparison = compare_configs(variants, workload, target=on, progress=tell, **options)
                except Exception as error:  # of the first variant, where all are refused
                    problem = explain(error)
                    last = name == targets[-1] and not comparisons
                    if last or isinstance(error, RematWithoutEffect) or problem.exit_code == INTERNAL:
                        raise
                    print(problem.text, file=sys.stderr)
                    continue
                comparisons.append(comparison)
                verified.append(_verify(workload, variants, comparison, on, stage) if verify else [])
        from jaxmem.report import html_report, render_comparison
        from jaxmem.report.verification import render_verifications

        every = [verification for found in verified for verification in found]
        results = {
            "--json": lambda: _to_json(join_comparisons(comparisons), every),
            "--html": lambda: html_report(join_comparisons(comparisons, name_targets=True)),
        }
        outputs.write(stdout, results)
    for number, (comparison, found) in enumerate(zip(comparisons, verified, strict=True)):
        parts = [""] if number else []
        parts += [render_comparison(comparison), *([render_verifications(found)] if found else [])]
        outputs.show(*parts)
    if any(comparison.without_effect for comparison in comparisons):
        raise typer.Exit(BAD_INPUT)
    if all(row.fits == "no" for c in comparisons for row in c.rows) or not all(found.passed for found in every):
        raise typer.Exit(DOES_NOT_FIT)


def _verify(workload, variants, comparison, target, stage) -> list["Verification"]:
    """Each row's step against its plain reference; what the rows compiled is not compiled again."""
    from jaxmem.train import Verifier, make_train_step

    verifier = Verifier(target=target, progress=stage)
    refused = dict(comparison.refused)
    kept = {name: config for name, config in variants.items() if name not in refused}
    steps = {name: make_train_step(workload, config, target=target) for name, config in kept.items()}
    for name, step in steps.items():
        verifier.remember(step, comparison[name])
    return [verifier.check(step, name=name) for name, step in steps.items()]


def _to_json(comparison: "Comparison", verified: list["Verification"]) -> str:
    """The comparison's JSON, with a `verification` in each row that has one."""
    if not verified:
        return comparison.to_json()
    table = comparison.to_dict()
    for row, found in zip(table["rows"], verified, strict=True):
        row["verification"] = found.to_dict()
    return json.dumps(table, indent=2)
