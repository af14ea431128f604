"""What each KV place holds behind each operation of a plan: rules OWN_KV, KV_PAGES, KV_CONTENTS."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from engine.contract.job import Job
from engine.contract.plan import Compute, Copy, Free, Grow, Plan, Share, Slice
from engine.contract.regions import Kind, PageSize, Place, Tier, Work, kv_place, told
from engine.contract.rules import ContractError, Rule
from engine.fast_forward.standing_plan import StandingPlan
from engine.memory.ledger import Ledger

WHOLE = (Work.FORWARD, None, 0, 0, False)  # a slice of serving, but for its job and tokens
GONE = -1  # tokens of a place that is not held


class PlanWalk:
    """One walk over the operations of a plan that serves; what it moves lies over the books.

    `filled` says of KV places which do not follow their job how many of its tokens they hold: a
    place that was grown and not written, or a copy. Every other KV place of a job holds all that
    the job has computed. It is as the plan leaves it when the walk has ended well.
    """

    def __init__(
        self,
        ledger: Ledger,
        jobs: Mapping[int, Job],
        standing: StandingPlan,
        filled: dict[Place, int],
        plan: Plan,
        device: int,
    ) -> None:
        self._ledger, self._page, self._jobs = ledger, ledger.page, jobs
        self._standing, self._filled = standing, filled
        self._plan, self._device = plan, device
        self._computed: dict[int, int] = {}  # tokens of jobs that the plan moves on
        self._known: dict[int, int] = {}
        self._recorded: dict[int, int] = {}
        self._tokens: dict[Place, int | None] = {}  # as `filled`; None where a place follows
        self._pages: dict[Place, int] = {}
        self._sliced = {
            s.job.job_id for op in plan.ops if isinstance(op, Compute) for s in op.slices
        }
        gone = [job.job_id for job in (*plan.restart, *plan.refuse)]
        self._given_up = {*gone}

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
        table = self._ledger.pages.get(place)
        return None if table is None else len(table)

    def _computed_of(self, job: Job) -> int:
        return self._computed.get(job.job_id, job.computed_tokens)

    def _tokens_of(self, place: Place, job: Job) -> int:
        """Tokens of its job whose keys and values a place holds."""
        if self._pages_of(place) is None:
            return GONE
        found = self._tokens.get(place, self._filled.get(place))
        return self._computed_of(job) if found is None else found

    def _others(self, place: Place) -> list[Place]:
        """Other places that hold this KV."""
        booked = self._ledger.places_of.get(place.region.owner, ())
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
            raise ContractError(
                Rule.SHARE, "a job shares pages where it begins, with a slice behind them", number
            )
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
                raise ContractError(
                    Rule.KV_FREED, "its only KV is freed: name the job in `restart`", number
                )
        self._pages[place] = self._tokens[place] = GONE

    def _compute(self, op: Compute, is_only: bool) -> None:
        served = [piece for piece in op.slices if piece.job.training is None]
        own = {kv_place(piece.job.job_id, Tier.GPU, self._device) for piece in served}
        for place in op.writes:
            if place.region.kind is Kind.KV and place not in own:
                owner = self._jobs.get(place.region.owner)
                if owner is None or owner.training is None:
                    raise ContractError(
                        Rule.OWN_KV, "its KV is written without a slice", place.region.owner
                    )
        written = set(op.writes)
        for piece in self._to_look_at(op, served) if is_only else served:
            self._serve(piece, written)

    def _to_look_at(self, op: Compute, served: Sequence[Slice]) -> Sequence[Slice]:
        """All but the decodes that go on as they were: they have room in their last pages."""
        cohort = self._standing.cohort
        if cohort is None or cohort.turns is None or not self._standing.leads(op):
            return served
        moved = {place.region.owner for place in self._pages}
        full = cohort.turns[cohort.clock % self._page.tokens]
        moved.update([due.place.region.owner for due in full])
        moved &= {*cohort.ids}
        looked = [op.slices[cohort.ids.index(number)] for number in moved]
        return [*looked, *[s for s in op.slices[len(cohort.jobs) :] if s.job.training is None]]

    def _serve(self, piece: Slice, written: Collection[Place]) -> None:
        job, number = piece.job, piece.job.job_id
        computed, place = self._computed_of(job), kv_place(number, Tier.GPU, self._device)
        known = self._known.get(number, job.known_tokens)
        if number in self._known:
            raise ContractError(
                Rule.ONCE, "a slice behind its next token, with which it may have ended", number
            )
        recorded = self._recorded.get(number, job.recorded_tokens)
        check_slice(piece, known - computed, is_gapless=recorded == computed)
        if piece.record:
            self._recorded[number] = recorded + piece.tokens
        pages = self._pages_of(place)
        if pages is None:
            raise ContractError(Rule.OWN_KV, f"{told(place)} is not held", number)
        if place not in written:
            raise ContractError(Rule.OWN_KV, f"{told(place)} is not among the writes", number)
        if computed + piece.tokens > pages * self._page.tokens:
            raise ContractError(
                Rule.KV_PAGES,
                f"{pages} pages of {self._page.tokens} for {computed} + {piece.tokens} tokens",
                number,
            )
        there = self._tokens_of(place, job)
        if there < computed:
            raise ContractError(
                Rule.KV_CONTENTS, f"{told(place)} holds {there} of its {computed} tokens", number
            )
        if self._tokens.get(place, self._filled.get(place)) is not None:
            for other in self._others(place):  # those that followed the job do so no more
                self._tokens[other] = self._tokens_of(other, job)
        self._tokens[place] = None
        if piece.tokens == known - computed:
            self._known[number] = known + 1
        self._computed[number] = computed + piece.tokens


def check_slice(piece: Slice, remaining_tokens: int, is_gapless: bool) -> None:
    """Raises ContractError where a slice breaks rule TOKENS."""
    given: Any = piece  # compiled, what is known to be an int is one: also True
    number, tokens = piece.job.job_id, given[1]
    if piece[2:-1] != WHOLE[:-1]:
        raise ContractError(
            Rule.TOKENS, "a served slice goes forward through all layers, and no more", number
        )
    if type(tokens) is not int or not 0 < tokens <= remaining_tokens:
        raise ContractError(
            Rule.TOKENS, f"a slice of {tokens!r} tokens, but {remaining_tokens} remain", number
        )
    if piece.record and not is_gapless:
        raise ContractError(Rule.TOKENS, "a record is a gapless prefix", number)


class RepeatedPart(NamedTuple):
    """Steps up to `until` (exclusive) in which a job's slice has so many tokens."""

    until: int
    tokens: int


