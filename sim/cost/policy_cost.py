"""What policies are quoted: prices of operations before they are issued."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.contract.adapter_check import adapters_of
from engine.contract.executor import Launch, Pieces
from engine.contract.plan import Collective, Copy, Op
from engine.contract.progress import context_of
from engine.contract.regions import Place, Pool, kv_place
from sim.cost.contract import LaunchCost


@dataclass(frozen=True)
class PolicyCost:
    """The engine's Cost for policies: prices an operation before it is issued.

    cost    the cost model of the device
    nbytes  bytes that a place holds now, as the ledger books them
    pace    factor on all durations: a predictor that is wrong on purpose
    """

    cost: LaunchCost
    nbytes: Callable[[Place], int]
    pace: float = 1.0

    @property
    def copy_share(self) -> float:
        """Of its rate, what a copy to or from the host keeps beside a collective of its device."""
        return self.cost.copy_share

    def op_ns(self, op: Op) -> int:
        """Predicted duration of an operation, with its jobs at their present progress.

        Args:
            op: a compute, copy or collective.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost has no price for it.
        """
        if isinstance(op, Copy):
            return self.launch_ns(Launch(op, nbytes=self.nbytes(op.src)))
        if isinstance(op, Collective):
            return self.launch_ns(Launch(op, nbytes=op.nbytes))
        slices = op.slices
        if not op.reads and (reads := adapters_of(slices, op.device)):
            op = replace(op, reads=reads)  # as a plan builder names them
        pieces = Pieces(
            tuple([s.job.job_id for s in slices]),
            tuple([s.tokens for s in slices]),
            tuple([context_of(s) for s in slices]),
            tuple([s.tokens == s.job.remaining_tokens for s in slices]),
            ((),) * len(slices),
        )
        return self.launch_ns(Launch(op, pieces=pieces))

    def copy_ns(self, source: Pool, target: Pool, nbytes: int, contended: bool = False) -> int:
        """Predicted duration of a copy, also of what is not booked yet.

        Args:
            source: the tier and device that it comes from.
            target: those that it goes to.
            nbytes: its size.
            contended: the other direction of the link is busy.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost has no price for it.
        """
        copy = Copy(kv_place(0, *source), kv_place(0, *target))  # prices know directions and bytes
        return round(self.pace * self.cost.copy_ns(Launch(copy, nbytes=nbytes), contended))

    def launch_ns(self, launch: Launch) -> int:
        """Predicted duration of a launch as it was issued.

        Args:
            launch: a compute, copy or collective.

        Returns:
            Nanoseconds.

        Raises:
            ValueError: the cost has no price for it.
        """
        price: Callable[[Launch], int] = self.cost.compute_ns
        if isinstance(launch.op, Copy):
            price = self.cost.copy_ns
        elif isinstance(launch.op, Collective):
            price = self.cost.collective_ns
        return round(self.pace * price(launch))
