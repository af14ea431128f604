"""How a trace is imported: one flat set of options for the command line and conf/."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from traces.serving.sharegpt import MAX_MESSAGE_CHARS

DEFAULT_RULE = "vllm_filter_plus_role_check"
CHOICES = {
    "kind": ("auto", "sharegpt", "text", "lengths", "azure", "burstgpt", "mooncake", "servegen"),
    "time_unit": ("auto", "ms", "s"),
    "sample_by": ("line", "paragraph", "document"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of an import. Text needs a tokenizer; all other options have defaults.

    `kind` "auto" follows from the columns of the source. `seed` None is the rule's own seed, or
    file order where the rule has none; `shuffle` False is file order. `max_total_tokens` and
    `min_tokens` override the rule's. `oversample` draws requests again up to `limit`, as vLLM does
    by default; it is off here, because equal prompts look like prefix-cache hits. `think_s` is the
    mean think time of closed-loop turns, in seconds.

    Recorded traces (azure, burstgpt, mooncake, servegen) keep their order and times. `start_s` and
    `duration_s` take a part of the recording, `rate` sets the mean requests per second, and
    `spread` draws stamps that were rounded to a coarse bucket inside it, by seed. `model` and
    `log_type` choose rows of BurstGPT. `time_unit` and `block_tokens` say what Mooncake lines leave
    open. `lengths` is the file of ServeGen's token lengths.

    Text to train on (kind text) lies in the field `text_field` of its rows; plain text has one
    document per `sample_by`. A document ends with `eos_token`; None asks the tokenizer.

    `slo_column` is the column of the SLO classes. A table of lengths may name any column (None:
    `slo`, if the table has it); BurstGPT has Model and Log Type (None: Log Type, if the file has
    it).
    """

    tokenizer: str | Path | None = None
    rule: str = DEFAULT_RULE
    kind: str = "auto"
    limit: int | None = None
    shuffle: bool = True
    seed: int | None = None
    oversample: bool = False
    keep_ids: bool = True
    max_total_tokens: int | None = None
    min_tokens: int | None = None
    think_s: float = 0.0
    think_exponential: bool = False
    bos_token: str | None = None
    max_message_chars: int = MAX_MESSAGE_CHARS
    start_s: float = 0.0
    duration_s: float | None = None
    rate: float | None = None
    spread: bool = True
    model: str | None = None
    log_type: str | None = None
    time_unit: str = "auto"
    block_tokens: int | None = None
    lengths: str | Path | None = None
    slo_column: str | None = None
    text_field: str = "text"
    sample_by: str = "line"
    eos_token: str | None = None

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; use one of {', '.join(known)}"
                )
        for name in ("limit", "max_total_tokens", "min_tokens", "max_message_chars"):
            _check_count(name, getattr(self, name))
        _check_count("block_tokens", self.block_tokens)
        for name in ("duration_s", "rate"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}; it must be a positive number")
        if not (self.start_s >= 0 and math.isfinite(self.start_s)):
            raise ValueError(f"start_s is {self.start_s}; it must be at least 0")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be at least 0")
        if self.oversample and self.limit is None:
            raise ValueError("oversample needs a limit to fill")


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
