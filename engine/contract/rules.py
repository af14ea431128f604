"""The rules that every plan must keep, errors with their remedies, and what makes data read-only.

The engine checks a plan before it books anything, so a breach changes no books.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields
from enum import Enum, StrEnum, auto
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, NoReturn, TypeVar


class Rule(StrEnum):
    """What a plan must keep. The value is the rule's name in an error."""

    ANSWER = "answer"  # a policy answers with a Plan of the contract's names and types
    READ_ONLY = "read only"  # a policy changes no object that it is shown
    JOB = "job"  # slices and KV are those of jobs that wait or are in service on the device
    ONCE = "once"  # a launch serves each job once
    RESTART = "restart"  # names jobs in service, none twice, none with a slice in the plan
    REFUSE = "refuse"  # names unfinished jobs, none twice, none with a slice in the plan
    RELAID = "relaid"  # names training jobs between steps with nothing in flight, and their layouts
    TOKENS = "tokens"  # a served slice is whole tokens, 1 to those that remain, in all layers
    LANE = "lane"  # serving launches run on compute lanes that the device declares
    DEVICE = "device"  # operations run on the plan's device, or between it and another pool
    PLACE = "place"  # places lie in pools that the machine has
    BYTES = "bytes"  # byte counts are whole and not below zero, those of KV whole pages
    ROOM = "room"  # the bytes that a plan takes fit into the pools
    HELD = "held"  # a place that is touched, copied, freed or waited for is held
    TIER = "tier"  # a launch touches places of the tier and device that it runs on
    OWN_KV = "own KV"  # a serving launch writes the KV place of each of its jobs and of no other
    KV_PAGES = "KV pages"  # the pages of this place hold context and new tokens
    KV_CONTENTS = "KV contents"  # keys and values of the context are in these pages
    KV_FREED = "KV freed"  # the only KV of an unfinished job is freed only with a restart
    SHARE = "share"  # shared pages hold the beginning of a job that has not begun
    COPY = "copy"  # keeps region and size, and never puts older contents over newer ones
    ADAPTER = (
        "adapter"  # a slice runs through the adapter of its job, and versions stay as they are
    )
    RECORD = "record"  # what serving keeps of a prompt is kept whole, and given back whole
    OPERATION = "operation"  # an operation is a new object: not in flight, not twice in a plan
    TRAINING_ORDER = "training order"  # forward, backward and update go in the order of the chain
    TRAINING_PLACES = "training places"  # a launch names the places of its footprint, in its bytes
    TRAINING_CONTENTS = "training contents"  # it reads places that are written, and the newest copy
    TRAINING_FREED = "training freed"  # no place is freed before its last use
    EXCHANGE = "exchange"  # a collective exchanges the bytes that the group's layout says


class ContractError(RuntimeError):
    """A plan breaks a rule. The message is one line: policy, line, step, device, job, what, rule.

    Args:
        rule: the rule.
        what: what the plan does, in words.
        job_id: the job that it concerns, if any.
        policy: the name of the policy, once it is known.
        step: the number of the plan, over all devices.
        device: the device that the plan was for.
        at: file and line of the policy, as `FILE:LINE`; "" where they are not known.
    """

    def __init__(
        self,
        rule: Rule,
        what: str,
        job_id: int | None = None,
        policy: str = "",
        step: int | None = None,
        device: int | None = None,
        at: str = "",
    ) -> None:
        super().__init__(
            rule, what, job_id, policy, step, device, at
        )  # pickle and copy need all arguments
        self.rule, self.what, self.job_id = rule, what, job_id
        self.policy, self.step, self.device, self.at = policy, step, device, at

    def __str__(self) -> str:
        made = f"policy {self.policy} ({self.at})" if self.at else f"policy {self.policy}"
        where = [made] if self.policy else [self.at] if self.at else []
        where += [f"step {self.step}"] if self.step is not None else []
        where += [f"device {self.device}"] if self.device is not None else []
        is_of_job = self.job_id is not None and self.job_id >= 0  # -1 owns what belongs to no job
        where += [f"job {self.job_id}"] if is_of_job else []
        return f"{', '.join(where)}{': ' if where else ''}{self.what} (rule: {self.rule})"

    def located(
        self, policy: str, step: int | None = None, device: int | None = None, at: str = ""
    ) -> ContractError:
        """This error with the policy that broke the rule, and the step and device of its plan.

        Args:
            policy: the name of the policy.
            step: the number of the plan, over all devices.
            device: the device that the plan was for.
            at: file and line of the policy, where this error knows none.

        Returns:
            A new error with an equal rule and text.
        """
        at = self.at or at
        return ContractError(self.rule, self.what, self.job_id, policy, step, device, at)


