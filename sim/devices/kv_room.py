"""Room for KV pages beside weights, the activation peak and a reserve, by formula."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contract.regions import PageSize
from models.spec import ModelSpec

GRAPH_RESERVE_BYTES = 64 << 20  # cuBLAS's workspace (32 MiB on Hopper), segments not filled
SPLIT_ROWS = 1024  # rows times KV heads up to which a decode may split keys (132 x 4, rounded up)
LOGIT_BYTES = 12  # float32 logits, their probabilities, and the draws that divide them


@dataclass(frozen=True)
class MemoryPlan:
    """Contents of a share of a device's memory. All in bytes.

    usable      the share
    weights     all parameters, embeddings and head included
    activation  the larger of a forward over `step_tokens` and of sampling for `sequences`: logits
                in the model's dtype and LOGIT_BYTES for each of sequences x vocabulary
    reserve     bytes without a formula: graphs, context and library workspaces
    page        one page of KV
    """

    usable: int
    weights: int
    activation: int
    reserve: int
    page: int

    @property
    def left(self) -> int:
        """Bytes left for KV; below 0 where the rest does not fit."""
        return self.usable - self.weights - self.activation - self.reserve

    @property
    def pages(self) -> int:
        """KV pages that fit in the bytes left.

        Raises:
            ValueError: not one page fits.
        """
        if self.left < self.page:
            raise ValueError(
                f"memory: {self.weights} bytes of weights, {self.activation} of activations and a "
                f"reserve of {self.reserve} leave no page of {self.page} in {self.usable}; "
                "take a larger share, a smaller model or a smaller step"
            )
        return self.left // self.page


def plan_memory(
    model: ModelSpec,
    device_bytes: int,
    share: float,
    step_tokens: int,
    sequences: int,
    reserve_bytes: int,
    page: PageSize,
) -> MemoryPlan:
    """The memory plan of an engine that profiles itself at its largest step, as vLLM does.

    Args:
        model: the model.
        device_bytes: the device's memory.
        share: part of it that the engine may use, 0 to 1.
        step_tokens: tokens of the largest step.
        sequences: most sequences of a step.
        reserve_bytes: bytes without a formula.
        page: a page of the model's KV.

    Returns:
        The plan.
    """
    forward = model.workspace_bytes([step_tokens], samples=0)
    sampling = sequences * model.vocab_size * (model.item_bytes + LOGIT_BYTES)
    return MemoryPlan(
        usable=int(share * device_bytes),
        weights=model.weight_bytes,
        activation=max(forward, sampling),
        reserve=reserve_bytes,
        page=page.nbytes,
    )


def graph_bytes(model: ModelSpec, rows: int, page: PageSize) -> int:
    """Memory that CUDA graphs of decodes keep at all times.

    They hold buffers (seven numbers and a page table per row, as long as the model's positions),
    the workspace of the largest graph, which the smaller ones share, the float32 outputs and sums
    of split keys, and GRAPH_RESERVE_BYTES. An upper estimate: never compared with a GPU.

    Args:
        model: the model.
        rows: decodes of the largest graph; 0 without graphs.
        page: a page of the model's KV.

    Returns:
        Bytes; 0 without graphs.
    """
    if not rows:
        return 0
    table = 4 * 16 * -(-model.max_positions // (16 * page.tokens))  # rows of 16 page ids
    shared = model.num_heads // model.num_kv_heads
    split = max(rows * model.num_kv_heads, SPLIT_ROWS) * shared * 4 * (model.head_dim + 1)
    workspace = model.workspace_bytes([1] * rows, samples=rows, page_tokens=page.tokens)
    return rows * (7 * 8 + table) + workspace + split + GRAPH_RESERVE_BYTES
