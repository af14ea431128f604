"""What serving beside finetuning promises, each with the test or claim that shows it."""

from __future__ import annotations

import pytest

from tests.benchmarks.test_shown import is_there

RUNS = "tests/finetuning/test_co_serving_runs.py"
BOUNDS = "tests/finetuning/test_windows_bounds.py"
CONTROLS = "tests/finetuning/test_windows_controls.py"
BYTES = "tests/finetuning/test_windows_memory.py"
STEPS = "tests/finetuning/test_windows_steps.py"
ENGINE = "tests/engine/test_windows.py"
POLICY = "tests/policies/test_coserve.py"
SLO = "tests/policies/test_coserve_slo.py"
ADAPTERS = "tests/finetuning/test_served_adapters.py"
PUBLISHED = "tests/finetuning/test_published_adapters.py"
RESIDENT = "tests/policies/test_adapters.py"
FIGURES = "tests/analysis/test_experiments.py"

SHOWN = {
    # exact where the order is equal
    "equal launches give equal bits on every clock": (
        f"{RUNS}::test_equal_launches_give_equal_bits_on_every_clock"
    ),
    "one window, unfused, is plain torch and peft": (
        "tests/finetuning/test_windows_exact.py::test_one_window_is_plain_torch_bit_for_bit"
    ),
    "kept or computed again: equal bits": (f"{RUNS}::test_kept_or_computed_again_gives_equal_bits"),
    # bounded elsewhere
    "gradients within 1e-12 in float64": f"{BOUNDS}::test_gradients_in_float64",
    "gradients within 5e-6 in float32": f"{BOUNDS}::test_gradients_in_float32",
    "distance to float64 at most 1.25 times torch's": f"{BOUNDS}::test_gradients_in_bfloat16",
    "20 steps of SGD": f"{STEPS}::test_twenty_steps_of_sgd",
    "20 steps of AdamW": f"{STEPS}::test_twenty_steps_of_adamw",
    "negative control: no sums of KV gradients": (
        f"{CONTROLS}::test_without_sums_of_key_and_value_gradients"
    ),
    "negative control: forward order": (
        f"{CONTROLS}::test_windows_back_in_the_order_of_the_forward"
    ),
    "negative control: no mask": f"{CONTROLS}::test_a_window_without_a_mask",
    "negative control: labels by window": (f"{CONTROLS}::test_labels_that_end_with_their_window"),
    # tokens and decisions
    "tokens equal generate": f"{RUNS}::test_requests_get_the_tokens_of_generate",
    "labels cross windows": (
        f"{ENGINE}::test_labels_cross_the_borders_of_windows_and_leave_the_prompt_out"
    ),
    "never over capacity under pressure": f"{POLICY}::test_laws_hold_under_pressure",
    "grown finetuning causes no restart": f"{POLICY}::test_finetuning_preempts_no_request",
    "a job ends with the last request": f"{POLICY}::test_a_job_ends_with_the_last_request",
    "plans are played back": f"{POLICY}::test_a_log_is_played_back",
    # adapters of requests
    "tokens with adapters equal peft's generate": f"{ADAPTERS}::test_tokens_equal_those_of_peft",
    "adapters: sim and lockstep plan alike": f"{ADAPTERS}::test_plans_are_those_of_the_simulation",
    "resident bytes of adapters are exact": (
        f"{ADAPTERS}::test_resident_bytes_are_exact_by_the_meter"
    ),
    "a request keeps its version": (
        f"{PUBLISHED}::test_a_request_keeps_the_version_with_which_it_was_admitted"
    ),
    "adapters: LRU": f"{RESIDENT}::test_the_least_recently_used_goes_first",
    "pages are keyed by adapter": f"{RESIDENT}::test_pages_of_another_adapter_are_never_found",
    "adapters under pressure keep every law": f"{RESIDENT}::test_random_traces_keep_every_law",
    # bytes
    "kept bytes equal their formula": f"{BYTES}::test_a_layer_keeps_the_bytes_of_the_formula",
    "frozen weights lie there once": (
        f"{BYTES}::test_adapters_lie_over_the_weights_that_are_served"
    ),
    "the meter reads what is booked": f"{BYTES}::test_the_meter_reads_what_is_booked",
    "no graph outlives a launch": f"{BYTES}::test_no_graph_outlives_a_launch",
    # published figures
    "constant steps": "benchmarks/coserving/constant_steps.py",
    "FlexLLM's 15 cells, 10 %, 6 %, 7 %, 0.05, 15 s": "benchmarks/coserving/flexllm_table.py",
    "FlexLLM's steps at 70B": "benchmarks/coserving/flexllm_steps.py",
    "FlexLLM's Fig. 13 and all other figures": "benchmarks/coserving/flexllm_page.py",
    # policies
    "policy budget": f"{POLICY}::test_a_window_takes_what_requests_leave_of_the_budget",
    "policy slo": f"{SLO}::test_no_step_takes_longer_than_the_slo",
    "policy temporal": f"{SLO}::test_two_steps_train_behind_some_that_serve",
    "policy temporal, dynamic": f"{SLO}::test_training_comes_seldom_while_requests_wait",
    "policy temporal, limited": f"{SLO}::test_a_limited_turn_is_a_window_or_some_layers",
    "policy elastic: PatrickStar and ZeRO-3 under KV": (
        "tests/policies/test_elastic.py::test_requests_take_what_training_can_evict"
    ),
    "a wrong predictor is corrected": (
        f"{SLO}::test_a_wrong_predictor_is_corrected_by_what_launches_took"
    ),
    # experiments
    "budget_sweep, coserve_frontier": f"{FIGURES}::test_finetuning_is_drawn_beside_latency",
}
ABSENT = {
    "an 8B shape in bfloat16 on a GPU": "windows run on the CPU alone; a GPU refuses them by name",
    "the SLO attainment that FlexLLM draws": "published as curves, without numbers",
}


@pytest.mark.parametrize("promise", SHOWN)
def test_what_is_promised_is_shown(promise: str) -> None:
    assert is_there(SHOWN[promise]), SHOWN[promise]


def test_what_is_not_shown_has_a_reason() -> None:
    assert all(ABSENT.values()) and not ABSENT.keys() & SHOWN.keys()
