"""How the processes of `jaxmem train --coordinator` find one another before JAX's coordinator takes over.

JAX alone waits five minutes for whoever does not come, cannot tell who that is, and does not notice two processes of
one id. So process 0 listens on the coordinator's port first, and hears who is there.
"""

import contextlib
import json
import os
import select
import socket
import sys
import time

from jaxmem.errors import ProcessError

PATIENCE_SECONDS = 300.0
_NAME_SECONDS = 30.0  # for a host's name to be known: that of a machine that starts meanwhile may come late
_SAY_SECONDS = 20.0
_HELLO = "jaxmem processes 1"


def meet(host: str, port: int, count: int, process: int, *, patience: float = PATIENCE_SECONDS) -> None:
    """Returns when all processes are there.

    Args:
      host, port: of process 0.
      count: of processes.
      process: this one, from 0 on.
      patience: seconds to wait for the others.

    Raises:
      ProcessError: the port is in use, process 0 cannot be reached, others do not come, an id is there twice, or others
        were told another number of processes. Whoever is there gets the same error.
    """
    mine = {"hello": _HELLO, "process": process, "count": count, "who": f"{socket.gethostname()}, pid {os.getpid()}"}
    until = time.monotonic() + patience
    if process == 0:
        with _listening(port) as server:
            _Host(server, mine, until, patience).gather()
    else:
        _join(host, port, mine, until, patience)


def _listening(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=4096
        )
    except OSError as error:
        raise ProcessError(
            wanted=f"port {port} of --coordinator to be free on {socket.gethostname()}, where process 0 is",
            got=error.strerror or str(error),
            do="Choose another port, the same for all processes, or end the run that uses it.",
        ) from None


class _Host:
    """Process 0: hears who is there."""

    def __init__(self, server: socket.socket, mine: dict, until: float, patience: float):
        self.server, self.mine, self.until, self.patience = server, mine, until, patience
        self.count = mine["count"]
        self.there: dict[int, tuple[socket.socket, str]] = {}

    def gather(self) -> None:
        said = time.monotonic()
        while missing := [each for each in range(1, self.count) if each not in self.there]:
            if time.monotonic() > self.until:
                self._refuse(
                    wanted=f"{self.count} processes within {self.patience:.0f} s",
                    got=f"no word of {_named(missing)}",
                    do="Start the same command in each, with its own --process-id, and look whether they reach "
                    "process 0 at --coordinator.",
                )
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                print(f"jaxmem: waiting for {_named(missing)} of {self.count}", file=sys.stderr, flush=True)
            self._hear()
        self._tell({"go": True})

    def _hear(self) -> None:
        sockets = [self.server, *(connection for connection, _ in self.there.values())]
        ready, _, _ = select.select(sockets, [], [], 1.0)
        for process, (connection, _) in list(self.there.items()):
            if connection in ready:  # who waits says nothing: it has left
                connection.close()
                del self.there[process]
        if self.server in ready:
            connection, _ = self.server.accept()
            told = _read(connection, time.monotonic() + 5)
            if told is None or told.get("hello") != _HELLO:  # somebody else
                connection.close()
                return
            self._check(told, connection)

    def _check(self, told: dict, connection: socket.socket) -> None:
        process, who = told["process"], told["who"]
        known = {0: self.mine["who"], **{each: name for each, (_, name) in self.there.items()}}
        twice = process in known
        self.there[-1 if twice else process] = connection, who
        if told["count"] != self.count:
            self._refuse(
                wanted="the same --num-processes in all processes",
                got=f"{self.count} in process 0 ({known[0]}) and {told['count']} in process {process} ({who})",
                do="Give all of them the same command but for --process-id.",
            )
        if twice:
            self._refuse(
                wanted="a --process-id of its own in each process",
                got=f"{process} in two: {known[process]}, and {who}",
                do=f"Number them from 0 to {self.count - 1}.",
            )

    def _refuse(self, **said: str) -> None:
        self._tell({"refused": said})
        raise ProcessError(**said)

    def _tell(self, told: dict) -> None:
        for connection, _ in self.there.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(told).encode() + b"\n")
        for connection, _ in self.there.values():  # they close first, so that the port is free at once
            with contextlib.suppress(OSError):
                connection.settimeout(5)
                connection.recv(1)
            connection.close()


def _join(host: str, port: int, mine: dict, until: float, patience: float) -> None:
    """A process other than 0: says that it is there, and waits for the others."""
    began = said = time.monotonic()
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=5)
            break
        except socket.gaierror as error:
            reason, limit = error.strerror or str(error), min(until, began + _NAME_SECONDS)
        except OSError as error:
            reason, limit = error.strerror or str(error), until
        if time.monotonic() > limit:
            raise ProcessError(
                wanted=f"process 0 to answer at {host}:{port}",
                got=f"{reason}, for {time.monotonic() - began:.0f} s",
                do="Look whether process 0 runs, and whether --coordinator names its host and a port that this one "
                "may reach.",
            )
        if time.monotonic() - said > _SAY_SECONDS:
            said = time.monotonic()
            print(f"jaxmem: waiting for process 0 at {host}:{port} ({reason})", file=sys.stderr, flush=True)
        time.sleep(0.25)
    with connection:
        connection.sendall(json.dumps(mine).encode() + b"\n")
        told = _read(connection, until + 5)
    if told is None or not {"go", "refused"} & set(told):
        raise ProcessError(
            wanted=f"process 0 of this run at {host}:{port}",
            got="something else, or a process 0 that has left" if told is None else "another program",
            do="Look at the output of process 0, or choose another port.",
        )
    if "refused" in told:
        raise ProcessError(**told["refused"])


def _read(connection: socket.socket, until: float) -> dict | None:
    """One line of JSON; None of what is none."""
    text = b""
    try:
        while not text.endswith(b"\n") and len(text) < 10_000:
            connection.settimeout(max(until - time.monotonic(), 0.1))
            part = connection.recv(1000)
            if not part:
                return None
            text += part
        told = json.loads(text)
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def _named(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (", …" if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"
