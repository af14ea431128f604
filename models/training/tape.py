"""Tensors without numbers: what torch allocates, keeps for a backward and gives back, in bytes.

A storage counts from the operator that makes it until nobody holds it, by Python's own count of
references, as in torch. So a layer written down with the variables of its Hugging Face module
(models/training/tape_layers.py) peaks where that peaks. Operators are in
models/training/tape_operators.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# What a backward hands to an input without allocating:
SAME = 0  # the gradient that came in, summed down where the input is smaller
PART = -1  # a view of part of it


class TapeMeter:
    """Bytes alive, now and at their peak."""

    __slots__ = ("live_bytes", "peak_bytes")

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0


class Storage:
    """Bytes of one allocation; they are alive as long as this is."""

    __slots__ = ("_meter", "nbytes")

    def __init__(self, meter: TapeMeter, nbytes: int) -> None:
        self._meter, self.nbytes = meter, nbytes
        meter.live_bytes += nbytes
        meter.peak_bytes = max(meter.peak_bytes, meter.live_bytes)

    def __del__(self) -> None:
        self._meter.live_bytes -= self.nbytes


@dataclass(slots=True, eq=False)
class Node:
    """How the gradients of some values come from that of what was made of them.

    A node with several slots has made several values (a split); a leaf has made none.
    """

    slot_bytes: int  # of each value that it made
    edges: tuple[Edge | None, ...] = ()
    makes: tuple[int, ...] = ()  # per edge: bytes allocated for its gradient, SAME or PART
    saved: tuple[Storage, ...] = ()
    scratch: tuple[int, ...] = ()  # allocated beside them, one after another
    computes_all: bool = False  # also gradients that nobody wants
    gradients: list[Storage | None] = field(default_factory=lambda: [None])


Edge = tuple[Node, int]  # a node and the slot of it that takes the gradient


@dataclass(slots=True, eq=False)
class Value:
    """A tensor: so many numbers in a storage, and who wants its gradient (None: nobody)."""

    storage: Storage
    elements: int
    item_bytes: int
    edge: Edge | None = None

    @property
    def nbytes(self) -> int:
        """Of its numbers; the storage of a view may be larger."""
        return self.elements * self.item_bytes


class Tape:
    """One pass of a unit. `keeps` is False under no_grad: nothing is recorded then."""

    def __init__(self, keeps: bool = True) -> None:
        self._meter = TapeMeter()
        self._keeps = keeps
        self._nodes: list[Node] = []

    @property
    def live_bytes(self) -> int:
        """Of all storages that somebody holds now."""
        return self._meter.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The most alive at once, since the beginning or the last restart."""
        return self._meter.peak_bytes

    def restart_peak(self) -> None:
        """Peaks count from now on."""
        self._meter.peak_bytes = self._meter.live_bytes

    def storage(self, nbytes: int) -> Storage:
        """A fresh allocation."""
        return Storage(self._meter, nbytes)

    def outside(self, elements: int, item_bytes: int, wanted: bool = False) -> Value:
        """A tensor that was there before and does not count: an input or a parameter."""
        edge = (Node(elements * item_bytes), 0) if wanted and self._keeps else None
        return Value(self.storage(0), elements, item_bytes, edge)

    def make(
        self,
        elements: int,
        item_bytes: int,
        inputs: Sequence[Value] = (),
        makes: tuple[int, ...] = (),
        saved: tuple[Storage | None, ...] = (),
        scratch: tuple[int, ...] = (),
        saves_result: bool = False,
        computes_all: bool = False,
        view_of: Value | None = None,
    ) -> Value:
        """What one operator returns; with a node if somebody wants a gradient through it.

        `saved` may name None for what this operator's backward does not need.
        """
        storage = view_of.storage if view_of else self.storage(elements * item_bytes)
        made = Value(storage, elements, item_bytes)
        if any(value.edge for value in inputs):
            edges = tuple(value.edge for value in inputs)
            kept = tuple(s for s in (*saved, storage if saves_result else None) if s is not None)
            node = Node(made.nbytes, edges, makes, kept, scratch, computes_all)
            self._nodes.append(node)
            made.edge = (node, 0)
        return made

    def split(self, value: Value, parts: int) -> list[Value]:
        """Equal views of a tensor, whose gradients are copied together."""
        size = value.elements // parts
        views = [Value(value.storage, size, value.item_bytes) for _ in range(parts)]
        if value.edge:
            part_bytes = size * value.item_bytes
            node = Node(part_bytes, (value.edge,), (value.nbytes,), gradients=[None] * parts)
            self._nodes.append(node)
            for slot, view in enumerate(views):
                view.edge = (node, slot)
        return views

    def backward(self, gradient: Storage) -> None:
        """From the last value made down to the leaves, the youngest node first, as torch does."""
        self._nodes[-1].gradients = [gradient]
        del gradient
        while self._nodes:
            self._pass_on(self._nodes.pop())

    def _pass_on(self, node: Node) -> None:
        assert None not in node.gradients, "every value recorded is part of the last one"
        made = self._gradients(node)
        node.gradients, node.saved = [], ()
        made.reverse()
        for edge in node.edges:
            gradient = made.pop()
            if edge and gradient:
                self._add(*edge, gradient)

    def _gradients(self, node: Node) -> list[Storage | None]:
        """One per edge; all of them before any is summed down to a smaller input."""
        scratch = [self.storage(nbytes) for nbytes in node.scratch]
        made: list[Storage | None] = []
        for edge, nbytes in zip(node.edges, node.makes, strict=True):
            if edge or node.computes_all:
                made.append(node.gradients[0] if nbytes in (SAME, PART) else self.storage(nbytes))
            else:
                made.append(None)
        scratch.clear()
        for place, (edge, nbytes) in enumerate(zip(node.edges, node.makes, strict=True)):
            whole = node.slot_bytes if nbytes == SAME else nbytes
            if edge and edge[0].slot_bytes < whole:
                made[place] = self.storage(edge[0].slot_bytes)
        return made

    def _add(self, node: Node, slot: int, gradient: Storage) -> None:
        """Gradients of one value add up in a new tensor: so torch does while it is watched by a
        TorchDispatchMode (runtime/measure/tracker.py); unwatched it often adds in place, and takes
        less."""
        if node.gradients[slot] is not None:
            gradient = self.storage(node.slot_bytes)
        node.gradients[slot] = gradient
