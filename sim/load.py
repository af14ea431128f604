"""What attention is loaded with in a launch, as far as its cost depends on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.cohort import Behind
from engine.executor import Launch, Pieces
from sim.cost import forward_shape, shifted


class Load(NamedTuple):
    """What attention costs by: prompt slices as one, and decodes with the token in hand."""

    chunk: int  # prompt tokens
    behind: int  # tokens in KV before them
    decodes: int
    past: int  # sum of their contexts
    most: int
    least: int

    @classmethod
    def of(
        cls,
        slices: Iterable[tuple[int, int]],
        lead: int = 0,
        total: int = 0,
        ends: Sequence[int] = (),
    ) -> Load:
        """Of slices by tokens and context; before them decodes, of which sum and ends are known."""
        past: list[int] = []
        chunk = behind = 0
        for n, context in slices:
            if n == 1 and context:
                past.append(context + 1)
            else:
                chunk += n
                behind += context
        seen = [*ends, *past]
        most, least = max(seen, default=0), min(seen, default=0)
        return cls(chunk, behind, lead + len(past), total + sum(past), most, least)


def sizes(launch: Launch) -> tuple[int, int]:
    """New tokens and sampled rows of a launch."""
    pieces = launch.pieces
    if isinstance(pieces, Pieces):
        return sum(pieces.tokens), sum(pieces.samples)
    return sum([piece.tokens for piece in pieces]), sum([piece.samples for piece in pieces])


def load_of(launch: Launch, steps: int) -> Load:
    """What a repeated launch loads attention with after so many steps."""
    pieces = launch.pieces
    if isinstance(pieces, Pieces) and isinstance(pieces.contexts, Behind):
        behind, lead, more = pieces.contexts, pieces.contexts.lead, 1 + steps
        tail = zip(pieces.tokens[lead:], behind.tail, strict=True)
        rest = [(n, context + steps * n) for n, context in tail]
        return Load.of(rest, lead, behind.total + lead * more, [x + more for x in behind.ends])
    tokens, contexts, _ = forward_shape(launch)
    return Load.of(zip(tokens, shifted(tokens, contexts, steps), strict=True))
