"""Hand-made states for tests of policies: jobs, views and what a policy makes of them."""

from __future__ import annotations

from typing import Any

from engine.contract.job import Job
from engine.contract.layout import Layout
from engine.contract.plan import Plan
from engine.contract.policy import Memory, Scheduling
from engine.contract.regions import SHARED_OWNER, Kind, PageSize, Place, Region, Tier, kv_place
from engine.contract.view import View
from engine.loop.profile import EngineProfile
from engine.memory.dry_run import DryRunPlanBuilder
from policies.kv.paged_restart import PagedRestart

PAGE = PageSize(tokens=4, nbytes=4000)
POOL, HOST = (Tier.GPU, 0), (Tier.HOST, 0)
V1 = PagedRestart(watermark=0.0, prompts="must_fit", gives_way=True)
V0 = PagedRestart(watermark=0.01, prompts="reserved", spare_pages=1, gives_way=True)


def job(
    job_id: int, prompt: int, computed: int = 0, known: int = 0, arrival_ns: int = 0, slo: str = ""
) -> Job:
    return Job(job_id, arrival_ns, prompt, known or prompt, computed, slo=slo)


def decoding(job_id: int, computed: int, **given: Any) -> Job:
    """A job that has generated one token or more behind `computed`."""
    return job(job_id, min(computed, 8), computed, computed + 1, **given)


def view(
    serving: list[Job],
    waiting: list[Job],
    pages: int = 100,
    held: dict[int, int] | None = None,
    weight_bytes: int = 0,
) -> View:
    """A state of one device; `held`: pages by job, those of the computed tokens unless given."""
    if held is None:
        held = {j.job_id: PAGE.count(j.computed_tokens) for j in serving if j.computed_tokens}
    places = {kv_place(i): n * PAGE.nbytes for i, n in held.items()}
    free = pages * PAGE.nbytes - sum(places.values())
    assert free >= 0, "the state holds more than there is"
    weights = {Place(Region(SHARED_OWNER, Kind.WEIGHT), Tier.GPU, 0): weight_bytes}
    return View(
        now_ns=0,
        device=0,
        issued=0,
        serving=serving,
        training=[],
        waiting=waiting,
        free_bytes={POOL: free, HOST: 0},
        coming_bytes={POOL: 0, HOST: 0},
        held_bytes=places | weights,
        written={},
        used={},
        in_flight=(),
        capacity_bytes={POOL: pages * PAGE.nbytes + weight_bytes, HOST: 0},
        page=PAGE,
        profile=EngineProfile(),
        layout=Layout(weights),
    )


def sliced(scheduling: Scheduling, state: View) -> list[tuple[int, int]]:
    return [(piece.job.job_id, piece.tokens) for piece in scheduling.batch(state)]


def fitted(scheduling: Scheduling, memory: Memory, state: View) -> Plan:
    plan = DryRunPlanBuilder(state)
    memory.fit(scheduling.batch(state), state, plan)
    return plan.plan()


def seated(plan: Plan) -> list[tuple[int, int]]:
    return [(s.job.job_id, s.tokens) for op in plan.ops for s in getattr(op, "slices", ())]


def ids(jobs: tuple[Job, ...]) -> list[int]:
    return [j.job_id for j in jobs]
