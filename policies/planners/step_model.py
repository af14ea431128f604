"""A model of ProTrain's step: its time and its peak for many configurations at once.

The paper gives closed forms (section 5, equations 2 to 11, as read by others): sums of the larger
of computation and copies. Here lanes are followed launch by launch instead, since the sums err by
the fill of the pipeline, by copies that wait for updates, and by the turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engine.contract.layout import Mode
from engine.contract.plan import COMPUTE_LANE, HOST_LANE
from policies.planners.blocks import Blocks, Configuration, Placement, modes_of_blocks
from policies.planners.step_quotes import QuotedCopy, QuotedStep
from policies.training.cycle import fetch_turn

Ints = npt.NDArray[np.int64]
MODES = (Mode.KEEP, Mode.RECOMPUTE, Mode.OFFLOAD)
NEVER = np.iinfo(np.int64).max
STEPS = 3  # that are followed: the last one begins as all later ones do


@dataclass(frozen=True)
class Placements:
    """Blocks that offload and that compute again: every pair of numbers.

    Args:
        pairs: numbers of each.
        modes: per pair and unit, an index into MODES.
    """

    pairs: tuple[tuple[int, int], ...]
    modes: npt.NDArray[np.int8]

    @classmethod
    def of(
        cls,
        swaps: Sequence[int],
        checkpoints: Sequence[int],
        blocks: Blocks,
        num_units: int,
        interval: int,
        placement: Placement,
    ) -> Placements:
        """All pairs of these numbers that the blocks allow.

        Args:
            swaps: numbers of blocks that offload.
            checkpoints: numbers of blocks that compute again.
            blocks: the blocks.
            num_units: layers, embedding and head.
            interval: see `modes_of_blocks`.
            placement: see `modes_of_blocks`.

        Returns:
            Pairs in their order.
        """
        count = len(blocks.units)
        pairs = [(s, c) for s in swaps for c in checkpoints if s + c <= count]
        rows = [
            [MODES.index(m) for m in modes_of_blocks(Configuration(0, 0, *pair), blocks, num_units,
                                                     interval, placement)]
            for pair in pairs
        ]  # fmt: skip
        return cls(tuple(pairs), np.array(rows, np.int8).reshape(len(pairs), num_units))


@dataclass(frozen=True)
class StepModel:
    """Time and peak of a step on one device, for arrays of configurations.

    Args:
        quotes: durations and bytes.
        blocks: what persists or passes through buffers.
        placements: modes of units.
        swaps_ahead: turns of units before its backward at which a block's activations are fetched.
        gradients_out: units whose gradients may be on their way out.
    """

    quotes: QuotedStep
    blocks: Blocks
    placements: Placements
    swaps_ahead: int
    gradients_out: int

    @cached_property
    def position(self) -> dict[int, int]:
        """By unit, the position of its chunk among those of blocks."""
        found = dict[int, int]()
        for u, unit in enumerate(self.quotes.layout.units):
            for c in unit.chunks:
                if c in self.blocks.chunks:
                    found[u] = self.blocks.chunks.index(c)
        return found

    def _last_adder(self, unit: int) -> int | None:
        """The chunk of blocks to which a backward is the last of its microbatch that adds."""
        layout, at = self.quotes.layout, self.position.get(unit)
        if at is None or not layout.chunks[self.blocks.chunks[at]].trains:
            return None
        users = [u for u, p in self.position.items() if p == at and u >= layout.first]
        return at if min(users) == unit else None

    @cached_property
    def leaves_at(self) -> Ints:
        """Per placement and unit, the turn at which offloaded activations leave the device.

        Beyond all turns where they never do: they would leave when they are to be fetched again.
        """
        modes, layout = self.placements.modes, self.quotes.layout
        count = len(layout.units)
        found = np.full(modes.shape, NEVER, np.int64)
        done_at = np.full(len(modes), -1, np.int64)
        for unit in range(count):
            is_away = modes[:, unit] == MODES.index(Mode.OFFLOAD)
            done_at = np.where(is_away, np.maximum(done_at, unit) + self.swaps_ahead, done_at)
            fetched = fetch_turn(
                2 * count - 1 - unit, replace(layout, swaps_ahead=self.swaps_ahead)
            )
            found[:, unit] = np.where(is_away & (done_at < fetched), done_at, NEVER)
        return found

    # ---- bytes
    @cached_property
    def activation_bytes(self) -> Ints:
        """The most that a step takes beside states and buffers, in program order.

        By part of the step and placement: forwards below the head, the head, backwards below it.
        """
        layout, job, modes = self.quotes.layout, self.quotes.job, self.placements.modes
        units, tables = layout.units, self.quotes.units
        count, last = len(units), len(units) - 1
        held, peaks = np.zeros(len(modes), np.int64), np.zeros((3, len(modes)), np.int64)

        def of(field: str, unit: int) -> Ints:
            values = [getattr(tables[mode][unit], field) for mode in MODES]
            return np.array(values, np.int64)[modes[:, unit]]

        fetched, leaves_at = self._fetched_at(), self.leaves_at
        several = job.microbatches > 1  # sums lie there from one microbatch to the next
        held += self._gradient_bytes(range(len(layout.chunks)), False) if several else 0
        order = [(True, u) for u in range(count)]
        order += [(False, u) for u in range(last, layout.first - 1, -1)]
        for moment, (is_forward, u) in enumerate(order):
            peak = peaks[1 if u == last else 0 if is_forward else 2]
            is_again = (not is_forward) & (modes[:, u] == MODES.index(Mode.RECOMPUTE))
            coming = np.zeros(len(modes), np.int64)  # behind the first launch of this turn
            for v in fetched.get(moment, ()):
                coming += np.where(leaves_at[:, v] < NEVER, units[v].saved_bytes, 0)
            if is_forward:
                output = of("output_bytes", u)
                held = held + output + of("kept_bytes", u)
                np.maximum(peak, held + of("forward_bytes", u), out=peak)
                held = held - (units[u].input_bytes if u < layout.first else 0)
                held = held + self._sent_bytes(u)
            else:
                saved = of("saved_bytes", u)
                held = held + np.where(is_again, saved, 0)
                np.maximum(peak, held + of("again_bytes", u), out=peak)
                held = held + np.where(is_again, coming, 0)
                trained = units[u].trained
                begun = self._gradient_bytes(trained, True)
                apart = 0 if several else self._gradient_bytes(trained, False)
                grown = begun + apart + of("backward_bytes", u)
                np.maximum(peak, held + grown, out=peak)
                passed = units[u].input_bytes if u > layout.first else 0
                came = units[u + 1].input_bytes if u < last else 0
                held = held + passed - came - saved - units[u].input_bytes
                held = held + (apart if self._sums_last else 0)
            for v in self.blocks.units:
                held = held - np.where(leaves_at[:, v] == moment, units[v].saved_bytes, 0)
            held = held + np.where(is_again, 0, coming)
        return peaks

    def _sent_bytes(self, unit: int) -> Ints:
        """What a forward leaves behind that is on its way to the host."""
        is_away = self.placements.modes[:, unit] == MODES.index(Mode.OFFLOAD)
        return np.where(is_away, self.quotes.layout.units[unit].saved_bytes, 0)

    def _gradient_bytes(self, chunks: Iterable[int], of_blocks: bool) -> int:
        """Gradients of those of these chunks that belong to blocks, or to none."""
        own = self.blocks.chunks
        found = [c for c in chunks if (c in own) is of_blocks]
        return sum([self.quotes.layout.chunks[c].gradient_bytes for c in found])

    @property
    def _sums_last(self) -> bool:
        """Whether gradients on the device outlast the backwards that add to them, to the step's end
        or through its microbatches."""
        job = self.quotes.job
        clips = job.recipe.clip_norm is not None
        return job.microbatches > 1 or clips or not job.has_update

    def _fetched_at(self) -> dict[int, list[int]]:
        """By turn of a step, the units whose activations are fetched behind its launch."""
        layout = replace(self.quotes.layout, swaps_ahead=self.swaps_ahead)
        count, found = len(layout.units), dict[int, list[int]]()
        for unit in self.blocks.units:
            found.setdefault(fetch_turn(2 * count - 1 - unit, layout), []).append(unit)
        return {moment: sorted(units, reverse=True) for moment, units in found.items()}

    def states_bytes(self, persistent: Ints, buffers: Ints) -> Ints:
        """Bytes on the device of states that persist and of buffers.

        While blocks are gone through, a chunk comes into one buffer more, and on the way back the
        gradients of another are on their way out.

        Args:
            persistent: chunks of blocks that persist.
            buffers: other chunks with weights on the device.

        Returns:
            Bytes by part of the step, see `activation_bytes`, and configuration.
        """
        layout, job, own = self.quotes.layout, self.quotes.job, self.blocks.chunks

        def states(c: int) -> int:
            return layout.chunks[c].weight_bytes + layout.chunks[c].optimizer_bytes

        always = sum([states(c) for c in range(len(layout.chunks)) if c not in own])
        persist = np.cumsum([0, *[states(c) for c in own]])[persistent]
        each = [layout.chunks[c].gradient_bytes for c in own]
        sums = np.cumsum([0, *each])[persistent] * int(self._sums_last)
        largest = max([0, *[layout.chunks[c].whole_bytes for c in own]])
        others = len(own) - persistent
        here, coming = (np.minimum(count, others) * largest for count in (buffers, buffers + 1))
        leaving = np.where(others > 0, max([0, *each]), 0)
        base, early = always + persist, sums * int(job.microbatches > 1)
        back = base + coming + leaving + sums
        return np.stack([base + coming + early, base + here + early, back])

    def peak_bytes(self, persistent: Ints, buffers: Ints, placement: Ints) -> Ints:
        """The least memory in which configurations run as foreseen; a run that has more uses more.

        Args:
            persistent: chunks of blocks that persist.
            buffers: other chunks with weights on the device.
            placement: indices into the placements.

        Returns:
            Bytes, the shape of the arguments.
        """
        states = self.states_bytes(persistent, buffers)
        return np.asarray((states + self.activation_bytes[:, placement]).max(0), np.int64)

    def all_peak_bytes(self, persistent: Ints, buffers: Ints) -> Ints:
        """`peak_bytes` of every placement with every pair.

        Args:
            persistent: chunks of blocks that persist.
            buffers: other chunks with weights on the device.

        Returns:
            Bytes by placement and pair.
        """
        states, found = self.states_bytes(persistent, buffers), None
        for part, activations in zip(states, self.activation_bytes, strict=True):
            own = activations[:, None] + part[None, :]
            found = own if found is None else np.maximum(found, own)
        return np.asarray(found, np.int64)

    @cached_property
    def host_activation_bytes(self) -> Ints:
        """Per placement, what a step has on the host beside states."""
        units, modes = self.quotes.layout.units, self.placements.modes
        is_away = modes == MODES.index(Mode.OFFLOAD)
        return np.asarray(is_away @ np.array([u.saved_bytes for u in units], np.int64), np.int64)

    def host_states_bytes(self, persistent: Ints) -> Ints:
        """Bytes on the host of states that do not persist, their gradients, and an update.

        Args:
            persistent: chunks of blocks that persist.

        Returns:
            Bytes, the shape of the argument.
        """
        own = [self.quotes.layout.chunks[c] for c in self.blocks.chunks]
        each = [c.weight_bytes + c.optimizer_bytes + c.gradient_bytes for c in own]
        sums = np.cumsum([0, *each])
        work = np.array([*[c.update_bytes for c in own], 0], np.int64)
        largest = np.maximum.accumulate(work[::-1])[::-1]  # of the chunks from each one on
        return np.asarray(sums[-1] - sums[persistent] + largest[persistent], np.int64)

    # ---- time
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
        return {
            COMPUTE_LANE: launches[:, None] + here[None, :],
            HOST_LANE: (host[-1] - host[persistent])[None, :] + 0 * launches[:, None],
            "gpu->host": sent[:, None] + (out[-1] - out[persistent])[None, :],
            "host->gpu": came[:, None] + loads[None, :] + again[None, :],
        }

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
        self._arrived = np.zeros((max(1, count), len(persistent)), np.int64)
        self._made = np.zeros((max(1, count), len(persistent)), np.int64)
        self._outs = [zero] * (model.gradients_out + 1)
        self._swapped_out, self._swapped_in = dict[int, Ints](), dict[int, Ints]()
        self._gathered = zero
        self._tables = {
            field: np.array([[getattr(u, field) for u in self._quotes.units[m]] for m in MODES])
            for field in ("forward_ns", "again_ns", "backward_ns")
        }
        self._moment = 0
        self._fetched = model._fetched_at()
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
                self._forward(u)
            for u in reversed(units[layout.first :]):
                self._backward(u, k, eager and is_last)
        if job.has_update and not eager:
            own = self._model.blocks.chunks
            for c, chunk in enumerate(layout.chunks):
                if c in own:
                    self._update(own.index(c), self._compute)
                elif chunk.trains:
                    self._run(np.full(len(self._index), self._quotes.chunks[c].device_ns))
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
        at = self._model.position.get(unit)
        if at is None:
            return self._gathered
        arrived = np.where(at >= self._persistent, self._arrived[at], 0)
        return np.maximum(arrived, self._gathered)

    def _forward(self, u: int) -> None:
        issued = self._run(self._of("forward_ns", u), self._weights(u))
        if u in self._model.blocks.units:
            self._swap_out(u)
        at, above = self._model.position.get(u), self._model.position.get(u + 1)
        if above is not None:
            self._enter_forward(-1 if at is None else at, above, issued)
        self._end_turn(issued, u + 1 if u + 1 < len(self._layout.units) else u)

    def _backward(self, u: int, k: int, updates: bool) -> None:
        layout, model = self._layout, self._model
        is_again = self._modes[:, u] == MODES.index(Mode.RECOMPUTE)
        weights, issued = self._weights(u), self._gates[0]
        if is_again.any():
            before = self._compute
            self._run(self._of("again_ns", u), weights, is_plan=False)
            self._compute = np.where(is_again, self._compute, before)
        waits = [weights]
        if u in self._swapped_in:
            waits.append(self._swapped_in.pop(u))
        trains = bool(layout.units[u].trained)
        at, ends = model.position.get(u), model._last_adder(u)
        if trains and at is not None:
            waits.append(np.where(at >= self._persistent, self._outs[0], 0))
        if k and at is not None and trains:
            waits.append(self._back(at, issued))
        self._run(self._of("backward_ns", u), *waits)
        ready = self._reduced(u)
        if trains:
            self._outs = [*self._outs[1:], self._gradients_out(ends, ready)]
        below = model.position.get(u - 1)
        if at is not None and below is not None and below < at:
            self._enter_backward(below, issued)
        self._end_turn(issued, u - 1 if u > layout.first else u)
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
        self._run(np.where(persists, chunk.device_ns, 0))
        self._compute = np.where(persists, self._compute, before)
        self._gates = tuple([np.where(persists, new, old)
                             for new, old in zip(self._gates, gates, strict=True)])  # type: ignore[assignment]  # fmt: skip
        host = np.maximum(self._host, ready) + (chunk.host_ns or 0)
        self._host = np.where(persists, self._host, host)
        self._made[at] = np.where(persists, 0, self._host)
        is_next = ~persists & (at - self._persistent < self._buffers)
        self._load(np.full(len(persists), at), is_next, self._gates[0])

    def _update_others(self, unit: int) -> None:
        """Updates of embedding, head and adapters, on the device."""
        layout, own = self._layout, self._model.blocks.chunks
        for c in layout.units[unit].trained:
            users = [u for u, x in enumerate(layout.units) if c in x.trained]
            if c not in own and min(users) == unit:
                self._run(np.full(len(self._index), self._quotes.chunks[c].device_ns))

    # ---- copies
    def _copied(self, start: Ints, copy: QuotedCopy, other: Ints) -> Ints:
        ns = np.where(other > start, copy.contended_ns, copy.alone_ns)
        return np.asarray(start + ns, np.int64)

    def _gradients_out(self, at: int | None, ready: Ints) -> Ints:
        """Gradients of a chunk go to the host; returns when they are there."""
        if at is None:
            return np.zeros_like(ready)
        copy = self._quotes.chunks[self._model.blocks.chunks[at]].out
        is_out = at >= self._persistent
        start = np.maximum(self._out, ready)
        out = self._copied(start, copy, self._in)
        self._out = np.where(is_out, out, self._out)
        return np.where(is_out, self._out, 0)

    def _back(self, at: int, issued: Ints) -> Ints:
        """Gradients of an earlier microbatch come back to the device; returns when."""
        copy = self._quotes.chunks[self._model.blocks.chunks[at]].back
        is_away = at >= self._persistent
        done = self._copied(np.maximum(self._in, issued), copy, self._out)
        self._in = np.where(is_away, done, self._in)
        return np.where(is_away, done, 0)

    def _swap_out(self, unit: int) -> None:
        is_away = self._modes[:, unit] == MODES.index(Mode.OFFLOAD)
        if is_away.any():
            copy = self._quotes.swap(unit, is_out=True)
            out = self._copied(np.maximum(self._out, self._compute), copy, self._in)
            self._out = np.where(is_away, out, self._out)
            self._swapped_out[unit] = np.where(is_away, self._out, 0)

    def _swap_in(self, unit: int, issued: Ints) -> None:
        is_away = self._modes[:, unit] == MODES.index(Mode.OFFLOAD)
        is_away &= self._leaves[:, unit]
        if unit in self._swapped_out and is_away.any():
            copy = self._quotes.swap(unit, is_out=False)
            start = np.maximum(np.maximum(self._in, issued), self._swapped_out.pop(unit))
            done = self._copied(start, copy, self._out)
            self._in = np.where(is_away, done, self._in)
            self._swapped_in[unit] = np.where(is_away, done, 0)

    def _load(self, at: Ints, is_loaded: npt.NDArray[np.bool_], issued: Ints) -> None:
        """Weights of chunks come to the device, where they are to."""
        if not is_loaded.any():
            return
        at = np.clip(at, 0, max(0, self._count - 1))
        start = np.maximum(np.maximum(self._in, issued), self._made[at, self._index])
        alone, contended = self._loads[at, 0], self._loads[at, 1]
        done = start + np.where(self._out > start, contended, alone)
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

    # ---- groups
    def _end_turn(self, issued: Ints, following: int) -> None:
        """What is fetched behind a launch for the next turns, but for weights of buffers."""
        if self._layout.ranks > 1:
            chunks = self._layout.units[following].chunks
            ns = sum([self._quotes.chunks[c].gather_ns for c in chunks])
            ready = self._arrived_or_here(following)
            self._gathered = self._net = np.maximum(np.maximum(self._net, issued), ready) + ns
        for unit in self._fetched.get(self._moment, ()):
            self._swap_in(unit, issued)
        self._moment += 1

    def _arrived_or_here(self, unit: int) -> Ints:
        at = self._model.position.get(unit)
        if at is None:
            return np.zeros(len(self._index), np.int64)
        return np.where(at >= self._persistent, self._arrived[at], 0)

    def _reduced(self, unit: int) -> Ints:
        """When the gradients of a backward are added up over the group."""
        if self._layout.ranks == 1 or not self._layout.units[unit].trained:
            return self._compute
        ns = sum([self._quotes.chunks[c].reduce_ns for c in self._layout.units[unit].trained])
        self._net = np.maximum(self._net, self._compute) + ns
        return self._net
