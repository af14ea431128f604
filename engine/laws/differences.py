"""What differs between two plans, two runs or two views, in words for a message of one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from engine.contract.job import named
from engine.contract.plan import Collective, Compute, Copy, Free, Grow, Plan, Share
from engine.contract.regions import told
from engine.results.plan_log import encode
from engine.results.recorder import Recorder

MOST = 8  # jobs that a message names


class Difference(NamedTuple):
    """What differs, and what it is in one and in the other."""

    what: str
    one: object
    other: object

    def told(self, one: str, other: str) -> str:
        """The difference in words, with a word on each side of it."""
        return f"{self.what}: {self.one} {one}, {self.other} {other}"


def of_plans(one: object, other: object) -> Difference | None:
    """The first difference of two plans.

    Args:
        one: a plan, or what was answered instead.
        other: a plan, or what was answered instead.

    Returns:
        The job or the field that differs; None where both are written alike.
    """
    if not isinstance(one, Plan) or not isinstance(other, Plan):
        return Difference("the answer", *[_kind(answer) for answer in (one, other)])
    tokens = [_tokens(plan) for plan in (one, other)]
    for number in sorted({*tokens[0], *tokens[1]}):
        counts = [served.get(number, "none") for served in tokens]
        if counts[0] != counts[1]:
            return Difference(f"tokens of job {number}", *counts)
    if [*tokens[0]] != [*tokens[1]]:
        return Difference("the order of jobs", *[[*served][:MOST] for served in tokens])
    for field in ("restart", "refuse"):
        numbers = [[job.job_id for job in getattr(plan, field)] for plan in (one, other)]
        if numbers[0] != numbers[1]:
            return Difference(f"jobs to {field}", *[found[:MOST] for found in numbers])
    for i, (first, second) in enumerate(zip_longest(one.ops, other.ops)):
        if _text(first) != _text(second):
            return Difference(f"operation {i}", _operation(first), _operation(second))
    return (
        Difference("wake_ns", one.wake_ns, other.wake_ns) if one.wake_ns != other.wake_ns else None
    )


def of_runs(one: Recorder, other: Recorder) -> Difference:
    """The first difference of what two runs have recorded: of plans, else of tables.

    Args:
        one: a run.
        other: a run of the policy on equal work.

    Returns:
        The step, or the row of a table, and what differs in it.

    Raises:
        ValueError: nothing differs.
    """
    for row, again in zip(one.plans, other.plans, strict=False):
        if found := of_plans(row[-1], again[-1]):
            return found._replace(what=f"step {row[0]}, device {row[1]}: {found.what}")
    if len(one.plans) != len(other.plans):
        return Difference("the number of plans", len(one.plans), len(other.plans))
    tables = one.tables(), other.tables()
    for name in tables[0]:
        pairs = zip_longest(*[table[name].to_pylist() for table in tables], fillvalue={})
        for i, (row, again) in enumerate(pairs):
            for column in [key for key in {**row, **again} if row.get(key) != again.get(key)]:
                return Difference(
                    f"{column} in row {i} of {name}", row.get(column), again.get(column)
                )
    raise ValueError("the runs do not differ")


def of_views(before: Mapping[str, Any], after: Mapping[str, Any], of_job: Sequence[str]) -> str:
    """The first difference of what two views show.

    Args:
        before: the fields of a view.
        after: the fields of a view.
        of_job: what the values of a job are called; the first is its number.

    Returns:
        The name of the field, and of the job where it is a job's.
    """
    name = next(name for name in before if before[name] != after[name])
    one, other = before[name], after[name]
    if name in ("serving", "training", "waiting") and len(one) == len(other):
        number = of_job.index("job_id")
        job, again = next(pair for pair in zip(one, other, strict=True) if pair[0] != pair[1])
        if job[number] == again[number]:
            at = next(i for i, value in enumerate(job) if value != again[i])
            return f"{of_job[at]} of job {job[number]}"
    return f"view.{name}"


def _kind(answer: object) -> str:
    return "a Plan" if isinstance(answer, Plan) else named(answer)


def _tokens(plan: Plan) -> dict[int, str]:
    """The tokens of each job in a plan, slice by slice, in the order of the slices."""
    found: dict[int, str] = {}
    for op in plan.ops:
        for piece in op.slices if isinstance(op, Compute) else ():
            before = found.get(piece.job.job_id)
            found[piece.job.job_id] = f"{before}+{piece.tokens}" if before else f"{piece.tokens}"
    return found


def _text(op: Any) -> str:
    return "" if op is None else encode(Plan((op,)))


def _operation(op: object) -> str:
    """An operation in words."""
    match op:
        case Grow(place, nbytes):
            return f"Grow of {told(place)} by {nbytes} bytes"
        case Share(place, pages):
            return f"Share of {len(pages)} pages for {told(place)}"
        case Free(place=place):
            return f"Free of {told(place)}"
        case Copy(src=src, dst=dst):
            return f"Copy of {told(src)} to {dst.tier}:{dst.device}"
        case Compute() | Collective():
            return f"{type(op).__name__} that writes {len(op.writes)} places"
    return "none"
