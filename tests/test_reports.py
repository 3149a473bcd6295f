"""Public bug reports and requests of users: the test that fails if each came back.

A wrong drafter stays lossless and is only slow, so most of these bugs shipped without anybody noticing.
"""

import ast
import re

import pytest
from helpers.paths import ROOT

# rows there are: a report that loses its row loses its guard
ROWS = 45

# what went wrong, and the threads it was reported in -> tests as `room/file.py::test`; any other string is what has
# no test yet, and why
REPORTS = {
    "non-persistent buffers are noise after a load: huggingface/transformers#48892, #45902": (
        "model/test_fresh_load.py::test_every_buffer_of_a_fresh_load_equals_a_built_one",
        "model/test_weights_on_disk.py::test_construction_on_meta_then_load_works",
    ),
    "`'list' object has no attribute 'keys'`: huggingface/transformers#44861": (
        "model/test_fresh_load.py::test_ties_are_a_dictionary_or_absent",
    ),
    "`all_tied_weights_keys` is missing: huggingface/transformers#43883, #48253": (
        "model/test_fresh_load.py::test_post_init_has_run",
        "publish/test_bundle.py::test_bundle_decodes_on_every_supported_transformers",
    ),
    "`kernels.foo.py` not found: huggingface/transformers#29714": (
        "test_boundary.py::test_shipped_file_imports_only_siblings_and_the_stack",
        "publish/test_bundle.py::test_bundle_decodes_without_this_package",
    ),
    "`.item()` on meta tensors: huggingface/transformers#45092": (
        "model/test_weights_on_disk.py::test_construction_on_meta_then_load_works",
    ),
    "a self-hosted Hub without xet: huggingface/huggingface_hub#4786, #4507": (
        "publish/test_hub_xet.py::test_server_without_xet_names_the_way_around",
    ),
    "a random embedding or head in the export: lightseekorg/TorchSpec#38, vllm-project/speculators#1114": (
        "model/test_weights_on_disk.py::test_the_state_dict_has_the_public_names_and_no_embedding_or_head",
        "publish/test_bundle.py::test_bundle_keeps_every_weight_and_names_its_code_locally",
        "publish/test_bundle.py::test_broken_checkpoint_is_refused_and_nothing_is_written",
        "conversion/test_convert.py::test_copies_of_the_targets_tables_are_left_out_when_they_are_equal",
        "conversion/test_mutations.py::test_mutation_is_refused_with_its_message",
    ),
    "tap layers guessed by a formula: z-lab/dflash#156, sgl-project/sglang#37475": (
        "model/test_configuration.py::test_required_fields_are_never_guessed",
        "model/test_configuration.py::test_a_broken_rule_is_refused_by_name",
        "publish/test_verify.py::test_taps_shifted_by_one_are_caught_by_the_canary",
    ),
    "`tie_word_embeddings` copied from the target: sgl-project/SpecForge#139": (
        "model/test_weights_on_disk.py::test_a_tie_flag_copied_from_the_target_changes_nothing",
        "conversion/test_mutations.py::test_mutation_is_refused_with_its_message",
    ),
    "the wrong target: vllm-project/vllm#18906": (
        "checkpoints/test_pairing.py::test_mismatch_is_an_error_with_its_rule",
        "model/test_binding.py::test_a_target_of_another_shape_is_refused",
    ),
    "does the block count its anchor?: sgl-project/sglang#30982, verl-project/verl-SpeCo#78": (
        "model/test_rounds.py::test_a_block_counts_its_anchor",
        "publish/test_cards.py::test_sections_and_snippets",
        "sglang_plugin/test_startup.py::test_arguments_are_filled_in",
        "sglang_plugin/test_engines.py::test_drafts_are_those_of_the_model_for_the_same_text",
        "conversion/test_mutations.py::test_mutation_is_refused_with_its_message",
    ),
    "an architecture that another class claims: vllm-project/vllm#52197": (
        "model/test_fresh_load.py::test_names_are_nobody_elses",
        "publish/test_bundle.py::test_bundle_keeps_every_weight_and_names_its_code_locally",
        "sglang_plugin/test_engine_refusals.py::test_the_plugin_registers_everything",
    ),
    "`Cache.crop` changed its meaning: huggingface/transformers#47720, #47433, #48479": (
        "model/test_rounds.py::test_caches_are_rolled_back_by_negative_counts_only",
        "model/test_rounds.py::test_blocks_accepted_whole_keep_the_text_on_every_supported_transformers",
        "model/test_context_cache.py::test_a_crop_out_of_range_is_refused",
        "publish/test_bundle.py::test_bundle_decodes_on_every_supported_transformers",
    ),
    "pinned weights with newer code: huggingface/transformers#18537, #23745": (
        "publish/test_published.py::test_tag_keeps_its_code_and_weights_when_main_moves",
        "publish/test_bundle.py::test_bundle_keeps_every_weight_and_names_its_code_locally",
    ),
    "a re-saved model without its code: huggingface/transformers#24737": (
        "model/test_fresh_load.py::test_a_saved_copy_carries_its_own_code",
        "publish/test_published.py::test_saved_and_forked_copies_draft_alike",
    ),
    "an optional import at the top: huggingface/transformers#28459": (
        "test_boundary.py::test_triton_is_only_imported_inside_try",
        "publish/test_bundle.py::test_bundle_decodes_without_this_package",
    ),
    "invalid metadata after a long upload: huggingface/huggingface_hub#1927": (
        "publish/test_hub_refusals.py::test_unfit_folder_is_refused_and_nothing_is_sent",
        "publish/test_hub_refusals.py::test_hub_refuses_a_card_before_the_repository_exists",
        "publish/test_cards.py::test_author_metadata_is_checked",
    ),
    "the xet client fails: huggingface/xet-core#928, #548": (
        "publish/test_hub_xet.py::test_damaged_xet_storage_names_the_way_around",
    ),
    "413, 429, 503, 504, 403: huggingface/huggingface_hub#918, #2587, #3071, #3186, #3183": (
        "publish/test_hub_faults.py::test_passing_fault_is_survived",
        "publish/test_hub_faults.py::test_lasting_fault_changes_nothing_and_names_the_remedy",
        "publish/test_hub_push.py::test_many_files_and_pages",
    ),
    "a checkpoint read as another method's: vllm-project/vllm#52111": (
        "publish/test_bundle.py::test_broken_checkpoint_is_refused_and_nothing_is_written",
        "conversion/test_convert_refusals.py::test_unknown_format_is_refused_with_its_keys",
        "conversion/test_convert.py::test_converted_checkpoint_computes_what_the_oracle_computes",
    ),
    "d2t absent or all zero: SafeAILab/EAGLE#222": (
        "conversion/test_convert.py::test_community_copies_give_the_same_weights",
        "conversion/test_mutations.py::test_mutation_is_refused_with_its_message",
    ),
    "dropped key names: verl-project/verl-SpeCo#62": (
        "checkpoints/test_readers.py::test_a_renamed_tensor_is_named_by_every_reader",
        "publish/test_bundle.py::test_broken_checkpoint_is_refused_and_nothing_is_written",
    ),
    "no card: vllm-project/speculators#1055": (
        "publish/test_cards.py::test_front_matter",
        "publish/test_cards.py::test_sections_and_snippets",
        "publish/test_cards.py::test_author_metadata_is_checked",
        "publish/test_hub_refusals.py::test_unfit_folder_is_refused_and_nothing_is_sent",
        "publish/test_hub_refusals.py::test_push_refuses_a_card_without_license_or_with_numbers_of_nobody",
        "a base model or a result that is missing only warns: targets may be local, and an upload may come first",
    ),
    "thinking off instead of on: z-lab/dflash#133": (
        "checkpoints/test_pairing.py::test_caution_is_reported_and_does_not_refuse",
        "evaluation/test_receipts.py::test_bad_receipt_is_refused",
        "the recorded mode applied to prompts: comes with evaluation",
    ),
    "thinking on instead of off: z-lab/dflash#60": (
        "evaluation/test_receipts.py::test_protocols_differ",
        "publish/test_cards.py::test_results_state_their_protocol",
        "a run in both modes: comes with evaluation",
    ),
    "which state a tap is: vllm-project/vllm#40727, #42704": (
        "model/test_greedy.py::test_taps_are_the_hidden_states_of_transformers",
        "model/test_pair.py::test_drafts_are_the_recorded_ones",
        "sglang_plugin/test_engines.py::test_drafts_are_those_of_the_model_for_the_same_text",
        "checkpoints/test_taps.py::test_tapped_states_are_those_the_ids_mean",
    ),
    "guessed taps: z-lab/dflash#156": (
        "model/test_configuration.py::test_required_fields_are_never_guessed",
        "checkpoints/test_readers.py::test_a_wrong_count_of_taps_is_refused_by_every_reader",
    ),
    "`mat1 and mat2`: vllm-project/vllm#48113": (
        "checkpoints/test_pairing.py::test_mismatch_is_an_error_with_its_rule",
        "publish/test_verify.py::test_wrong_target_is_refused_before_it_is_loaded",
        "model/test_binding.py::test_another_tokenizer_is_refused",
    ),
    "anchor first or one more: sgl-project/sglang#40144, ggml-org/llama.cpp#26275": (
        "model/test_rounds.py::test_a_block_counts_its_anchor",
        "publish/test_verify.py::test_a_drafter_that_is_never_accepted_fails_verify",
        "model/test_block_pass.py::test_a_block_of_another_size_is_refused",
    ),
    "config dialects: sgl-project/sglang#40630, vllm-project/speculators#753": (
        "conversion/test_convert.py::test_round_trips_keep_every_byte_and_every_setting",
        "checkpoints/test_taps.py::test_speculators_nested_config_is_read",
        "sglang_plugin/test_engine_refusals.py::test_the_plugin_registers_everything",
        "sglang_plugin/test_startup.py::test_a_trainers_config_is_read",
    ),
    "the mask token ignored: sgl-project/SpecForge#604, NVIDIA-NeMo/Automodel#2461": (
        "model/test_configuration.py::test_required_fields_are_never_guessed",
        "model/test_configuration.py::test_a_broken_rule_is_refused_by_name",
        "checkpoints/test_pairing.py::test_mismatch_is_an_error_with_its_rule",
        "model/test_drafting.py::test_the_cached_walk_equals_the_sequential_walk",
    ),
    "the draft's head overwritten: vllm-project/vllm-ascend#11374": (
        "model/test_weights_on_disk.py::test_the_state_dict_has_the_public_names_and_no_embedding_or_head",
        "model/test_binding.py::test_a_bound_drafter_knows_its_target",
        "conversion/test_mutations.py::test_mutation_is_refused_with_its_message",
    ),
    "a quantised head: sgl-project/sglang#35534": (
        "checkpoints/test_pairing.py::test_caution_is_reported_and_does_not_refuse",
        "sglang_plugin/test_transition_cache.py::test_a_quantised_head_is_scored_through_its_own_method",
    ),
    "a quantised draft at zero acceptance: sgl-project/sglang#39087": (
        "publish/test_verify.py::test_a_drafter_that_is_never_accepted_fails_verify",
        "publish/test_bundle.py::test_float32_checkpoint_is_published_in_bfloat16_but_a_basis_is_not",
        "model/test_weights_on_disk.py::test_a_basis_stays_float32_in_a_bfloat16_load",
        "conversion/test_quantize.py::test_linears_of_the_layers_are_rounded_and_nothing_else_is_touched",
        "conversion/test_quantize.py::test_push_asks_for_a_receipt_of_these_very_weights",
    ),
    "sampling that is not lossless or slow: z-lab/dflash#74": (
        "model/test_sampling.py::test_sampled_text_has_the_targets_distribution",
        "model/test_sampling.py::test_q_equal_to_p_is_always_accepted",
        "kernels/test_kernels.py::test_walk_draws_from_q",
        "sglang_plugin/test_engines.py::test_samples_have_the_targets_distribution",
    ),
    "is it lossless?: sgl-project/sglang#38009, z-lab/dflash#159": (
        "evaluation/test_receipts.py::test_bad_receipt_is_refused",
        "publish/test_cards.py::test_results_state_their_protocol",
        "model/test_pair.py::test_greedy_text_equals_plain_decoding_token_for_token",
        "the logit gap where two texts part: comes with evaluation",
    ),
    "high accuracy in training, low acceptance in serving: sgl-project/SpecForge#455, #533": (
        "training/test_blocks.py::test_packed_blocks_equal_each_block_alone",
        "model/test_greedy.py::test_transformers_own_dflash_loop_gives_the_same_text",
        "sglang_plugin/test_engines.py::test_text_and_acceptance_are_those_of_the_transformers_loop",
    ),
    "other languages and domains, and which data: z-lab/dflash#7, #52": (
        "publish/test_cards.py::test_training_is_shown_without_paths_and_losses",
        "publish/test_cards.py::test_sections_and_snippets",
        "acceptance by domain and the best block length: come with evaluation",
    ),
    "several GPUs: vllm-project/vllm#31886, #48392": ("sglang_plugin/test_engines.py::test_two_ranks_draft_alike",),
    "flags of a result: z-lab/dflash#35": (
        "publish/test_cards.py::test_results_state_their_protocol",
        "evaluation/test_receipts.py::test_bad_receipt_is_refused",
    ),
    "more targets: z-lab/dflash#68": ("publish/test_catalog.py::test_issue_targets_are_listed",),
    "one drafter for fine-tunes of its target: z-lab/dflash#149": (
        "model/test_binding.py::test_another_head_warns_with_codes_and_is_refused_with_a_basis",
        "checkpoints/test_pairing.py::test_caution_is_reported_and_does_not_refuse",
    ),
    "a strict map of keys: verl-project/verl-SpeCo#62": (
        "checkpoints/test_readers.py::test_a_renamed_tensor_is_named_by_every_reader",
    ),
    "a round trip is not a sufficient check: vllm-project/speculators#1041": (
        "model/test_block_pass.py::test_a_block_equals_the_oracle",
        "publish/test_published.py::test_independent_mirror_reads_what_was_pushed",
    ),
    "simulated acceptance: sgl-project/sglang#32595": ("evaluation/test_receipts.py::test_bad_receipt_is_refused",),
}


def named(entry):
    return [text for text in entry if "::" in text]


def test_every_row_names_its_threads():
    """Catches a row that got lost, one without a public thread, and one with neither test nor reason."""
    assert len(REPORTS) == ROWS
    assert all(re.search(r": [\w.-]+/[\w.-]+#\d+(, ([\w.-]+/[\w.-]+)?#\d+)*$", row) for row in REPORTS)
    assert all(isinstance(entry, tuple) and entry and all(entry) for entry in REPORTS.values())
    assert all(len(entry) - len(named(entry)) <= 1 for entry in REPORTS.values()), "one reason a row"


@pytest.mark.parametrize("row", REPORTS)
def test_every_named_test_exists(row):
    """Catches a test that was renamed or removed together with the only guard of a report."""
    for test in named(REPORTS[row]):
        file, name = test.split("::")
        tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_rows_without_a_full_test_are_listed_with_their_reason():
    """Catches an open row that CONTRIBUTING.md does not list, and a line that stays when the row is closed."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Public reports")[1].split("\n## ")[0]
    listed = [" ".join(row.split()) for row in re.findall(r"^- `([^`]+)`", text, re.MULTILINE)]
    assert listed == [row for row, entry in REPORTS.items() if len(entry) > len(named(entry))]
