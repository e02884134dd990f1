"""Where results go: a JSON file written whole or not at all, or stdout kept clean for JSON."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from jaxmem.errors import InputError

STDOUT = "-"


class OutputError(InputError):
    """A file that was asked for cannot be written."""


def check_writable(path: str | None, option: str):
    """Raises OutputError now, rather than after minutes of compiling, if `path` cannot be written.

    Args:
      path: a file's path; None and "-" always pass.
      option: the option that named it, for the message.
    """
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


def write_json(path: str, text: str, stdout):
    """Writes JSON text, ending in one newline, to `path`, or to `stdout` for "-"."""
    text = text.rstrip("\n") + "\n"
    if path == STDOUT:
        stdout.write(text)
        stdout.flush()
    else:
        write_text(path, text)


@contextlib.contextmanager
def clean_stdout(wanted: bool) -> Iterator:
    """Gives the real stdout for the JSON, while everything else that is printed goes to stderr.

    File descriptor 1 is redirected too, since libraries and child processes write there.
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
