"""The names that configurations and modules of earlier versions hold, and what they are now.

Nothing that a user has need be rewritten at once: an old `_target_` is followed to the new class,
and an old import in a user's own module is told with the new name.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# By old and new package: a module that kept its own name, or OLD=NEW.
MODULES: dict[tuple[str, str], str] = {
    ("traces", "traces"): (
        "cached=import_cache cells=records dataset=tables drops=records fingerprint=store "
        "import_=importing json_value=records options=import_options"
    ),
    ("traces", "traces.serving"): (
        "arrivals azure=published buckets=recorded_times burstgpt=published classes=sessions "
        "client_lengths=servegen clients=sessions figures=rules joint_lengths kinds=published "
        "lengths mooncake prompts=request random_lengths=lengths recorded recorded_times "
        "request rows=recorded rules sample sample_lengths=joint_lengths "
        "sample_tokenizer=sample selection servegen sharegpt think=sessions "
        "units=recorded_times"
    ),
    ("traces", "traces.training"): (
        "batches eos=texts packing=batches recipe text_import=texts text_sample text_store "
        "texts training=job"
    ),
    ("engine", "models"): (
        "model=spec model_file=hf_config model_shape=by_size operators parameters workspace"
    ),
    ("engine", "models.training"): "tape tape_layers tape_operators training_shape=shape",
    ("engine", "engine.contract"): (
        "contract=rules decodes=view exchange=footprint executor fleet=policy footprint job "
        "lanes=executor layout members=rules page_need=plan_check plan plan_check "
        "plan_walk=kv_check policy progress read_only=rules regions training=job "
        "training_contract=training_check training_layout=layout training_needs "
        "training_progress=progress training_uses=training_needs view"
    ),
    ("engine", "engine.fast_forward"): (
        "cohort=decode_batch course=horizon growth=repeated_plan jump leg=repeated_plan recurrence "
        "repeat=repeated_plan run=repeated_plan standing=standing_plan stretch=horizon"
    ),
    ("engine", "engine.laws"): "checks=check_replay contents=check_replay",
    ("engine", "engine.loop"): (
        "arrivals=admission door=admission ends=completions engine flights=state "
        "garbage=engine launcher=issuing leftovers=completions news=state profile "
        "questions=asking reuse=issuing roster=state"
    ),
    ("engine", "engine.memory"): (
        "balance=dry_run booking=ledger draft=dry_run holdings=pool journal=scoreboard "
        "ledger pages=pool prefix=pool returns=pool scoreboard sharing=ledger trial=dry_run"
    ),
    ("engine", "engine.results"): (
        "deliveries=recorder figures=schema outcome=outcomes planlog=plan_log record=schema "
        "recorder rows=tables"
    ),
    ("policies", "policies.kv"): (
        "max_reservation paged_restart paged_swap seating=paged_allocation"
    ),
    ("policies", "policies.planners"): "fixed_chunks laying_out=placement unit_chunks",
    ("policies.planners", "policies.planners"): "windows=unit_chunks",
    ("policies", "policies.routing"): (
        "least_outstanding prefix_affinity round_robin router=least_outstanding"
    ),
    ("policies", "policies.scheduling"): (
        "chunked_prefill continuous_batching earliest_deadline orca order "
        "predictors=shortest_job recorded shortest_job static_batching vllm_v1"
    ),
    ("policies", "policies.sharing"): "time_shared",
    ("policies", "policies.training"): (
        "all_on_device candidates=eviction cycle demand_paging eviction fsdp2_offload occupancy "
        "out_of_memory patrickstar residency streaming tide=patrickstar training_order "
        "zero3_offload zero_offload"
    ),
    ("sim", "sim.cost"): (
        "cost=contract late=scaled load=launch_shape prices=contract ragged=piecewise "
        "roofline table=piecewise tables trained=training_launch training_operators "
        "training_terms=training_operators"
    ),
    ("sim", "sim.devices"): "device group memory=kv_room",
    ("sim", "sim"): "host_memory=executor",
    ("sim.devices", "sim"): "host_memory=executor",
    ("sim", "sim.fit"): (
        "errors fit=fit_tables fit_training=fit_tables nonnegative=solve shapes=recorded_shapes "
        "solve"
    ),
    ("sim", "sim.foreign"): "aiconfigurator kernel_profile measured skew=kernel_profile vidur",
    ("runtime", "runtime.client"): "answer gauges openai sse",
    ("runtime", "runtime.executors"): (
        "clock cuda device executor=lockstep link=wall mixed=joined_machines "
        "replicas=joined_machines streams timeline=clock wall"
    ),
    ("runtime.kernels", "runtime.kernels"): (
        "activate=norm decode=paged_attention prefill=paged_attention tile=paged_attention"
    ),
    ("runtime", "runtime.measure"): (
        "calibrate driver meter probe=reference reference shapes tracker "
        "training_reference=reference training_shapes=shapes workspace=tracker"
    ),
    ("runtime", "runtime.serving"): (
        "attention columns=packing frame=packing fused gated graphs kv machine merge=gated "
        "model pack=packing packed=packing paged sampling transcript=packing"
    ),
    ("runtime", "runtime.training"): (
        "activations draws=units gradients=optimizer graph_memory=saved host_memory=store "
        "lane_store=store model_states optimizer saved storages=store store sums=optimizer "
        "trainee=trainer trainer training_machine=machine units"
    ),
    ("tandem", "tandem.cli"): (
        "calibrate catalog cli=__main__ collect compare doctor errors family=plan_command "
        "foresight=plan_command largest=plan_command least=plan_command progress=terminal "
        "refusal=terminal report run screen=terminal sweep trace"
    ),
    ("tandem", "tandem.config"): (
        "build compose composed=composed_config conform=check decoding=slo keys=check kinds=build "
        "outside paths=composed_config slo wanted=check"
    ),
    ("tandem", "tandem.sweeps"): (
        "axes=grid base=grid engines grid imports=workers manifest=point point workers"
    ),
    ("tandem", "tandem.wiring"): (
        "budget experiment folder foreign=cost machines made_up=workload openai origin=cost "
        "pace=backends profile provenance=folder quiet=backends setting=run_spec "
        "shortage=budget training training_profile=profile workload worlds=backends"
    ),
    ("analysis", "analysis"): (
        "drift=distance training_pairs=training training_time=training words=verdicts"
    ),
    ("analysis", "analysis.figures"): (
        "figures=run_figures plots policy_style=style style sweep_plots sweep_points timelines "
        "training_plots"
    ),
    ("analysis.experiments", "analysis.figures.experiments"): (
        "adam_placement chunk_size drawn eviction lines link_bandwidth max_scale memory_tide "
        "model_size"
    ),
    ("analysis", "analysis.pages"): (
        "cells class_table=tables pages=tables report sweep_report training_pages=training_tables"
    ),
}
# By name, where a name left its module or has another name there.
NAMES: dict[str, str] = {
    "engine.checks.check_end": "engine.loop.completions.check_end",
    "engine.checks.check_requests": "engine.loop.completions.check_requests",
    "engine.cohort.Behind": "engine.contract.executor.Contexts",
    "engine.decodes.Decodes": "engine.contract.view.RunningDecodes",
    "engine.footprint.Launching": "engine.contract.footprint.LaunchFootprint",
    "engine.regions.aside": "engine.contract.regions.tied_gradient",
    "engine.regions.flow": "engine.contract.regions.input_gradient",
    "engine.reuse.Reuse": "engine.loop.issuing.PrefixReuse",
    "engine.executor.skipped_to": "engine.loop.state.passed_to",
    "engine.executor.VirtualClock": "engine.loop.state.VirtualClock",
    "engine.contract.executor.VirtualClock": "engine.loop.state.VirtualClock",
    "engine.contract.executor.passed_to": "engine.loop.state.passed_to",
    "engine.fleet.Chains": "engine.loop.state.Chains",
    "engine.contract.policy.Chains": "engine.loop.state.Chains",
    "engine.policy.name_of": "engine.contract.rules.name_of",
    "engine.contract.policy.made_at": "engine.contract.rules.made_at",
    "engine.contract.policy.name_of": "engine.contract.rules.name_of",
    "engine.tape.Node": "models.training.tape.BackwardNode",
    "engine.tape_layers.Pass": "models.training.tape_layers.UnitForward",
    "policies.cycle.horizon": "policies.training.cycle.lookahead",
    "policies.out_of_memory.knobs_of_launch": "policies.training.out_of_memory.remedies_of_launch",
    "policies.out_of_memory.knobs_of_states": "policies.training.out_of_memory.remedies_of_states",
    "policies.router.least_loaded": "policies.routing.least_outstanding.shortest_queue",
    "policies.seating.Seating": "policies.kv.paged_allocation.PagedAllocation",
    "policies.seating.SeatingRules": "policies.kv.paged_allocation.PagedRules",
    "sim.late.Late": "sim.cost.scaled.SlowerCopies",
    "sim.cost.forward_shape": "sim.cost.launch_shape.forward_shape",
    "sim.cost.PolicyCost": "sim.cost.policy_cost.PolicyCost",
    "sim.cost.contract.PolicyCost": "sim.cost.policy_cost.PolicyCost",
    "sim.solve.Sample": "sim.fit.solve.Observation",
    "sim.fit.solve.Sample": "sim.fit.solve.Observation",
    "engine.contract.policy.named": "engine.contract.job.named",
    "engine.memory.dry_run.PageDryRun": "engine.memory.pool.PageDryRun",
    "traces.cells.whole": "traces.records.whole_number",
    "traces.files.whole": "traces.files.atomically",
    "traces.arrivals.Recorded": "traces.serving.arrivals.RecordedArrivals",
    "traces.azure.COLUMNS": "traces.serving.published.AZURE_COLUMNS",
    "traces.burstgpt.COLUMNS": "traces.serving.published.BURSTGPT_COLUMNS",
    "traces.rows.Rows": "traces.serving.recorded.RecordRows",
    "traces.recorded_times.Stamps": "traces.serving.recorded_times.RecordedTimes",
    "traces.rules.Rule": "traces.serving.rules.MessageRule",
    "engine.tape.Meter": "models.training.tape.TapeMeter",
    "engine.job.Pace": "engine.contract.job.TokenClock",
    "engine.training.Task": "engine.contract.layout.TrainingTask",
    "engine.training.layout_of": "engine.contract.training_progress.layout_of",
    "engine.training.Training": "engine.contract.training_progress.TrainingProgress",
    "engine.plan.SHARED_OWNER": "engine.contract.regions.SHARED_OWNER",
    "engine.plan.Tier": "engine.contract.regions.Tier",
    "engine.plan.Kind": "engine.contract.regions.Kind",
    "engine.plan.Work": "engine.contract.regions.Work",
    "engine.plan.Pool": "engine.contract.regions.Pool",
    "engine.plan.Region": "engine.contract.regions.Region",
    "engine.plan.Place": "engine.contract.regions.Place",
    "engine.plan.kv_place": "engine.contract.regions.kv_place",
    "engine.plan.PageSize": "engine.contract.regions.PageSize",
    "engine.cohort.Cohort": "engine.fast_forward.decode_batch.DecodeBatch",
    "engine.course.Course": "engine.fast_forward.horizon.Horizon",
    "engine.course.course": "engine.fast_forward.horizon.horizon",
    "engine.recurrence.Step": "engine.fast_forward.recurrence.RecurringStep",
    "engine.repeat.Repeat": "engine.fast_forward.repeated_plan.RepeatedPlan",
    "engine.leg.Leg": "engine.fast_forward.repeated_plan.RunSegment",
    "engine.leg.legs": "engine.fast_forward.repeated_plan.segments",
    "engine.run.Run": "engine.fast_forward.repeated_plan.RepeatedSteps",
    "engine.standing.Standing": "engine.fast_forward.standing_plan.StandingPlan",
    "engine.arrivals.Arrivals": "engine.loop.admission.ArrivalQueue",
    "engine.door.Door": "engine.loop.admission.Admission",
    "engine.questions.Questions": "engine.loop.asking.Asking",
    "engine.ends.Ends": "engine.loop.completions.Completions",
    "engine.leftovers.Leftovers": "engine.loop.completions.DeferredFrees",
    "engine.flights.Flight": "engine.loop.state.IssuedOp",
    "engine.flights.Flights": "engine.loop.state.InFlight",
    "engine.news.News": "engine.loop.state.Wakeup",
    "engine.launcher.Launcher": "engine.loop.issuing.Issuing",
    "engine.roster.Roster": "engine.loop.state.JobLists",
    "engine.profile.Step": "engine.loop.profile.ProfiledStep",
    "engine.balance.Balance": "engine.memory.dry_run.DryRun",
    "engine.trial.Trial": "engine.memory.pool.PageDryRun",
    "engine.returns.ReturnQueue": "engine.memory.pool.FreeQueue",
    "engine.policy.Composed": "policies.composed.Composed",
    "policies.recorded.Recorded": "policies.scheduling.recorded.RecordedPlans",
    "policies.cycle.Link": "policies.training.cycle.CycleLaunch",
    "policies.tide.Tide": "policies.training.patrickstar.StepStatistics",
    "policies.tide.tide_of": "policies.training.patrickstar.statistics_of",
    "policies.tide.Budget": "policies.training.patrickstar.MemoryBudget",
    "sim.fit_training.Recorded": "sim.fit.fit_tables.RecordedTraining",
    "runtime.sse.Limits": "runtime.client.sse.StreamLimits",
    "runtime.sse.Exchange": "runtime.client.sse.HttpExchange",
    "runtime.streams.Work": "runtime.executors.streams.LaneWork",
    "runtime.streams.Mark": "runtime.executors.streams.LaneMark",
    "runtime.driver.Run": "runtime.measure.driver.DrivenRun",
    "runtime.meter.Residency": "runtime.measure.meter.ProcessResidency",
    "runtime.reference.Pace": "runtime.measure.reference.ClockPace",
    "runtime.training_reference.Timed": "runtime.measure.reference.TimedWork",
    "runtime.shapes.Rows": "runtime.measure.shapes.ShapeRows",
    "runtime.shapes.Limits": "runtime.measure.shapes.ShapeLimits",
    "runtime.training_shapes.grid": "runtime.measure.shapes.training_grid",
    "runtime.training_shapes.holdout": "runtime.measure.shapes.training_holdout",
    "runtime.machine.Part": "runtime.serving.machine.LaunchPart",
    "runtime.machine.Machine": "runtime.serving.machine.ServingMachine",
    "runtime.columns.Columns": "runtime.serving.packing.RowColumns",
    "runtime.attention.Segment": "runtime.serving.paged.GatheredDecodes",
    "runtime.attention.Group": "runtime.serving.paged.DecodeGroup",
    "runtime.attention.Chunk": "runtime.serving.paged.PrefillSlice",
    "runtime.attention.Rows": "runtime.serving.paged.AttentionRows",
    "runtime.attention.Scratch": "runtime.serving.paged.Scratch",
    "runtime.training_machine.Trained": "runtime.training.machine.IssuedTraining",
    "runtime.saved.Packed": "runtime.training.saved.PackedTensor",
    "runtime.lane_store.Stay": "runtime.training.store.LaneStay",
    "runtime.store.Store": "runtime.training.store.RegionStore",
    "tandem.family.told": "tandem.cli.plan_command.told_many",
    "tandem.composed.Composed": "tandem.config.composed_config.ComposedConfig",
    "tandem.point.Task": "tandem.sweeps.point.PointTask",
    "tandem.point.Outcome": "tandem.sweeps.point.PointOutcome",
    "tandem.pace.about": "tandem.wiring.cost.about",
    "tandem.profile.COST": "tandem.wiring.cost.COST",
    "tandem.profile.read_cost": "tandem.wiring.cost.read_cost",
    "tandem.profile.device_facts": "tandem.wiring.cost.device_facts",
    "tandem.training_profile.FITTED": "tandem.wiring.profile.FITTED_TRAINING",
    "tandem.training_profile.HELD_OUT": "tandem.wiring.profile.HELD_OUT_TRAINING",
    "tandem.training_profile.judged": "tandem.wiring.profile.judged_training",
    "tandem.family.Foreseen": "tandem.cli.plan_command.PlannedPoint",
    "tandem.family.foreseen": "tandem.cli.plan_command.plan_points",
    "tandem.foresight.Foresight": "tandem.cli.plan_command.PlannedRun",
    "tandem.foresight.foresee": "tandem.cli.plan_command.plan_run",
    "tandem.foresight.largest": "tandem.cli.plan_command.max_layers",
    "tandem.foresight.least_layers": "tandem.cli.plan_command.min_layers",
    "tandem.keys.check_keys": "tandem.config.check.check_unused_keys",
    "tandem.largest.Words": "tandem.cli.terminal.Overrides",
    "tandem.largest.largest_of": "tandem.cli.terminal.largest_model_by_rest",
    "tandem.largest.told_largest": "tandem.cli.terminal.largest_model_lines",
    "tandem.least.least_memory": "tandem.cli.plan_command.min_memory",
    "tandem.least.least_of": "tandem.cli.plan_command.min_budget_of",
    "tandem.least.told_least": "tandem.cli.plan_command.told_min_budget",
    "tandem.made_up.requests": "tandem.wiring.workload.synthetic_requests",
    "tandem.made_up.stream": "tandem.wiring.workload.synthetic_stream",
    "tandem.setting.Setting": "tandem.wiring.run_spec.RunSpec",
    "tandem.setting.setting_of": "tandem.wiring.run_spec.run_spec_of",
    "tandem.wanted.wanted": "tandem.config.check.expected",
    "tandem.worlds.World": "tandem.wiring.backends.Backend",
    "tandem.worlds.world_of": "tandem.wiring.backends.backend_of",
    "analysis.experiments.lines.Axis": "analysis.figures.experiments.lines.FigureAxis",
    "analysis.cells.Table": "analysis.pages.cells.HtmlTable",
    "analysis.class_table.LATENCIES": "analysis.pages.tables.CLASS_LATENCIES",
    "analysis.class_table.COLUMNS": "analysis.pages.tables.CLASS_COLUMNS",
}


# Names without a successor, and what does their work now.
STRETCHED = "the engine repeats plans by itself, where a policy's Traits promise that it may"
GONE: dict[str, str] = {
    "engine.rows.request_row": "engine.results.outcomes.requests_table makes them all",
    "engine.course.Said": STRETCHED,
    "engine.deliveries.Stretch": "a request has Stretches (engine.results.outcomes)",
    "engine.draft.Draft": "write to the `plan` of fit(batch, view, plan)",
    "engine.plan.GrowCycle": STRETCHED,
    "engine.course.decodes_before_prompts": STRETCHED,
    "engine.course.last_said": STRETCHED,
    "engine.jump.offers_jumps": STRETCHED,
    "engine.page_need.Part": STRETCHED,
    "engine.page_need.first_lack": STRETCHED,
    "engine.page_need.parts_of": STRETCHED,
    "engine.plan_walk.check_slice": "the engine checks every slice of a plan by itself",
    "engine.policy.Stretch": STRETCHED,
    "engine.stretch.base_of": STRETCHED,
    "policies.order.in_service": "take view.in_service()",
    "policies.order.known_decodes": "take view.running_decodes()",
}


@cache
def modules() -> Mapping[str, str]:
    """The new name of every module that was moved, by its old name."""
    found = {}
    for (before, after), words in MODULES.items():
        for word in words.split():
            old, _, new = word.partition("=")
            found[f"{before}.{old}"] = f"{after}.{new or old}"
    return found


def current(path: str) -> str:
    """What `MODULE.NAME` is called now: the path itself where it is no earlier name."""
    if path in NAMES:
        return NAMES[path]
    module, _, name = path.rpartition(".")
    return f"{modules()[module]}.{name}" if module in modules() else path


def with_current_targets(node: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose targets, at any depth, have the names of now."""
    return {key: _current_value(key, value) for key, value in node.items()}


