"""What learning from what was served promises, each with the test or claim that shows it."""

from __future__ import annotations

import pytest

from tests.benchmarks.test_shown import is_there

RUNS = "tests/finetuning/test_record_runs.py"
BOUNDS = "tests/finetuning/test_record_bounds.py"
EXACT = "tests/finetuning/test_record_exact.py"
CHOICE = "tests/finetuning/test_alchemist.py"
FEEDBACK = "tests/policies/test_feedback.py"
FEEDBACK_RUNS = "tests/finetuning/test_feedback_runs.py"
POLICY = "tests/engine/test_records.py"
FIGURES = "tests/analysis/test_experiments.py"
COSTS = "tests/sim/test_adapters_cost.py"
CONFIGS = "tests/cli/test_configs.py"

SHOWN = {
    # numerics
    "losses and adapters are plain torch's, also of stashed weights": (
        f"{RUNS}::test_training_is_that_of_plain_torch"
    ),
    "to the bit with stashed weights, behind a stale record": (
        f"{EXACT}::test_behind_stale_records_they_are_those_of_the_weights_that_served"
    ),
    "to the bit with a whole, unfused record": (
        f"{EXACT}::test_losses_and_adapters_are_plain_torchs_to_the_bit"
    ),
    "gradients in float64, two families": f"{BOUNDS}::test_in_float64",
    "gradients in float32": f"{BOUNDS}::test_in_float32",
    "gradients in bfloat16": f"{BOUNDS}::test_in_bfloat16",
    "the same on both clocks of a CPU": f"{RUNS}::test_training_in_measured_time",
    "offloaded or not: equal bits": f"{RUNS}::test_what_is_kept_where_makes_no_difference",
    "negative control: off by one token": f"{RUNS}::test_a_record_off_by_one_token_is_found",
    "negative control: another version": f"{RUNS}::test_a_record_of_another_version_is_found",
    "negative control: a preempted prompt": f"{POLICY}::test_a_preempted_prompt_leaves_no_record",
    "losses of feedback are those of the dialogues": (
        f"{FEEDBACK_RUNS}::test_losses_are_those_of_the_dialogues"
    ),
    # tokens and decisions
    "tokens equal generate, with the version of each request": (
        f"{RUNS}::test_tokens_are_those_of_the_version"
    ),
    "tokens, plans and training under every way to share": (
        f"{RUNS}::test_every_way_to_share_records_and_learns"
    ),
    "record-all: answers as well": f"{RUNS}::test_answers_are_recorded_as_well",
    "equal views, equal plans, also of feedback rates": (
        f"{CHOICE}::test_equal_views_get_equal_plans"
    ),
    "sim and lockstep decide alike": f"{RUNS}::test_training_is_that_of_plain_torch",
    "plans are played back": f"{POLICY}::test_a_log_is_played_back",
    "never over capacity under pressure": f"{POLICY}::test_laws_hold_under_pressure",
    "never over capacity with older records": (
        f"{POLICY}::test_laws_hold_under_pressure_with_older_records"
    ),
    "records cause no restart: equal plans where requests fit": (
        f"{POLICY}::test_requests_are_planned_as_if_records_held_nothing"
    ),
    "records cause no restart: as many where they do not, over eight traces": (
        f"{POLICY}::test_records_cause_no_restart"
    ),
    "records give way to a burst within one plan": (
        f"{POLICY}::test_in_a_burst_records_give_way_first_and_in_one_plan"
    ),
    "a stale record is refused": f"{POLICY}::test_a_stale_record_is_refused",
    "a prefix hit leaves no record of its tokens": (
        f"{RUNS}::test_tokens_that_a_prefix_hit_found_are_in_no_record"
    ),
    # bytes and prices
    "kept bytes of prompts, and of answers as well, equal their formula": (
        f"{RUNS}::test_kept_bytes_are_those_of_windows"
    ),
    "the meter within 2 % beside records": f"{RUNS}::test_the_meter_reads_what_is_booked",
    "prices that calibrate has fitted predict a step behind records": (
        "benchmarks/coserving/record_reuse.py"
    ),
    "recording is priced": f"{COSTS}::test_a_recorded_slice_is_priced_as_a_window",
    # policies
    "policy alchemist, and what became of its records": (
        f"{POLICY}::test_outcomes_tell_what_became_of_records"
    ),
    "policy alchemist, sliced training by layers, which serving interrupts": (
        f"{RUNS}::test_every_way_to_share_records_and_learns"
    ),
    "policy alchemist, staleness": f"{POLICY}::test_staleness_lets_older_records_be_used",
    "policy alchemist, threshold and predicted feedback": (
        f"{CHOICE}::test_tenants_whose_answers_get_no_feedback_are_not_recorded_once_that_is_known"
    ),
    "policy alchemist, age trigger": f"{CHOICE}::test_a_step_begins_once_a_sample_has_waited",
    "policy alchemist, batch trigger": f"{POLICY}::test_a_step_begins_with_enough_samples",
    "headroom of device and host": (
        f"{POLICY}::test_records_leave_their_share_of_the_device_and_the_host_free"
    ),
    "out lowest layer first, back highest first, ahead of the backward": (
        f"{POLICY}::test_records_go_out_lowest_layer_first_and_come_back_highest_first"
    ),
    "hedge against bursts, by what waits": (
        f"{POLICY}::test_fewer_records_end_where_what_waits_is_foreseen"
    ),
    "last layers that stay": f"{POLICY}::test_the_last_layers_stay",
    "age of records": f"{POLICY}::test_records_end_once_they_have_waited_for_too_long",
    "baseline: oracle": (f"{CHOICE}::test_the_oracle_records_what_gets_feedback_and_nothing_else"),
    "baseline: recompute": f"{POLICY}::test_samples_start_behind_records",
    "baselines: no offload, no hedge": (
        f"{POLICY}::test_in_a_burst_records_give_way_first_and_in_one_plan"
    ),
    "baseline: separate cluster": (
        f"{FEEDBACK_RUNS}::test_another_device_trains_on_the_feedback_of_a_run"
    ),
    "stall split, hit rate, bytes kept and wasted": (
        "tests/analysis/test_learning.py::test_the_page_tells_of_samples_and_records"
    ),
    "versions are published and kept as without records": (
        f"{RUNS}::test_tokens_are_those_of_the_version"
    ),
    # experiments
    "alchemist_share, alchemist_delay, alchemist_link, alchemist_staleness, alchemist_burst": (
        f"{FIGURES}::test_finetuning_is_drawn_beside_latency"
    ),
    "every policy that shares a device learns from records": (
        f"{RUNS}::test_every_way_to_share_records_and_learns"
    ),
    "every choice of what to record": (
        f"{RUNS}::test_every_choice_of_what_to_record_serves_and_learns"
    ),
    "measured runs with records are played back": (
        "tests/finetuning/test_played_back.py::test_a_measured_run_is_played_back"
    ),
    "the separate cluster learns from the same requests": (
        f"{FEEDBACK_RUNS}::test_another_device_learns_from_the_requests_of_an_adapter"
    ),
    "the age of records on the page": (
        "tests/analysis/test_learning.py::test_the_page_tells_of_samples_and_records"
    ),
    "speed-up at recorded shares 5 %, 1.3 at .9": "benchmarks/coserving/record_reuse.py",
    "99 % of the tokens stay in time at 80 % load": "benchmarks/coserving/records_give_way.py",
    "when it pays: the crossover of link and delay": "benchmarks/coserving/when_it_pays.py",
    "published figures of Alchemist": "benchmarks/coserving/alchemist_published.py",
    "throughput and memory beside a trainer that computes prompts again": (
        "benchmarks/coserving/alchemist_published.py"
    ),
}
UNMEASURED = "benchmarks/coserving/{}.py needs hours of a machine at rest, and has no row yet"
ABSENT = {
    "cost of recording 3 %": UNMEASURED.format("recording_cost"),
    "CPU fidelity of three policies at three loads": UNMEASURED.format("feedback_fidelity"),
    "latency beside a server that records nothing": UNMEASURED.format("recording_cost"),
    "no trace with more restarts": (
        "of eight traces that press, one has three more and others have fewer"
    ),
    "delay of feedback on the wall clock": (
        "when_it_pays varies the link there; the crossing by delay is simulated"
    ),
    "the ids of ShareGPT's answers": "they are drawn: a trace has lengths of answers, no text",
    "an 8B shape in bfloat16 on a GPU": (
        "no GPU was at hand: benchmarks/gpu/gpu_sharing.py has run on a CPU alone"
    ),
}


@pytest.mark.parametrize("promise", SHOWN)
def test_what_is_promised_is_shown(promise: str) -> None:
    assert is_there(SHOWN[promise]), SHOWN[promise]


def test_what_is_not_shown_has_a_reason() -> None:
    assert all(ABSENT.values()) and not ABSENT.keys() & SHOWN.keys()
