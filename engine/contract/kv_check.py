"""The check of KV contents: what each place holds while a plan goes on, operation by operation.

A place of KV holds the tokens that its job has computed, or fewer: a copy that was left behind, or
pages that no launch has written yet. A launch finds all tokens of its contexts, and no plan frees
the only KV of a job that goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.contract.job import Job, TokenClock
from engine.contract.plan import Compute, Copy, Free, Grow, Plan, Share, Slice
from engine.contract.regions import Kind, PageSize, Place, Tier, Work, kv_place, told
from engine.contract.rules import ContractError, Rule

WHOLE = (Work.FORWARD, None, 0, 0, False)  # fields of a served slice behind job and tokens
GONE = -1  # tokens of a place that is not held


class Leading(NamedTuple):
    """Decodes of the plan before that head a launch in their order, and go on as before.

    Attributes:
        ids: their jobs.
        full: a page for each decode whose pages are full; None where that is not known.
        clock: the clock that they move with.
    """

    ids: tuple[int, ...]
    full: tuple[Grow, ...] | None
    clock: TokenClock


class PlanWalk:
    """One walk over the operations of a plan that serves; its changes lie over the books.

    A KV place follows its job where it holds all tokens that the job has computed. `filled` has the
    tokens of every place that does not: one that was grown and not written, or a copy. A walk that
    finds no breach leaves `filled` as the plan does.
    """

    def __init__(
        self,
        page: PageSize,
        tables: dict[Place, list[int]],
        places_of: Mapping[int, Iterable[Place]],
        jobs: Mapping[int, Job],
        leading: Callable[[Compute], Leading | None],
        filled: dict[Place, int],
        plan: Plan,
        device: int,
    ) -> None:
        self._page, self._tables, self._places_of, self._jobs = page, tables, places_of, jobs
        self._leading, self._filled = leading, filled
        self._plan, self._device = plan, device
        self._computed: dict[int, int] = {}  # tokens of jobs that the plan moves on
        self._known: dict[int, int] = {}
        self._recorded: dict[int, int] = {}
        self._tokens: dict[Place, int | None] = {}  # as `filled`; None where a place follows
        self._pages: dict[Place, int] = {}
        self._sliced = {
            s.job.job_id for op in plan.ops if isinstance(op, Compute) for s in op.slices
        }
        self._given_up = {job.job_id for job in (*plan.restart, *plan.refuse)}

    @property
    def recorded(self) -> Iterable[int]:
        """The requests of which the plan records a slice."""
        return self._recorded

    def walk(self) -> None:
        """Raises ContractError where the order of the plan breaks a rule."""
        launches = [op for op in self._plan.ops if isinstance(op, Compute)]
        for op in self._plan.ops:
            if isinstance(op, Compute):
                self._compute(op, is_only=len(launches) == 1)
            elif isinstance(op, Copy):
                if op.src.region.kind is Kind.KV:
                    self._copy(op)
            elif isinstance(op, Grow | Share | Free) and op.place.region.kind is Kind.KV:
                if isinstance(op, Grow):
                    self._grow(op)
                elif isinstance(op, Share):
                    self._share(op)
                else:
                    self._free(op)
        for place, tokens in self._tokens.items():
            if tokens is None or tokens == GONE:
                self._filled.pop(place, None)
            else:
                self._filled[place] = tokens

    # ---- what is where
    def _pages_of(self, place: Place) -> int | None:
        """Pages of a place; None where it is not held."""
        if place in self._pages:
            found = self._pages[place]
            return None if found == GONE else found
        table = self._tables.get(place)
        return None if table is None else len(table)

    def _computed_of(self, job: Job) -> int:
        return self._computed.get(job.job_id, job.computed_tokens)

    def _tokens_of(self, place: Place, job: Job) -> int:
        """The tokens of a job whose keys and values a place holds."""
        if self._pages_of(place) is None:
            return GONE
        found = self._tokens.get(place, self._filled.get(place))
        return self._computed_of(job) if found is None else found

    def _others(self, place: Place) -> list[Place]:
        """Other places that hold the KV of this one's job."""
        booked = self._places_of.get(place.region.owner, ())
        return [
            other
            for other in dict.fromkeys((*booked, *self._pages))
            if other != place and other.region == place.region and self._pages_of(other) is not None
        ]

    # ---- operations
    def _grow(self, op: Grow) -> None:
        place, pages = op.place, self._pages_of(op.place)
        if pages is None:
            self._tokens[place] = 0
        self._pages[place] = (pages or 0) + op.nbytes // self._page.nbytes

    def _share(self, op: Share) -> None:
        place, number = op.place, op.place.region.owner
        job, tokens = self._jobs.get(number), len(op.pages) * self._page.tokens
        if job is None or self._computed_of(job) or number not in self._sliced:
            what = "a job shares pages where it begins, with a slice behind them"
            raise ContractError(Rule.SHARE, what, number)
        self._computed[number] = tokens
        self._tokens[place], self._pages[place] = None, len(op.pages)

    def _copy(self, op: Copy) -> None:
        src, dst, job = op.src, op.dst, self._jobs.get(op.src.region.owner)
        pages = self._pages_of(src)
        if pages is None:
            raise ContractError(Rule.HELD, f"copy of {told(src)}, which is not held")
        if job is None or job.training is not None:
            return
        tokens, there = self._tokens_of(src, job), self._tokens_of(dst, job)
        if there > tokens:
            raise ContractError(
                Rule.COPY,
                f"copy of {tokens} tokens from {src.tier} over {there} newer ones on {dst.tier}",
                job.job_id,
            )
        if there < tokens:
            self._tokens[dst] = tokens
        self._pages[dst] = pages

    def _free(self, op: Free) -> None:
        place, number = op.place, op.place.region.owner
        job = self._jobs.get(number)
        if job is not None and job.training is None and number not in self._given_up:
            computed = self._computed_of(job)
            rest = [self._tokens_of(other, job) for other in self._others(place)]
            if computed and max(rest, default=GONE) < computed:
                what = "its only KV is freed: name the job in `restart`"
                raise ContractError(Rule.KV_FREED, what, number)
        self._pages[place] = self._tokens[place] = GONE

    def _compute(self, op: Compute, is_only: bool) -> None:
        served = [piece for piece in op.slices if piece.job.training is None]
        own = {kv_place(piece.job.job_id, Tier.GPU, self._device) for piece in served}
        for place in op.writes:
            if place.region.kind is Kind.KV and place not in own:
                owner = self._jobs.get(place.region.owner)
                if owner is None or owner.training is None:
                    what = "its KV is written without a slice"
                    raise ContractError(Rule.OWN_KV, what, place.region.owner)
        written = set(op.writes)
        for piece in self._to_look_at(op, served) if is_only else served:
            self._serve(piece, written)

    def _to_look_at(self, op: Compute, served: Sequence[Slice]) -> Sequence[Slice]:
        """The slices to check: decodes that go on as before have room in their last pages."""
        leading = self._leading(op)
        if leading is None or leading.full is None:
            return served
        moved = {place.region.owner for place in self._pages}
        moved.update([due.place.region.owner for due in leading.full])
        moved &= {*leading.ids}
        looked = [op.slices[leading.ids.index(number)] for number in moved]
        return [*looked, *[s for s in op.slices[len(leading.ids) :] if s.job.training is None]]

    def _serve(self, piece: Slice, written: Collection[Place]) -> None:
        job, number = piece.job, piece.job.job_id
        place = kv_place(number, Tier.GPU, self._device)
        if self._goes_on(piece, place, written):
            return
        computed = self._computed_of(job)
        known = self._known.get(number, job.known_tokens)
        if number in self._known:
            what = "a slice behind its next token, with which it may have ended"
            raise ContractError(Rule.ONCE, what, number)
        recorded = self._recorded.get(number, job.recorded_tokens)
        _check_slice(piece, known - computed, is_gapless=recorded in (0, computed))
        if piece.record:
            self._recorded[number] = computed + piece.tokens
        pages = self._pages_of(place)
        if pages is None:
            raise ContractError(Rule.OWN_KV, f"{told(place)} is not held", number)
        if place not in written:
            raise ContractError(Rule.OWN_KV, f"{told(place)} is not among the writes", number)
        if computed + piece.tokens > pages * self._page.tokens:
            what = f"{pages} pages of {self._page.tokens} for {computed} + {piece.tokens} tokens"
            raise ContractError(Rule.KV_PAGES, what, number)
        there = self._tokens_of(place, job)
        if there < computed:
            what = f"{told(place)} holds {there} of its {computed} tokens"
            raise ContractError(Rule.KV_CONTENTS, what, number)
        if self._tokens.get(place, self._filled.get(place)) is not None:
            for other in self._others(place):  # places that followed the job stay behind
                self._tokens[other] = self._tokens_of(other, job)
        self._tokens[place] = None
        if piece.tokens == known - computed:
            self._known[number] = known + 1
        self._computed[number] = computed + piece.tokens

    def _goes_on(self, piece: Slice, place: Place, written: Collection[Place]) -> bool:
        """Moves on a job which the plan has not touched, in pages that it holds; else False.

        Nearly all slices are such, and they keep all rules that `_serve` checks one by one.
        """
        given: Any = piece  # compiled, what is known to be an int is one: also True
        job, number, tokens = piece.job, piece.job.job_id, given[1]
        if number in self._computed or place in self._pages or place in self._filled:
            return False
        table, moved = self._tables.get(place), self._tokens
        if table is None or place in moved or place not in written or piece[2:] != WHOLE:
            return False
        left, computed = job.remaining_tokens, job.computed_tokens
        if type(tokens) is not int or not 0 < tokens <= left:
            return False
        if computed + tokens > len(table) * self._page.tokens:
            return False
        moved[place] = None
        if tokens == left:
            self._known[number] = job.known_tokens + 1
        self._computed[number] = computed + tokens
        return True


def _check_slice(piece: Slice, remaining_tokens: int, is_gapless: bool) -> None:
    """Rule TOKENS. `is_gapless`: whether activations of the tokens before may go on a record."""
    given: Any = piece  # compiled, what is known to be an int is one: also True
    number, tokens = piece.job.job_id, given[1]
    if piece[2:-1] != WHOLE[:-1]:
        what = "a served slice goes forward through all layers, and no more"
        raise ContractError(Rule.TOKENS, what, number)
    if type(tokens) is not int or not 0 < tokens <= remaining_tokens:
        what = f"a slice of {tokens!r} tokens, but {remaining_tokens} remain"
        raise ContractError(Rule.TOKENS, what, number)
    if piece.record and not is_gapless:
        what = "a record has no gap, and a job that was preempted leaves none"
        raise ContractError(Rule.TOKENS, what, number)
