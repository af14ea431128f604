"""Service by tenant: what tokens are charged, and how a tenant that comes back is lifted."""

from __future__ import annotations

import pytest

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.progress import restart
from engine.contract.regions import Work
from engine.contract.training_progress import TrainingProgress
from engine.contract.view import ServiceWeights
from engine.loop.service import DeviceService, Service
from tests.policies.finetuning_jobs import finetuning_job
from traces.serving.request import Sample

WEIGHTS = ServiceWeights(1.0, 2.0, 0.5, 0.25)


def request(number: int, tenant: str, prompt: int = 10) -> Job:
    return Job(number, 0, prompt, prompt, tenant=tenant)


def serve(service: DeviceService, job: Job, decodes: int = 0, prompt: int | None = None) -> None:
    """A waiting request computes its prompt, or a part of it, and so many decodes."""
    service.begins(job)
    tokens = job.remaining_tokens if prompt is None else prompt
    job._advance(tokens, tokens == job.remaining_tokens)
    for _ in range(decodes):
        job._advance(1, 1)


def arrive(service: DeviceService, *jobs: Job) -> None:
    for job in jobs:
        service.waits(job)


def test_tokens_are_charged_as_they_are_computed() -> None:
    service, one, other = DeviceService(WEIGHTS), request(0, "a"), request(1, "b", 20)
    arrive(service, one, other)
    assert service.shown() == {"a": 0, "b": 0}
    serve(service, one, decodes=3)
    serve(service, other, prompt=6)
    assert service.shown() == {"a": 10 + 2 * 3, "b": 6}
    service.leaves(one)
    assert service.shown() == {"a": 16, "b": 6}, "what has left stays charged"
    (a, b) = service.rows()
    assert (a.prefill_tokens, a.decode_tokens, b.prefill_tokens, b.decode_tokens) == (10, 3, 6, 0)


def test_the_counters_are_read_only() -> None:
    service = DeviceService(WEIGHTS)
    arrive(service, request(0, "a"))
    with pytest.raises(TypeError):
        service.shown()["a"] = 5.0  # type: ignore[index]


def test_what_a_restart_computes_again_is_a_prompt_and_is_charged_again() -> None:
    service, job = DeviceService(WEIGHTS), request(0, "a")
    arrive(service, job)
    serve(service, job, decodes=3)
    service.waits(job)
    restart(job)
    assert service.shown() == {"a": 16}
    serve(service, job, decodes=1)
    assert service.shown() == {"a": 16 + 14 + 2}, "the prompt, and four tokens of the answer"


def test_tokens_of_kept_pages_cost_nothing() -> None:
    service, job = DeviceService(WEIGHTS), request(0, "a")
    arrive(service, job)
    job._compute_from(4)
    serve(service, job)
    assert service.shown() == {"a": 6}


def test_windows_are_charged_forward_and_back() -> None:
    """Six units: an embedding, four layers and the head, whose backward comes with its forward."""
    service = DeviceService(WEIGHTS)
    progress = TrainingProgress(finetuning_job(7, [Sample(12)], tenant="a"))
    job = Job.trains(progress, 0)
    assert job.tenant == "a"
    service.waits(job)
    service.trains(Slice(job, 12, Work.FORWARD, range(6)))
    assert service.shown() == {"a": 0.5 * 12}
    service.trains(Slice(job, 12, Work.BACKWARD, range(3, 5)))
    assert service.shown() == {"a": 6 + 0.25 * 12 * 2 / 5}
    service.trains(Slice(job, 12, Work.BACKWARD, range(3)))
    assert service.shown() == {"a": pytest.approx(6 + 0.25 * 12)}
    service.trains(Slice(job, 1, Work.UPDATE, range(1)))
    assert service.shown() == {"a": pytest.approx(9)}, "updates cost nothing"
    service.leaves(job)


# ---- a tenant that comes back
def served_long(service: DeviceService, number: int, tenant: str, tokens: int) -> None:
    """A request of a tenant has come and gone."""
    job = request(number, tenant, tokens)
    service.waits(job)
    serve(service, job)
    service.leaves(job)


