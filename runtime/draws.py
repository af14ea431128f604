"""Random numbers of one training job: what dropout would draw if the job ran alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Draws:
    """Lends a job's generator state to torch's default generator of a device, forward by forward.

    Dropout knows no other generator, so whoever else draws on the same device must not do so from
    another thread meanwhile. A forward that runs again draws what it drew first; below unit
    `lowest` none does, and nothing is kept.
    """

    def __init__(self, seed: int, device: torch.device, lowest: int) -> None:
        own = torch.Generator(device)
        own.manual_seed(seed)
        self._state = own.get_state()
        self._generator = torch.default_generator
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        self._lowest = lowest
        self._before: dict[tuple[int, int], Tensor] = {}  # (microbatch, unit): state it began with
        self._last = (-1, -1)

    @contextmanager
    def first(self, unit: int, microbatch: int) -> Iterator[None]:
        """Around a unit's forward."""
        with self._lent(self._state):
            yield
            after = self._generator.get_state()
        if torch.equal(after, self._state):
            return
        key = (microbatch, unit)
        assert key > self._last, f"F{unit, microbatch} draws dropout behind F{self._last[::-1]}"
        if unit >= self._lowest:
            self._before[key] = self._state
        self._state, self._last = after, key

    @contextmanager
    def again(self, unit: int, microbatch: int) -> Iterator[None]:
        """Around the same forward later."""
        state = self._before.get((microbatch, unit))
        with self._lent(self._state if state is None else state):
            yield

    def forget(self, unit: int, microbatch: int) -> None:
        """That forward will not run again."""
        self._before.pop((microbatch, unit), None)

    @contextmanager
    def _lent(self, state: Tensor) -> Iterator[None]:
        others = self._generator.get_state()
        self._generator.set_state(state)
        try:
            yield
        finally:
            self._generator.set_state(others)
