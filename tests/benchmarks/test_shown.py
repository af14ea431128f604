"""What documents, comparisons and reports promise, each with the test or claim that shows it."""

from __future__ import annotations

import ast
import csv
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS, GUIDES, AB = (
    "tests/laws/test_docs.py",
    "tests/laws/test_guides.py",
    "tests/analysis/test_ab.py",
)
PAGES = "tests/policies/test_policies_pages.py"
LOOK, SWEEP = "tests/analysis/test_look.py", "tests/analysis/test_report_sweep.py"
CLI = "tests/cli"
INTERVALS = "benchmarks/correctness/ab_intervals.py"

SHOWN = {
    # documents
    "README has at most 1,200 words": f"{DOCS}::test_readme_is_short",
    "DESIGN has at most 200 lines": f"{DOCS}::test_design_is_short",
    "no decision has more than 40 lines": f"{DOCS}::test_a_decision_has_its_form",
    "README and CLAIMS agree": f"{DOCS}::test_readme_and_claims_agree",
    "every page is in the site": f"{DOCS}::test_every_page_is_in_the_list_of_the_site",
    "the site builds strictly": ".ci/run: make docs",
    "every Python block runs": f"{GUIDES}::test_python_of_a_document_runs",
    "every command of README runs": f"{GUIDES}::test_commands_of_readme_run",
    "every command of a guide runs": f"{GUIDES}::test_commands_of_a_guide_run",
    "slow commands run": f"{GUIDES}::test_slow_commands_of_a_document_run",
    "blocks that are not run are listed": f"{GUIDES}::test_blocks_that_are_not_run_are_listed",
    "the notebook executes": f"{GUIDES}::test_the_notebook_runs",
    "policy feedback_queue": f"{GUIDES}::test_the_feedback_queue_keeps_its_contract_and_its_levels",
    "policy shortest": (
        "tests/cli/test_cli_measured.py::test_the_readmes_policy_is_the_example_and_runs_as_it_stands"
    ),
    "policy keeps_room": f"{GUIDES}::test_the_guides_policy_restarts_less",
    "the wheel works outside": (
        "tests/laws/test_packages.py::test_an_installed_wheel_works_outside_the_checkout"
    ),
    # which policy is better
    "equal runs differ in nothing": f"{AB}::test_equal_runs_differ_in_nothing",
    "equal policies are told apart in 3 to 8 % of 1,000": INTERVALS,
    "3 % slower is detected in 80 %": INTERVALS,
    "a pair above 90 % load needs seeds": INTERVALS,
    "shortest first names the losers": f"{AB}::test_shortest_first_makes_long_prompts_wait",
    "neighbours in a queue depend on each other": (
        "tests/analysis/test_intervals.py::test_blocks_cover_dependent_values_better_than_single_draws"
    ),
    "few samples are marked": f"{AB}::test_percentiles_of_few_requests_are_marked",
    # why a prediction is off
    "direct part and consequence explain 90 %": "benchmarks/fidelity/why_split.py",
    "parts that cancel are told": (
        "tests/analysis/test_report.py::test_parts_of_opposite_signs_are_said_to_cancel"
    ),
    "causes of what reruns hide are left out": (
        "tests/analysis/test_report.py::test_causes_of_what_reruns_hide_are_left_out"
    ),
    # sweeps
    "rate, replicas, pages, device budget and link along x": (
        f"{SWEEP}::test_a_real_sweep_is_drawn_over_what_it_varies"
    ),
    "lines of the SLO carry their value": (
        f"{SWEEP}::test_a_line_of_the_objective_carries_its_value"
    ),
    "no table is cut off": f"{SWEEP}::test_nothing_of_the_page_is_cut",
    "the terminal prints the points": f"{CLI}/test_sweep.py::test_the_terminal_has_a_row_per_point",
    "folders are named by what varies": (
        f"{CLI}/test_sweep.py::test_folders_are_named_by_what_varies_with_the_hash_behind"
    ),
    "runs.parquet is small, and documented": (
        f"{CLI}/test_collect.py::test_the_small_table_has_what_varies_and_the_headlines"
    ),
    # look
    "milliseconds where seconds read as 0.002": (
        f"{LOOK}::test_numbers_that_are_read_together_have_one_unit"
    ),
    "a unit on every axis": (
        f"{SWEEP}::test_a_setting_of_tokens_bytes_pages_or_time_has_its_unit_on_an_axis"
    ),
    "opacity by density": f"{LOOK}::test_many_points_are_faint",
    "one figure of memory": f"{LOOK}::test_the_memory_of_both_runs_lies_in_one_figure",
    "capacity off the scale": (
        f"{LOOK}::test_the_capacity_is_a_line_only_where_it_leaves_room_for_the_data"
    ),
    "a headline on every page": f"{LOOK}::test_each_page_begins_with_what_it_says",
    "pages in a browser": (
        "tests/analysis/test_browser.py::test_the_page_of_a_prediction_and_its_measurement"
    ),
    # what newcomers met
    "a mistyped word gets a suggestion, backend=gpu too": (
        f"{CLI}/test_mistakes.py::test_a_mistake_is_told_in_one_line"
    ),
    "rnu gets a suggestion": f"{CLI}/test_cli.py::test_a_mistyped_verb_gets_a_suggestion",
    "bare tandem prints help": f"{CLI}/test_cli.py::test_bare_tandem_prints_help",
    "completion": f"{CLI}/test_cli.py::test_bash_completes_verbs_groups_and_choices",
    "job.generated_tokens": f"{PAGES}::test_a_job_tells_the_tokens_of_its_answer_so_far",
    "why waiting jobs stay behind swapped-out ones": (
        f"{PAGES}::test_a_waiting_job_passes_a_swapped_out_one_only_where_the_rules_say_so"
    ),
    "OpenAI's messages": (
        "tests/traces/test_importing.py::test_openais_messages_are_read_like_conversations"
    ),
    "names of rules in the help of import": (
        "tests/traces/test_importing.py::test_help_lists_every_rule"
    ),
    "a duplicate request id": "tests/traces/test_store.py::test_a_wrong_value_is_named",
    "what is imported is asked for": (
        "tests/laws/test_requirements.py::test_what_is_imported_is_asked_for"
    ),
    "the version, and the licence": (
        "tests/laws/test_packages.py::test_the_version_is_one_and_the_licence_is_there"
    ),
    # fidelity of a workload
    "every rerun is told": (
        "tests/fidelity/test_verdicts.py::test_a_page_shows_verdicts_and_discarded_reruns"
    ),
}
ABSENT = {
    "three models and policies at 50 and 80 % load, within their bars": (
        "fidelity_command fails: five of six cases keep their bars; of the sixth three of fourteen "
        "reruns were steady, not five in a row (docs/claims.md)"
    ),
    "the errors of the recipe that README names": (
        "README shows them, but calibrated_once fails: one of four runs was off by 24 % of mean "
        "TPOT, while the machine's speed changed by 15 %, and another by 5.3 % of peak KV (bar 5)"
    ),
    "a device budget with lines of an SLO": "budget.device_bytes is of training, which has no SLO",
    "a new user within an hour": "no script can be new to Tandem; every block of a guide is run",
}


