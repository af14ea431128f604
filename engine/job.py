"""A request in service or a training job in progress. Only the engine changes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.plan import Work
from traces.request import Request, TrainingJob

Unit = tuple[Work, int]  # what is done, and to which layer


@dataclass(slots=True, eq=False)
class Job:
    """Progress as *issued*: what is in flight counts as done.

    A serving job has `known_tokens` (prompt and generated so far) and `computed_tokens` of them
    in the KV pages. A training job has a frontier per microbatch. Policies read, never write.
    """

    job_id: int
    arrival_ns: int
    prompt_tokens: int = 0
    known_tokens: int = 0
    computed_tokens: int = 0
    recorded_tokens: int = 0  # a gapless prefix whose activations are kept
    slo: str = ""
    session: int | None = None
    turn: int = 0
    prefix_ids: tuple[int, ...] = ()  # names of the prompt's blocks, see Request
    device: int | None = None  # the replica it was routed to; None: any
    training: TrainingJob | None = None
    step: int = 0  # training: steps completed, as issued
    forward: dict[int, list[int]] = field(default_factory=dict)  # microbatch -> tokens per layer
    backward: dict[int, list[int]] = field(default_factory=dict)
    updated: list[int] = field(default_factory=list)  # updates issued per layer

    @classmethod
    def serving(cls, request: Request, arrival_ns: int) -> Job:
        """A request as it starts its service. Its output length stays behind (oracle boundary)."""
        return cls(
            request.request_id,
            arrival_ns,
            prompt_tokens=request.prompt_tokens,
            known_tokens=request.prompt_tokens,
            slo=request.slo,
            session=request.session,
            turn=request.turn,
            prefix_ids=request.prefix_ids or (),
        )

    @classmethod
    def trains(cls, spec: TrainingJob, arrival_ns: int, recorded_tokens: int = 0) -> Job:
        """A training job at its first step, behind what serving has recorded for it."""
        return cls(
            spec.job_id,
            arrival_ns,
            training=spec,
            recorded_tokens=recorded_tokens,
            updated=[0] * spec.num_layers,
        )

    @property
    def remaining_tokens(self) -> int:
        """Known tokens that are not computed: a prompt's rest while prefilling, one in decode."""
        return self.known_tokens - self.computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is missing."""
        computed = self.computed_tokens
        return self.known_tokens - computed > 1 or not computed

    def frontier(self, microbatch: int = 0) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens done per layer, forward and backward. Training jobs only."""
        assert self.training is not None, f"job {self.job_id} is no training job"
        layers = self.training.num_layers
        forward = self.forward.get(microbatch) or [self.recorded_tokens] * layers
        return forward, self.backward.get(microbatch) or [0] * layers

    def chain(self, microbatch: int) -> list[Unit]:
        """Units of a microbatch that are not issued yet, in the only legal order."""
        assert self.training is not None, f"job {self.job_id} is no training job"
        tokens, layers = self.training.sequence_tokens, range(self.training.num_layers)
        forward, backward = self.frontier(microbatch)
        units = [(Work.FORWARD, layer) for layer in layers if forward[layer] < tokens]
        return units + [(Work.BACKWARD, i) for i in reversed(layers) if backward[i] < tokens]

    def ahead(self, n: int) -> Sequence[Unit]:
        """The next n units of the chain, cyclically: what a memory policy may look forward to."""
        assert self.training is not None, f"job {self.job_id} is no training job"
        layers = range(self.training.num_layers)
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
