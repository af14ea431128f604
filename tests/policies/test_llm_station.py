"""LLMStation's planner: tasklets by equation 1, evenly spread, and steps in time in the mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.contract.job import Job
from engine.contract.plan import Op
from engine.contract.regions import Work
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import Cost
from engine.laws.check_policy import WatchedPolicy
from policies.scheduling.chunked_prefill import ChunkedPrefill
from policies.sharing.llm_station import LlmStation
from tests.policies.finetuning_jobs import finetuning_job
from tests.policies.test_coserve_slo import (
    PerToken,
    fastest_ns,
    of_sample,
    run,
    step_ns,
    windows_of,
)
from tests.support.states import decoding, view
from traces.serving.request import Sample
from traces.training.recipe import Recipe

NS = 1_000  # of a token


def station(slo_s: float, **given: Any) -> LlmStation:
    given = {"tasklet_tokens": 16, "steps": 10, **given}
    return LlmStation(ChunkedPrefill(64, 12), slo_s, **given)


class PerLaunch(PerToken):
    """A quote of 20 us for each launch, and so long for each token."""

    def op_ns(self, op: Op) -> int:
        return 20_000 + super().op_ns(op)


def carrying(
    slo_s: float,
    requests: int = 4,
    fused: bool = True,
    lora_rank: int | None = 4,
    cost: Cost = PerToken(),  # noqa: B008
) -> list[int]:
    """The numbers of the plans, of 20, that carry a tasklet beside decodes."""
    job = finetuning_job(9, [Sample(400)], recipe=Recipe(lora_rank=lora_rank))
    sample = Job.trains(TrainingProgress(job), 0)
    jobs = [decoding(i, 10) for i in range(requests)]
    state = replace(view(jobs, [], pages=1000), training=[sample], cost=cost)
    scheduling, found = station(slo_s, fused=fused), list[int]()
    for number in range(20):
        batch = scheduling.batch(replace(state, issued=number))
        if any([piece.job.training is not None for piece in batch]):
            found.append(number)
    return found


@pytest.mark.parametrize(
    ("alone_ns", "beside_ns", "slo_s", "count"),
    [
        (40.0, 90.0, 50e-9, 2),  # 10 (50 - 40) 90 / ((90 - 40) 90)
        (40.0, 60.0, 50e-9, 5),
        (40.0, 49.0, 50e-9, 10),
        (40.0, 40.0, 50e-9, 10),
        (50.0, 90.0, 50e-9, 0),
        (60.0, 90.0, 50e-9, 0),
    ],
)
def test_equation_1(alone_ns: float, beside_ns: float, slo_s: float, count: int) -> None:
    assert station(slo_s).tasklets(alone_ns, beside_ns) == count


def test_steps_that_carry_a_tasklet_are_spread_evenly() -> None:
    """Four decodes take 4 us, a tasklet 16 us more: half of the steps within 12 us in the mean."""
    assert carrying(12e-6) == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    assert carrying(20e-6) == [*range(20)]
    assert carrying(5.6e-6) == [9, 19]
    assert carrying(4e-6) == []
    assert carrying(1e-9, requests=0) == [*range(20)], "nothing is served"


@pytest.mark.parametrize(("fused", "lora_rank"), [(False, 4), (True, None)])
def test_a_launch_of_its_own_is_quoted_as_one(fused: bool, lora_rank: int | None) -> None:
    """Four decodes take 24 us, a tasklet 16 us more, or 36 us where it is a launch of its own."""
    assert carrying(32e-6, cost=PerLaunch()) == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    own = carrying(33e-6, fused=fused, lora_rank=lora_rank, cost=PerLaunch())
    assert own == [4, 9, 14, 19], "2 of 10: 10 (33 - 24) / 36 is 2.5"
    assert carrying(60e-6, fused=fused, lora_rank=lora_rank, cost=PerLaunch()) == [*range(20)]


@pytest.mark.parametrize("more", [1.1, 1.4])
def test_steps_are_in_time_in_the_mean(more: float) -> None:
    """A simulation runs as it is quoted; a tasklet has the size that it is given."""
    work = of_sample(120)
    slo_s = more * fastest_ns(work) / 1e9
    watched: list[WatchedPolicy] = []
    recorder, _ = run(station(slo_s), work, watch=watched)
    steps = [(ns, works) for ns, serves, works in step_ns(recorder).values() if serves]
    assert sum([ns for ns, _ in steps]) <= slo_s * 1e9 * len(steps)
    assert {Work.FORWARD} in [works for _, works in steps]
    assert {Work.BACKWARD} in [works for _, works in steps]
    assert max([piece.tokens for piece in windows_of(recorder)]) == 16
    assert all(len(piece.layers or ()) == 1 for piece in back_of(recorder))
    assert watched[0].asked


def back_of(recorder: Any) -> list[Any]:
    return [piece for piece in windows_of(recorder) if piece.work is Work.BACKWARD]


def test_more_time_is_more_finetuning() -> None:
    work = of_sample(120)
    fast_s = fastest_ns(work) / 1e9
    tokens = list[int]()
    for more in (1.02, 1.2, 2.0):
        recorder, _ = run(station(more * fast_s), work)
        own = [piece for piece in windows_of(recorder) if piece.work is Work.FORWARD]
        tokens.append(sum([piece.tokens for piece in own]))
    assert tokens[0] < tokens[2] and tokens == sorted(tokens)


def test_wrong_settings_are_told() -> None:
    for name in ("tasklet_tokens", "steps"):
        with pytest.raises(ValueError, match=f"LLMStation: {name} is 0, must be above 0"):
            station(1.0, **{name: 0})
    with pytest.raises(ValueError, match=r"slo_s is 0\.0, must be above 0"):
        station(0.0)
