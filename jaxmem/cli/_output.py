"""Where results go: files written whole or not at all, or a stdout that holds nothing else."""

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxmem._stdout import flush_libraries
from jaxmem.errors import InputError

STDOUT = "-"
_UNBROKEN = 10_000  # characters: wider than any table


class OutputError(InputError):
    """A file that was asked for cannot be written."""


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The files that the options of one command name.

    Args:
      paths: option → path, "-" for stdout, None where the option is not given.
    """

    paths: Mapping[str, str | None]

    @property
    def to_stdout(self) -> bool:
        """Whether a result goes to stdout, which then holds nothing else."""
        return STDOUT in self.paths.values()

    def check(self, inputs: Sequence[str | None] = ()):
        """Refuses a file that cannot be written, or that would replace another of these.

        Args:
          inputs: paths of the files that the command reads; a FILE:FUNCTION too.

        Raises:
          OutputError: now, rather than after minutes of compiling.
        """
        read = [path for path in inputs if path]
        read += [path.rpartition(":")[0] for path in read if ":" in path]
        given = [(option, path) for option, path in self.paths.items() if path is not None]
        for index, (option, path) in enumerate(given):
            check_writable(path, option)
            for other, taken in given[:index]:
                if path == taken == STDOUT or _same_file(path, taken):
                    raise OutputError(
                        wanted="a file of its own for each result",
                        got=f"{path} for {other} and {option}",
                        do="Name another file." if path != STDOUT else "Write one of them to a file.",
                    )
            if any(_same_file(path, source) for source in read):
                raise OutputError(
                    wanted=f"{option} to name a file to write",
                    got=f"{path}, which this command reads",
                    do="Name another file.",
                )

    def write(self, stdout, results: Mapping[str, Callable[[], str]]):
        """Writes the text of each result that was asked for.

        Args:
          stdout: the stream for "-", from `clean_stdout`.
          results: option → function that gives the text.
        """
        for option, text in results.items():
            if (path := self.paths[option]) is not None:
                write_result(path, text(), stdout, option)

    def show(self, *renderables: Any):
        """Prints what rich can render, unless stdout is for a result."""
        if not self.to_stdout:
            show(*renderables)


def show(*renderables: Any):
    """Prints what rich can render: in a terminal's width and colours; elsewhere without line breaks or trailing spaces.

    So names and table rows stay whole for `grep` and the like, unless COLUMNS asks for a width.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        return Console().print(*renderables, sep="\n")
    with (console := Console(width=None if os.environ.get("COLUMNS") else _UNBROKEN)).capture() as captured:
        console.print(*renderables, sep="\n")
    _write(sys.stdout, "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _write(stream, text: str):
    """Writes to stdout. A reader that has seen enough, such as `head`, does not change how the command ends."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        discard(stream)


def discard(stream):
    """Points a stream at the null device, so that flushing what it still holds does not complain."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _same_file(one: str, two: str) -> bool:
    """Whether both are one file that would be replaced; /dev/null may stand twice."""
    if STDOUT in (one, two) or (os.path.exists(one) and not os.path.isfile(one)):
        return False
    if os.path.exists(one) and os.path.exists(two):
        return os.path.samefile(one, two)
    return os.path.realpath(one) == os.path.realpath(two)


def check_writable(path: str | None, option: str):
    """Raises OutputError if a file cannot be written there; None and "-" always pass."""
    if path is None or path == STDOUT:
        return
    directory = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        problem, do = "a directory", "Name a file in it."
    elif not os.path.isdir(directory):
        problem, do = f"no directory {directory}", "Create it first."
    elif os.path.exists(path) and not os.access(path, os.W_OK):
        problem, do = "a file without write permission", "Change its permission, or name another file."
    else:
        try:
            with tempfile.TemporaryFile(dir=directory):
                return
        except OSError as error:
            problem, do = f"{error.strerror or error} in {directory}", "Free space, or name a file elsewhere."
    raise OutputError(wanted=f"to write {option} {path}", got=problem, do=do)


def write_text(path: str, text: str):
    """Writes `text`: a reader of `path` sees the old file or the new one, never half of it.

    A symbolic link is kept and the file it points to replaced; what is not a regular file (a pipe,
    /dev/null) cannot be replaced and is written straight.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        return
    handle, temporary = tempfile.mkstemp(prefix=".jaxmem-", suffix=".tmp", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, _mode_for(path))  # mkstemp makes files that only the owner can read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_result(path: str, text: str, stdout, option: str):
    """Writes a text, ended by one newline, to `path`, or to `stdout` for "-".

    Raises:
      OutputError: the file could not be written; the old one is as it was.
    """
    text = text.rstrip("\n") + "\n"
    if path == STDOUT:
        return _write(stdout, text)
    try:
        write_text(path, text)
    except OSError as error:
        raise OutputError(
            wanted=f"to write {option} {path}",
            got=error.strerror or str(error),
            do="What was there before is as it was. Free space, or name a file elsewhere.",
        ) from error


@contextlib.contextmanager
def clean_stdout(wanted: bool) -> Iterator:
    """Gives the real stdout for a result, while everything else that is printed goes to stderr.

    File descriptor 1 is redirected too, since libraries and child processes write to it. Where no result is `wanted`
    there, stdout stays as it is.
    """
    if not wanted:
        yield sys.stdout
        return
    stdout = sys.stdout
    stdout.flush()
    saved = _redirect_descriptor(stdout)
    try:
        # The stream handed out writes to the saved descriptor, or is stdout itself where it has none.
        out = stdout if saved is None else open(os.dup(saved), "w", encoding="utf-8")  # noqa: SIM115
        with contextlib.redirect_stdout(sys.stderr):
            yield out
        if out is not stdout:
            out.close()
    finally:
        if saved is not None:
            flush_libraries()
            os.dup2(saved, 1)
            os.close(saved)


def _redirect_descriptor(stdout) -> int | None:
    """Points descriptor 1 at stderr and returns a copy of the old one; None if stdout is not on it."""
    try:
        if stdout.fileno() != 1:
            return None
        saved = os.dup(1)
        os.dup2(2, 1)
        return saved
    except (OSError, ValueError, AttributeError):  # a captured stdout has no descriptor
        return None


def _mode_for(path: str) -> int:
    if os.path.exists(path):
        return os.stat(path).st_mode & 0o7777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
