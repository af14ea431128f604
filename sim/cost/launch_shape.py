"""The shape of a launch: what prices of serving depend on, and which of its slices train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.contract.executor import Contexts, Launch, Pieces
from engine.contract.plan import Compute, Slice
from engine.contract.regions import Work


class Load(NamedTuple):
    """The tokens that attention's cost depends on: prompt slices in sum, decodes by their contexts.

    prompt_tokens   new tokens of all prompt slices
    prompt_context  tokens in KV before those slices
    decodes         slices of one token behind a context
    decode_context  sum of their contexts, each with the token in hand
    longest         the longest of these contexts; 0 without decodes
    shortest        the shortest of them; 0 without decodes
    """

    prompt_tokens: int
    prompt_context: int
    decodes: int
    decode_context: int
    longest: int
    shortest: int

    @classmethod
    def of(
        cls,
        slices: Iterable[tuple[int, int]],
        lead: int = 0,
        total: int = 0,
        ends: Sequence[int] = (),
    ) -> Load:
        """The load of slices, behind decodes of which only sums are known.

        Args:
            slices: (new tokens, tokens in KV) per slice.
            lead: decodes before the slices.
            total: sum of their contexts, each with the token in hand.
            ends: their shortest and longest context; empty without such decodes.

        Returns:
            The load of all of them together.
        """
        past: list[int] = []
        prompt_tokens = prompt_context = 0
        for n, context in slices:
            if n == 1 and context:
                past.append(context + 1)
            else:
                prompt_tokens += n
                prompt_context += context
        seen = [*ends, *past]
        longest, shortest = max(seen, default=0), min(seen, default=0)
        decodes = lead + len(past)
        return cls(prompt_tokens, prompt_context, decodes, total + sum(past), longest, shortest)


def load_of(launch: Launch, steps: int) -> Load:
    """The attention load of a repeated launch.

    Args:
        launch: the first launch.
        steps: repeats before the one that is asked for; each adds its tokens to the contexts.

    Returns:
        The load of that repeat.
    """
    pieces = launch.pieces
    if isinstance(pieces, Pieces) and isinstance(pieces.contexts, Contexts):
        behind, lead, more = pieces.contexts, pieces.contexts.lead, 1 + steps
        tail = zip(pieces.tokens[lead:], behind.tail, strict=True)
        rest = [(n, context + steps * n) for n, context in tail]
        return Load.of(rest, lead, behind.total + lead * more, [x + more for x in behind.extremes])
    tokens, contexts, _ = forward_shape(launch)
    return Load.of(zip(tokens, shifted(tokens, contexts, steps), strict=True))


def sizes(launch: Launch) -> tuple[int, int]:
    """The two sums that dense operators depend on.

    Args:
        launch: a serving launch.

    Returns:
        New tokens and sampled rows.
    """
    pieces = launch.pieces
    if isinstance(pieces, Pieces):
        return sum(pieces.tokens), sum(pieces.samples)
    return sum([piece.tokens for piece in pieces]), sum([piece.samples for piece in pieces])


def forward_shape(launch: Launch) -> tuple[list[int], list[int], int]:
    """The shape of a serving launch, as `ShapeCost.shape_ns` takes it.

    Args:
        launch: a Compute without training slices.

    Returns:
        New tokens per slice, tokens in KV per slice, and sampled rows.
    """
    pieces = launch.pieces
    if isinstance(pieces, Pieces):
        return list(pieces.tokens), list(pieces.contexts), sum(pieces.samples)
    tokens = [piece.tokens for piece in pieces]
    return tokens, [piece.context_tokens for piece in pieces], sum(p.samples for p in pieces)


def shifted(tokens: Sequence[int], contexts: Sequence[int], steps: int) -> list[int]:
    """Contexts of a repeated launch.

    Args:
        tokens: new tokens per slice.
        contexts: tokens in KV per slice at the first launch.
        steps: repeats before the one that is asked for.

    Returns:
        Tokens in KV per slice at that repeat.
    """
    return [context + steps * n for n, context in zip(tokens, contexts, strict=True)]


def compute_of(launch: Launch) -> Compute:
    """The operation of a launch that computes.

    Args:
        launch: a launch of a Compute.

    Returns:
        Its operation.
    """
    assert isinstance(launch.op, Compute)
    return launch.op


def training_slices(launch: Launch) -> Sequence[Slice]:
    """The slices of training jobs in a launch.

    Args:
        launch: a Compute.

    Returns:
        Its training slices, in their order.

    Raises:
        ValueError: a serving slice names layers or a work other than forward: no price is known.
    """
    op, pieces, lead = compute_of(launch), launch.pieces, 0
    if isinstance(pieces, Pieces) and isinstance(pieces.contexts, Contexts):
        lead = pieces.contexts.lead  # a decode batch serves
    found = []
    for piece in op.slices[lead:]:
        if piece.job.training is not None:
            found.append(piece)
        elif piece.layers is not None or piece.work is not Work.FORWARD:
            raise ValueError("no cost is known for single layers of serving yet; serve all at once")
    return found


def context_in(launch: Launch, piece: Slice) -> int:
    """The tokens before a slice of a launch.

    Args:
        launch: a Compute with one piece per slice.
        piece: one of its slices.

    Returns:
        Tokens in KV, or in the sample of a finetuning job.
    """
    slices, pieces = compute_of(launch).slices, launch.pieces
    at = len(slices) - 1 if slices[-1] is piece else slices.index(piece)  # windows come last
    if isinstance(pieces, Pieces):
        return int(pieces.contexts[at])
    return pieces[at].context_tokens


def finetunes(training: Sequence[Slice]) -> bool:
    """Whether training slices are those of a job that finetunes.

    Args:
        training: the training slices of a launch.

    Returns:
        True for a window, or the update of such a job.
    """
    job = training[0].job.training if training else None
    return job is not None and job.spec.finetunes


def served_part(launch: Launch) -> Launch:
    """A launch without its training slices.

    Args:
        launch: a Compute with one piece per slice.

    Returns:
        A launch of the serving slices alone.
    """
    op = compute_of(launch)
    rows = zip(op.slices, launch.pieces, strict=True)
    served = [(s, piece) for s, piece in rows if s.job.training is None]
    slices = tuple([s for s, _ in served])
    return Launch(op.again_as(slices), pieces=tuple([piece for _, piece in served]))


def prompts_of(launch: Launch) -> int:
    """Serving slices of several tokens: admitting their requests keeps the host busy.

    Args:
        launch: any launch.

    Returns:
        The number of such slices.
    """
    pieces = launch.pieces
    tokens = pieces.tokens if isinstance(pieces, Pieces) else [piece.tokens for piece in pieces]
    prompts = len(tokens) - tokens.count(1)
    return prompts - sum([s.tokens > 1 for s in training_slices(launch)]) if prompts else 0
