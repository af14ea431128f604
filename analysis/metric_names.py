"""The names of metrics and of their parts, and which end of a metric is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SLO_KEYS = ("ttft_s", "tpot_s", "e2e_s")
OF = "_of_"  # before the class, in the names of figures
FOR = "_for_"  # before the tenant

LATENCIES = ("ttft", "tpot", "itl", "e2e", "norm_latency")
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
BEST = {  # metrics that rank the points of a sweep: whether more is better
    "goodput": True,
    "slo_attainment": True,
    "request_throughput": True,
    "output_throughput": True,
    "train_tokens_per_s": True,
    "p50_ttft_s": False,
    "p99_ttft_s": False,
    "p99_tpot_s": False,
    "p99_e2e_s": False,
}
PERCENTILES = (50, 90, 95, 99)
PREDICTION, MEASUREMENT = "prediction", "measurement"  # the runs of a comparison

KINDS = ("kv", "weight", "gradient", "optimizer", "activation", "buffer", "adapter")
PENDING = "pending"  # freed, and still in use by an operation
PARTS = (*KINDS, PENDING)  # they add up to the used bytes

WORKS = ("forward", "again", "backward", "update")
WAITING = "waiting"  # no lane computes: copies or collectives are in flight, or plans are made
TIMES = (*WORKS, "mixed", "serving", WAITING)


def ties(values: Iterable[float], best: float) -> str:
    """A suffix with the number of other values equal to the best; empty without any."""
    others = sum(value == best for value in values) - 1
    return f" (and {others} more)" if others > 0 else ""


def classes_in(names: Iterable[object]) -> list[str]:
    """The classes that appear in names of figures."""
    head = f"num_requests{OF}"
    return [name.removeprefix(head) for name in map(str, names) if name.startswith(head)]


def tenants_in(names: Iterable[object]) -> list[str]:
    """The tenants that appear in names of figures."""
    heads = (f"num_requests{FOR}", f"charged{FOR}")
    found = [(name, head) for name in map(str, names) for head in heads if name.startswith(head)]
    return sorted({name.removeprefix(head) for name, head in found})


def shares_in(metrics: Mapping[str, float | int | str]) -> dict[str, float]:
    """`time_shares` as they stand in the metrics of a run; empty without training."""
    names = {part: f"train_{part}_share" for part in TIMES}
    return {part: float(metrics[name]) for part, name in names.items() if name in metrics}


def percents(shares: Mapping[str, float], decimals: int = 0) -> dict[str, str]:
    """Shares as percentages without a sign, rounded so that they add up (largest remainders)."""
    units = {part: share * 10 ** (2 + decimals) for part, share in shares.items()}
    whole = {part: int(value) for part, value in units.items()}
    left = round(sum(units.values())) - sum(whole.values())
    for part in sorted(units, key=lambda part: whole[part] - units[part])[:left]:
        whole[part] += 1
    return {part: f"{value / 10**decimals:.{decimals}f}" for part, value in whole.items()}
