"""Launch shapes to measure: the calibration grids of serving and training, and their hold-outs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from engine.contract.regions import PageSize


class ShapeRows(NamedTuple):
    """The slice of one job: `tokens` new tokens behind `context` tokens in the KV."""

    tokens: int
    context: int = 0
    samples: bool = True


class Move(NamedTuple):
    """A copy of so many KV pages between the tiers."""

    pages: int
    to_host: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """The launches of one plan: at most one Compute, and copies beside it."""

    kind: str
    rows: tuple[ShapeRows, ...] = ()
    moves: tuple[Move, ...] = ()

    def pages(self, page: PageSize) -> int:
        """Counts the KV pages that the slices need.

        Args:
            page: Tokens and bytes of a page.

        Returns:
            Pages of all slices, their contexts included.
        """
        return sum(page.count(r.tokens + r.context) for r in self.rows)


class ShapeLimits(NamedTuple):
    """The limits of a shape: positions of the model, pages of both arenas, tokens of a launch."""

    positions: int
    pages: int
    host_pages: int
    tokens: int = 2048

    def admit(self, shape: Shape, page: PageSize) -> bool:
        """Checks a shape against the limits.

        Args:
            shape: The shape to launch.
            page: Tokens and bytes of a KV page.

        Returns:
            Whether the shape can be launched.
        """
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
LARGE_CONTEXTS = (16, 128, 384)  # few: a step of many decodes takes long
LATER_SLICES = (  # behind a context
    4,
    16,
    64,
    128,
    256,
    512,
    1024,
)
PAST_TOKENS = (32, 128, 256, 512, 1024, 2048)
COPIES = (1, 2, 4, 8, 16, 32, 64, 128)  # pages


def grid(limits: ShapeLimits, page: PageSize) -> list[Shape]:
    """Lists the shapes that a serving profile is fitted to: every operator alone, then together.

    Args:
        limits: What fits on the machine.
        page: Tokens and bytes of a KV page.

    Returns:
        The shapes that fit, no two of them equal.
    """
    shapes = dict.fromkeys([*_decodes(), *_prefills(), *_hybrids(), *_copies()])
    return [shape for shape in shapes if limits.admit(shape, page)]


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
    for n in LATER_SLICES:
        for past in PAST_TOKENS:
            yield Shape("later slice", (ShapeRows(n, past, samples=False),))
    for count in (2, 4, 8):
        for n in (8, 32, 128, 256):
            yield Shape("prompts", (ShapeRows(n),) * count)


def _hybrids() -> Iterator[Shape]:
    """Decodes beside a prefill slice, as chunked prefill packs them; some slices end a prompt."""
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
    """Draws random shapes that are not in the grid: a fit is judged by them.

    Three in four launches are like those of replays. The rest are so long or so many that a single
    operator takes most of the time. Copies of other sizes than the grid's follow.

    Args:
        limits: What fits on the machine.
        page: Tokens and bytes of a KV page.
        seed: Of the draws.
        count: Compute launches to draw.

    Returns:
        The shapes that fit, at most `count` of them with a Compute.
    """
    rng, known = random.Random(seed), set(grid(limits, page))
    few = count // 4 // len(RULED)
    draws = [(_random, count - few * len(RULED)), *((draw, few) for draw in RULED)]
    found: dict[Shape, None] = {}
    for draw, number in draws:
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
    """Decodes over so many tokens in KV that their attention takes most of the time."""
    reach = _few_positions(limits)
    contexts = [rng.randint(reach // 4, reach // 2) for _ in range(rng.randint(5, 31))]
    return Shape("long decodes", tuple(ShapeRows(1, max(1, context)) for context in contexts))


def _short_decodes(rng: random.Random, limits: ShapeLimits) -> Shape:
    """So many decodes over so few tokens in KV that the head takes most of the time."""
    context = min(rng.randint(4, 32), limits.positions - 1)
    return Shape("short decodes", (ShapeRows(1, context),) * rng.randint(17, 95))


def _long_prompt(rng: random.Random, limits: ShapeLimits) -> Shape:
    """So many prompt tokens, with none in KV, that their attention takes most of the time."""
    reach = _few_positions(limits)
    return Shape("long prompt", (ShapeRows(rng.randint(max(1, reach // 2), reach), samples=False),))


def _long_later_slice(rng: random.Random, limits: ShapeLimits) -> Shape:
    """A slice so long, behind so long a context, that their attention takes most of the time."""
    reach = _few_positions(limits)
    n, past = (max(1, rng.randint(reach // 4, reach // 2)) for _ in range(2))
    return Shape("long later slice", (ShapeRows(n, past, samples=False),))


RULED = (_long_decodes, _short_decodes, _long_prompt, _long_later_slice)


def probes(limits: ShapeLimits, page: PageSize) -> dict[str, Shape]:
    """Chooses three fixed shapes whose times tell whether the machine has drifted.

    Args:
        limits: What fits on the machine.
        page: Tokens and bytes of a KV page.

    Returns:
        By name: one decode, a decode batch of up to eight, a prefill of up to 128 tokens.
    """
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
PARTS = (1, 4, 16)  # sequences that equal rows are cut into: separates attention from the rest


class Microbatch(NamedTuple):
    """`sequences` of `tokens` each."""

    sequences: int
    tokens: int

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.tokens


class TrainingLimits(NamedTuple):
    """The limits of a microbatch: positions of the model, rows in all."""

    positions: int
    rows: int

    def admit(self, shape: Microbatch) -> bool:
        """Checks a microbatch against the limits.

        Args:
            shape: The microbatch to train on.

        Returns:
            Whether its sequences are long enough and fit.
        """
        return SHORTEST <= shape.tokens <= self.positions and shape.rows <= self.rows


def training_grid(limits: TrainingLimits) -> list[Microbatch]:
    """Lists the microbatches that a training profile is fitted to.

    Rows double; each number of rows is cut into few and into many sequences. Each microbatch is
    measured on all units of a chain, forward and backward, kept and recomputed. The updates of
    chunks are measured too, and depend on no microbatch.

    Args:
        limits: What fits on the machine.

    Returns:
        The microbatches that fit, no two of them equal.

    Raises:
        ValueError: No microbatch fits.
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
    """Draws microbatches between those of the training_grid: a fit is judged by them.

    Args:
        limits: What fits on the machine.
        seed: Of the draws.
        count: Microbatches to draw.

    Returns:
        At most `count` microbatches that fit and are not in the grid.

    Raises:
        ValueError: No microbatch fits.
    """
    rng, known = random.Random(seed), set(training_grid(limits))
    found: dict[Microbatch, None] = {}
    longest = min(limits.positions, limits.rows)
    for _ in range(100 * count):
        tokens = round(SHORTEST * (longest / SHORTEST) ** rng.random())
        shape = Microbatch(rng.randint(1, max(1, limits.rows // tokens)), tokens)
        if len(found) < count and shape not in known and limits.admit(shape):
            found[shape] = None
    return list(found)
