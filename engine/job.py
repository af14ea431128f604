"""A request in service or a training job in progress. Only the engine changes it."""

from __future__ import annotations

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
    Policies read, never write.
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
        self.job_id, self.arrival_ns, self.prompt_tokens = job_id, arrival_ns, prompt_tokens
        self._known, self._computed, self._pace = known_tokens, computed_tokens, ALONE
        self.recorded_tokens = recorded_tokens  # a gapless prefix whose activations are kept
        self.slo, self.session, self.turn = slo, session, turn
        self.prefix_ids = prefix_ids  # names of the prompt's blocks, see Request
        self.device: int | None = None  # the replica it was routed to; None: any
        self.training = training

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

    @known_tokens.setter
    def known_tokens(self, tokens: int) -> None:
        self._known = tokens - self._pace.clock

    @property
    def computed_tokens(self) -> int:
        """Known tokens in the KV pages."""
        return self._computed + self._pace.clock

    @computed_tokens.setter
    def computed_tokens(self, tokens: int) -> None:
        self._computed = tokens - self._pace.clock

    def advance(self, computed_tokens: int, new_tokens: int) -> None:
        """So many more are in the KV pages, and so many more are known."""
        self._computed += computed_tokens
        self._known += new_tokens

    def move_with(self, pace: Pace) -> None:
        """From now on it gets a token whenever they do."""
        clock = self._pace.clock - pace.clock
        self._known, self._computed, self._pace = self._known + clock, self._computed + clock, pace

    @property
    def remaining_tokens(self) -> int:
        """Known tokens that are not computed: a prompt's rest while prefilling, one in decode."""
        return self._known - self._computed

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is missing."""
        return self._known - self._computed > 1 or not self._computed + self._pace.clock
