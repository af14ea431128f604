"""The model of a finetuning job: adapters over what is served, or weights of its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from models.spec import ModelSpec
from runtime.finetuning.products import fields_of, products_of, roles_of, wide
from runtime.serving.model import first_of, learned_positions
from runtime.training.trainer import prepare
from runtime.training.units import Units
from traces.training.recipe import Recipe

NAME = "tandem_window"  # of the attention, as transformers knows it
NO_LABEL = -100


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    meta: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; `meta` records a window, or knows it."""
    return meta.attend(module.layer_idx, query, key, value, scaling), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def over_served(model: Any, recipe: Recipe) -> Any:
    """A model that trains as a recipe says, from the weights of a served model.

    Args:
        model: The served model of Hugging Face; it stays as it is.
        recipe: Of the job.

    Returns:
        Modules of its own, whose frozen parameters are the very ones of `model`.
    """
    if recipe.lora_rank is not None:
        shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
        return prepare(copy.deepcopy(model, shared), recipe)
    # What trains begins on the host: its chunks have memory of their own on a GPU.
    begun = {
        id(p): nn.Parameter(p.to("cpu" if p.is_cuda else p.device, copy=True))
        for p in model.parameters()
    }
    kept = {id(buffer): buffer for buffer in model.buffers()}
    own = prepare(copy.deepcopy(model, begun | kept).requires_grad_(True), recipe)
    for parameter, served in zip(own.parameters(), model.parameters(), strict=True):
        if not parameter.requires_grad:
            parameter.data = served.data
    return own


class FinetunedModel:
    """A causal language model, run over windows of one sample: rows are [1, tokens, hidden].

    Attributes:
        model: Of Hugging Face, wrapped by peft where it has adapters.
        shares: Whether its products are those that are served, but for adapters.
        first: The unit at which a backward ends.
        trained_of: By unit, indices of the parameters that train.
        products: By layer, its matrix products.
        by_address: All of them by address of the matrix, if it is a served one.
        roles: By layer, the matrices that a backward does not compute with again.
        fields: By layer, what it keeps of each token.
    """

    def __init__(self, model: Any, spec: ModelSpec, shares: bool) -> None:
        """
        Args:
            model: What `prepare` has returned.
            spec: Its spec.
            shares: Whether its products are those that are served, but for adapters.
        """
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, _no_mask)
        self.model, self.shares = model.eval(), shares  # a window draws no dropout
        units = Units(model)
        self.first, self.trained_of = units.first, units.trained_of
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        plain.config._attn_implementation = NAME
        body = plain.base_model
        body = getattr(body, "decoder", body)  # OPT's body is one level deeper
        self._norm = first_of(body, "ln_f", "norm", "final_layer_norm")
        self._tokens, self._head = plain.get_input_embeddings(), plain.get_output_embeddings()
        self._rotary: Any = getattr(body, "rotary_emb", None)
        self._positions = learned_positions(body)
        self._layers = list(first_of(body, "h", "layers"))
        self.dtype, self.hidden_size = self._tokens.weight.dtype, spec.hidden_size
        self.products = [products_of(layer) for layer in self._layers]
        self.roles = [roles_of(products) for products in self.products]
        own = [product for products in self.products for product in products]
        self.by_address = {product.weight.data_ptr(): product for product in own} if shares else {}
        sizes = (spec.hidden_size, spec.query_size, spec.num_heads, self.dtype)
        self.fields = [fields_of(roles, *sizes) for roles in self.roles]

    @classmethod
    def of(
        cls,
        served: Any,
        spec: ModelSpec,
        recipe: Recipe,
        begins: Mapping[str, Tensor] | None = None,
    ) -> FinetunedModel:
        """The model of a job over a served one: all its products are, if it trains adapters.

        `begins` has the matrices that adapters begin with, by the names of `drawn_adapter`; None:
        as peft begins.
        """
        model = over_served(served, recipe)
        for name, matrix in (begins or {}).items():
            model.get_parameter(f"base_model.model.{name}").data.copy_(matrix)
        return cls(model, spec, shares=recipe.lora_rank is not None)

    @property
    def num_units(self) -> int:
        """Embedding, layers and head."""
        return len(self._layers) + 2

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[1, tokens] ids and positions -> [1, tokens, hidden]."""
        hidden: Tensor = self._tokens(ids)
        return hidden if self._positions is None else hidden + self._positions(positions)

    def turns(self, positions: Tensor) -> dict[str, Any]:
        """What every layer is told of positions, [1, tokens]."""
        told: dict[str, Any] = {"position_ids": positions}
        if self._rotary is not None:
            like = torch.empty(0, dtype=self.dtype, device=positions.device)
            told["position_embeddings"] = self._rotary(like, positions)
        return told

    def layer(self, index: int, hidden: Tensor, turns: dict[str, Any], meta: Any) -> Tensor:
        """One layer over a window; `meta` attends."""
        run = self._layers[index]
        out = run(hidden, attention_mask=None, meta=meta, **turns)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of rows, [1, rows, hidden], with a label each or NO_LABEL."""
        logits = self._head(self._norm(hidden))[0]
        return cross_entropy(
            logits.to(wide(self.dtype)), labels, ignore_index=NO_LABEL, reduction="sum"
        )