def is_there(where: str) -> bool:
    """Whether a test exists, a claim has passed, or a script has a line."""
    name, mark, test = where.partition("::")
    if not mark:
        name, mark, line = where.partition(": ")
        path = ROOT / name
        if not mark:
            return path.is_file() and path.stem in passed_claims()
        return path.is_file() and line in path.read_text().splitlines()
    tree = ast.parse((ROOT / name).read_text()) if (ROOT / name).is_file() else ast.Module([], [])
    return any(isinstance(node, ast.FunctionDef) and node.name == test for node in tree.body)


@cache
def passed_claims() -> set[str]:
    """The scripts whose row among the claims says pass."""
    with (ROOT / "benchmarks/CLAIMS.csv").open(newline="", encoding="utf-8") as file:
        return {row["script"] for row in csv.DictReader(file) if row["verdict"] == "pass"}


@pytest.mark.parametrize("promise", SHOWN)
def test_what_is_promised_is_shown(promise: str) -> None:
    assert is_there(SHOWN[promise]), SHOWN[promise]


def test_what_is_not_shown_has_a_reason() -> None:
    assert all(ABSENT.values()) and not ABSENT.keys() & SHOWN.keys()


@pytest.mark.parametrize(
    "where",
    ["tests/laws/test_docs.py::test_nothing", "benchmarks/none.py", ".ci/run: make nothing"],
)
def test_what_is_not_there_is_seen(where: str) -> None:
    assert not is_there(where)
