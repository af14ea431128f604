"""The two ways in which a command ends badly. A ValueError from anywhere counts as Usage."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


def line_of(error: BaseException) -> str:
    """The line of an error: with the settings that would help, where it names remedies."""
    from engine.contract.rules import Advised  # where something has failed, not at every start

    if not isinstance(error, Advised):
        return str(error)
    from tandem.wiring.budget import advised_line

    return advised_line(error)


class Usage(ValueError):
    """The command or its settings are wrong; the message is one line for the user."""


class RunFailed(RuntimeError):
    """A run failed, refused all requests, or lost some at a server: the line says why.

    The folder of a run that failed holds the traceback.
    """


class Exited(RunFailed):
    """A policy, or other code that a configuration names, has called sys.exit."""


@contextmanager
def exits_fail() -> Iterator[None]:
    """Around code that a configuration names: sys.exit there must not end the command.

    Raises Exited, with the place of the call.
    """
    try:
        yield
    except SystemExit as error:
        first: BaseException = error
        while isinstance(first.__cause__, SystemExit):  # raised again, by simpy or a lane's mark
            first = first.__cause__
        place = traceback.extract_tb(first.__traceback__)[-1]
        raise Exited(
            f"sys.exit({error.code!r}) was called in {place.filename}, line {place.lineno}; "
            f"a policy returns or raises an error"
        ) from error
