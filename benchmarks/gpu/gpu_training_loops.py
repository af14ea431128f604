"""Training loops to compare with on a GPU: a plain loop, and FSDP2 with CPU offload."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from runtime.training.trainer import build_trainee
from tandem.wiring.training import Trainee


@dataclass(frozen=True)
class TimedLoop:
    """Median seconds of a step after the first, and all losses."""

    step_s: float
    losses: list[float]


def plain_loop(trainee: Trainee, seed: int, device: str) -> TimedLoop:
    """bf16 weights, fp32 masters and AdamW on the device; activations checkpointed per layer."""
    model = build_trainee(trainee.spec, trainee.job.recipe, seed).to(device)
    _checkpoint(model)
    own = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().requires_grad_() for p in own]
    optimizer = _adamw(masters, trainee)

    def update() -> None:
        for parameter, master in zip(own, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(own, masters, strict=True):
                parameter.copy_(master)
                master.grad = None

    return _timed(model, trainee, device, update)


def fsdp2(trainee: Trainee, seed: int, device: str) -> TimedLoop:
    """fp32 weights and AdamW on the host, units gathered in bf16; checkpointed per layer."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = build_trainee(trainee.spec, trainee.job.recipe, seed).float()
    _checkpoint(model)
    how: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    with _group():
        body = model.base_model
        for layer in getattr(body, "h", None) or body.layers:
            fully_shard(layer, **how)
        fully_shard(model, **how)
        for buffer in model.buffers():  # FSDP2 does not move them
            buffer.data = buffer.data.to(device)
        optimizer = _adamw(list(model.parameters()), trainee)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return _timed(model, trainee, device, update)


def _checkpoint(model: Any) -> None:
    """Makes each layer recompute its activations in its backward."""
    newer = getattr(model, "activation_checkpointing_enable", None)  # absent in transformers 4
    (newer or model.gradient_checkpointing_enable)()


@contextmanager
def _group() -> Iterator[None]:
    """A group of this process alone."""
    import torch.distributed as dist

    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _adamw(parameters: list[Tensor], trainee: Trainee) -> torch.optim.Optimizer:
    recipe = trainee.job.recipe
    return torch.optim.AdamW(
        parameters, lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.eps,
        weight_decay=recipe.weight_decay, fused=True,
    )  # fmt: skip


def _timed(model: Any, trainee: Trainee, device: str, update: Callable[[], None]) -> TimedLoop:
    """Times all steps of the job; a step ends when its loss is known and the device is idle."""
    job, losses, took = trainee.job, list[float](), list[float]()
    for step in range(job.num_steps):
        began = time.perf_counter()
        for k in range(step * job.microbatches, (step + 1) * job.microbatches):
            ids = torch.tensor(trainee.batches.ids(k), dtype=torch.int64, device=device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / job.microbatches).backward()
        update()
        losses.append(float(loss.detach()))
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return TimedLoop(median(took[1:] or took), losses)
