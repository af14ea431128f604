"""The decodes in service, as the plan before had them."""

from __future__ import annotations

from typing import NamedTuple

from engine.plan import GrowCycle, Place, Slice


class Decodes(NamedTuple):
    """Spares a policy to look at each decode at each question; says nothing that a View does not.

    The rest of those in service have begun their prompts.
    """

    slices: tuple[Slice, ...]  # one token each, in the order of admission
    places: tuple[Place, ...]  # what each writes
    growth: GrowCycle  # whose pages are full: at step 0 now, and so on, a token at each step
