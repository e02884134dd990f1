"""`jaxmem residuals`: what the forward pass keeps for the backward pass, value by value."""

from jaxmem._status import stages
from jaxmem.cli._fields import NONE_GIVEN, Fields, sets_fields
from jaxmem.cli._options import Debug, File, JsonOut, Settings
from jaxmem.cli._output import Outputs, clean_stdout


@sets_fields()
def residuals(
    file: File,
    settings: Settings = None,
    fields: Fields = NONE_GIVEN,
    json_out: JsonOut = None,
    debug: Debug = False,
):
    """List what one micro-batch keeps for its backward pass, before and after --remat. Nothing is compiled."""
    from jaxmem.cli._environment import start_jax

    outputs = Outputs({"--json": json_out})
    outputs.check(inputs=(file, fields.path))
    start_jax()
    from jaxmem.cli._load import load_workload
    from jaxmem.train import make_train_step

    chosen = fields.config()
    with clean_stdout(outputs.to_stdout) as stdout:
        with stages(f"loading {file}") as stage:
            step = make_train_step(load_workload(file, settings=settings or ()), chosen)
            stage("tracing")
            table = step.residuals()
        outputs.write(stdout, {"--json": table.to_json})
    from rich.text import Text

    from jaxmem.report.residuals import render_residuals

    outputs.show(render_residuals(table), *(Text(f"! {warning}") for warning in step.examine().warnings))
