"""Alchemist: which prompts are recorded, by what is known of feedback, and when steps begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from engine.laws.check_policy import WatchedPolicy
from tests.engine.test_records import alchemist, learning, run, through
from tests.policies.finetuning_jobs import finetuning_job
from tests.policies.test_feedback import MS
from tests.support.replays import Replay, random_requests
from traces.serving.request import Request, Sample
from traces.training.recipe import Recipe

pytestmark = pytest.mark.ci


def recorded(found: Replay) -> dict[int, str]:
    """What became of each record, by its request."""
    return {row[0]: row[7] for row in found.recorder.records}


def of_tenants(seed: int) -> list[Request]:
    requests = through(random_requests(seed, 60, rate=300))
    return [replace(r, tenant="ab"[r.request_id % 2]) for r in requests]


def test_the_oracle_records_what_gets_feedback_and_nothing_else() -> None:
    requests = through(random_requests(3, 40, rate=300))
    job = learning(requests, 3, microbatches=8, staleness=100)
    found = run(requests, job, policy=alchemist(record="oracle")).check()
    everything = run(requests, job, policy=alchemist(record="all")).check()
    answered = {sample.request for sample in job.samples}
    assert recorded(found).keys() <= answered
    assert recorded(everything).keys() - answered, "all prompts are recorded there"
    wasted = [status for status in recorded(everything).values() if status != "used"]
    assert sum(status != "used" for status in recorded(found).values()) < len(wasted)


def test_tenants_whose_answers_get_no_feedback_are_not_recorded_once_that_is_known() -> None:
    """A half is assumed of a tenant without an answer; Laplace's rule takes it down from there."""
    requests = of_tenants(5)
    samples = [
        Sample(r.prompt_tokens + r.output_tokens, r.prompt_tokens, MS, r.request_id)
        for r in requests
        if r.tenant == "a"
    ]
    job = finetuning_job(
        1000, samples, learns=True, publish="a", recipe=Recipe(lora_rank=4), microbatches=6,
        num_steps=5, staleness=100,
    )  # fmt: skip

    def of(tenant: str, found: Replay) -> int:
        return sum([requests[request].tenant == tenant for request in recorded(found)])

    threshold = run(requests, job, policy=alchemist(record="threshold", least=0.2)).check()
    everything = run(requests, job, policy=alchemist(record="all")).check()
    assert of("a", threshold) >= of("a", everything) > 20
    assert 0 < of("b", threshold) < of("b", everything) / 2


@pytest.mark.parametrize("delay_ms", [1, 80])
def test_answers_too_young_for_feedback_do_not_count_against_their_tenant(delay_ms: int) -> None:
    """All answers get feedback, which comes long behind the next ones."""
    requests = through(random_requests(5, 60, rate=300))
    samples = [
        Sample(r.prompt_tokens + r.output_tokens, r.prompt_tokens, delay_ms * MS, r.request_id)
        for r in requests
    ]
    job = finetuning_job(
        1000, samples, learns=True, publish="a", recipe=Recipe(lora_rank=4), microbatches=60,
        num_steps=1, until_served=False,
    )  # fmt: skip
    found = run(requests, job, policy=alchemist(record="threshold", least=0.3)).check()
    everything = run(requests, job, policy=alchemist(record="all")).check()
    assert recorded(found).keys() == recorded(everything).keys()
    assert len(recorded(found)) > 40


def counts(found: Replay) -> Mapping[str, int]:
    rows = found.rows("requests")
    return {"restarts": sum([r["restarts"] for r in rows]), "steps": len(found.rows("training"))}


@pytest.mark.parametrize("record", ["all", "threshold", "oracle"])
def test_equal_views_get_equal_plans(record: str) -> None:
    """Also of what is known of feedback; under pressure, with two tenants."""
    requests = [replace(r, output_tokens=2 * r.output_tokens) for r in of_tenants(7)]
    job = learning(requests, 7, microbatches=4, staleness=2)
    watched = WatchedPolicy(alchemist(record=record, least=0.4))
    found = run(requests, job, pages=440, policy=watched).check()
    plain = run(requests, job, pages=440, policy=alchemist(record=record, least=0.4)).check()
    assert found.plan_log() == plain.plan_log() and counts(found)["steps"] == job.num_steps


@pytest.mark.parametrize("wait_ms", [2, 20])
def test_a_step_begins_once_a_sample_has_waited(wait_ms: int) -> None:
    """Though there are not enough samples; with the first plan behind that moment."""
    requests = through(random_requests(5, 40, rate=300))
    job = learning(requests, 5, microbatches=1)
    given = {"samples": 1000, "max_wait_s": wait_ms / 1e3}
    found = run(requests, job, policy=alchemist(record="all", **given)).check()
    came = sorted([at for times in found.recorder._released.values() for at in times])
    first = min([row["start_ns"] for row in found.rows("training")])
    asked = sorted([row[2] for row in found.recorder.plans if row[2] >= came[0] + wait_ms * MS])
    assert first >= came[0] + wait_ms * MS
    assert first <= asked[1], "with the first plan, or behind the launch that is under way then"
