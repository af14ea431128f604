"""Service by tenant: the tokens that jobs were charged as issued, for `View.service`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from engine.contract.job import Job
from engine.contract.plan import Slice
from engine.contract.regions import Work
from engine.contract.view import ServiceWeights


class TenantService(NamedTuple):
    """What a tenant has got on a device.

    Attributes:
        tenant: its name.
        prefill_tokens: prompt tokens that were computed, also those that a restart repeats.
        decode_tokens: tokens that decodes computed.
        forward_tokens: tokens of training that went forward through all units.
        backward_tokens: tokens of training that went back through all units that gradients pass.
        charged: the weighted sum of these.
        lifted: what was added where the tenant came back to a queue.
    """

    tenant: str
    prefill_tokens: int
    decode_tokens: int
    forward_tokens: float
    backward_tokens: float
    charged: float
    lifted: float


@dataclass(slots=True)
class _Account:
    """What a tenant has got by jobs that are in service no more, and by training."""

    prefill: int = 0
    decode: int = 0
    forward: float = 0.0
    backward: float = 0.0
    lift: float = 0.0


class _Begun(NamedTuple):
    """A request in service: from which of its tokens on it is charged, as prompt and as decode."""

    job: Job
    start: int
    prompt: int


class _Queue:
    """Tenants with waiting jobs of one kind, and the tenant whose job left the queue last."""

    def __init__(self) -> None:
        self.waiting: Counter[str] = Counter()
        self.last: str | None = None

    def leave(self, tenant: str) -> None:
        """A job of a tenant waits no more."""
        self.waiting[tenant] -= 1
        if not self.waiting[tenant]:
            del self.waiting[tenant]
        self.last = tenant


class DeviceService:
    """The virtual token counters of a device (Sheng et al., OSDI 2024, algorithm 2).

    Tokens count when they are issued. What a request in service has got is read off its progress,
    so steps that are issued as one need no account of their own. A tenant whose request comes to
    a queue without another of its own is lifted to the least of the tenants that wait there; to the
    tenant that left last where none waits. So time in which a tenant asks for nothing gives it no
    claim. Tenants are compared as if the prompts in service were computed whole, as the paper
    charges them. Finetuning has a queue of its own, which jobs leave at their end.

    Args:
        weights: of the tokens.
    """

    def __init__(self, weights: ServiceWeights) -> None:
        self._weights = weights
        self._accounts: dict[str, _Account] = {}
        self._begun: dict[int, _Begun] = {}
        self._requests, self._training = _Queue(), _Queue()

    # ---- what happens to jobs
    def waits(self, job: Job) -> None:
        """A job has arrived, or waits again because it lost its keys and values."""
        if job.job_id in self._begun:
            self._settle(job)
        queue = self._requests if job.training is None else self._training
        account = self._accounts.setdefault(job.tenant, _Account())
        if job.tenant not in queue.waiting:
            known = self._with_prompts()
            least = min([known[tenant] for tenant in queue.waiting], default=None)
            if least is None and queue.last is not None:
                least = known[queue.last]
            if least is not None and known[job.tenant] < least:
                account.lift += least - known[job.tenant]
        queue.waiting[job.tenant] += 1

    def begins(self, job: Job) -> None:
        """A job enters service, perhaps behind tokens of kept pages."""
        if job.training is None:
            self._requests.leave(job.tenant)
            self._begun[job.job_id] = _Begun(job, job.computed_tokens, job.known_tokens)

    def leaves(self, job: Job) -> None:
        """A job leaves: served, trained, refused or stopped."""
        if job.training is not None:
            self._training.leave(job.tenant)
        elif job.job_id in self._begun:
            self._settle(job)
        else:
            self._requests.leave(job.tenant)

    def trains(self, piece: Slice) -> None:
        """A slice of training is issued. Updates and what is computed again are not charged."""
        training, account = piece.job.training, self._accounts[piece.job.tenant]
        assert training is not None, f"job {piece.job.job_id} does not train"
        units = training.spec.num_units
        count = units if piece.layers is None else len(piece.layers)
        if piece.work is Work.FORWARD:
            account.forward += piece.tokens * count / units
        elif piece.work is Work.BACKWARD:  # of a window, the head's comes with its forward
            own = units - training.first - training.spec.finetunes
            account.backward += piece.tokens * min(count, own) / own

    def _settle(self, job: Job) -> None:
        """A request is in service no more."""
        prefill, decode = _computed(self._begun.pop(job.job_id))
        account = self._accounts[job.tenant]
        account.prefill += prefill
        account.decode += decode

    def _with_prompts(self) -> dict[str, float]:
        """The counter of each tenant, as if the prompts in service were computed."""
        found, left = dict(self.shown()), Counter[str]()
        for job, _, prompt in self._begun.values():
            left[job.tenant] += max(0, prompt - job.computed_tokens)
        for tenant, tokens in left.items():
            found[tenant] += self._weights.prefill * tokens
        return found

    # ---- what is told
    def shown(self) -> Mapping[str, float]:
        """The counter of each tenant that has had a job here, read-only."""
        found = {row.tenant: row.charged + row.lifted for row in self.rows()}
        return MappingProxyType(found)

    def rows(self) -> list[TenantService]:
        """What each tenant has got so far, in the order of their first jobs.

        Whole tokens are added up before they are weighed: the sums do not depend on the order in
        which jobs end, or on how many steps were issued as one.
        """
        prefill = {tenant: account.prefill for tenant, account in self._accounts.items()}
        decode = {tenant: account.decode for tenant, account in self._accounts.items()}
        for begun in self._begun.values():
            own = _computed(begun)
            prefill[begun.job.tenant] += own[0]
            decode[begun.job.tenant] += own[1]
        weights, found = self._weights, list[TenantService]()
        for tenant, account in self._accounts.items():
            tokens = prefill[tenant], decode[tenant], account.forward, account.backward
            charged = weights.prefill * tokens[0] + weights.decode * tokens[1]
            charged += weights.forward * tokens[2] + weights.backward * tokens[3]
            found.append(TenantService(tenant, *tokens, charged, account.lift))
        return found


def _computed(begun: _Begun) -> tuple[int, int]:
    """Tokens that a request in service has got, of its prompt and by decodes."""
    job, start, prompt = begun
    done = job.computed_tokens
    return max(0, min(done, prompt) - start), max(0, done - prompt)


class Service:
    """The service of all devices. Each replica has counters of its own.

    Jobs that belong to no replica count on device 0.

    Args:
        weights: of the tokens.
        devices: how many there are.
        has_replicas: whether each device serves requests of its own.
    """

    def __init__(self, weights: ServiceWeights, devices: int, has_replicas: bool) -> None:
        self._has_replicas = has_replicas
        self._devices = [DeviceService(weights) for _ in range(devices if has_replicas else 1)]

    def of(self, job: Job) -> DeviceService:
        """The counters of a job's device."""
        return self._devices[(job.device or 0) if self._has_replicas else 0]

    def shown(self, device: int) -> Mapping[str, float]:
        """See `View.service`."""
        return self._devices[device if self._has_replicas else 0].shown()

    def rows(self) -> list[tuple[int, TenantService]]:
        """What each tenant has got on each device."""
        return [(device, row) for device, own in enumerate(self._devices) for row in own.rows()]
