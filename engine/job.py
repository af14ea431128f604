"""A request in service or a training job in progress. Only the engine changes it."""

from __future__ import annotations

from typing import Any

from engine.read_only import refuse_write
from engine.training import Training
from traces.request import Request


class Pace:
    """Of jobs that move together: how often each of them has got a token."""

    __slots__ = ("clock",)

    def __init__(self) -> None:
        self.clock = 0


ALONE = Pace()  # of whoever moves by himself: it stands still


class Job:
    """Progress as *issued*: what is in flight counts as done.

    A serving job has `known_tokens` (prompt and generated so far) and `computed_tokens` of them
    in the KV pages; both grow with its pace. How far a training job is, says its `training`.
    `recorded_tokens` are a gapless prefix whose activations are kept, `prefix_ids` names of the
    prompt's blocks (see Request), `device` the replica it was routed to (None: any).
    The methods that change a job are the engine's; an assignment raises ContractError.
    """

    __slots__ = (
        "_computed",
        "_known",
        "_pace",
        "arrival_ns",
        "device",
        "job_id",
        "prefix_ids",
        "prompt_tokens",
        "recorded_tokens",
        "session",
        "slo",
        "training",
        "turn",
    )
    job_id: int
    arrival_ns: int
    prompt_tokens: int
    recorded_tokens: int
    slo: str
    session: int | None
    turn: int
    prefix_ids: tuple[int, ...]
    device: int | None
    training: Training | None
    _known: int
    _computed: int
    _pace: Pace

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
        session: int | None = None,
        turn: int = 0,
        prefix_ids: tuple[int, ...] = (),
        training: Training | None = None,
    ) -> None:
        object.__setattr__(self, "job_id", job_id)
        object.__setattr__(self, "arrival_ns", arrival_ns)
        object.__setattr__(self, "prompt_tokens", prompt_tokens)
        object.__setattr__(self, "recorded_tokens", recorded_tokens)
        object.__setattr__(self, "slo", slo)
        object.__setattr__(self, "session", session)
        object.__setattr__(self, "turn", turn)
        object.__setattr__(self, "prefix_ids", prefix_ids)
        object.__setattr__(self, "device", None)
        object.__setattr__(self, "training", training)
        object.__setattr__(self, "_known", known_tokens)
        object.__setattr__(self, "_computed", computed_tokens)
        object.__setattr__(self, "_pace", ALONE)

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_write(f"{name} of job {self.job_id}")

    def __setstate__(self, state: tuple[Any, dict[str, Any]]) -> None:
        """Of a copy."""
        for name, value in state[1].items():
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        refuse_write(f"{name} of job {self.job_id}")

    def __repr__(self) -> str:
        if self.training is not None:
            return f"Job({self.job_id}: {self.training.step} training steps done)"
        return f"Job({self.job_id}: {self.computed_tokens} of {self.known_tokens} tokens)"

    @classmethod
    def serving(cls, request: Request, arrival_ns: int) -> Job:
        """A request as it starts its service. Its output length stays behind (oracle boundary)."""
        return cls(
            request.request_id,
            arrival_ns,
            request.prompt_tokens,
            request.prompt_tokens,
            slo=request.slo,
            session=request.session,
            turn=request.turn,
            prefix_ids=request.prefix_ids or (),
        )

    @classmethod
    def trains(cls, training: Training, arrival_ns: int) -> Job:
        """A training job at its first step."""
        return cls(training.spec.job_id, arrival_ns, training=training)

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt and generated ones."""
        return self._known + self._pace.clock

    @property
    def computed_tokens(self) -> int:
        """Known tokens in the KV pages."""
        return self._computed + self._pace.clock

    def _compute_from(self, tokens: int) -> None:
        """So many are in the KV pages: those that were found there, or none after a restart."""
        object.__setattr__(self, "_computed", tokens - self._pace.clock)

    def _advance(self, computed_tokens: int, new_tokens: int) -> None:
        """So many more are in the KV pages, and so many more are known."""
        object.__setattr__(self, "_computed", self._computed + computed_tokens)
        if new_tokens:
            object.__setattr__(self, "_known", self._known + new_tokens)

    def _move_with(self, pace: Pace) -> None:
        """From now on it gets a token whenever they do."""
        clock = self._pace.clock - pace.clock
        object.__setattr__(self, "_known", self._known + clock)
        object.__setattr__(self, "_computed", self._computed + clock)
        object.__setattr__(self, "_pace", pace)

    def _record(self, tokens: int) -> None:
        """Activations of so many more are kept."""
        object.__setattr__(self, "recorded_tokens", self.recorded_tokens + tokens)

    def _route(self, device: int) -> None:
        """A replica is to serve it."""
        object.__setattr__(self, "device", device)

    def _name_prefix(self, prefix_ids: tuple[int, ...]) -> None:
        """What its prompt begins with is known by these names."""
        object.__setattr__(self, "prefix_ids", prefix_ids)

    @property
    def remaining_tokens(self) -> int:
        """Known tokens that are not computed: a prompt's rest while prefilling, one in decode."""
        return self._known - self._computed

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is missing."""
        return self._known - self._computed > 1 or not self._computed + self._pace.clock
