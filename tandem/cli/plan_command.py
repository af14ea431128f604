"""`tandem plan`: whether training fits, the time of a step, the least memory, the largest model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from analysis.run import Run
from analysis.training import training_steps, training_summary
from analysis.usage import lane_shares, pool_uses
from engine.contract.regions import Pool, Tier
from engine.loop.state import VirtualClock
from engine.results.recorder import Recorder
from policies.training.out_of_memory import DoesNotFit, OutOfMemory
from sim.cost.contract import LaunchCost
from sim.cost.scaled import SlowerCopies
from sim.executor import SimExecutor
from tandem.cli.catalog import with_axes
from tandem.cli.plan_choice import choice_lines, write_surface
from tandem.cli.terminal import (
    Overrides,
    largest_model_lines,
    search_bar,
    shown_bytes,
    shown_parts,
    shown_seconds,
    shown_times,
)
from tandem.config.composed_config import ComposedConfig
from tandem.sweeps.grid import Grid, grid_of
from tandem.wiring.backends import Backend
from tandem.wiring.budget import advised_line
from tandem.wiring.experiment import engine_of
from tandem.wiring.run_spec import RunSpec, builder_of, run_spec_of, spec_of, training_space
from tandem.wiring.training import Trainee, planner_of
from tandem.wiring.workload import is_nothing
from traces.serving.request import Sample

LATE = 0.03  # as far as a steady machine moves
STEPS = 3  # simulated: a warm-up, one that finds memory as it left it, and one that has settled
MOST_LAYERS = 512  # beyond any model that is trained; a plan of so many takes seconds
BEYOND = 3  # layers: chunks are rounded, so a deeper model may fit where one in between does not
EXAMPLES = """examples:
  tandem plan trace=none training=sample policy=zero3_offload budget.device_bytes=70000000
  tandem plan trace=none training=sample policy=zero_offload,zero3_offload model=tiny_llama,gpt2
  tandem plan experiment=max_scale policy=patrickstar   (the models that its yaml sweeps)
  tandem plan trace=none training=sample policy=protrain --surface surface.csv
"""


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """What the simulator says of a few steps."""

    run_spec: RunSpec
    run: Run

    @cached_property
    def slower_copies(self) -> Run:
        """The run with copies to the host a little slower than predicted."""
        return _simulated(self.run_spec, SlowerCopies(self.run_spec.cost, LATE))

    @property
    def step_s(self) -> float:
        """Seconds of a settled step: the last."""
        return float(training_steps(self.run)["step_s"].iloc[-1])

    @property
    def tokens_per_s(self) -> float:
        """Of a settled step."""
        return float(training_steps(self.run)["tokens"].iloc[-1]) / self.step_s

    def peak_bytes(self, pool: str) -> dict[str, int]:
        """What lies in a pool such as gpu:0 when it is fullest, by part; `used` is the sum."""
        return _fullest(self.run, pool)

    def most_bytes(self, pool: str) -> int:
        """The peak of a pool, or its peak with slower copies to the host, if that is higher."""
        return max(_fullest(run, pool)["used"] for run in (self.run, self.slower_copies))


def _fullest(run: Run, pool: str) -> dict[str, int]:
    tier, _, device = pool.partition(":")
    return pool_uses(run)[tier, int(device)].fullest


def plan_run(point: ComposedConfig, num_layers: int | None = None) -> PlannedRun:
    """Simulates a few steps of what the point trains, on a model of so many layers.

    ValueError where the configuration is wrong, DoesNotFit where it is right and too large.
    """
    spec = spec_of(point)
    if num_layers is not None:
        spec = replace(spec, name=f"{spec.name} x {num_layers} layers", num_layers=num_layers)
    run_spec = _short(run_spec_of(point, spec))
    if not run_spec.trainees:
        raise ValueError("tandem plan predicts training: choose what to train, training=...")
    return PlannedRun(run_spec, _simulated(run_spec, run_spec.cost))


def max_layers(point: ComposedConfig) -> int:
    """The most layers of the point's model that fit; at most MOST_LAYERS.

    0 where the fewest layers that the recipe trains do not fit. Found by doubling and halving, as
    if depth alone decided; then a few layers beyond are tried.
    """
    with search_bar("looking for the largest") as tried:

        @cache
        def fits(count: int) -> bool:
            tried()
            try:
                plan_run(point, count)
            except DoesNotFit:
                return False
            return True

        return _max_that_fits(fits, min_layers(point))


def _max_that_fits(fits: Callable[[int], bool], least: int) -> int:
    low, high = least - 1, least
    while fits(high):
        low, high = high, min(2 * high, MOST_LAYERS)
        if low == high:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low < least:
        return 0
    count = low + 2
    while count <= low + BEYOND:
        low, count = (count if fits(count) else low), count + 1
    return low


def min_layers(point: ComposedConfig) -> int:
    """Layers of the shallowest model in which the point's recipe trains something."""
    asked = builder_of(point).build(point.config["training"], "training")
    return max(1, int(asked.recipe.min_units) - 2)  # embedding and head


