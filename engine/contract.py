"""The rules that every plan must keep, and the error that a breach of one raises.

The engine checks a plan before it books anything, so after a breach all books are as before it.
"""

from __future__ import annotations

from enum import StrEnum


class Rule(StrEnum):
    """What a plan is held to. The value is the name that an error tells."""

    ANSWER = "answer"  # a policy answers with a Plan whose fields have the types of the contract
    READ_ONLY = "read only"  # a policy changes nothing that it is shown
    JOB = "job"  # slices and KV are those of jobs that wait or are in service on the device
    ONCE = "once"  # a launch serves each job once
    RESTART = "restart"  # names jobs in service, none twice, none with a slice in the plan
    REFUSE = "refuse"  # names unfinished jobs, none twice, none with a slice in the plan
    TOKENS = "tokens"  # a served slice is whole tokens, 1 to those that remain, in all layers
    LANE = "lane"  # serving launches run on compute lanes that the device declares
    DEVICE = "device"  # operations run on the plan's device, or between it and another pool
    PLACE = "place"  # places lie in pools that the machine has
    BYTES = "bytes"  # byte counts are whole and not below zero, those of KV whole pages
    ROOM = "room"  # what a plan takes fits into the pools
    HELD = "held"  # what is touched, copied, freed or waited for is held
    TIER = "tier"  # a launch touches what lies where it runs
    OWN_KV = "own KV"  # a serving launch writes the KV place of each of its jobs and of no other
    KV_PAGES = "KV pages"  # these hold context and new tokens
    KV_CONTENTS = "KV contents"  # and the keys and values of the context are in them
    KV_FREED = "KV freed"  # the only KV of an unfinished job is freed only with a restart
    SHARE = "share"  # shared pages hold the beginning of a job that has not begun
    COPY = "copy"  # keeps region and size, and never puts older contents over newer ones
    OPERATION = "operation"  # an operation is a new object: not in flight, not twice in a plan
    REPEATS = "repeats"  # a repeated plan is growth and one launch, within prompts and pages
    TRAINING_ORDER = "training order"  # forward, backward and update go in the order of the chain
    TRAINING_PLACES = "training places"  # a launch names what engine/regions says, in its bytes
    TRAINING_CONTENTS = "training contents"  # what it reads is there, and the newest there is
    TRAINING_FREED = "training freed"  # nothing is freed before its last use
    EXCHANGE = "exchange"  # a collective exchanges what the group's layout says, in its bytes


class ContractError(RuntimeError):
    """A plan breaks a rule. The message is one line: policy, step, device, job, rule, and what."""

    def __init__(
        self,
        rule: Rule,
        what: str,
        job_id: int | None = None,
        policy: str = "",
        step: int | None = None,
        device: int | None = None,
    ) -> None:
        super().__init__(rule, what, job_id, policy, step, device)  # so that it can be copied
        self.rule, self.what, self.job_id = rule, what, job_id
        self.policy, self.step, self.device = policy, step, device

    def __str__(self) -> str:
        where = [f"policy {self.policy}"] if self.policy else []
        where += [f"step {self.step}"] if self.step is not None else []
        where += [f"device {self.device}"] if self.device is not None else []
        is_of_job = self.job_id is not None and self.job_id >= 0  # -1 owns what belongs to no job
        where += [f"job {self.job_id}"] if is_of_job else []
        return f"{', '.join(where)}{': ' if where else ''}{self.what} (rule: {self.rule})"

    def located(
        self, policy: str, step: int | None = None, device: int | None = None
    ) -> ContractError:
        """The same, with the policy that broke the rule, the step and the device of its plan."""
        return ContractError(self.rule, self.what, self.job_id, policy, step, device)


class BrokenLaw(RuntimeError):
    """A replay that has ended, or the books of one, break a law of the engine."""