class Remedy(Enum):
    """A change to a run that would help, beside more memory. Tandem names its settings."""

    # of what is trained
    TRAIN_ADAPTERS = auto()  # LoRA: states of the adapters alone
    SMALLER_MODEL = auto()
    SMALLER_MICROBATCHES = auto()  # fewer sequences
    SHORTER_SEQUENCES = auto()
    LARGER_SHARE = auto()  # of the memory that training and serving divide
    # of activations
    RECOMPUTE = auto()
    OFFLOAD_INPUTS = auto()  # inputs of layers wait for the backward on the host
    KEEP_INPUTS = auto()  # on the device
    # of where model states lie before the first step
    START_ON_HOST = auto()
    START_ON_HOST_FIRST = auto()  # the device takes what the host has no room for
    START_ON_DEVICE = auto()
    # of chunks
    SMALLER_CHUNKS = auto()
    LARGER_CHUNKS = auto()
    LARGER_SIZES = auto()  # to search among
    NAMED_SIZE = auto()  # none is searched
    OVERSIZE_ALONE = auto()  # a module larger than a chunk has a chunk of its own
    # of shares of the device
    LARGER_WARMUP_SHARE = auto()  # for chunks in warm-up
    LARGER_SHARES = auto()  # that one, and that of the device which is used at all
    # of a memory policy
    OWN_GRADIENTS = auto()  # gradients have places of their own, apart from their weights
    PAGED_MEMORY = auto()  # KV in pages, without reservations
    NO_PREFIX_CACHING = auto()


class Advised(Exception):
    """An error that names what would help."""

    remedies: tuple[Remedy, ...] = ()


class SettingsConflict(Advised, ValueError):
    """Settings of a policy that do not go together, or not with what it is to do.

    Args:
        problem: one line with what is wrong.
        remedies: what would help, most useful first.
    """

    def __init__(self, problem: str, remedies: Sequence[Remedy]) -> None:
        super().__init__(problem)
        self.remedies = tuple(remedies)


class BrokenLaw(RuntimeError):
    """A finished replay, or its books, break a law of the engine."""


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
CALLED = "engine.contract.traits"  # its frames lie between a user's line and a message on it
OURS = ("engine", "policies")  # packages whose lines a user cannot mend
GUARDS = (
    "engine.contract.rules",
    "engine.contract.job",
    "engine.contract.training_progress",
    "engine.loop.profile",
)


def refuse_write(what: str) -> NoReturn:
    """Refuses a write to read-only data.

    Args:
        what: the data, in words.

    Raises:
        ContractError: always, with the file and line that wrote.
    """
    frame = sys._getframe(1)
    while _is_between(frame.f_code.co_filename, frame.f_globals) and frame.f_back is not None:
        frame = frame.f_back
    at = file_line(frame.f_code.co_filename, frame.f_lineno) or "a line that is not known"
    raise ContractError(Rule.READ_ONLY, f"a write to {what}, which is read-only", at=at)


def _is_between(filename: str, names: dict[str, Any]) -> bool:
    """Whether a frame only passes a write on: a guard's, or Python's own (`random.shuffle`)."""
    is_pythons = filename.startswith(PYTHON) and "site-packages" not in filename
    return is_pythons or names.get("__name__") in GUARDS


def as_write(error: Exception) -> ContractError | None:
    """A policy's error as a breach of READ_ONLY.

    Args:
        error: what the policy raised.

    Returns:
        None where the error is not that of a write to frozen data.
    """
    text = str(error)
    is_write = isinstance(error, TypeError | AttributeError) and any(w in text for w in WRITES)
    if not is_write and not isinstance(error, FrozenInstanceError):
        return None
    lines = [*_lines(error.__traceback__)]
    at = lines[-1][1] if lines else "a line that is not known"
    return ContractError(Rule.READ_ONLY, text, at=at)


def line_of_policy(error: Exception) -> str:
    """The last line of a user's own code that an error has passed.

    Args:
        error: what was raised while a policy planned.

    Returns:
        Such as `mine.py:12`; "" where the error has passed our own code alone.
    """
    lines = [at for package, at in _lines(error.__traceback__) if package not in OURS]
    return lines[-1] if lines else ""


def _lines(traceback: TracebackType | None) -> Iterator[tuple[str, str]]:
    """The package, and file and line, of each frame of a traceback that lies in a file."""
    while traceback is not None:
        code, names = traceback.tb_frame.f_code, traceback.tb_frame.f_globals
        is_pythons = code.co_filename.startswith(PYTHON) and "site-packages" not in code.co_filename
        if not is_pythons and (at := file_line(code.co_filename, traceback.tb_lineno)):
            yield str(names.get("__name__")).partition(".")[0], at
        traceback = traceback.tb_next


