"""What the runtime keeps of a job: its tokens and its page table as an array."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence


class Transcript:
    """The tokens of one job and where its KV lies.

    Tokens are kept by position, so a job that starts again computes prompt and generated tokens
    once more and adds none. `tickets` says, per generated token and as *prepared*, in which slot
    of the ring it lies (or will): that is how a launch reads a token still in flight.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.tickets: list[int] = []
        self.pages = array("q")
        self.source: Sequence[int] = ()  # the ledger's own list: kept, so that no other is it

    def follow(self, pages: Sequence[int]) -> Sequence[int]:
        """Brings the page table up to date; returns the pages that are new in it.

        A table only grows while a job keeps its KV; after a restart or a swap it is another one,
        even where the same pages came back in the same order: they have been released meanwhile.
        """
        if pages is not self.source:
            self.source, self.pages = pages, array("q")
        new = pages[len(self.pages) :]
        self.pages.extend(new)
        return new

    def ticket(self, position: int) -> int:
        """Where the token at a position lies in the ring."""
        return self.tickets[position - self.prompt_tokens]

    def promise(self, position: int, ticket: int) -> None:
        """A prepared launch will put the token of this position there."""
        assert position - self.prompt_tokens == len(self.tickets), f"token {position} comes twice"
        self.tickets.append(ticket)

    def append(self, position: int, token: int) -> None:
        """A launch has yielded the token of this position."""
        assert position == len(self.tokens), f"token {position} comes after {len(self.tokens)}"
        self.tokens.append(token)


class Transcripts(dict[int, Transcript]):
    """Those of all jobs, by job id; each starts with its prompt when it is first asked for."""

    def __init__(self, prompts: Mapping[int, Sequence[int]]) -> None:
        super().__init__()
        self._prompts = prompts

    def __missing__(self, job_id: int) -> Transcript:
        self[job_id] = Transcript(self._prompts[job_id])
        return self[job_id]
