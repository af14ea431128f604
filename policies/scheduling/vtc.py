"""Fair service over tenants: a virtual token counter each, and the smallest is served first."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from math import inf

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.policy import Scheduling, Traits, traits_of
from engine.contract.view import ServiceWeights, View


@dataclass(frozen=True)
class Vtc:
    """Virtual token counter (Sheng et al., OSDI 2024, "Fairness in Serving LLMs", algorithm 2).

    Another scheduling forms the batches. It is shown waiting requests by the counters of their
    tenants in place of their arrival: the next one is the first of the tenant with the smallest
    counter, to which its whole prompt is added before the one behind it is chosen. Prompts of
    requests in service count whole as well, so a counter is as high as at their admission.

    Of two tenants that always have a request waiting, neither gets more service than the other by
    2 max(prefill x longest prompt, decode x tokens of KV) over any stretch of time, where KV is
    reserved for whole answers (theorem 4.4 of the paper). Within a tenant first come is first
    served; without tenants it is as without this scheduling.

    Args:
        serving: forms the batches, of waiting requests in the order in which it is shown them; one
            that sorts by arrival, as Orca does, is first come, first served all the time.
        prefill: what a prompt token adds to the counter of its tenant.
        decode: what a token of an answer adds.
        forward: what a token of a finetuning job adds that goes forward.
        backward: what a token of a finetuning job adds that goes back.

    Raises:
        ValueError: a weight is below 0, or both of serving are 0.
    """

    serving: Scheduling
    prefill: float = 1.0
    decode: float = 2.0
    forward: float = 1.0
    backward: float = 1.0

    def __post_init__(self) -> None:
        for name, weight in self.weights._asdict().items():
            if not 0 <= weight < inf:
                raise ValueError(f"virtual token counter: {name} is {weight}, must be at least 0")
        if not self.prefill + self.decode:
            raise ValueError("virtual token counter: prefill and decode are 0: nothing counts")

    @property
    def weights(self) -> ServiceWeights:
        """What each token adds."""
        return ServiceWeights(self.prefill, self.decode, self.forward, self.backward)

    @property
    def traits(self) -> Traits:
        """The bounds of the scheduling that forms the batches, and the weights of tokens."""
        serving = traits_of(self.serving)
        return Traits(
            step_tokens=serving.step_tokens,
            prompt_tokens=serving.prompt_tokens,
            max_jobs=serving.max_jobs,
            service=self.weights,
        )

    def batch(self, view: View) -> Sequence[Slice]:
        most = traits_of(self.serving).max_jobs
        room = most - len(view.serving) if most else len(view.waiting)
        if room <= 0 or len(view.waiting) < 2:  # no order matters, and nothing that moves is read
            return self.serving.batch(view)
        if view.service is None:
            raise ValueError(
                "virtual token counter: no service is counted; a scheduling around it passes on "
                "Traits(service=...)"
            )
        begun = [job for job in view.serving if job.is_prefilling]
        order = by_counter(view.waiting, view.service, begun, self.prefill)
        first = [job for job, _ in zip(order, range(room), strict=False)]
        chosen = {job.job_id for job in first}
        rest = [job for job in view.waiting if job.job_id not in chosen]
        return self.serving.batch(replace(view, waiting=[*first, *rest]))


def by_counter(
    waiting: Sequence[Job], service: Mapping[str, float], begun: Sequence[Job], prefill: float
) -> Iterator[Job]:
    """Waiting requests, each the first of the tenant that has the smallest counter by then.

    Args:
        waiting: requests in the order of arrival; restarted ones come first.
        service: the counters of tenants.
        begun: requests in service whose prompts are not computed yet.
        prefill: what a prompt token adds to a counter.

    Yields:
        Each request once. Of equal counters that of the first request in `waiting` is taken.
    """
    counters = defaultdict[str, float](float, service)
    for job in begun:
        counters[job.tenant] += prefill * job.remaining_tokens
    queues: dict[str, deque[tuple[int, Job]]] = {}
    for place, job in enumerate(waiting):
        queues.setdefault(job.tenant, deque()).append((place, job))
    heads = [(counters[tenant], queue[0][0], tenant) for tenant, queue in queues.items()]
    heapify(heads)
    while heads:
        counter, _, tenant = heads[0]
        queue = queues[tenant]
        _, job = queue.popleft()
        yield job
        if not queue:
            heappop(heads)
            continue
        heapreplace(heads, (counter + prefill * job.remaining_tokens, queue[0][0], tenant))
