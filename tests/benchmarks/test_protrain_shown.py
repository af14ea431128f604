"""What ProTrain promises, each with the test or claim that shows it, or why it is absent."""

from __future__ import annotations

import pytest

from tests.benchmarks.test_shown import is_there

RUNS = "tests/planners/test_protrain_runs.py"
SEARCH = "tests/planners/test_protrain_search.py"
STAGES = "tests/engine/test_stages.py"
PLAN = "tests/cli/test_plan_command.py"
SAVED = "tests/training/test_checkpoints.py"
UNITS = "tests/training/test_unit_profile.py"
DRAWN = "tests/analysis/test_experiments.py"
REPLANNED = "tests/planners/test_replanning.py"

SHOWN = {
    # order as data
    "GPipe, flush and 2BW under all law checks": (
        f"{STAGES}::test_pipelines_obey_the_laws_and_repeat_their_plans"
    ),
    "shards on any device": f"{STAGES}::test_shards_run_on_any_device",
    "a flush costs the bubble, two versions none": (
        f"{STAGES}::test_a_flush_costs_the_bubble_and_two_versions_have_none"
    ),
    "order eager; clipping waits for the norm": (
        f"{STAGES}::test_clipped_updates_wait_for_the_norm_of_all_gradients"
    ),
    "copies are quoted by direction and bytes": (
        f"{SEARCH}::test_planners_are_quoted_copies_by_direction_and_bytes"
    ),
    # numerics
    "configurations and recipes equal plain torch to the bit": (
        f"{RUNS}::test_any_configuration_trains_as_plain_torch_and_decides_alike"
    ),
    "the same on threads": f"{RUNS}::test_a_thread_for_each_lane_trains_as_plain_torch",
    "a weight copy taken for new fails": (
        f"{RUNS}::test_a_weight_copy_that_its_update_has_made_old_is_refused"
    ),
    "overlap is real, and none with clipping": (
        f"{RUNS}::test_eager_updates_lie_under_the_backward_and_clipped_ones_do_not"
    ),
    "rivals with eager updates": f"{RUNS}::test_eager_updates_train_as_plain_torch",
    # the model and the choice
    "peak, time and regret on whole surfaces": "benchmarks/scale/protrain_surface.py",
    "peak and time, sampled": (
        f"{SEARCH}::test_a_configuration_runs_in_the_peak_that_is_foreseen_and_takes_its_time"
    ),
    "brute force; more memory is never slower": (
        f"{SEARCH}::test_the_search_finds_what_brute_force_finds"
    ),
    "refusals name the least deficit": f"{SEARCH}::test_refusals_name_the_least_deficit",
    "rivals at their best settings": "benchmarks/scale/protrain_rivals.py",
    "200 random budgets": (
        f"{SEARCH}::test_nothing_that_is_chosen_is_refused_or_goes_over_capacity"
    ),
    "hidden share within 2 points of max(arrival, lane free)": (
        f"{RUNS}::test_a_host_update_begins_when_its_gradients_have_come_and_its_lane_is_free"
    ),
    "a 20B model is searched": f"{SEARCH}::test_few_configurations_of_a_20b_model_are_timed",
    "a 20B model is searched in a second": "benchmarks/scale/protrain_search.py",
    "deep models are searched by some numbers of each knob": (
        f"{SEARCH}::test_a_deep_model_is_searched_by_some_numbers_of_each_knob"
    ),
    "plan tells the choice, runners-up, what bounds it": (
        f"{PLAN}::test_the_choice_of_protrain_is_told_with_what_bounds_it"
    ),
    "plan writes the surface": f"{PLAN}::test_a_surface_is_a_file_with_the_fastest_first",
    "plan writes the surface of what does not fit": (
        f"{PLAN}::test_a_surface_is_written_where_nothing_fits"
    ),
    "fast-forward of steps holds": (
        "tests/training/test_training_matrix.py::test_steps_of_protrain_and_of_eager_updates_recur"
    ),
    "eager beside the tables of PatrickStar and ZeRO-3": (
        "analysis/REPRODUCTION.md: "
        "| system | model | published | ours | error | batch | chunk | eager |"
    ),
    # the profiler
    "units alone: bytes equal the tape's": f"{UNITS}::test_bytes_are_those_of_the_tape",
    "a model four times the arena, inside it": (
        f"{UNITS}::test_a_model_of_four_times_the_device_is_measured_inside_it"
    ),
    "what module hooks miss": f"{UNITS}::test_hooks_miss_what_no_module_makes",
    # checkpoints
    "resumed bit for bit, every policy": (
        f"{SAVED}::test_a_resumed_job_ends_as_if_it_had_never_stopped"
    ),
    "a run that a signal ended is resumed": f"{SAVED}::test_a_run_that_a_signal_ended_is_resumed",
    "a checkpoint is whole while other lanes go on": (
        f"{SAVED}::test_what_a_checkpoint_copies_stays_while_other_lanes_go_on"
    ),
    "a truncated checkpoint is refused": (
        f"{SAVED}::test_a_truncated_checkpoint_is_refused_and_the_one_before_it_is_used"
    ),
    "from_pretrained loads the weights": (
        f"{SAVED}::test_weights_are_what_plain_torch_has_trained_and_from_pretrained_loads_them"
    ),
    "adapters as peft's": f"{SAVED}::test_adapters_are_saved_as_peft_saves_them",
    "experiment knob_surface": (
        f"{DRAWN}::test_more_that_persists_takes_more_and_checkpoints_take_time"
    ),
    "experiment link_bandwidth_swaps": f"{DRAWN}::test_swaps_are_chosen_where_the_link_is_fast",
    "experiment estimator_error": f"{DRAWN}::test_configurations_are_predicted_and_measured",
    "experiment breathing_kv": f"{DRAWN}::test_the_best_share_of_each_load_is_found_in_hindsight",
    "a plan that is searched again when the budget changes": (
        f"{REPLANNED}::test_a_job_gives_way_to_requests_and_comes_back"
    ),
    "laid out anew at each step: bit for bit": (
        f"{REPLANNED}::test_a_job_that_is_laid_out_anew_at_each_step_trains_as_plain_torch"
    ),
    "twelve configurations measured on the service clock; estimator against cpu, three recipes": (
        "benchmarks/fidelity/protrain_measured.py"
    ),
    "published ratios to ZeRO-3 on four A100": "benchmarks/scale/protrain_published.py",
}
ABSENT = {
    "no swaps on an RTX 3090": (
        "16, 1, 16 and 16 of 50 blocks swap at batch 4 to 16, since steps are faster so, by 0.0 to "
        "2.6 % (protrain_published)"
    ),
    "12B and 20B rows of PatrickStar": (
        "not explained: at half the batch that fits, 20B, 30B and 40B on one A100 reach 91.7, 58.9 "
        "and 57.8 Tflops (published 93, 57, 56), and two devices follow "
        "within 6 %, but 20B on two and 50B on one do not"
    ),
    "everything persistent within 2 % of train_on_device and 3 % of a loop": (
        "training_speed fails: ProTrain takes 0.4 % less than train_on_device, and 1.1 % more, but "
        "that takes 6.4 and 1.1 % more than a loop (bar 3 %); bookkeeping is 4.5 and 1.6 % (bar 5)"
    ),
    "eager beside the published table of FSDP2": "no table of FSDP2's throughput is published",
    "2,090 tokens/s, averages and largest models": (
        "analysis/REPRODUCTION.md says what of their settings is unknown"
    ),
    "profiler on a GPU": "no GPU was at hand",
    "peaks within and between operations of a unit": (
        "`units.csv` has those of units; the share that hooks miss is of what is kept, not the peak"
    ),
    "plans read the profile of units": "they read what calibrate fits to short jobs",
    "the peak bar on whole surfaces": (
        "never below it on all of them; at most 10 % above on each 60th configuration, as the "
        "least memory of one takes several runs"
    ),
    "every setting of every rival": (
        "ZeRO-3's persistent units and gradients out, FSDP2's root and PatrickStar's warm-up are "
        "not swept"
    ),
    "the states at four times the arena, all 42 cases": (
        "14 need more than a quarter of their states, and are named in the test"
    ),
    "checkpoints of samples in windows": "they are of jobs that train whole microbatches",
    "a GPU in an emulated 24 GB": (
        "no GPU was at hand: benchmarks/gpu/gpu_training.py has run on a CPU alone"
    ),
}


@pytest.mark.parametrize("promise", SHOWN)
def test_what_is_promised_is_shown(promise: str) -> None:
    assert is_there(SHOWN[promise]), SHOWN[promise]


def test_what_is_not_shown_has_a_reason() -> None:
    assert all(ABSENT.values()) and not ABSENT.keys() & SHOWN.keys()
