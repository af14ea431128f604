"""A model of ProTrain's step: its time and its peak for many configurations at once.

The paper gives closed forms (section 5, equations 2 to 11, as read by others): sums of the larger
of computation and copies. Here lanes are followed launch by launch instead, since the sums err by
the fill of the pipeline, by copies that wait for updates, and by the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engine.contract.layout import Mode
from engine.contract.plan import COMPUTE_LANE, HOST_LANE, NET_LANE
from policies.planners.step_memory import MODES, NEVER, Ints, StepMemory
from policies.planners.step_quotes import QuotedCopy

Bools = npt.NDArray[np.bool_]
STEPS = 3  # that are followed: the last one begins as all later ones do


@dataclass(frozen=True)
class StepModel(StepMemory):
    """Time and peak of a step on one device, for arrays of configurations. See StepMemory."""

    def bounds_ns(self, persistent: Ints, buffers: Ints) -> Ints:
        """Lower bounds of a step: what its busiest lane does in it.

        Args:
            persistent: chunks of blocks that persist.
            buffers: other chunks with weights on the device.

        Returns:
            Nanoseconds, by placement and configuration.
        """
        lanes = self.lanes_ns(persistent, buffers)
        return np.asarray(np.maximum.reduce(np.broadcast_arrays(*lanes.values())), np.int64)

    def lanes_ns(self, persistent: Ints, buffers: Ints) -> dict[str, Ints]:
        """What each lane does in a step, at the least: copies as if they met no others.

        Args:
            persistent: chunks of blocks that persist.
            buffers: other chunks with weights on the device.

        Returns:
            By the name of the lane, nanoseconds by placement and configuration.
        """
        quotes, own, modes = self.quotes, self.blocks.chunks, self.placements.modes
        job, layout = quotes.job, quotes.layout
        fields = ("forward_ns", "again_ns", "backward_ns")
        tables = np.array([[[getattr(u, f) for u in quotes.units[m]] for m in MODES]
                           for f in fields]).sum(0)  # fmt: skip
        launches = tables[modes, np.arange(len(layout.units))].sum(1) * job.microbatches
        always = [q.device_ns for c, q in enumerate(quotes.chunks) if c not in own]
        chunks = [quotes.chunks[c] for c in own]

        def from_first(each: Sequence[int]) -> Ints:
            return np.asarray(np.cumsum([0, *each]), np.int64)

        here = from_first([c.device_ns for c in chunks])[persistent] + sum(always)
        host = from_first([c.host_ns or 0 for c in chunks])
        out = from_first([c.out.alone_ns for c in chunks])
        load = from_first([c.load.alone_ns for c in chunks])
        away = self.leaves_at < NEVER
        swaps = [[quotes.swap(u, is_out).alone_ns for u in range(len(layout.units))]
                 for is_out in (True, False)]  # fmt: skip
        sent, came = (away @ np.array(each, np.int64) * job.microbatches for each in swaps)
        passing = len(own) - persistent
        loads = np.where(self._is_frozen, 0, load[-1] - load[persistent])  # each once
        least = min([c.load.alone_ns for c in chunks], default=0)
        again = np.maximum(0, passing - np.minimum(buffers, passing)) * least  # not at the turn
        gathers = [c.gather_ns for c in chunks]
        apart = (
            persistent + np.maximum(0, passing - buffers) - 1
        )  # gathered once more, on the way back
        net = np.maximum(0, apart) * min(gathers, default=0) * job.microbatches
        net += 0 if self._is_frozen else sum(gathers)
        reduced = [(unit[False] or 0) * (job.microbatches - 1) + (unit[True] or 0)
                   for unit in self.reduced_ns]  # fmt: skip
        return {
            NET_LANE: (net + sum(reduced))[None, :] + 0 * launches[:, None],
            COMPUTE_LANE: launches[:, None] + here[None, :],
            HOST_LANE: (host[-1] - host[persistent])[None, :] + 0 * launches[:, None],
            "gpu->host": sent[:, None] + (out[-1] - out[persistent])[None, :],
            "host->gpu": came[:, None] + loads[None, :] + again[None, :],
        }

    @cached_property
    def reduced_ns(self) -> list[tuple[int | None, int | None]]:
        """By unit, what its backward has added up over the group: of an earlier microbatch, and of
        the last one; None where nothing is."""
        layout, found = self.quotes.layout, list[tuple[int | None, int | None]]()
        for unit, own in enumerate(layout.units):
            ends = [
                c for c in own.trained if not any([c in u.trained for u in layout.units[:unit]])
            ]
            parts = [c for c in ends if layout.chunks[c].remote_bytes]  # else once a step
            sums = [sum([self.quotes.chunks[c].reduce_ns for c in each]) if each else None
                    for each in (parts, ends)]  # fmt: skip
            found.append((sums[0], sums[1]) if layout.ranks > 1 else (None, None))
        return found

    @cached_property
    def _is_frozen(self) -> bool:
        """Whether weights in buffers stay from step to step, since none trains."""
        layout = self.quotes.layout
        return not any([layout.chunks[c].trains for c in self.blocks.chunks])

    def step_ns(self, persistent: Ints, buffers: Ints, placement: Ints) -> Ints:
        """Nanoseconds of a step in the middle of training.

        Args:
            persistent: chunks of blocks that persist.
            buffers: other chunks with weights on the device.
            placement: indices into the placements.

        Returns:
            Nanoseconds, the shape of the arguments.
        """
        lanes = _Lanes(self, persistent, buffers, placement)
        ends = [lanes.step() for _ in range(STEPS)]
        before, after = list(pairwise(ends))[-1]
        return np.asarray(after - before, np.int64)


class _Lanes:
    """The lanes of a device while steps are followed, for arrays of configurations."""

    def __init__(self, model: StepModel, persistent: Ints, buffers: Ints, placement: Ints) -> None:
        self._model, self._persistent = model, persistent
        self._modes = model.placements.modes[placement]
        self._leaves = model.leaves_at[placement] < NEVER
        self._quotes, self._layout = model.quotes, model.quotes.layout
        self._count = count = len(model.blocks.chunks)
        self._buffers = np.minimum(buffers, count - persistent)
        zero = np.zeros(len(persistent), np.int64)
        self._index = np.arange(len(persistent))
        self._compute, self._gates = zero, (zero, zero)  # ends of the last two plans
        self._in, self._out, self._host, self._net = zero, zero, zero, zero
        # Of the newest collectives: a copy meets those of a turn or two, a gather and a reduction.
        self._begins = self._ends = np.zeros((8, len(zero)), np.int64)
        self._summed = zero  # end of the last reduction of gradients
        self._arrived = np.zeros((max(1, count), len(persistent)), np.int64)
        self._made = np.zeros((max(1, count), len(persistent)), np.int64)
        self._outs = [zero] * (model.gradients_out + 1)
        self._swapped_out, self._swapped_in = dict[int, Ints](), dict[int, Ints]()
        self._came_back = dict[int, Ints]()
        every = range(len(self._layout.chunks))
        self._gathered = {c: zero for c in every}  # when a chunk's parts of other devices came
        self._is_whole = {c: np.zeros(len(zero), np.bool_) for c in every}
        self._tables = {
            field: np.array([[getattr(u, field) for u in self._quotes.units[m]] for m in MODES])
            for field in ("forward_ns", "again_ns", "backward_ns")
        }
        self._moment = 0
        self._fetched = model.fetched_at()
        loads = [self._quotes.chunks[c].load for c in model.blocks.chunks] or [QuotedCopy(0, 0)]
        self._loads = np.array(loads, np.int64)

    def step(self) -> Ints:
        """Follows one step; returns when its last launch on the device ends."""
        layout, job = self._layout, self._quotes.job
        eager = job.has_update and job.recipe.clip_norm is None
        units = range(len(layout.units))
        for k in range(job.microbatches):
            is_last, self._moment = k == job.microbatches - 1, 0
            for u in units:
                self._forward(u, k)
            for u in reversed(units[layout.first :]):
                self._backward(u, k, eager and is_last)
        if job.has_update and not eager:
            own = self._model.blocks.chunks
            for c, chunk in enumerate(layout.chunks):
                if c in own:
                    self._update(own.index(c), self._compute)
                elif chunk.trains:
                    self._update_here(c)
        return self._compute

    # ---- launches
    def _run(self, ns: Ints, *waits: Ints, is_plan: bool = True) -> Ints:
        """A launch on the device; returns when its plan was issued: two plans are in flight."""
        issued = self._gates[0]
        start = np.maximum(self._compute, issued)
        for wait in waits:
            start = np.maximum(start, wait)
        self._compute = start + ns
        if is_plan:
            self._gates = (self._gates[1], self._compute)
        return issued

    def _of(self, field: str, unit: int) -> Ints:
        found: Ints = self._tables[field][:, unit][self._modes[:, unit]]
        return found

    def _weights(self, unit: int) -> Ints:
        """When the weights of a unit are on the device."""
        found = self._arrived_or_here(self._model.position.get(unit))
        for c in self._layout.units[unit].chunks if self._layout.ranks > 1 else ():
            found = np.maximum(found, self._gathered[c])
        return found

    def _forward(self, u: int, k: int) -> None:
        at, above = self._model.position.get(u), self._model.position.get(u + 1)
        self._gather(u, self._gates[0])
        issued = self._run(self._of("forward_ns", u), self._weights(u))
        if u in self._model.blocks.units:
            self._swap_out(u)
        if above is not None:
            self._enter_forward(-1 if at is None else at, above, issued)
        following = u + 1 if u + 1 < len(self._layout.units) else u
        top = self._count - self._buffers
        self._drop_gathered(u, following, top)
        self._end_turn(issued, following, adds=k > 0 and following == u)

    def _backward(self, u: int, k: int, updates: bool) -> None:
        layout, model = self._layout, self._model
        is_last = k == self._quotes.job.microbatches - 1
        following = u - 1 if u > layout.first else None if is_last else 0
        at, ends = model.position.get(u), model.last_adder(u)
        is_again = self._modes[:, u] == MODES.index(Mode.RECOMPUTE)
        issued = self._gates[0]
        self._gather(u, issued)
        weights = self._weights(u)
        if is_again.any():
            before = self._compute
            self._run(self._of("again_ns", u), weights, is_plan=False)
            self._compute = np.where(is_again, self._compute, before)
            if following is not None:  # what is here already is gathered ahead of the reduction
                self._gather(following, issued, is_again & self._is_in_window(u, following))
        waits = [weights]
        if u in self._swapped_in:
            waits.append(self._swapped_in.pop(u))
        trains = bool(layout.units[u].trained)
        if trains and at is not None:
            waits.append(np.where(at >= self._persistent, self._outs[0], 0))
        back = self._came_back.pop(u, self._compute)
        if self._layout.ranks == 1:
            waits.append(back)
        self._run(self._of("backward_ns", u), *waits)
        ready = self._reduced(u, is_last, back)
        if trains:
            self._outs = [*self._outs[1:], self._gradients_out(ends, ready)]
        below = model.position.get(u - 1)
        if at is not None and below is not None and below < at:
            self._enter_backward(below, issued)
        stays = self._persistent + self._buffers
        self._drop_gathered(u, following, self._count if is_last else 0, 0 if is_last else stays)
        self._end_turn(issued, following, adds=k > 0 and following == u - 1)
        if updates:
            if ends is not None:
                self._update(ends, self._outs[-1])
            self._update_others(u)

    def _update(self, at: int, ready: Ints) -> None:
        """The update of a chunk of blocks, on the device where it persists."""
        chunk = self._quotes.chunks[self._model.blocks.chunks[at]]
        if not self._layout.chunks[self._model.blocks.chunks[at]].trains:
            return
        persists = at < self._persistent
        before, gates = self._compute, self._gates
        self._run(np.where(persists, chunk.device_ns, 0), self._summed)
        self._compute = np.where(persists, self._compute, before)
        self._gates = tuple([np.where(persists, new, old)
                             for new, old in zip(self._gates, gates, strict=True)])  # type: ignore[assignment]  # fmt: skip
        host = np.maximum(self._host, ready) + (chunk.host_ns or 0)
        self._host = np.where(persists, self._host, host)
        self._made[at] = np.where(persists, 0, self._host)
        self._is_whole[self._model.blocks.chunks[at]][:] = False  # its parts are old now
        is_next = ~persists & (at - self._persistent < self._buffers)
        self._load(np.full(len(persists), at), is_next, self._gates[0])

    def _update_here(self, chunk: int) -> None:
        self._run(np.full(len(self._index), self._quotes.chunks[chunk].device_ns), self._summed)
        self._is_whole[chunk][:] = False

    def _update_others(self, unit: int) -> None:
        """Updates of embedding, head and adapters, on the device."""
        layout, own = self._layout, self._model.blocks.chunks
        for c in layout.units[unit].trained:
            users = [u for u, x in enumerate(layout.units) if c in x.trained]
            if c not in own and min(users) == unit:
                self._update_here(c)

    # ---- copies
    def _copied(self, start: Ints, other: Ints, alone: Ints | int, contended: Ints | int) -> Ints:
        """When a copy ends, beside one the other way until `other`, and beside collectives."""
        ns, share = np.where(other > start, contended, alone), self._quotes.cost.copy_share
        if share < 1:
            under_way = ((self._begins <= start) & (start < self._ends)).any(0)
            ns = np.where(under_way, np.rint(ns / share), ns)
        return np.asarray(start + ns, np.int64)

    def _gradients_out(self, at: int | None, ready: Ints) -> Ints:
        """Gradients of a chunk go to the host; returns when they are there."""
        if at is None:
            return np.zeros_like(ready)
        copy = self._quotes.chunks[self._model.blocks.chunks[at]].out
        is_out = at >= self._persistent
        start = np.maximum(self._out, ready)
        out = self._copied(start, self._in, *copy)
        self._out = np.where(is_out, out, self._out)
        return np.where(is_out, self._out, 0)

    def _come_back(self, unit: int, issued: Ints) -> None:
        """Gradients of an earlier microbatch come back for the first backward that adds to them."""
        at, trained = self._model.position.get(unit), self._layout.units[unit].trained
        if at is None or self._model.blocks.chunks[at] not in trained:
            return
        if any([p == at and u > unit for u, p in self._model.position.items()]):
            return
        copy = self._quotes.chunks[self._model.blocks.chunks[at]].back
        is_away = at >= self._persistent
        done = self._copied(np.maximum(self._in, issued), self._out, *copy)
        self._in = np.where(is_away, done, self._in)
        self._came_back[unit] = np.where(is_away, done, 0)

    def _swap_out(self, unit: int) -> None:
        is_away = self._modes[:, unit] == MODES.index(Mode.OFFLOAD)
        if is_away.any():
            copy = self._quotes.swap(unit, is_out=True)
            out = self._copied(np.maximum(self._out, self._compute), self._in, *copy)
            self._out = np.where(is_away, out, self._out)
            self._swapped_out[unit] = np.where(is_away, self._out, 0)

    def _swap_in(self, unit: int, issued: Ints) -> None:
        is_away = self._modes[:, unit] == MODES.index(Mode.OFFLOAD)
        is_away &= self._leaves[:, unit]
        if unit in self._swapped_out and is_away.any():
            copy = self._quotes.swap(unit, is_out=False)
            start = np.maximum(np.maximum(self._in, issued), self._swapped_out.pop(unit))
            done = self._copied(start, self._out, *copy)
            self._in = np.where(is_away, done, self._in)
            self._swapped_in[unit] = np.where(is_away, done, 0)

    def _load(self, at: Ints, is_loaded: npt.NDArray[np.bool_], issued: Ints) -> None:
        """Weights of chunks come to the device, where they are to."""
        if not is_loaded.any():
            return
        at = np.clip(at, 0, max(0, self._count - 1))
        start = np.maximum(np.maximum(self._in, issued), self._made[at, self._index])
        done = self._copied(start, self._out, self._loads[at, 0], self._loads[at, 1])
        self._in = np.where(is_loaded, done, self._in)
        self._arrived[at, self._index] = np.where(is_loaded, done, self._arrived[at, self._index])

    def _enter_forward(self, at: int, above: int, issued: Ints) -> None:
        """The window of buffers moves up behind a forward."""
        if above <= at:
            return
        top = self._count - self._buffers
        low = np.maximum(self._persistent, np.minimum(np.maximum(at, self._persistent), top))
        high = np.maximum(self._persistent, np.minimum(np.maximum(above, self._persistent), top))
        self._load(high + self._buffers - 1, high > low, issued)

    def _enter_backward(self, below: int, issued: Ints) -> None:
        """The window of buffers moves down behind a backward."""
        entering = below - self._buffers + 1
        at_turn = np.maximum(self._persistent, self._count - self._buffers)
        is_new = (entering >= self._persistent) & (entering < at_turn) & (self._buffers > 0)
        self._load(entering, is_new, issued)

    def _end_turn(self, issued: Ints, following: int | None, adds: bool) -> None:
        """What is fetched behind a launch for the next turns, but for weights of buffers.

        The next turn `adds` where it is a backward of a later microbatch than the first.
        """
        if following is not None:
            self._gather(following, issued)
            if adds:
                self._come_back(following, issued)
        for unit in self._fetched.get(self._moment, ()):
            self._swap_in(unit, issued)
        self._moment += 1

    def _arrived_or_here(self, at: int | None) -> Ints:
        if at is None:
            return np.zeros(len(self._index), np.int64)
        return np.where(at >= self._persistent, self._arrived[at], 0)

    # ---- groups
    def _gather(self, unit: int, issued: Ints, where: Bools | bool = True) -> None:
        """The parts of other devices of a unit's chunks come, unless they are here."""
        for c in self._layout.units[unit].chunks if self._layout.ranks > 1 else ():
            is_due = ~self._is_whole[c] & where
            ready = np.maximum(issued, self._arrived_or_here(self._model.position.get(unit)))
            begins = np.maximum(self._net, ready)
            done = begins + self._quotes.chunks[c].gather_ns
            self._take(begins, done, is_due)
            self._net = np.where(is_due, done, self._net)
            self._gathered[c] = np.where(is_due, done, self._gathered[c])
            self._is_whole[c] |= is_due

    def _is_in_window(self, unit: int, below: int) -> Bools:
        """Whether weights of the next unit back are here before the window of buffers moves."""
        at, other = self._model.position.get(unit), self._model.position.get(below)
        if other is None:
            return np.ones(len(self._index), np.bool_)
        low = self._count - self._buffers if at is None else at - self._buffers + 1
        return np.asarray((other < self._persistent) | (other >= low))

    def _drop_gathered(
        self, unit: int, following: int | None, low: Ints | int, high: Ints | int = NEVER
    ) -> None:
        """Parts of other devices leave behind a unit, but where its chunk stays or comes next.

        A chunk of blocks stays that does not persist and lies in [low, high).
        """
        near = () if following is None else self._layout.units[following].chunks
        for c in self._layout.units[unit].chunks if self._layout.ranks > 1 else ():
            at = self._model.position.get(unit) if c in self._model.blocks.chunks else None
            if c not in near:
                stays = (
                    False if at is None else (at >= self._persistent) & (low <= at) & (at < high)
                )
                self._is_whole[c] = self._is_whole[c] & stays

    def _take(self, begins: Ints, ends: Ints, where: Bools | bool = True) -> None:
        """Notes a collective for copies over the same link."""
        if self._quotes.cost.copy_share < 1:
            earlier = np.vstack([begins, self._begins[:-1]]), np.vstack([ends, self._ends[:-1]])
            self._begins = np.where(where, earlier[0], self._begins)
            self._ends = np.where(where, earlier[1], self._ends)

    def _reduced(self, unit: int, is_last: bool, back: Ints) -> Ints:
        """When the gradients that a backward is the last to add to are added up over the group.

        The sums of earlier microbatches come `back` for it: the backward itself writes its own.
        """
        ns = self._model.reduced_ns[unit][is_last]
        if ns is None:
            return self._compute
        begins = np.maximum(np.maximum(self._net, self._compute), back)
        self._summed = self._net = begins + ns
        self._take(begins, self._net)
        return self._net
