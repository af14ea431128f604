"""Why a run has served nobody, or a server has lost requests, and what to turn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.folder import provenance_in


def refusal(folder: Path, metrics: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """One line where every request of a finished run was refused, or a server has not served
    all; None elsewhere."""
    count = metrics.get("num_requests")
    if count and config["backend"]["name"] == "openai":
        return _lost(folder, metrics)
    if not count or metrics["num_refused"] < count:
        return None
    told = f"all {count} requests were refused"
    if config.get("replayed") is not None:
        return f"{told}, as they were in the run that is replayed: {config['replayed']}"
    return f"{told}: {_reason(folder, config)}"


def num_lost(metrics: Mapping[str, Any]) -> int:
    """How many requests a server has refused or not finished; 0 in other backends, whose policies
    may refuse."""
    if metrics.get("backend") != "openai":
        return 0
    return int(metrics["num_refused"] + metrics["num_unfinished"])


def _lost(folder: Path, metrics: Mapping[str, Any]) -> str | None:
    if not (lost := num_lost(metrics)):
        return None
    refused, unfinished = metrics["num_refused"], metrics["num_unfinished"]
    return (
        f"the server lost {lost} of {metrics['num_requests']} requests ({refused} refused, "
        f"{unfinished} unfinished): what became of each is in {folder}/client.parquet"
    )


def _reason(folder: Path, config: Mapping[str, Any]) -> str:
    """The need against what there is. A reservation is taken whole, pages as a job grows."""
    pages, page_tokens = int(provenance_in(folder)["kv_pages"]), config["page_tokens"]
    shortest = _shortest_prompt_tokens(folder)
    there = f"a device has {pages} pages of {page_tokens} tokens"
    more = f"raise budget.kv_pages (it is {pages}) or budget.fraction"
    reserved = config["memory"].get("max_tokens")
    if reserved is None:
        return (
            f"the shortest has a prompt of {shortest} tokens, {-(-shortest // page_tokens)} pages "
            f"of KV, and grows from there; {there}; {more}, or import a trace of shorter requests"
        )
    needed = -(-reserved // page_tokens)
    if needed > pages:
        return (
            f"each reserves {needed} pages of KV (memory.max_tokens={reserved}), {needed - pages} "
            f"more than there are; {there}; {more}, or lower memory.max_tokens"
        )
    return (
        f"none stays within its reservation of memory.max_tokens={reserved} (the shortest has a "
        f"prompt of {shortest} tokens); raise it, or take memory=paged_restart"
    )


def _shortest_prompt_tokens(folder: Path) -> int:
    from engine.record import read_table

    tokens = read_table(folder / "requests.parquet", columns=["prompt_tokens"])
    return min(tokens["prompt_tokens"].to_pylist())
