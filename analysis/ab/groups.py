"""Runs grouped by the setting in which they differ, seeds aside: the sides of a comparison."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from shlex import quote
from typing import Any

from analysis.columns import Block
from analysis.run import RunFacts, flat

OF_A_POLICY = ("scheduling", "memory", "planner")
DECIDES = (*OF_A_POLICY, "router", "replicas")
IGNORED = ("cache", "record", "trusted", "hydra")  # what a run reports or reads, not what it does
OF_THE_WORK = ("trace", "arrival", "training", "limit")
CLASS = "_target_"
CHOICES = (CLASS, "name")  # settings that tell which option of a section a run has
Settings = dict[str, Any]
Key = tuple[str, int]  # the trace, and which run of that trace it is


@dataclass(frozen=True, eq=False)
class RunGroup:
    """The runs of one setting, by trace."""

    name: str
    runs: Mapping[Key, RunFacts]

    @property
    def traces(self) -> dict[str, list[RunFacts]]:
        """The runs of each trace; runs of one trace are no independent samples."""
        found: dict[str, list[RunFacts]] = defaultdict(list)
        for (trace, _), run in self.runs.items():
            found[trace].append(run)
        return found


def letter(number: int) -> str:
    """The letter of a group by its place: A is the baseline; after Z come AA and BB."""
    return chr(ord("A") + number % 26) * (number // 26 + 1)


def is_seed(key: str) -> bool:
    """Whether a setting is a seed of the run; a seed of a policy is a setting of the policy."""
    return key.rpartition(".")[2] == "seed" and key.partition(".")[0] not in DECIDES


def differing(settings: Sequence[Settings]) -> list[str]:
    """Keys whose values are not the same in all settings."""
    keys = dict.fromkeys(key for found in settings for key in found)
    first = settings[0]
    return [
        key
        for key in keys
        if any(key not in s or key not in first or s[key] != first[key] for s in settings)
    ]


def has_one_policy(a: RunFacts, b: RunFacts) -> bool:
    """Whether two runs decide alike by their configuration. A server's decisions are its own."""
    if "openai" in (a.backend, b.backend):
        return True
    keys = differing([flat(a.config), flat(b.config)])
    return not any(key.partition(".")[0] in DECIDES for key in keys)


def grouped(runs: Sequence[RunFacts]) -> list[RunGroup]:
    """The groups of runs in the order in which they are given; the first is the baseline.

    Raises:
        ValueError: Fewer than two runs, or runs that differ in their seeds and traces alone.
    """
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run to compare: give two or more, or a folder of them")
    settings = [flat(run.config) for run in runs]
    keys = [key for key in differing(settings) if not _is_ignored(key)]
    if _have_one_trace(runs):
        keys = [key for key in keys if not key.startswith("trace.")]
    seeds = [key for key in keys if is_seed(key) or _follows_seed(key, settings)]
    chosen = [key for key in keys if key not in seeds]
    if not chosen:
        return _alike(runs, seeds)
    parts: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, found in enumerate(settings):
        parts[tuple(repr(found.get(key, "-")) for key in chosen)].append(i)
    names = _distinct([_name(runs[own[0]], chosen, settings) for own in parts.values()])
    return [
        RunGroup(name, _by_trace([runs[i] for i in own]))
        for name, own in zip(names, parts.values(), strict=True)
    ]


def _follows_seed(key: str, settings: Sequence[Settings]) -> bool:
    """Whether a policy's seed is that of its run, such as `seed: ${seed}`."""
    is_seed_of_policy = key.rpartition(".")[2] == "seed"
    return is_seed_of_policy and all(s.get(key, s.get("seed")) == s.get("seed") for s in settings)


def _is_ignored(key: str) -> bool:
    return key.partition(".")[0] in IGNORED


def _have_one_trace(runs: Sequence[RunFacts]) -> bool:
    hashes = {run.provenance.get("trace_hash") for run in runs}
    return len(hashes) == 1 and None not in hashes


def _alike(runs: Sequence[RunFacts], seeds: Sequence[str]) -> list[RunGroup]:
    """A group for each run of one setting: reruns, or seeds that left the trace as it was."""
    if seeds and not _have_one_trace(runs):
        raise ValueError(
            f"these {len(runs)} runs differ in their seeds alone, so each has a trace of its own: "
            "give runs of two settings or more, with the same seeds"
        )
    names = _distinct([f"seed={_seed(run)}" if seeds else run.name for run in runs])
    return [RunGroup(name, {("", 0): run}) for name, run in zip(names, runs, strict=True)]


def _by_trace(runs: Sequence[RunFacts]) -> dict[Key, RunFacts]:
    count: Counter[str] = Counter()
    found: dict[Key, RunFacts] = {}
    for run in runs:
        trace = _trace(run)
        found[(trace, count[trace])] = run
        count[trace] += 1
    return found


def _trace(run: RunFacts) -> str:
    """What runs of one trace have in common: its hash, else the seed.

    Training has no trace: a measured run of each seed is a sample of its own.
    """
    known = run.provenance.get("trace_hash")
    is_sample = known is None or (run.is_measured and not run.rows("requests"))
    return f"seed {_seed(run)}" if is_sample else str(known)


