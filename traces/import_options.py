"""How a trace is imported: one flat set of options, spelt alike by command line and conf/."""

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
    """How to import; every one has a default but the tokenizer, which text needs.

    `kind` "auto" tells a source by its columns. `seed` None is the rule's own (file order where the
    original has none); `shuffle` False is file order. `max_total_tokens` and `min_tokens` override
    the rule's. With `oversample`, too few requests are drawn again up to `limit` as vLLM does by
    default: equal prompts then look like prefix-cache hits, so it is off here. `think_s` is the
    mean think time of closed-loop turns.

    Recorded traces (azure, burstgpt, mooncake, servegen) keep their order and times: they take
    `start_s` and `duration_s` (a part of the recording), `rate` (mean requests per second wanted)
    and `spread` (stamps rounded to a coarse bucket are drawn inside it, by seed). `model` and
    `log_type` choose rows of BurstGPT, `time_unit` and `block_tokens` say what Mooncake lines
    leave open, `lengths` is where ServeGen's token lengths lie.

    Text to train on (kind text) is read from the field `text_field` of its rows; plain text has a
    document per `sample_by`. A document ends with `eos_token`; None asks the tokenizer.

    `slo_column` names the SLO classes: of a table of lengths any column (None: `slo`, if it has
    one), of BurstGPT Model or Log Type (None: Log Type, if it has one).
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