def at_caller(told: str) -> str:
    """A message with the line of a user's own code that has called the contract.

    Args:
        told: the message.

    Returns:
        Such as `mine.py:12: TOLD`; the message alone where our own code has called.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")) in (CALLED, "dataclasses"):
        frame = frame.f_back
    if frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] in OURS:
        return told
    at = file_line(frame.f_code.co_filename, frame.f_lineno)
    return f"{at}: {told}" if at else told


def at_class(kind: type, told: str) -> str:
    """A message with the line where a user's own class begins.

    Args:
        kind: the class.
        told: the message.

    Returns:
        Such as `mine.py:12: TOLD`; the message alone for our own classes, and without a source.
    """
    if package_of(kind) in OURS:
        return told
    try:
        filename, line = inspect.getsourcefile(kind), inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):  # no source, or built in
        return told
    at = file_line(filename or "", line)
    return f"{at}: {told}" if at else told


def defined_at(function: object) -> str:
    """Where a function or method is defined.

    Args:
        function: any object.

    Returns:
        Such as `mine.py:12`; "" where no source is known: a compiled function, or one that was made
        by exec or typed in.
    """
    try:
        code = inspect.unwrap(function).__code__  # type: ignore[arg-type]
        return file_line(code.co_filename, code.co_firstlineno)
    except (AttributeError, TypeError, ValueError):  # no function, or wrapped around itself
        return ""


def package_of(function: object) -> str:
    """The outermost package of a function.

    Args:
        function: any object.

    Returns:
        Such as `engine`; "" where the function has no module.
    """
    return str(getattr(function, "__module__", "")).partition(".")[0]


def file_line(filename: str, number: int) -> str:
    """A line of a file for messages.

    Args:
        filename: its path, as Python knows it.
        number: of the line, from 1.

    Returns:
        `FILE:LINE`, relative to the working directory where the file lies below it; "" for no file.
    """
    if not os.path.isfile(filename):
        return ""
    with suppress(ValueError, OSError):  # elsewhere, or the working directory is gone
        filename = str(Path(filename).relative_to(Path.cwd()))
    return f"{filename}:{number}"


HALVES = (("scheduling", "batch"), ("memory", "fit"))
RULES_OF_A_BATCH = (Rule.JOB, Rule.ONCE, Rule.TOKENS, Rule.TRAINING_ORDER)


def made_at(policy: object, rule: Rule) -> str:
    """Where the code is that made a plan which breaks a rule.

    Args:
        policy: a policy, or a router.
        rule: the rule; it tells which half made what breaks it, where both are a user's own.

    Returns:
        File and line of the user's own `plan`, `batch`, `fit` or `route`; of a policy without any,
        those of the half. "" where no source is known.
    """
    halves = [*HALVES]
    if rule not in RULES_OF_A_BATCH:
        halves.reverse()
    found = [getattr(getattr(policy, half, None), name, None) for half, name in halves]
    whole = [getattr(policy, name, None) for name in ("plan", "route")]
    made = [f for f in (*found, *whole) if f is not None and package_of(f) != "engine"]
    own = [function for function in made if package_of(function) not in OURS]
    return next(filter(None, map(defined_at, own or made)), "")


def name_of(policy: object) -> str:
    """A policy's name for messages.

    Args:
        policy: a policy, or one that asks the policy that it has as `watched_policy`.

    Returns:
        Its class, or `SCHEDULING with MEMORY` where it has two halves.
    """
    policy = getattr(policy, "watched_policy", policy)
    halves = [(getattr(policy, half, None), method) for half, method in HALVES]
    names = [type(half).__name__ for half, method in halves if hasattr(half, method)]
    return " with ".join(names) or type(policy).__name__


class ReadOnlyList(list[Item]):
    """A list that policies only read. The engine writes with `list.append(items, item)`.

    Reads are those of a plain list, so they cost no more.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse_write("a list of the view")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a plain list."""
        return list, (list(self),)

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


def plain(*enums: type[StrEnum]) -> None:
    """Makes members plain attributes, as from Python 3.12 on: 3.11 calls Python for each."""
    for enum in enums:
        for member in enum:
            type.__setattr__(enum, member.name, member)


def stored_by_slot(*records: type) -> None:
    """Gives frozen dataclasses with slots an `__init__` that stores by their slots' setters.

    The `__init__` of dataclass looks each field up by its name, which takes longer.
    """
    for record in records:
        before = record.__init__  # type: ignore[misc]
        if not isinstance(before, FunctionType):
            continue  # compiled: stores by itself
        names = [field.name for field in fields(record)]
        setters = {f"set_{name}": getattr(record, name).__set__ for name in names}
        lines = [f"    set_{name}(self, {name})" for name in names]
        exec("\n".join([f"def __init__(self, {', '.join(names)}):", *lines]), setters)
        after = setters["__init__"]
        after.__defaults__, after.__annotations__ = before.__defaults__, before.__annotations__
        after.__qualname__, after.__module__ = before.__qualname__, record.__module__
        record.__init__ = after  # type: ignore[misc]