def _current_value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return with_current_targets(value)
    if isinstance(value, list):
        return [_current_value("", item) for item in value]
    return current(value) if key == "_target_" and isinstance(value, str) else value


def old_imports(error: BaseException) -> str | None:
    """All imports of old names in the module in which one has failed, each with the new name.

    None for any other error, and where the statement that has failed imports no old name.
    """
    if not isinstance(error, ImportError):
        return None
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        found = dict(_old_imports_in(path)) if path.is_file() else {}
        if any(frame.lineno in lines for lines in found):
            return "; ".join(found.values())
    return None


def _old_imports_in(path: Path) -> Iterator[tuple[range, str]]:
    """The lines of each statement of a Python file that imports old names, and a clause on it."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        if told := dict.fromkeys(clause for name in paths if (clause := _renamed(name))):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            yield lines, f"{ast.unparse(node)} in {path.name}:{node.lineno}: {', '.join(told)}"


def _renamed(path: str) -> str | None:
    """Such as: engine.plan is engine.contract.plan now. None for what is there as it is named."""
    old = path if path in modules() else path.rpartition(".")[0]
    if path in GONE:
        return f"{path} is gone: {GONE[path]}"
    if (path not in NAMES and old not in modules()) or _exists(path):
        return None
    return f"{path} is {NAMES[path]} now" if path in NAMES else f"{old} is {modules()[old]} now"


def _exists(path: str) -> bool:
    """Whether a path is a module of ours, or a name in one."""
    module, _, name = path.rpartition(".")
    with suppress(ImportError):
        if find_spec(path) is not None:
            return True
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False