def test_a_newcomer_is_lifted_to_the_least_that_wait() -> None:
    service = DeviceService(WEIGHTS)
    arrive(service, request(0, "a"))
    served_long(service, 1, "a", 100)
    arrive(service, request(2, "b"))
    served_long(service, 3, "b", 300)
    arrive(service, request(4, "c"))
    assert service.shown() == {"a": 100, "b": 400, "c": 100}
    assert {row.tenant: row.lifted for row in service.rows()} == {"a": 0, "b": 100, "c": 100}


def test_with_nothing_waiting_it_is_lifted_to_the_tenant_that_left_last() -> None:
    service = DeviceService(WEIGHTS)
    served_long(service, 0, "a", 100)
    arrive(service, request(1, "b"))
    assert service.shown() == {"a": 100, "b": 100}


def test_a_tenant_that_waits_is_not_lifted_again() -> None:
    service = DeviceService(WEIGHTS)
    arrive(service, request(0, "a"), request(1, "b"), request(2, "b"))
    served = request(3, "a", 500)
    service.waits(served)
    serve(service, served)
    arrive(service, request(4, "b"))
    assert service.shown() == {"a": 500, "b": 0}, "it has waited all the time, and is owed this"


def test_requests_in_service_alone_save_no_claim() -> None:
    """Its last request is long and cheap; the next one finds it lifted."""
    service, long = DeviceService(WEIGHTS), request(0, "b")
    service.waits(long)
    serve(service, long)
    served_long(service, 1, "a", 500)
    arrive(service, request(2, "a"), request(3, "b"))
    assert service.shown()["b"] == service.shown()["a"] == 510


def test_prompts_in_service_count_whole_where_tenants_are_compared() -> None:
    service, long = DeviceService(WEIGHTS), request(0, "a", 200)
    arrive(service, long, request(1, "a"))
    serve(service, long, prompt=50)
    assert service.shown() == {"a": 50}
    arrive(service, request(2, "b"))
    assert service.shown() == {"a": 50, "b": 200}


def test_a_restart_brings_its_tenant_back_to_the_queue() -> None:
    service, one = DeviceService(WEIGHTS), request(0, "b")
    arrive(service, one)
    serve(service, one)
    served_long(service, 1, "a", 500)
    arrive(service, request(2, "a"))
    service.waits(one)
    restart(one)
    assert service.shown()["b"] == service.shown()["a"]


def test_finetuning_has_a_queue_of_its_own() -> None:
    """A job that trains beside all requests lifts no request, and is lifted by none."""
    service = DeviceService(WEIGHTS)
    served_long(service, 0, "a", 400)
    arrive(service, request(1, "a"))
    jobs = [finetuning_job(i, [Sample(12)], tenant=t) for i, t in ((7, "c"), (8, "d"))]
    first, second = (Job.trains(TrainingProgress(job), 0) for job in jobs)
    service.waits(first)
    service.trains(Slice(first, 12, Work.FORWARD, range(6)))
    assert service.shown()["c"] == 6
    service.waits(second)
    assert service.shown()["d"] == 6
    arrive(service, request(2, "e"))
    assert service.shown()["e"] == 400


def test_a_refused_request_leaves_the_queue() -> None:
    service, refused = DeviceService(WEIGHTS), request(0, "a")
    arrive(service, refused)
    service.leaves(refused)
    served_long(service, 1, "b", 30)
    assert service.shown() == {"a": 0, "b": 30}


def test_replicas_have_counters_of_their_own() -> None:
    service, job = Service(WEIGHTS, 2, has_replicas=True), request(0, "a")
    job._route(1)
    service.of(job).waits(job)
    serve(service.of(job), job)
    assert (dict(service.shown(0)), dict(service.shown(1))) == ({}, {"a": 10})
    assert [(device, row.tenant) for device, row in service.rows()] == [(1, "a")]
    one = Service(WEIGHTS, 2, has_replicas=False)
    assert one.shown(0) == one.shown(1) == {}