def _simulated(run_spec: RunSpec, cost: LaunchCost) -> Run:
    env, recorder = VirtualClock(), Recorder()
    engine = engine_of(run_spec, Backend(env, SimExecutor(env, cost)), recorder)
    engine.replay(run_spec.work)
    tables = {name: table.to_pandas() for name, table in recorder.tables().items()}
    return Run(Path(), **tables, provenance={}, config={})


def _short(run_spec: RunSpec) -> RunSpec:
    def few(trainee: Trainee) -> Trainee:
        job = trainee.job
        samples = _longest_first(job.samples)
        if job.learns:  # nothing is served here that feedback would follow
            samples = tuple([sample._replace(release_ns=0, request=None) for sample in samples])
        few_steps = min(job.num_steps, job.begun_steps + STEPS)
        return replace(
            trainee, job=replace(job, num_steps=few_steps, samples=samples, learns=False)
        )

    return replace(run_spec, trainees=tuple(few(trainee) for trainee in run_spec.trainees))


def _longest_first(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples with the longest one before all others: it decides whether a job fits."""
    lengths = [sample.tokens for sample in samples]
    at = lengths.index(max(lengths)) if lengths else 0
    moved = [*samples[at : at + 1], *samples[:at], *samples[at + 1 :]]
    rows = zip(moved, samples, strict=True)
    return tuple([own._replace(release_ns=there.release_ns) for own, there in rows])


# ---- the command
def main(words: Sequence[str]) -> int:
    """Prints the plan; 0 if it fits, 1 if not (then what is missing, and what would fit).

    Of several points it prints which of them fit, and the largest model among these.
    """
    parser = argparse.ArgumentParser(
        prog="tandem plan",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-largest", action="store_true", help="do not look for larger models")
    parser.add_argument("--config-dir", help="a folder of your own yaml files")
    about = "write all that policy=protrain chose from to this CSV file: times and peaks"
    parser.add_argument("--surface", type=Path, metavar="FILE", help=about)
    about = "as for tandem run, or KEY=a,b,c as for tandem sweep"
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=about)
    chosen = parser.parse_intermixed_args(words)
    grid = grid_of([*with_axes(chosen.overrides), "backend=sim"], chosen.config_dir)
    if grid.axes:
        if chosen.surface is not None:
            raise ValueError("--surface is of one point: give each key one value")
        return tell(grid)
    (point,) = grid.points()
    try:
        found = plan_run(point)
    except DoesNotFit as error:
        print(f"does not fit: {advised_line(error)}")
        if least := told_min_budget(point, error):
            print(least)
        if chosen.surface is not None:
            _tell_surface_beyond(point, error, chosen.surface)
        _tell_max_layers(point, chosen.no_largest)
        return 1
    print(told(found))
    for line in choice_lines(point, found.run_spec):
        print(line)
    if chosen.surface is not None:
        _tell_surface(point, found.run_spec, chosen.surface)
    _tell_max_layers(point, chosen.no_largest)
    return 0


def _tell_surface(
    point: ComposedConfig,
    run_spec: RunSpec,
    path: Path,
    capacity_bytes: Mapping[Pool, int] | None = None,
) -> None:
    count = write_surface(point, run_spec, path, capacity_bytes)
    if count is None:
        raise ValueError("--surface is of a planner that searches: take policy=protrain")
    print(f"surface: {count:,} configurations in {path}")


def _tell_surface_beyond(point: ComposedConfig, refused: DoesNotFit, path: Path) -> None:
    """The surface of a point that does not fit: configurations do not depend on the memory."""
    if not is_nothing(point.config["trace"]) or point.config.get("replayed") is not None:
        print(f"no surface in {path}: what does not fit has one where it trains alone (trace=none)")
    elif (need := min_budget_of(point, refused)) is None:
        print(f"no surface in {path}: no budget was found that is enough")
    else:
        enough = _with_budget(point, need)
        _tell_surface(enough, run_spec_of(enough), path, training_space(point))


def told(found: PlannedRun) -> str:
    """Step time and where it goes, peak per tier and what makes it."""
    run, metrics = found.run, training_summary(found.run)
    (trainee, *_), room = found.run_spec.trainees, found.run_spec.room
    lanes = [f"{lane.partition(':')[2]} {share:.0%}" for lane, share in lane_shares(run).items()]
    lines = [
        f"fits: {trainee.spec.name}, {trainee.spec.parameters / 1e6:,.1f} M parameters, "
        f"{trainee.job.sequences} x {trainee.job.sequence_tokens} tokens, "
        f"{trainee.job.microbatches} to a step{_shared(trainee.job.ranks)}",
        f"step: {shown_seconds(found.step_s)} ({found.tokens_per_s:.4g} tokens/s; "
        f"{found.run_spec.cost.form}); the first {shown_seconds(metrics['first_train_step_s'])}",
        f"time: {shown_times(metrics)}; lanes busy: {', '.join(lanes)}",
    ]
    for (tier, device), capacity in room.capacity_bytes.items():
        peak, most = found.peak_bytes(pool := f"{tier}:{device}"), found.most_bytes(pool)
        used = peak.pop("used")
        late = f" (or {shown_bytes(most)}, if copies out are {LATE:.0%} slower)" * (most > used)
        shown = f"{shown_bytes(used)} of {shown_bytes(capacity)}{late}"
        name = "device" if tier is Tier.GPU else tier  # as in `budget`
        lines.append(f"{name} peak: {shown}: {shown_parts(peak)}")
    return "\n".join(lines)


def _shared(ranks: int) -> str:
    """Memory and lanes below are those of one device."""
    return f", on {ranks} devices each" if ranks > 1 else ""


def _tell_max_layers(point: ComposedConfig, is_silent: bool) -> None:
    if is_silent:
        return
    if isinstance(planner_of(point.config).get("modes"), list):
        print("largest: not sought, since planner.modes names layers one by one")
        return
    count = max_layers(point)
    if not count:
        least = min_layers(point)
        few = "one layer of this width fits" if least == 1 else f"{least} layers of this width fit"
        print(f"largest: not even {few}")
        return
    spec = replace(spec_of(point), num_layers=count)
    layers = f"{'at least ' if count == MOST_LAYERS else ''}{count} layer{'s' * (count > 1)}"
    print(f"largest of this width: {layers}, {spec.parameters / 1e6:,.1f} M parameters")


Need = dict[Tier, int]  # bytes
Try = Callable[[Need], DoesNotFit | None]  # why so much is too little; None: it fits

KEYS = {Tier.GPU: "device_bytes", Tier.HOST: "host_bytes"}  # of the config node `budget`
TRIES = 64  # until it fits
PRECISION = 1000  # the answer is known to a part in so many at least,
CLOSE_TRIES = 4  # and then tried to the byte so often


def min_memory(tried: Try, start: Need, refused: DoesNotFit) -> Need | None:
    """What fits instead of `start`: the least of each tier beside the other tiers.

    None where nothing fits after TRIES. The search assumes that more memory never hurts. The
    deficit of a launch is mostly a lower bound, which the last launch meets: the answer is mostly
    exact. The answer is always tried, and a byte less too.
    """
    low, high = dict(start), dict(start)
    for _ in range(TRIES):
        for tier in high:
            if lacks := _lacking(refused, tier):
                if isinstance(refused, OutOfMemory):
                    low[tier] = high[tier] + lacks
                high[tier] += max(lacks, high[tier] - start[tier])
        if (found := tried(high)) is None:
            break
        refused = found
    else:
        return None
    for tier in high:
        high[tier] = _lowered(tried, high, tier, start[tier], low[tier])
    return high


def _lacking(refused: DoesNotFit, tier: Tier) -> int:
    """A lower bound on what a tier lacks; one byte where the error names no deficit."""
    if isinstance(refused, OutOfMemory):
        return refused.deficit_bytes if refused.pool[0] is tier else 0
    return 1


def _lowered(tried: Try, fitting: Need, tier: Tier, floor: int, low: int) -> int:
    """The least of one tier that fits, from a floor on: by turns a told deficit, and halving.

    Where the bound is met a byte less is tried: a launch tells its deficit for the places as they
    lie, and less memory may place them otherwise. If a byte less fits, told deficits count as one
    byte from then on.
    """
    high, is_low, close_tries, believes = fitting[tier], True, 0, True
    while floor < high and close_tries < CLOSE_TRIES:
        is_met, is_close = low == high, high - low <= high // PRECISION
        close_tries += is_close and not is_met
        at = high - 1 if is_met else low if is_low or is_close else (low + high) // 2
        refused = tried({**fitting, tier: at})
        if refused is None:
            believes &= not is_met
            high, low = at, floor if is_met else low
        else:
            lacks = _lacking(refused, tier) if believes else 1
            floor, low = at + 1, min(high, at + max(1, lacks))
        is_low = not is_low
    return high


def min_budget_of(point: ComposedConfig, refused: DoesNotFit) -> Need | None:
    """The budget with which a point that was refused, and only trains, fits; None if none does."""

    with search_bar("looking for the least budget") as count:

        def tried(need: Need) -> DoesNotFit | None:
            count()
            try:
                plan_run(_with_budget(point, need))
            except DoesNotFit as error:
                return error
            return None

        return min_memory(tried, _space(point), refused)


def told_min_budget(point: ComposedConfig, refused: DoesNotFit) -> str:
    """One line: the budget with which the point fits; empty where requests are served too, or plans
    are played back."""
    if not is_nothing(point.config["trace"]) or point.config.get("replayed") is not None:
        return ""
    start, need = _space(point), min_budget_of(point, refused)
    if need is None:
        return "fits from: no budget was found that is enough"
    words = [
        f"budget.{KEYS[tier]}={nbytes} ({shown_bytes(nbytes)})"
        for tier, nbytes in need.items()
        if nbytes > start[tier]
    ]
    if not words:  # the simulation, which is shorter than a run, finds room as it is
        return ""
    lacked = {tier: _lacking(refused, tier) for tier in need}
    is_more = any(need[tier] > start[tier] + lacked[tier] for tier in need)
    why = ", for all of the plan; the shortfall above is that of one launch" if is_more else ""
    return f"fits from: {' '.join(words)}{why}{_beyond(point, need[Tier.GPU])}"


def _space(point: ComposedConfig) -> Need:
    space = training_space(point)
    return {tier: space[tier, 0] for tier in KEYS}


def _with_budget(point: ComposedConfig, need: Need) -> ComposedConfig:
    """The point with so much memory, on a device that has it."""
    config = point.config
    budget = {**config["budget"], **{KEYS[tier]: nbytes for tier, nbytes in need.items()}}
    has = max(config["device"]["memory_bytes"], need[Tier.GPU])
    device = {**config["device"], "memory_bytes": has}
    return replace(point, config={**config, "budget": budget, "device": device})


def _beyond(point: ComposedConfig, nbytes: int) -> str:
    device = point.config["device"]
    if nbytes <= device["memory_bytes"]:
        return ""
    has = shown_bytes(device["memory_bytes"])
    return f"; that is more than the {has} of {device['name']}: take a larger device, device=..."


@dataclass(frozen=True, eq=False)
class PlannedPoint:
    """A point of a grid, planned; `found` is None where it does not fit."""

    overrides: Overrides
    parameters: int
    found: PlannedRun | None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.found is not None


def plan_points(
    points: Iterable[ComposedConfig], common: Sequence[str] = ()
) -> Iterator[PlannedPoint]:
    """Plans point by point; overrides in `common` are left out of the rows.

    ValueError where a configuration is wrong.
    """
    for point in points:
        words = tuple(word for word in point.overrides if word not in common)
        found, refusal = None, ""
        try:
            found = plan_run(point)
        except DoesNotFit as error:
            refusal = advised_line(error)
        yield PlannedPoint(words, spec_of(point).parameters, found, refusal)


def tell(grid: Grid) -> int:
    """Prints a line per point, and the largest models; 0 if any fits."""
    rows = []
    for row in plan_points(grid.points(), grid.fixed):
        print(told_many(row), flush=True)
        rows.append(row)
    print("\n".join(largest_model_lines(rows, "fits")))
    return 0 if any(row.found for row in rows) else 1


def told_many(row: PlannedPoint) -> str:
    """One line: step time and peaks, or what is missing."""
    named = " ".join(row.overrides) or "this point"
    head = f"{named}: {row.parameters / 1e6:,.1f} M parameters"
    if row.found is None:
        return f"{head}, does not fit: {row.refusal.partition(';')[0]}"
    peaks = [
        f"{tier} {shown_bytes(row.found.peak_bytes(f'{tier}:{device}')['used'])}"
        for tier, device in row.found.run_spec.room.capacity_bytes
    ]
    return f"{head}, fits: step {shown_seconds(row.found.step_s)}, peaks {', '.join(peaks)}"
