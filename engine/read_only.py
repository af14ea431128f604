"""What a policy is shown and cannot change: a write raises, and names the line that wrote."""

from __future__ import annotations

import os
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from engine.contract import ContractError, Rule

Item = TypeVar("Item")
# What Python says of a write to a proxy, a named tuple, a tuple, or a frozen class with slots.
WRITES = (
    "'mappingproxy' object",
    "can't set attribute",
    "can't delete attribute",
    "has no setter",
    "is read-only",
    "does not support item assignment",
    "does not support item deletion",
    "super(type, obj): obj must be",
)
# Modules whose frames lie between a write and its refusal.
PYTHON = str(Path(os.__file__).parent)
GUARDS = ("engine.read_only", "engine.job", "engine.profile", "engine.training")


def refuse_write(what: str) -> NoReturn:
    """Raises ContractError for a write, with the line that wrote."""
    frame = sys._getframe(1)
    while _is_between(frame.f_code.co_filename, frame.f_globals) and frame.f_back is not None:
        frame = frame.f_back
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    raise ContractError(Rule.READ_ONLY, f"{where} writes to {what}, which is read-only")


def _is_between(filename: str, names: dict[str, Any]) -> bool:
    """Whether a frame only passes a write on: ours, or Python's own (`random.shuffle`)."""
    is_pythons = filename.startswith(PYTHON) and "site-packages" not in filename
    return is_pythons or names.get("__name__") in GUARDS


def as_write(error: Exception) -> ContractError | None:
    """The error of a policy as a breach of READ_ONLY, if it is that of a write to frozen data."""
    text = str(error)
    is_write = isinstance(error, TypeError | AttributeError) and any(w in text for w in WRITES)
    if not is_write and not isinstance(error, FrozenInstanceError):
        return None
    return ContractError(Rule.READ_ONLY, f"{_last_line(error.__traceback__)}: {text}")


def _last_line(traceback: TracebackType | None) -> str:
    """Where an error was raised: the last line that lies in a file."""
    found = "a line that is not known"
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith("<"):
            found = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


class ReadOnlyList(list[Item]):
    """A list that policies read, as fast as any. The engine writes by `list.append(it, item)`."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse_write("a list of the view")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a list like any other."""
        return list, (list(self),)

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
