"""Launch shapes to be measured: the calibration grids, and what is held out from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from engine.contract.regions import PageSize


class ShapeRows(NamedTuple):
    """The slice of one job: `tokens` new ones behind `context` in the KV."""

    tokens: int
    context: int = 0
    samples: bool = True


class Move(NamedTuple):
    """A copy of so many KV pages between the tiers."""

    pages: int
    to_host: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """What one plan launches: at most one Compute, and copies beside it."""

    kind: str
    rows: tuple[ShapeRows, ...] = ()
    moves: tuple[Move, ...] = ()

    def pages(self, page: PageSize) -> int:
        """KV pages that its slices need."""
        return sum(page.count(r.tokens + r.context) for r in self.rows)


class ShapeLimits(NamedTuple):
    """What fits: positions of the model, pages of both arenas, tokens of a launch."""

    positions: int
    pages: int
    host_pages: int
    tokens: int = 2048

    def admit(self, shape: Shape, page: PageSize) -> bool:
        """Whether a shape can be launched at all."""
        longest = max((r.tokens + r.context for r in shape.rows), default=0)
        moved = sum(m.pages for m in shape.moves)
        return (
            longest <= self.positions
            and sum(r.tokens for r in shape.rows) <= self.tokens
            and shape.pages(page) + moved <= self.pages
            and moved <= self.host_pages
        )


BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LARGE_BATCHES = (96, 128, 192, 256)
CONTEXTS = (16, 64, 128, 256, 512, 1024, 2048, 4000)
SLICES = (
    *(2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536),
    *(2048, 4096, 8192),
)
LARGE_CONTEXTS = (16, 128, 384)  # few: a step of many decodes is a long one
CHUNKS = (4, 16, 64, 128, 256, 512, 1024)
PASTS = (32, 128, 256, 512, 1024, 2048)
COPIES = (1, 2, 4, 8, 16, 32, 64, 128)  # pages


def grid(limits: ShapeLimits, page: PageSize) -> list[Shape]:
    """The shapes a profile is fitted to: every operator alone, then together. No two are equal."""
    wanted = dict.fromkeys([*_decodes(), *_prefills(), *_mixed(), *_copies()])
    return [shape for shape in wanted if limits.admit(shape, page)]


def _decodes() -> Iterator[Shape]:
    for batch in BATCHES:
        for context in CONTEXTS:
            yield Shape("decode", (ShapeRows(1, context),) * batch)
    for batch in LARGE_BATCHES:
        for context in LARGE_CONTEXTS:
            yield Shape("decode", (ShapeRows(1, context),) * batch)


def _prefills() -> Iterator[Shape]:
    for n in SLICES:
        yield Shape("prefill", (ShapeRows(n),))
        yield Shape("prefill", (ShapeRows(n, samples=False),))  # tells the head from the layers
    for n in CHUNKS:
        for past in PASTS:
            yield Shape("chunk", (ShapeRows(n, past, samples=False),))
    for count in (2, 4, 8):
        for n in (8, 32, 128, 256):
            yield Shape("prompts", (ShapeRows(n),) * count)


def _mixed() -> Iterator[Shape]:
    """Decodes beside a slice, as chunked prefill launches them; some slices end their prompt."""
    for batch in (1, 2, 4, 8, 16, 32):
        for n, past, samples in ((16, 0, True), (64, 0, False), (200, 0, True), (480, 0, False)):
            for context in (128, 512):
                decodes = (ShapeRows(1, context),) * batch
                yield Shape("mixed", (ShapeRows(n, past, samples), *decodes))
        yield Shape("mixed", (ShapeRows(240, 256, samples=True), *(ShapeRows(1, 256),) * batch))


def _copies() -> Iterator[Shape]:
    """By size and direction: alone, against the other direction, and beside a launch."""
    busy = (ShapeRows(1, 256),) * 8
    for pages in COPIES:
        yield from _alone_and_both(pages)
        yield Shape("copy+decode", busy, (Move(pages, True),))


def _alone_and_both(pages: int) -> Iterator[Shape]:
    """A copy in each direction, then both at once."""
    out, back = Move(pages, True), Move(pages, False)
    yield Shape("copy", moves=(out,))
    yield Shape("copy", moves=(back,))
    yield Shape("copies", moves=(out, back))


def holdout(limits: ShapeLimits, page: PageSize, seed: int, count: int = 48) -> list[Shape]:
    """Random shapes, none of them in the grid: what a fit is judged by.

    `count` launches, three in four as replays have them, the rest so long or so many that a single
    operator takes most of the time; then copies of other sizes than the grid's.
    """
    rng, known = random.Random(seed), set(grid(limits, page))
    few = count // 4 // len(RULED)
    wanted = [(_random, count - few * len(RULED)), *((draw, few) for draw in RULED)]
    found: dict[Shape, None] = {}
    for draw, number in wanted:
        most = len(found) + number
        for _ in range(100 * number):
            shape = draw(rng, limits)
            if len(found) < most and shape not in known and limits.admit(shape, page):
                found[shape] = None
    for small, large in pairwise(COPIES[1:]):
        found |= dict.fromkeys(_alone_and_both(rng.randrange(small + 1, large)))
    return [shape for shape in found if limits.admit(shape, page)]


def _random(rng: random.Random, limits: ShapeLimits) -> Shape:
    """Decodes of lognormal contexts (median 250) beside no, one or two prefill slices."""
    kind = rng.choice(("decode", "decode", "mixed", "prefill"))
    reach = limits.positions - 1
    decodes = 0 if kind == "prefill" else rng.choice((1, 2, 3, rng.randint(4, 16), 32))
    rows = [
        ShapeRows(1, min(reach, max(1, round(rng.lognormvariate(5.5, 0.8)))))
        for _ in range(decodes)
    ]
    for _ in range(0 if kind == "decode" else rng.choice((1, 1, 2))):
        n = min(reach, max(2, round(rng.lognormvariate(4.8, 0.9))))
        past = rng.choice((0, 0, rng.randint(1, max(1, reach - n))))
        rows.insert(0, ShapeRows(n, min(past, reach - n), samples=rng.random() < 0.5))
    return Shape(kind, tuple(rows))


def _few_positions(limits: ShapeLimits) -> int:
    """The longest slice of a launch of the grid."""
    return min(limits.positions, limits.tokens) - 1


def _long_decodes(rng: random.Random, limits: ShapeLimits) -> Shape:
    """So many tokens in KV that attention of decodes takes most of the time."""
    reach = _few_positions(limits)
    contexts = [rng.randint(reach // 4, reach // 2) for _ in range(rng.randint(5, 31))]
    return Shape("long decodes", tuple(ShapeRows(1, max(1, context)) for context in contexts))


def _short_decodes(rng: random.Random, limits: ShapeLimits) -> Shape:
    """So many rows with so little in KV that the head does."""
    context = min(rng.randint(4, 32), limits.positions - 1)
    return Shape("short decodes", (ShapeRows(1, context),) * rng.randint(17, 95))


def _long_prompt(rng: random.Random, limits: ShapeLimits) -> Shape:
    """So many tokens at once, with nothing in KV, that their attention does."""
    reach = _few_positions(limits)
    return Shape("long prompt", (ShapeRows(rng.randint(max(1, reach // 2), reach), samples=False),))


def _long_chunk(rng: random.Random, limits: ShapeLimits) -> Shape:
    """The same behind a context."""
    reach = _few_positions(limits)
    n, past = (max(1, rng.randint(reach // 4, reach // 2)) for _ in range(2))
    return Shape("long chunk", (ShapeRows(n, past, samples=False),))


RULED = (_long_decodes, _short_decodes, _long_prompt, _long_chunk)


def probes(limits: ShapeLimits, page: PageSize) -> dict[str, Shape]:
    """Three fixed shapes whose times tell whether the machine has drifted, by name."""
    batch, context = 8, 200
    while batch > 1 and not limits.admit(Shape("", (ShapeRows(1, context),) * batch), page):
        batch, context = batch // 2, max(1, context // 2)
    n = min(128, limits.positions, limits.pages * page.tokens)
    small = min(context, limits.positions - 1)
    return {
        "decode_1": Shape("decode", (ShapeRows(1, small),)),
        f"decode_{batch}": Shape("decode", (ShapeRows(1, small),) * batch),
        f"prefill_{n}": Shape("prefill", (ShapeRows(n),)),
    }


SHORTEST = 16  # tokens of a sequence
PARTS = (1, 4, 16)  # sequences that equal rows are cut into: tells attention from the rest


class Microbatch(NamedTuple):
    """So many sequences of so many tokens each."""

    sequences: int
    tokens: int

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.tokens


class TrainingLimits(NamedTuple):
    """What fits: positions of the model, rows of a microbatch."""

    positions: int
    rows: int

    def admit(self, shape: Microbatch) -> bool:
        """Whether it can be trained on."""
        return SHORTEST <= shape.tokens <= self.positions and shape.rows <= self.rows


def training_grid(limits: TrainingLimits) -> list[Microbatch]:
    """What a profile is fitted to: rows by doubling, each as few and as many sequences.

    All units of a chain are measured with each, forward and backward, kept and recomputed; so are
    the updates of its chunks, which depend on none of this. ValueError where nothing fits.
    """
    found: dict[Microbatch, None] = {}
    rows = 2 * SHORTEST
    while rows < 2 * limits.rows:
        most = min(rows, limits.rows)
        for parts in PARTS:
            tokens = min(limits.positions, most // parts)
            if tokens:
                found[Microbatch(most // tokens, tokens)] = None
        rows *= 2
    admitted = [shape for shape in found if limits.admit(shape)]
    if not admitted:
        raise ValueError(
            f"no microbatch of {SHORTEST} tokens or more fits {limits.positions} positions and "
            f"{limits.rows} rows; calibrate with longer sequences"
        )
    return admitted


def training_holdout(limits: TrainingLimits, seed: int, count: int = 8) -> list[Microbatch]:
    """Microbatches between those of the training_grid, by which a fit is judged."""
    rng, known = random.Random(seed), set(training_grid(limits))
    found: dict[Microbatch, None] = {}
    longest = min(limits.positions, limits.rows)
    for _ in range(100 * count):
        tokens = round(SHORTEST * (longest / SHORTEST) ** rng.random())
        shape = Microbatch(rng.randint(1, max(1, limits.rows // tokens)), tokens)
        if len(found) < count and shape not in known and limits.admit(shape):
            found[shape] = None
    return list(found)
