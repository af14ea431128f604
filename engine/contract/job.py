"""A request in service or a training job in progress. Only the engine changes it."""

from __future__ import annotations

from typing import Any

from engine.contract.adapters import AdapterVersion
from engine.contract.layout import TrainingLayout
from engine.contract.rules import refuse_write
from engine.contract.training_progress import TrainingProgress
from traces.serving.request import Request

NO_RECORD = -1


class TokenClock:
    """Counts the tokens that jobs which move together have got, each of them."""

    __slots__ = ("clock",)

    def __init__(self) -> None:
        self.clock = 0


ALONE = TokenClock()  # of jobs that move by themselves: it stands still


class Job:
    """A request in service or a training job, with its progress as *issued*.

    Slices in flight count as computed. Only the engine calls the methods that change a job; an
    assignment raises ContractError.

    Attributes:
        job_id: the number of the request or training job.
        arrival_ns: when it arrived, on the clock of the run.
        prompt_tokens: tokens of the prompt.
        recorded_tokens: the token up to which activations are kept, without a gap from some token
            on; 0: none are, NO_RECORD: none will be, because the job was preempted.
        slo: the name of the request's service level.
        adapter: the version that its tokens run through; None: the model without an adapter. While
            a job waits for the first time it is the newest one.
        tenant: the name of the tenant whose job it is; "" without one.
        session: the session that it is a turn of; None without one.
        turn: the number of the turn in its session.
        gets_feedback: whether feedback on it will come; for oracles, no other policy may know.
        prefix_ids: names of the blocks that the prompt begins with (see Request).
        device: the replica that it is routed to; None: any.
        training: the progress of a training job; None of a request.
    """

    __slots__ = (
        "_clock",
        "_computed",
        "_known",
        "adapter",
        "arrival_ns",
        "device",
        "gets_feedback",
        "job_id",
        "prefix_ids",
        "prompt_tokens",
        "recorded_tokens",
        "session",
        "slo",
        "tenant",
        "training",
        "turn",
    )
    job_id: int
    arrival_ns: int
    prompt_tokens: int
    recorded_tokens: int
    slo: str
    adapter: AdapterVersion | None
    tenant: str
    session: int | None
    turn: int
    gets_feedback: bool
    prefix_ids: tuple[int, ...]
    device: int | None
    training: TrainingProgress | None
    _known: int
    _computed: int
    _clock: TokenClock

    def __init__(
        self,
        job_id: int,
        arrival_ns: int,
        prompt_tokens: int = 0,
        known_tokens: int = 0,
        computed_tokens: int = 0,
        recorded_tokens: int = 0,
        *,
        slo: str = "",
        adapter: AdapterVersion | None = None,
        tenant: str = "",
        session: int | None = None,
        turn: int = 0,
        gets_feedback: bool = False,
        prefix_ids: tuple[int, ...] = (),
        training: TrainingProgress | None = None,
    ) -> None:
        object.__setattr__(self, "job_id", job_id)
        object.__setattr__(self, "gets_feedback", gets_feedback)
        object.__setattr__(self, "arrival_ns", arrival_ns)
        object.__setattr__(self, "prompt_tokens", prompt_tokens)
        object.__setattr__(self, "recorded_tokens", recorded_tokens)
        object.__setattr__(self, "slo", slo)
        object.__setattr__(self, "adapter", adapter)
        object.__setattr__(self, "tenant", tenant)
        object.__setattr__(self, "session", session)
        object.__setattr__(self, "turn", turn)
        object.__setattr__(self, "prefix_ids", prefix_ids)
        object.__setattr__(self, "device", None)
        object.__setattr__(self, "training", training)
        object.__setattr__(self, "_known", known_tokens)
        object.__setattr__(self, "_computed", computed_tokens)
        object.__setattr__(self, "_clock", ALONE)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_write(f"{name} of job {self.job_id}")

    def __setstate__(self, state: tuple[Any, dict[str, Any]]) -> None:
        """Restores a copy."""
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        refuse_write(f"{name} of job {self.job_id}")

    def __repr__(self) -> str:
        if self.training is not None:
            return f"Job({self.job_id}: {self.training.step} training steps done)"
        return f"Job({self.job_id}: {self.computed_tokens} of {self.known_tokens} tokens)"

    @classmethod
    def serving(
        cls,
        request: Request,
        arrival_ns: int,
        adapter: AdapterVersion | None = None,
        gets_feedback: bool = False,
    ) -> Job:
        """The job of a request. It lacks the output length, which no policy may see.

        Args:
            request: the request of the trace.
            arrival_ns: when it arrived, on the clock of the run.
            adapter: the version that its tokens run through.
            gets_feedback: whether feedback on it will come.

        Returns:
            A job without progress.
        """
        return cls(
            request.request_id,
            arrival_ns,
            request.prompt_tokens,
            request.prompt_tokens,
            slo=request.slo,
            adapter=adapter,
            tenant=request.tenant,
            session=request.session,
            turn=request.turn,
            gets_feedback=gets_feedback,
            prefix_ids=request.prefix_ids or (),
        )

    @classmethod
    def trains(cls, training: TrainingProgress, arrival_ns: int) -> Job:
        """The job of training that is at its first step.

        Args:
            training: its progress.
            arrival_ns: when it arrived, on the clock of the run.

        Returns:
            A job without tokens of its own; `training` has its progress.
        """
        spec = training.spec
        return cls(spec.job_id, arrival_ns, tenant=spec.tenant, training=training)

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt, and tokens generated so far."""
        return self._known + self._clock.clock

    @property
    def generated_tokens(self) -> int:
        """Tokens of the answer so far; a restart keeps them. How many will come, no policy sees."""
        return self._known + self._clock.clock - self.prompt_tokens

    @property
    def computed_tokens(self) -> int:
        """Known tokens whose keys and values are in the KV pages."""
        return self._computed + self._clock.clock

    def _compute_from(self, tokens: int) -> None:
        """Sets the computed tokens: found in kept pages, or 0 after a restart."""
        object.__setattr__(self, "_computed", tokens - self._clock.clock)

    def _advance(self, computed_tokens: int, new_tokens: int) -> None:
        """Adds tokens that are computed, and tokens that are known."""
        object.__setattr__(self, "_computed", self._computed + computed_tokens)
        if new_tokens:
            object.__setattr__(self, "_known", self._known + new_tokens)

    def _move_with(self, clock: TokenClock) -> None:
        """From now on the job gets a token whenever the clock counts one."""
        ahead = self._clock.clock - clock.clock
        object.__setattr__(self, "_known", self._known + ahead)
        object.__setattr__(self, "_computed", self._computed + ahead)
        object.__setattr__(self, "_clock", clock)

    def _record_to(self, stop: int) -> None:
        """Activations are kept up to this token; NO_RECORD: none will be any more."""
        object.__setattr__(self, "recorded_tokens", stop)

    @property
    def may_record(self) -> bool:
        """Whether activations of its next tokens may be kept: behind those that are, or first."""
        return self.recorded_tokens in (0, self.computed_tokens)

    def _route(self, device: int) -> None:
        """Routes the job to a replica."""
        object.__setattr__(self, "device", device)

    def _run_through(self, adapter: AdapterVersion) -> None:
        """Another version of the adapter, of a job that waits for the first time."""
        object.__setattr__(self, "adapter", adapter)

    def _train_by(self, layout: TrainingLayout) -> None:
        """Another layout, of a job that is between two steps."""
        assert self.training is not None, "a training job"
        object.__setattr__(self, "training", self.training._laid_out(layout))

    def _name_prefix(self, prefix_ids: tuple[int, ...]) -> None:
        """Names the blocks that the prompt begins with."""
        object.__setattr__(self, "prefix_ids", prefix_ids)

    @property
    def remaining_tokens(self) -> int:
        """Known tokens that are not computed: the rest of a prompt, or 1 in decode."""
        return self._known - self._computed

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is to be computed."""
        return self._known - self._computed > 1 or not self._computed + self._clock.clock


def named(value: object) -> str:
    """The type of a value in words, for messages; that of every job is Job.

    Args:
        value: any object.

    Returns:
        Such as `a list`, or `None`.
    """
    kind = Job if isinstance(value, Job) else type(value)
    return "None" if value is None else f"a {kind.__name__}"
