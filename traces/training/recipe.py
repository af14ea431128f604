"""How a training job learns: optimizer, learning rate, precision, and which parameters train."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

CHOICES = {
    "optimizer": ("adamw", "sgd"),
    "schedule": ("constant", "linear", "cosine"),
    "dtype": ("float32", "bfloat16"),
}
NOT_READ_BY = {"adamw": ("momentum",), "sgd": ("betas", "eps")}
AMOUNTS = ("learning_rate", "eps", "weight_decay", "warmup_steps", "frozen_units", "seed")
SHARES = ("momentum", "dropout", "lora_dropout")  # in [0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings of optimizer, LoRA and loss; defaults are those of torch.optim.AdamW.

    `weight_decay` holds for all parameters that train. `clip_norm` bounds the norm of all gradients
    of a step together; None does not clip. `dtype` is that of weights and gradients; bfloat16 has
    float32 master weights. `dropout` replaces every dropout probability of the model.

    With `lora_rank` only adapters train, scaled by lora_alpha / lora_rank; None trains all
    parameters. `lora_targets` names their modules as peft does; empty takes peft's for the model.
    The first `frozen_units` units of the chain do not train; a tied table goes with the embedding.
    `seed` draws dropout masks, new adapters and the order of the data.
    """

    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    momentum: float = 0.0
    clip_norm: float | None = None
    schedule: str = "constant"
    warmup_steps: int = 0
    dtype: str = "float32"
    dropout: float = 0.0
    lora_rank: int | None = None
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ()
    frozen_units: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"recipe.{name}={value}: use one of {', '.join(known)}")
        for name in AMOUNTS:
            self._check(name, 0 <= getattr(self, name) < math.inf, "a number, at least 0")
        for name in SHARES:
            self._check(name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        are_shares = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        self._check("betas", are_shares, "two numbers in [0, 1)")
        self._check("lora_alpha", 0 < self.lora_alpha < math.inf, "above 0")
        for name in ("clip_norm", "lora_rank"):
            value = getattr(self, name)
            self._check(name, value is None or 0 < value < math.inf, "above 0, or null for none")
        self._check_unread(NOT_READ_BY[self.optimizer], f"optimizer={self.optimizer}")
        if self.lora_rank is None:
            lora = ("lora_alpha", "lora_dropout", "lora_targets")
            self._check_unread(lora, "lora_rank=null")

    @property
    def min_units(self) -> int:
        """Units of the shortest chain in which a parameter trains; the head has no adapters."""
        return self.frozen_units + 1 + (self.lora_rank is not None)

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """The learning rate of a step, as transformers.get_scheduler sets it.

        Args:
            step: The step, counted from 0.
            num_steps: Steps of the job.

        Returns:
            The rate. "constant" with warm-up is "constant_with_warmup" of transformers.
        """
        assert 0 <= step <= num_steps, f"step {step} of {num_steps}"
        if step < self.warmup_steps:
            return self.learning_rate * (step / self.warmup_steps)
        decay_steps = max(1, num_steps - self.warmup_steps)
        if self.schedule == "linear":
            return self.learning_rate * max(0.0, (num_steps - step) / decay_steps)
        if self.schedule == "cosine":
            progress = (step - self.warmup_steps) / decay_steps
            return self.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        return self.learning_rate

    def _check(self, name: str, holds: bool, condition: str) -> None:
        if not holds:
            raise ValueError(f"recipe.{name}={getattr(self, name)}: it must be {condition}")

    def _check_unread(self, names: tuple[str, ...], where: str) -> None:
        """Raises ValueError for a field that is set and not read."""
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise ValueError(f"recipe.{field.name} says nothing with {where}; leave it out")
