"""The units of a Hugging Face model's chain, each run alone: embedding, layers, head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runtime.serving.model import first_of, learned_positions


class Draws:
    """Lends a job's generator state to torch's default generator of a device, forward by forward.

    Dropout knows no other generator, so no other thread may draw on the device meanwhile. A forward
    that runs again draws what it drew first. Below unit `lowest` no forward runs again, and no
    state is kept.
    """

    def __init__(
        self, seed: int, device: torch.device, lowest: int, state: Tensor | None = None
    ) -> None:
        """`state` is that of a job that is resumed; None: it begins with the seed."""
        own = torch.Generator(device)
        own.manual_seed(seed)
        self._state = own.get_state() if state is None else state
        self._generator = torch.default_generator
        if device.type == "cuda":
            self._generator = torch.cuda.default_generators[device.index or 0]
        self._lowest = lowest
        self._before: dict[tuple[int, int], Tensor] = {}  # (microbatch, unit): state it began with
        self._last = (-1, -1)

    @property
    def state(self) -> Tensor:
        """What the next forward draws from."""
        return self._state

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
        own = self._generator.get_state()
        self._generator.set_state(state)
        try:
            yield
        finally:
            self._generator.set_state(own)


class Units:
    """A causal language model as units: 0 embeds, 1 to N are its layers, N + 1 is head and loss.

    Run one after the other they compute what the model's own forward computes with labels=ids and
    no padding, operator by operator: llama, mistral, qwen2, qwen3, gpt2 and opt, also with peft's
    adapters in the layers. `parameters` are the parameters that each unit uses, `trained_of` those
    that train, as indices into model.parameters(); a tied table is in two units. A backward ends at
    unit `first`: no parameter trains below.
    """

    def __init__(self, model: Any) -> None:
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()  # peft's wrapping
        body = model.base_model
        body = getattr(body, "decoder", body)  # OPT's is one deeper
        if getattr(model.config, "layerdrop", 0.0):
            raise ValueError("layerdrop skips layers at random; set it to 0 to train")
        self._model, self._body = model, body
        self._norm = first_of(body, "ln_f", "norm", "final_layer_norm")
        self._layers = list(first_of(body, "h", "layers"))
        self._rotary: Any = getattr(body, "rotary_emb", None)
        self._positions = learned_positions(body)
        self._counted: dict[int, Tensor] = {}  # by length: 0, 1, ...
        self._angles: dict[int, Any] = {}  # by length, of rotary positions
        self.parameters = self._indices(list(model.parameters()))
        trains = [parameter.requires_grad for parameter in model.parameters()]
        self.trained_of = [tuple(p for p in own if trains[p]) for own in self.parameters]
        if not any(trains):
            raise ValueError("no parameter of this model trains; freeze less of it")
        self.first = next(unit for unit, own in enumerate(self.trained_of) if own)

    @property
    def num_units(self) -> int:
        """Embedding, layers and head."""
        return len(self._layers) + 2

    @property
    def hidden_size(self) -> int:
        """Width of what one unit hands to the next."""
        return int(self._model.config.hidden_size)

    def run(self, unit: int, hidden: Tensor | None, ids: Tensor) -> Tensor:
        """The output of a unit: [sequences, tokens, hidden], of the head the mean loss.

        `hidden` is the output of the unit below (None for the embedding), `ids` are
        [sequences, tokens].
        """
        if unit == 0:
            return self._embed(ids)
        assert hidden is not None, f"unit {unit} has an input"
        if unit == self.num_units - 1:
            return self._loss(hidden, ids)
        positions = self._places(ids)
        told = {} if self._rotary is None else {"position_embeddings": self._turns(hidden, ids)}
        layer = self._layers[unit - 1]
        returned = layer(hidden, attention_mask=None, position_ids=positions, **told)
        out: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return out

    def _embed(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self._model.get_input_embeddings()(ids)
        if self._positions is None:
            return hidden
        positions = self._places(ids)
        if self._model.config.model_type == "opt":  # its positions have a row per sequence
            positions = positions.expand(ids.shape)
        hidden = hidden + self._positions(positions)
        drop = getattr(self._body, "drop", None)  # GPT-2's
        if drop is not None:
            hidden = drop(hidden)
        return hidden

    def _loss(self, hidden: Tensor, ids: Tensor) -> Tensor:
        logits = self._model.get_output_embeddings()(self._norm(hidden))
        vocab_size = self._model.config.vocab_size
        loss: Tensor = self._model.loss_function(logits=logits, labels=ids, vocab_size=vocab_size)
        return loss

    def _places(self, ids: Tensor) -> Tensor:
        """Positions of tokens, [1, tokens]."""
        length = ids.shape[1]
        if length not in self._counted:
            self._counted[length] = torch.arange(length, device=ids.device).unsqueeze(0)
        return self._counted[length]

    def _turns(self, hidden: Tensor, ids: Tensor) -> Any:
        """Cosines and sines of the rotary positions, equal for every layer and microbatch."""
        length = ids.shape[1]
        if length not in self._angles:
            self._angles[length] = self._rotary(hidden, self._places(ids))
        return self._angles[length]

    def constants(self, hidden: Tensor | None, ids: Tensor) -> tuple[Tensor, ...]:
        """Positions and angles, which all launches over this many tokens share and none moves."""
        angles = () if self._rotary is None or hidden is None else self._turns(hidden, ids)
        return (self._places(ids), *angles)

    def forget_constants(self) -> None:
        """Lets go of positions and angles: the next launch makes them anew."""
        self._counted.clear()
        self._angles.clear()

    def tables(self) -> list[Tensor]:
        """All that the model keeps beside its parameters: buffers, positions, angles."""
        angles = (tensor for turns in list(self._angles.values()) for tensor in turns)
        return [*self._model.buffers(), *self._counted.values(), *angles]

    def modules(self, unit: int) -> list[nn.Module]:
        """The modules that a unit runs; a table that is also its positions' comes twice."""
        if unit == 0:
            positions = first_of(self._body, "wpe", "embed_positions", "embed_tokens")
            return [self._model.get_input_embeddings(), positions]
        if unit == self.num_units - 1:
            return [self._norm, self._model.get_output_embeddings()]
        return [self._layers[unit - 1]]

    def _indices(self, parameters: list[nn.Parameter]) -> tuple[tuple[int, ...], ...]:
        """Indices of the parameters that each unit uses."""
        number = {id(parameter): i for i, parameter in enumerate(parameters)}
        found = []
        for unit in range(self.num_units):
            own = {number[id(p)] for module in self.modules(unit) for p in module.parameters()}
            found.append(tuple(sorted(own)))
        missing = set(range(len(parameters))) - {i for own in found for i in own}
        if missing:
            raise ValueError(f"{len(missing)} parameters of this model are in no unit of its chain")
        return tuple(found)
