"""Tensors without numbers: what torch allocates, saves for a backward and frees, in bytes.

A storage counts from the operator that makes it until its last reference goes, by Python's own
count of references, as in torch. So a layer that is written down with the variables of its Hugging
Face module (models/training/tape_layers.py) peaks where the module peaks. Operators are in
models/training/tape_operators.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Gradients that a backward hands to an input without an allocation:
SAME = 0  # the incoming gradient, summed down where the input is smaller
PART = -1  # a view of part of the incoming gradient


class TapeMeter:
    """Bytes of the live storages: now, at their peak, and behind each allocation."""

    __slots__ = ("history", "live_bytes", "peak_bytes")

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self.history: list[int] = []


class Storage:
    """One allocation of `nbytes`; its bytes are live as long as this object.

    Args:
        meter: Counts the bytes.
        nbytes: Size of the allocation; 0 for a tensor that is counted elsewhere.
    """

    __slots__ = ("_meter", "nbytes")

    def __init__(self, meter: TapeMeter, nbytes: int) -> None:
        self._meter, self.nbytes = meter, nbytes
        meter.live_bytes += nbytes
        meter.peak_bytes = max(meter.peak_bytes, meter.live_bytes)
        meter.history.append(meter.live_bytes)

    def __del__(self) -> None:
        self._meter.live_bytes -= self.nbytes


@dataclass(slots=True, eq=False)
class BackwardNode:
    """The backward of one operator.

    A node with several slots belongs to an operator of several results (a split). The node of a
    leaf has no edges.

    Attributes:
        slot_bytes: Bytes of each result of the operator.
        edges: Per input: where its gradient goes; None where it needs none.
        makes: Per input: bytes allocated for its gradient, or SAME, or PART.
        saved: Storages that the forward keeps for this backward.
        scratch: Bytes of temporary tensors of this backward, all live together.
        computes_all: Whether gradients are computed also for inputs that need none.
        gradients: Per slot: the gradient that has arrived.
    """

    slot_bytes: int
    edges: tuple[Edge | None, ...] = ()
    makes: tuple[int, ...] = ()
    saved: tuple[Storage, ...] = ()
    scratch: tuple[int, ...] = ()
    computes_all: bool = False
    gradients: list[Storage | None] = field(default_factory=lambda: [None])


Edge = tuple[BackwardNode, int]  # a node and the slot of it that takes the gradient


@dataclass(slots=True, eq=False)
class Value:
    """A tensor.

    Attributes:
        storage: The allocation that its numbers lie in.
        elements: How many numbers it has.
        item_bytes: Bytes of one number.
        edge: The node and slot that take its gradient; None where it needs none.
    """

    storage: Storage
    elements: int
    item_bytes: int
    edge: Edge | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's numbers; the storage of a view may be larger."""
        return self.elements * self.item_bytes


class Tape:
    """Records one forward of a unit and plays its backward.

    Args:
        keeps: Whether nodes are recorded; False is torch's no_grad.
    """

    def __init__(self, keeps: bool = True) -> None:
        self._meter = TapeMeter()
        self._keeps = keeps
        self._nodes: list[BackwardNode] = []

    @property
    def live_bytes(self) -> int:
        """Bytes of all storages that are live now."""
        return self._meter.live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once, from the beginning or the last restart on."""
        return self._meter.peak_bytes

    @property
    def history(self) -> Sequence[int]:
        """Bytes live behind each allocation, in their order."""
        return self._meter.history

    def restart_peak(self) -> None:
        """Makes the present bytes the peak."""
        self._meter.peak_bytes = self._meter.live_bytes

    def storage(self, nbytes: int) -> Storage:
        """A fresh allocation.

        Args:
            nbytes: Its size.

        Returns:
            The storage, whose bytes this tape counts while a reference to it lives.
        """
        return Storage(self._meter, nbytes)

    def outside(self, elements: int, item_bytes: int, requires_grad: bool = False) -> Value:
        """A tensor that exists before the forward and does not count: an input or a parameter.

        Args:
            elements: Numbers of the tensor.
            item_bytes: Bytes of one number.
            requires_grad: Whether a backward computes its gradient.

        Returns:
            A leaf; its storage has 0 bytes.
        """
        edge = (BackwardNode(elements * item_bytes), 0) if requires_grad and self._keeps else None
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
        """The result of one operator, with a node where an input needs a gradient.

        Args:
            elements: Numbers of the result.
            item_bytes: Bytes of one number.
            inputs: Tensors that the operator reads.
            makes: Per input: bytes allocated for its gradient, or SAME, or PART.
            saved: Storages that the backward reads; None stands for one that it does not need.
            scratch: Bytes of temporary tensors of the backward.
            saves_result: Whether the backward reads the result.
            computes_all: Whether the backward computes all gradients, needed or not.
            view_of: The tensor whose storage the result shares; None allocates.

        Returns:
            The tensor that the operator makes.
        """
        storage = view_of.storage if view_of else self.storage(elements * item_bytes)
        made = Value(storage, elements, item_bytes)
        if any(value.edge for value in inputs):
            edges = tuple(value.edge for value in inputs)
            kept = tuple(s for s in (*saved, storage if saves_result else None) if s is not None)
            node = BackwardNode(made.nbytes, edges, makes, kept, scratch, computes_all)
            self._nodes.append(node)
            made.edge = (node, 0)
        return made

    def split(self, value: Value, parts: int) -> list[Value]:
        """Equal views of a tensor, whose gradients a backward copies into one.

        Args:
            value: The tensor.
            parts: How many views; they divide its elements.

        Returns:
            The views, in order.
        """
        size = value.elements // parts
        views = [Value(value.storage, size, value.item_bytes) for _ in range(parts)]
        if value.edge:
            part_bytes = size * value.item_bytes
            node = BackwardNode(
                part_bytes, (value.edge,), (value.nbytes,), gradients=[None] * parts
            )
            self._nodes.append(node)
            for slot, view in enumerate(views):
                view.edge = (node, slot)
        return views

    def backward(self, gradient: Storage) -> None:
        """Plays the backward from the last value made to the leaves, the youngest node first.

        Torch runs nodes in this order. The tape is empty afterwards.

        Args:
            gradient: The gradient of the last value.
        """
        self._nodes[-1].gradients = [gradient]
        del gradient
        while self._nodes:
            self._pass_on(self._nodes.pop())

    def _pass_on(self, node: BackwardNode) -> None:
        assert None not in node.gradients, "every value recorded is part of the last one"
        made = self._gradients(node)
        node.gradients, node.saved = [], ()
        made.reverse()
        for edge in node.edges:
            gradient = made.pop()
            if edge and gradient:
                self._add(*edge, gradient)

    def _gradients(self, node: BackwardNode) -> list[Storage | None]:
        """A gradient per edge; all are computed before any is summed down to a smaller input."""
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

    def _add(self, node: BackwardNode, slot: int, gradient: Storage) -> None:
        """Adds up the gradients of one value, in a new tensor.

        Torch does so under a TorchDispatchMode (runtime/measure/tracker.py). Without one it often
        adds in place and takes less.
        """
        if node.gradients[slot] is not None:
            gradient = self.storage(node.slot_bytes)
        node.gradients[slot] = gradient
