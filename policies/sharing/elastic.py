"""Training of whole microbatches under keys and values that breathe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from engine.contract.plan import Slice
from engine.contract.policy import Memory, PlanBuilder, Traits, traits_of
from engine.contract.regions import Kind, Pool, Tier
from engine.contract.rules import Remedy
from engine.contract.view import View
from policies.sharing.time_shared import of_both_sides, side_of, within_shares
from policies.training.out_of_memory import OutOfMemory
from policies.training.residency import Residency


class Resident(Memory, Protocol):
    """A memory policy of training that tells what it can evict, and in which order."""

    def resident(self, view: View, plan: PlanBuilder) -> Residency:
        """What training has on the device when a plan begins.

        Args:
            view: what the policy may know.
            plan: takes the evictions.

        Returns:
            Its evictions are those that the policy itself would make.
        """


@dataclass(frozen=True)
class ElasticMemory:
    """Keys and values rise and fall, and what training has on the device gives way to them.

    Serving is planned as if the device lacked nothing that training can evict. Where it takes such
    bytes, chunks and offloaded activations leave for the host, in the order of the training policy.
    Training is planned in what keys and values leave, and waits for these to fall where a launch
    finds no room. To PatrickStar they are memory beside chunks, as activations are (Fang et al.,
    TPDS'23: the tide of non-model data). No request is preempted for training that can leave;
    activations that stay on the device, and launches in flight, cannot.

    The host is divided: evictions need room there that swapped requests do not take.

    Args:
        serving: memory policy of the requests.
        training: memory policy of the training jobs.
        host_share: of the host, for training.

    Raises:
        ValueError: `host_share` is not in [0, 1], or the training policy evicts nothing.
        OutOfMemory: from `fit`, a training launch can never fit.
    """

    serving: Memory
    training: Resident
    host_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.host_share <= 1:
            raise ValueError(f"elastic memory: host_share is {self.host_share}, must be in [0, 1]")
        if not hasattr(self.training, "resident"):
            name = type(self.training).__name__
            raise ValueError(
                f"elastic memory: {name} evicts nothing from the device for others; take "
                "PatrickStar, ProTrain, ZeRO-3, FSDP2 or paging on demand, or divide the memory"
            )

    @property
    def traits(self) -> Traits:
        """What is told of KV as serving has it, and of model states as training has it."""
        return of_both_sides(traits_of(self.serving), traits_of(self.training))

    def fit(self, batch: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        lack: OutOfMemory | None = None
        for trains in dict.fromkeys([_trains(piece) for piece in batch]):
            own = tuple([piece for piece in batch if _trains(piece) is trains])
            if trains:
                lack = self._train(own, view, plan)
            else:
                self._serve(own, view, plan)
            if plan:
                return
        if lack is not None and not view.in_flight:  # nothing will come back
            raise lack

    def _side(self, view: View, trains: bool) -> View:
        """One side, with its share of the host and the whole of the device."""
        return within_shares(side_of(view, trains), view, trains, self._shares)

    @property
    def _shares(self) -> Mapping[Tier, float]:
        return {Tier.HOST: self.host_share}

    def _train(self, own: tuple[Slice, ...], view: View, plan: PlanBuilder) -> OutOfMemory | None:
        """Writes a plan that trains. OutOfMemory that it returns may pass when KV falls."""
        side = self._side(view, trains=True)
        within = plan.within(_room_on_host(side))
        try:
            self.training.fit(own, side, within)
        except OutOfMemory as error:
            within.discard()
            if not any([place.region.kind is Kind.KV for place in view.held_bytes]):
                raise error.with_first(*_of_share(error)) from error
            return error
        return None

    def _serve(self, own: tuple[Slice, ...], view: View, plan: PlanBuilder) -> None:
        """Writes a plan that serves, behind the evictions that it needs."""
        side, trained = self._side(view, trains=False), self._side(view, trains=True)
        pool: Pool = (Tier.GPU, view.device)
        device = self.training.resident(trained, plan.within(_room_on_host(trained)))
        nbytes = device.evictable_bytes()
        if not nbytes:
            self.serving.fit(own, side, plan.within(_room_on_host(side)))
            return

        def make_room(pool: Pool, nbytes: int) -> None:
            device.give_way(nbytes)

        free = {**side.free_bytes, pool: side.free_bytes[pool] + nbytes}
        room = {**_room_on_host(side), pool: plan.room(pool) + nbytes}
        self.serving.fit(own, replace(side, free_bytes=free), plan.within(room, make_room))


def _room_on_host(side: View) -> dict[Pool, int]:
    return {pool: side.room(pool) for pool in side.free_bytes if pool[0] is Tier.HOST}


def _of_share(error: OutOfMemory) -> tuple[Remedy, ...]:
    """A larger share helps where the host is short, which alone is divided."""
    return (Remedy.LARGER_SHARE,) if error.pool[0] is Tier.HOST else ()


def _trains(piece: Slice) -> bool:
    return piece.job.training is not None
