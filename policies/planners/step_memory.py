"""What a step of ProTrain needs of the device and of the host, for many configurations at once.

The peak is followed launch by launch, since what swaps and gradients hold on their way out depends
on the order of launches (paper: section 5, as read by others).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from engine.contract.layout import Mode
from policies.planners.blocks import Blocks, Configuration, Placement, modes_of_blocks
from policies.planners.step_quotes import QuotedStep
from policies.training.cycle import fetch_turn

Ints = npt.NDArray[np.int64]
MODES = (Mode.KEEP, Mode.RECOMPUTE, Mode.OFFLOAD)
NEVER = np.iinfo(np.int64).max


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
        if len(checkpoints) > 1:  # also where numbers are left out, no block need keep all
            pairs = sorted({*pairs, *[(s, count - s) for s in swaps if s <= count]})
        rows = [
            [MODES.index(m) for m in modes_of_blocks(Configuration(0, 0, *pair), blocks, num_units,
                                                     interval, placement)]
            for pair in pairs
        ]  # fmt: skip
        return cls(tuple(pairs), np.array(rows, np.int8).reshape(len(pairs), num_units))


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a step on one device, for arrays of configurations.

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

    def last_adder(self, unit: int) -> int | None:
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

        fetched, leaves_at = self.fetched_at(), self.leaves_at
        several = job.microbatches > 1  # sums lie there from one microbatch to the next
        held += self._gradient_bytes(range(len(layout.chunks)), False) if several else 0
        order = [(True, u) for u in range(count)]
        order += [(False, u) for u in range(last, layout.first - 1, -1)]
        for moment, (is_forward, u) in enumerate(order):
            peak = peaks[1 if u == last else 0 if is_forward else 2]
            is_again = (not is_forward) & (modes[:, u] == MODES.index(Mode.RECOMPUTE))
            parts = self._parts_bytes(
                u, min(u + 1, last) if is_forward else max(u - 1, layout.first)
            )
            coming = np.zeros(len(modes), np.int64)  # behind the first launch of this turn
            for v in fetched.get(moment, ()):
                coming += np.where(leaves_at[:, v] < NEVER, units[v].saved_bytes, 0)
            if is_forward:
                output = of("output_bytes", u)
                held = held + output + of("kept_bytes", u)
                np.maximum(peak, held + of("forward_bytes", u) + parts, out=peak)
                held = held - (units[u].input_bytes if u < layout.first else 0)
                held = held + self._sent_bytes(u)
            else:
                saved = of("saved_bytes", u)
                held = held + np.where(is_again, saved, 0)
                np.maximum(peak, held + of("again_bytes", u) + parts, out=peak)
                held = held + np.where(is_again, coming, 0)
                trained = units[u].trained
                begun = self._gradient_bytes(trained, True)
                apart = 0 if several else self._gradient_bytes(trained, False)
                grown = begun + apart + of("backward_bytes", u)
                np.maximum(peak, held + grown + parts, out=peak)
                held = held + self._unreduced_bytes(u)
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

    def _parts_bytes(self, unit: int, following: int) -> int:
        """Parts of other devices of what two units read, beside chunks of blocks."""
        units, chunks = self.quotes.layout.units, self.quotes.layout.chunks
        read = {*units[unit].chunks, *units[following].chunks} - {*self.blocks.chunks}
        return sum([chunks[c].remote_bytes for c in read])

    def _unreduced_bytes(self, unit: int) -> int:
        """Gradients of all devices' parts: those that a backward leaves, less those that it ends.

        They begin with the first backward that adds to them, and are reduced behind the last one.
        """
        layout, change = self.quotes.layout, 0
        for c in layout.units[unit].trained:
            users = [u for u, other in enumerate(layout.units) if c in other.trained]
            if layout.chunks[c].remote_bytes:
                begins, ends = max(users) == unit, min(users) == unit
                change += layout.chunks[c].whole_bytes * (int(begins and not ends)
                                                          - int(ends and not begins))  # fmt: skip
        return change

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

    def fetched_at(self) -> dict[int, list[int]]:
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
        # Of what persists, too, parts of other devices are here for two blocks.
        parts = max([0, *[layout.chunks[c].remote_bytes for c in own]])
        pairs = [
            np.maximum(0, min(2, len(own)) - np.minimum(n, others)) for n in (buffers + 1, buffers)
        ]
        base, early = always + persist, sums * int(job.microbatches > 1)
        back = base + coming + leaving + sums
        found = [base + coming + early, base + here + early, back]
        more = parts * np.stack([pairs[0], pairs[1], pairs[0]])
        return np.asarray(np.stack(found) + more, np.int64)

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