def _seed(run: RunFacts) -> str:
    """The seeds of a run; those that are equal to the first are not repeated."""
    found = flat(run.config)
    seeds = [found["seed"]] if "seed" in found else [v for k, v in found.items() if is_seed(k)]
    return "/".join(dict.fromkeys(str(seed) for seed in seeds))


def _distinct(names: Sequence[str]) -> list[str]:
    count: Counter[str] = Counter()
    found = []
    for name in names:
        count[name] += 1
        found.append(name if count[name] == 1 else f"{name} ({count[name]})")
    return found


def _name(run: RunFacts, keys: Sequence[str], settings: Sequence[Settings]) -> str:
    """A group's name: the choices that differ, and the settings that differ within them."""
    own, parts = flat(run.config), dict[str, None]()
    words = dict(
        str(word).lstrip("+").partition("=")[::2] for word in run.provenance.get("overrides", ())
    )
    sections = dict.fromkeys(key.partition(".")[0] for key in keys)
    for section in sorted(sections, key=lambda name: name not in OF_A_POLICY):
        choice = next((k for c in CHOICES if (k := f"{section}.{c}") in keys), None)
        alike = [s for s in settings if choice is None or s.get(choice) == own.get(choice)]
        left = set(differing(alike))
        if choice is not None:
            parts[_choice(choice, own, words)] = None
        for key in keys:
            if key.partition(".")[0] == section and key in left and key in own:
                parts[f"{key}={own[key]}"] = None
    return " ".join(parts) or run.name


def _choice(key: str, own: Settings, words: Mapping[str, str]) -> str:
    """The choice as the command line named it, else by the class or name."""
    section = key.partition(".")[0]
    if section in words:
        return f"{section}={words[section]}"
    if section in OF_A_POLICY and "policy" in words:
        return f"policy={words['policy']}"
    return f"{section}={str(own.get(key)).rpartition('.')[2]}"


# ---- whether two groups did the same work
def pairs(a: RunGroup, b: RunGroup) -> list[str]:
    """The traces of which both groups have runs.

    Raises:
        ValueError: Runs of one seed that replay different traces, or groups of other workloads.
    """
    found = [trace for trace in a.traces if trace in b.traces]
    for trace in found:
        _check_one_trace(a.traces[trace][0], b.traces[trace][0])
    seeds = {_seed(run): run for run in b.runs.values()}
    for run in a.runs.values():
        if _seed(run) in seeds:
            _check_one_hash(run, seeds[_seed(run)])
    if not found:
        one, two = (flat(next(iter(g.runs.values())).config) for g in (a, b))
        odd = [k for k in differing([one, two]) if k.partition(".")[0] in OF_THE_WORK]
        if odd := [key for key in odd if not is_seed(key)]:
            raise ValueError(f"{a.name} and {b.name} have other work to do: {odd[0]} differs")
    return found


def _check_one_hash(a: RunFacts, b: RunFacts) -> None:
    hashes = [run.provenance.get("trace_hash") for run in (a, b)]
    if None not in hashes and hashes[0] != hashes[1]:
        keys = differing([flat(a.config), flat(b.config)])
        odd = [key for key in keys if key.partition(".")[0] in OF_THE_WORK]
        why = f" ({odd[0]} differs)" if odd else ""
        told = f"{a.name} and {b.name} replay different traces{why}"
        one = f"; compare one of them: {command}" if (command := _of_one_trace(a, b, odd)) else ""
        raise ValueError(f"{told}: compare runs of one trace, one load and one seed{one}")


def _check_one_trace(a: RunFacts, b: RunFacts) -> None:
    rows = [_prompts(run.columns("requests", ("request_id", "prompt_tokens"))) for run in (a, b)]
    if rows[0] != rows[1]:
        told = f"{a.name} and {b.name} replay different traces"
        raise ValueError(f"{told} (their requests differ): compare runs of one trace")


def _of_one_trace(a: RunFacts, b: RunFacts, odd: Sequence[str]) -> str:
    """A shell's command for the runs of a sweep with the work of `a`; empty where names hide it."""
    words = [str(word).lstrip("+") for word in a.provenance.get("overrides", ())]
    swept = [word for word in words if word.partition("=")[0] in odd]
    for key, _, value in (word.partition("=") for word in swept):
        pattern = f"*{key}@{value}[-+]*"  # what follows a value in a sweep's folder names
        is_told = fnmatchcase(a.folder.name, pattern) and not fnmatchcase(b.folder.name, pattern)
        if is_told and len([*a.folder.parent.glob(pattern)]) > 1:
            return f"tandem compare {quote(str(a.folder.parent))}/{pattern}"
    return ""


def _prompts(rows: Block) -> dict[int, int]:
    ids, tokens = rows["request_id"].tolist(), rows["prompt_tokens"].tolist()
    return dict(zip(ids, tokens, strict=True))
