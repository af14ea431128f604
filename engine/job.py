"""A request in service or a training job in progress. Only the engine changes it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan import Work
from traces.request import Request, TrainingJob

Unit = tuple[Work, int]  # what is done, and to which layer


class Pace:
    """Of jobs that move together: how often each of them has got a token."""

    __slots__ = ("clock",)

    def __init__(self) -> None:
        self.clock = 0


ALONE = Pace()  # of whoever moves by himself: it stands still


class Job:
    """Progress as *issued*: what is in flight counts as done.

    A serving job has `known_tokens` (prompt and generated so far) and `computed_tokens` of them
    in the KV pages; both grow with its pace. A training job has a frontier per microbatch.
    Policies read, never write.
    """

    __slots__ = (
        "_computed",
        "_known",
        "_pace",
        "arrival_ns",
        "backward",
        "device",
        "forward",
        "job_id",
        "prefix_ids",
        "prompt_tokens",
        "recorded_tokens",
        "session",
        "slo",
        "step",
        "training",
        "turn",
        "updated",
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
        training: TrainingJob | None = None,
    ) -> None:
        self.job_id, self.arrival_ns, self.prompt_tokens = job_id, arrival_ns, prompt_tokens
        self._known, self._computed, self._pace = known_tokens, computed_tokens, ALONE
        self.recorded_tokens = recorded_tokens  # a gapless prefix whose activations are kept
        self.slo, self.session, self.turn = slo, session, turn
        self.prefix_ids = prefix_ids  # names of the prompt's blocks, see Request
        self.device: int | None = None  # the replica it was routed to; None: any
        self.training, self.step = training, 0  # steps completed, as issued
        self.forward: dict[int, list[int]] = {}  # microbatch -> tokens per layer
        self.backward: dict[int, list[int]] = {}
        self.updated = [0] * (training.num_units if training else 0)  # updates issued per layer

    def __repr__(self) -> str:
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
    def trains(cls, spec: TrainingJob, arrival_ns: int, recorded_tokens: int = 0) -> Job:
        """A training job at its first step, behind what serving has recorded for it."""
        return cls(spec.job_id, arrival_ns, recorded_tokens=recorded_tokens, training=spec)

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

    def frontier(self, microbatch: int = 0) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens done per layer, forward and backward. Training jobs only."""
        assert self.training is not None, f"job {self.job_id} is no training job"
        layers = self.training.num_units
        forward = self.forward.get(microbatch) or [self.recorded_tokens] * layers
        return forward, self.backward.get(microbatch) or [0] * layers

    def chain(self, microbatch: int) -> list[Unit]:
        """Units of a microbatch that are not issued yet, in the only legal order."""
        assert self.training is not None, f"job {self.job_id} is no training job"
        tokens, layers = self.training.microbatch_tokens, range(self.training.num_units)
        forward, backward = self.frontier(microbatch)
        units = [(Work.FORWARD, layer) for layer in layers if forward[layer] < tokens]
        return units + [(Work.BACKWARD, i) for i in reversed(layers) if backward[i] < tokens]

    def ahead(self, n: int) -> Sequence[Unit]:
        """The next n units of the chain, cyclically: what a memory policy may look forward to."""
        assert self.training is not None, f"job {self.job_id} is no training job"
        layers = range(self.training.num_units)
        cycle = [(Work.FORWARD, i) for i in layers] + [(Work.BACKWARD, i) for i in reversed(layers)]
        if self.training.has_update:
            cycle += [(Work.UPDATE, i) for i in layers]
        start = cycle.index(self._next_unit() or cycle[0])
        return [cycle[(start + i) % len(cycle)] for i in range(n)]

    def _next_unit(self) -> Unit | None:
        assert self.training is not None
        if units := self.chain(self.step):
            return units[0]
        behind = (i for i, done in enumerate(self.updated) if done == self.step)
        layer = next(behind, None) if self.training.has_update else None
        return None if layer is None else (Work.UPDATE, layer)
