"""What a router may know: whom each replica was given, and whom it has not answered yet."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import index
from typing import TYPE_CHECKING

from engine.contract import ContractError
from engine.job import Job
from engine.read_only import ReadOnlyList, as_write

if TYPE_CHECKING:
    from engine.policy import Router


class Fleet:
    """The replicas of a run as those who send requests see them. Only the engine changes it.

    A request is outstanding from its arrival until its last token has been delivered (or it was
    refused): a router learns of an end when the client does.
    """

    def __init__(self, size: int, router: Router) -> None:
        self.assigned: list[int] = ReadOnlyList([0] * size)  # requests so far, by replica
        self._router = router
        self._outstanding: list[dict[int, Job]] = [{} for _ in range(size)]
        self._chains = Chains()

    def __len__(self) -> int:
        return len(self.assigned)

    def outstanding(self, replica: int) -> int:
        """Requests that a replica has not answered yet."""
        return len(self._outstanding[replica])

    def outstanding_tokens(self, replica: int) -> int:
        """Their prompts and what was generated of them so far, as issued: what they need of KV."""
        return sum(job.known_tokens for job in self._outstanding[replica].values())

    def last_with(self, job: Job) -> int | None:
        """The replica that last got the longest chain of blocks that this prompt begins with.

        Token ids name a prompt's full pages, by the keys of the page cache. Where a prompt has
        neither names nor a full page of ids, the turns of its session count as one chain.
        None where no replica got any of it.
        """
        return self._chains.last(_chain(job))

    def assign(self, job: Job) -> None:
        """Routes a job that has just arrived. ValueError where the router names no replica."""
        name = type(self._router).__name__
        try:
            answer = self._router.route(job, self)
        except ContractError as error:
            raise error.located(name) from None
        except (TypeError, AttributeError) as error:
            if (write := as_write(error)) is None:
                raise
            raise write.located(name) from error
        replica = index(answer) if hasattr(answer, "__index__") else -1
        if not 0 <= replica < len(self):
            raise ValueError(
                f"router {name} sends request {job.job_id} to replica {answer!r}, but there are "
                f"{len(self)}: it must name one of 0 to {len(self) - 1}"
            )
        job._route(replica)
        list.__setitem__(self.assigned, replica, self.assigned[replica] + 1)
        self._outstanding[replica][job.job_id] = job
        self._chains.note(_chain(job), replica)

    def left(self, job: Job) -> None:
        """A job was answered or refused."""
        assert job.device is not None, f"job {job.job_id} was never routed"
        del self._outstanding[job.device][job.job_id]


def _chain(job: Job) -> Sequence[Hashable]:
    if job.prefix_ids or job.session is None:
        return job.prefix_ids
    return (("session", job.session),)


class Chains:
    """Chains of block names as a tree; each node knows who got it last."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, Hashable], int] = {}  # (parent, name) -> node
        self._last: list[int] = [-1]  # by node; the root is 0

    def last(self, chain: Sequence[Hashable]) -> int | None:
        """Who got the longest known beginning of a chain last; None where not even one block."""
        node = 0
        for name in chain:
            child = self._nodes.get((node, name))
            if child is None:
                break
            node = child
        return self._last[node] if node else None

    def note(self, chain: Sequence[Hashable], who: int) -> None:
        """Somebody got a chain."""
        node = 0
        for name in chain:
            node = self._nodes.setdefault((node, name), len(self._last))
            if node == len(self._last):
                self._last.append(who)
            self._last[node] = who
