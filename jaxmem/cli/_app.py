"""The typer application, and the one place where exceptions become exit codes."""

import select
import sys
import traceback
from collections.abc import Sequence

import typer

from jaxmem._blame import users_frame
from jaxmem.cli import _environment
from jaxmem.cli._completion import whole_words
from jaxmem.cli._errors import DONE, INTERRUPTED, TERMINATED, explain
from jaxmem.cli._fields import OPTIONS
from jaxmem.cli._output import discard
from jaxmem.cli._warnings import plain_warnings
from jaxmem.cli.analyze import analyze
from jaxmem.cli.compare import compare
from jaxmem.cli.diff import diff
from jaxmem.cli.doctor import doctor
from jaxmem.cli.explain_oom import explain_oom
from jaxmem.cli.residuals import residuals
from jaxmem.cli.targets import targets
from jaxmem.cli.train import train
from jaxmem.errors import InputError

app = typer.Typer(
    name="jaxmem",
    help="Does my training step fit, what is the cheapest way to make it fit, and can I trust the answer?",
    epilog="Begin with `jaxmem compare examples/gpt.py`, or a file of yours whose function workload() returns a "
    "jaxmem.Workload. `jaxmem VERB --help` shows examples.\n\n"
    "Exit codes: 0 done · 1 does not fit · 2 bad input · 3 a fault of jaxmem itself, or another process of the run is "
    "lost · 130 stopped by Ctrl-C · 143 by SIGTERM.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# What each verb's help shows; a test parses all of them.
EXAMPLES = {
    analyze: (
        "jaxmem analyze examples/gpt.py --target gpu-h100",
        "jaxmem analyze examples/gpt.py:gpt2_124m --target tpu-v5e --html report.html",
    ),
    compare: (
        "jaxmem compare examples/gpt.py",
        "jaxmem compare examples/gpt.py --set batch=64,layers=8 --remat none,dots,auto:0.5 --target cpu,gpu-h100",
        "jaxmem compare examples/gpt.py --remat full --order free,tied --roll unrolled,rolled",
    ),
    diff: (
        "jaxmem analyze examples/gpt.py --target cpu --json a.json",
        "jaxmem analyze examples/gpt.py --target cpu --remat full --json b.json",
        "jaxmem diff a.json b.json",
    ),
    residuals: ("jaxmem residuals examples/gpt.py --remat dots",),
    train: (
        "jaxmem train examples/gpt.py --steps 20 --accumulation-steps 4",
        "jaxmem train examples/gpt.py --steps 1000 --checkpoint-dir gpt-run --save-every 50",
        "jaxmem train examples/gpt.py --steps 1000 --coordinator 10.0.0.1:1234 --num-processes 2 --process-id 0",
    ),
    explain_oom: ("python train.py 2>&1 | jaxmem explain-oom -",),
    targets: ("jaxmem targets", "jaxmem targets --json -"),
    doctor: ("jaxmem doctor",),
}
for verb, examples in EXAMPLES.items():
    # An empty line ends a line of an epilog.
    app.command(epilog="\n\n".join(["For example:", *examples]))(verb)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.", is_eager=True)):
    if version:
        from jaxmem import __version__, _installed

        # A source tree that was never installed has its own.
        typer.echo(f"jaxmem {_installed.version('jaxmem') or __version__}")
        raise typer.Exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; never raises for an expected failure.

    Args:
      argv: the arguments after the program's name; those of the process when None.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    jaxmem ...
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _environment.apply_defaults()
    try:
        # standalone_mode=False: errors come here as exceptions, so that all of them look alike.
        refuse_repeated(arguments)
        with plain_warnings(), whole_words():
            code = app(arguments, prog_name="jaxmem", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            error = error.__context__  # click and rich exit where a pipe breaks
        if isinstance(error, BrokenPipeError) and _is_of_stdout(error):  # its reader (`| head`) has seen enough
            discard(sys.stdout)
            return DONE
        if isinstance(error, SystemExit) and not error.code and users_frame(error) is None:
            return DONE  # of typer, whose completion exits
        problem = explain(error)
        if "--debug" in arguments:
            traceback.print_exception(error)
        if problem.text:
            print(problem.text, file=sys.stderr)
        return problem.exit_code
    if code in (INTERRUPTED, TERMINATED):
        print(f"jaxmem: stopped by {'Ctrl-C' if code == INTERRUPTED else 'SIGTERM'}", file=sys.stderr)
    return int(code or 0)


def refuse_repeated(arguments: Sequence[str]) -> None:
    """InputError for an option that is given twice: typer would take the last one without a word.

    >>> refuse_repeated(["compare", "gpt.py", "--set", "seq=8", "--set", "layers=2", "--target", "cpu"])
    """
    given = [word.partition("=")[0] for word in arguments if word.startswith("--") and len(word) > 2]
    for option in sorted(set(given) - {"--set"}):
        if given.count(option) > 1:
            lists = arguments[0] == "compare" and option in ("--target", *(e.option for e in OPTIONS if e.takes_list))
            raise InputError(
                wanted=f"{option} once",
                got=f"it {given.count(option)} times",
                do="Separate its values by commas." if lists else "Keep one of them. Only --set may be repeated.",
            )


def _is_of_stdout(error: BrokenPipeError) -> bool:
    """Whether stdout is the pipe that broke, and not one of the user's, such as a data worker's."""
    if users_frame(error) is None:
        return True
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # no poll on this system, or no descriptor
        return True