def parts_of(plan: Plan, i: int) -> list[RepeatedPart]:
    """The parts of the slice at a place of a repeated plan's launch."""
    launch = plan.ops[-1]
    assert isinstance(launch, Compute)
    behind, tokens = len(launch.slices) - i, launch.slices[i].tokens
    found: list[RepeatedPart] = []
    for step, last in plan.later:
        found.append(RepeatedPart(min(step, plan.repeats), tokens))
        now = last[-behind] if behind <= len(last) else launch.slices[i]
        tokens = now.tokens
    found.append(RepeatedPart(plan.repeats, tokens))
    return found


def first_lack(
    job: Job,
    pages: int,
    parts: Sequence[RepeatedPart],
    grows: Sequence[Grow],
    page: PageSize,
    tokens_left: int,
) -> tuple[Rule, str] | None:
    """What breaks first: more tokens than the prompt has left, or fewer pages than tokens.

    `grows` are those of the job's place; a plan's Grow with `every` comes again. A step behind the
    job's last token (`tokens_left` are still to be sampled) will never be issued: it needs nothing.
    """
    size, done, known, step = page.tokens, job.computed_tokens, job.known_tokens, 0
    once = sorted([(op.first, op.nbytes // page.nbytes) for op in grows if not op.every])
    again = [(op.first, op.every, op.nbytes // page.nbytes) for op in grows if op.every]
    for until, tokens in parts:
        if tokens > 1 and done + tokens * (until - step) > known:
            return Rule.TOKENS, f"{tokens} tokens a step up to step {until}, {known - done} remain"
        while step < until:
            have = pages + sum([n for first, n in once if first <= step])
            have += sum([((step - f) // e + 1) * n for f, e, n in again if f <= step])
            fits = (have * size - done) // tokens  # steps for which these pages do
            if fits > 0:
                end = step + fits
                if end >= until or (tokens == 1 and _goes_on(again, step, end, size)):
                    fits = until - step
                step, done = step + fits, done + tokens * fits
                continue
            # A token was sampled when all that was known was computed, and at each step since.
            if done < known or done - known + 1 < tokens_left:
                at = f"at step {step} {have} pages of {size} for {done} + {tokens} tokens"
                return Rule.KV_PAGES, at
            return None
    return None


def _goes_on(again: Sequence[tuple[int, int, int]], step: int, end: int, size: int) -> bool:
    """Whether a page comes behind `step` and up to `end`, and then one a page of tokens."""
    for first, every, n in again:
        following = first if first > step else first + ((step - first) // every + 1) * every
        if following <= end and every <= size and n > 0:
            return True
    return False
