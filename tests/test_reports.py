"""Public bug reports and requests of users: the test that fails if each came back, and tests that had no other place.

A wrong drafter stays lossless and is only slow, so most of these bugs shipped without anybody noticing.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import build_drafter, drafts_with_errors, target_record
from loopback_hub import HubServer
from overlays import OVERLAYS
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

from dspine_hub import modeling_dspine
from dspine_hub.checkpoints.loading import load_bundle, load_drafter_checkpoint
from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.canary import CANARY_PROMPTS
from dspine_hub.findings import Report
from dspine_hub.modeling_dspine import DSpineForSpeculation
from dspine_hub.publish import hub
from dspine_hub.publish.bundle import AUTO_MAP, SHIPPED, build_bundle
from dspine_hub.publish.verify import check_canary, check_tensors

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / "examples" / "mini"
OVERLAY_FOLDER = os.environ.get("DSPINE_OVERLAYS")
PROMPT = [3, 1, 4, 15, 92]

# the rows of both surveys; numbers are theirs, gaps included
BUG_ROWS = (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 18, 20, 21, 22, 24, 25, 26)
ASK_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 18, 19, 20)
ALSO_ROWS = (
    "z-lab/dflash#35",
    "z-lab/dflash#68",
    "z-lab/dflash#149",
    "verl-project/verl-SpeCo#62",
    "vllm-project/speculators#1041",
    "sgl-project/sglang#32595",
)

# row -> tests as `file.py::test`; any other string is what has no test yet, and why
REPORTS = {
    # non-persistent buffers are noise after a load: huggingface/transformers#48892, #45902
    "hub-facts 4.1": (
        "test_reports.py::test_every_buffer_of_a_fresh_load_equals_a_built_one",
        "test_modeling.py::test_construction_on_meta_then_load_works",
    ),
    # `'list' object has no attribute 'keys'`: huggingface/transformers#44861
    "hub-facts 4.2": ("test_reports.py::test_ties_are_a_dictionary_or_absent",),
    # `all_tied_weights_keys` is missing: huggingface/transformers#43883, #48253
    "hub-facts 4.3": (
        "test_reports.py::test_post_init_has_run",
        "test_bundle.py::test_bundle_decodes_on_every_supported_transformers",
    ),
    # `kernels.foo.py` not found: huggingface/transformers#29714
    "hub-facts 4.4": (
        "test_boundary.py::test_shipped_file_imports_only_siblings_and_the_stack",
        "test_bundle.py::test_bundle_decodes_without_this_package",
    ),
    # `.item()` on meta tensors: huggingface/transformers#45092
    "hub-facts 4.6": ("test_modeling.py::test_construction_on_meta_then_load_works",),
    # a self-hosted Hub without xet: huggingface/huggingface_hub#4786, #4507
    "hub-facts 4.7": ("test_hub.py::test_server_without_xet_names_the_way_around",),
    # a random embedding or head in the export: lightseekorg/TorchSpec#38, vllm-project/speculators#1114
    "hub-facts 4.8": (
        "test_modeling.py::test_the_state_dict_has_the_public_names_and_no_embedding_or_head",
        "test_bundle.py::test_bundle_keeps_every_weight_and_names_its_code_locally",
        "test_bundle.py::test_broken_checkpoint_is_refused_and_nothing_is_written",
        "test_convert.py::test_copies_of_the_targets_tables_are_left_out_when_they_are_equal",
        "test_convert_refusals.py::test_mutation_is_refused_with_its_message",
    ),
    # tap layers guessed by a formula: z-lab/dflash#156, sgl-project/sglang#37475
    "hub-facts 4.9": (
        "test_configuration.py::test_required_fields_are_never_guessed",
        "test_configuration.py::test_a_broken_rule_is_refused_by_name",
        "test_verify.py::test_taps_shifted_by_one_are_caught_by_the_canary",
    ),
    # `tie_word_embeddings` copied from the target: sgl-project/SpecForge#139
    "hub-facts 4.10": (
        "test_reports.py::test_a_tie_flag_copied_from_the_target_changes_nothing",
        "test_convert_refusals.py::test_mutation_is_refused_with_its_message",
    ),
    # the wrong target: vllm-project/vllm#18906
    "hub-facts 4.11": (
        "test_pairing.py::test_mismatch_is_an_error_with_its_rule",
        "test_modeling.py::test_a_target_of_another_shape_is_refused",
    ),
    # does the block count its anchor?: sgl-project/sglang#30982, verl-project/verl-SpeCo#78
    "hub-facts 4.12": (
        "test_reports.py::test_a_block_counts_its_anchor",
        "test_cards.py::test_sections_and_snippets",
        "test_sglang.py::test_arguments_are_filled_in",
        "test_sglang_engine.py::test_drafts_are_those_of_the_model_for_the_same_text",
        "test_convert_refusals.py::test_mutation_is_refused_with_its_message",
    ),
    # an architecture that another class claims: vllm-project/vllm#52197
    "hub-facts 4.13": (
        "test_reports.py::test_names_are_nobody_elses",
        "test_bundle.py::test_bundle_keeps_every_weight_and_names_its_code_locally",
        "test_sglang_engine.py::test_the_plugin_registers_everything",
    ),
    # `Cache.crop` changed its meaning: huggingface/transformers#47720, #47433, #48479
    "hub-facts 4.15": (
        "test_reports.py::test_caches_are_rolled_back_by_negative_counts_only",
        "test_reports.py::test_blocks_accepted_whole_keep_the_text_on_every_supported_transformers",
        "test_modeling.py::test_a_crop_out_of_range_is_refused",
        "test_bundle.py::test_bundle_decodes_on_every_supported_transformers",
    ),
    # pinned weights with newer code: huggingface/transformers#18537, #23745
    "hub-facts 4.16": (
        "test_hub.py::test_tag_keeps_its_code_and_weights_when_main_moves",
        "test_bundle.py::test_bundle_keeps_every_weight_and_names_its_code_locally",
    ),
    # a re-saved model without its code: huggingface/transformers#24737
    "hub-facts 4.17": (
        "test_reports.py::test_a_saved_copy_carries_its_own_code",
        "test_hub.py::test_saved_and_forked_copies_draft_alike",
    ),
    # an optional import at the top: huggingface/transformers#28459
    "hub-facts 4.18": (
        "test_boundary.py::test_triton_is_only_imported_inside_try",
        "test_bundle.py::test_bundle_decodes_without_this_package",
    ),
    # invalid metadata after a long upload: huggingface/huggingface_hub#1927
    "hub-facts 4.20": (
        "test_hub.py::test_unfit_folder_is_refused_and_nothing_is_sent",
        "test_hub.py::test_hub_refuses_a_card_before_the_repository_exists",
        "test_cards.py::test_author_metadata_is_checked",
    ),
    # the xet client fails: huggingface/xet-core#928, #548
    "hub-facts 4.21": ("test_reports.py::test_damaged_xet_storage_names_the_way_around",),
    # 413, 429, 503, 504, 403: huggingface/huggingface_hub#918, #2587, #3071, #3186, #3183
    "hub-facts 4.22": (
        "test_hub.py::test_passing_fault_is_survived",
        "test_hub.py::test_lasting_fault_changes_nothing_and_names_the_remedy",
        "test_hub.py::test_many_files_and_pages",
    ),
    # a checkpoint read as another method's: vllm-project/vllm#52111
    "hub-facts 4.24": (
        "test_bundle.py::test_broken_checkpoint_is_refused_and_nothing_is_written",
        "test_convert_refusals.py::test_unknown_format_is_refused_with_its_keys",
        "test_convert.py::test_converted_checkpoint_computes_what_the_oracle_computes",
    ),
    # d2t absent or all zero: SafeAILab/EAGLE#222
    "hub-facts 4.25": (
        "test_convert.py::test_community_copies_give_the_same_weights",
        "test_convert_refusals.py::test_mutation_is_refused_with_its_message",
    ),
    # dropped key names: verl-project/verl-SpeCo#62
    "hub-facts 4.26": (
        "test_reports.py::test_a_renamed_tensor_is_named_by_every_reader",
        "test_bundle.py::test_broken_checkpoint_is_refused_and_nothing_is_written",
    ),
    # no card: vllm-project/speculators#1055
    "ask 1": (
        "test_cards.py::test_front_matter",
        "test_cards.py::test_sections_and_snippets",
        "test_cards.py::test_author_metadata_is_checked",
        "test_hub.py::test_unfit_folder_is_refused_and_nothing_is_sent",
        "test_reports.py::test_push_refuses_a_card_without_license_or_with_numbers_of_nobody",
        "a base model or a result that is missing only warns: targets may be local, and an upload may come first",
    ),
    # thinking off instead of on: z-lab/dflash#133
    "ask 2": (
        "test_pairing.py::test_caution_is_reported_and_does_not_refuse",
        "test_receipts.py::test_bad_receipt_is_refused",
        "the recorded mode applied to prompts: comes with evaluation",
    ),
    # thinking on instead of off: z-lab/dflash#60
    "ask 3": (
        "test_receipts.py::test_protocols_differ",
        "test_cards.py::test_results_state_their_protocol",
        "a run in both modes: comes with evaluation",
    ),
    # which state a tap is: vllm-project/vllm#40727, #42704
    "ask 4": (
        "test_generation.py::test_taps_are_the_hidden_states_of_transformers",
        "test_pair.py::test_drafts_are_the_recorded_ones",
        "test_sglang_engine.py::test_drafts_are_those_of_the_model_for_the_same_text",
        "test_convert.py::test_tapped_states_are_those_the_ids_mean",
    ),
    # guessed taps: z-lab/dflash#156
    "ask 5": (
        "test_configuration.py::test_required_fields_are_never_guessed",
        "test_reports.py::test_a_wrong_count_of_taps_is_refused_by_every_reader",
    ),
    # `mat1 and mat2`: vllm-project/vllm#48113
    "ask 6": (
        "test_pairing.py::test_mismatch_is_an_error_with_its_rule",
        "test_verify.py::test_wrong_target_is_refused_before_it_is_loaded",
        "test_modeling.py::test_another_tokenizer_is_refused",
    ),
    # anchor first or one more: sgl-project/sglang#40144, ggml-org/llama.cpp#26275
    "ask 7": (
        "test_reports.py::test_a_block_counts_its_anchor",
        "test_reports.py::test_a_drafter_that_is_never_accepted_fails_verify",
        "test_modeling.py::test_a_block_of_another_size_is_refused",
    ),
    # config dialects: sgl-project/sglang#40630, vllm-project/speculators#753
    "ask 8": (
        "test_convert.py::test_round_trips_keep_every_byte_and_every_setting",
        "test_convert.py::test_speculators_nested_config_is_read",
        "test_sglang_engine.py::test_the_plugin_registers_everything",
        "test_sglang.py::test_a_trainers_config_is_read",
    ),
    # the mask token ignored: sgl-project/SpecForge#604, NVIDIA-NeMo/Automodel#2461
    "ask 9": (
        "test_configuration.py::test_required_fields_are_never_guessed",
        "test_configuration.py::test_a_broken_rule_is_refused_by_name",
        "test_pairing.py::test_mismatch_is_an_error_with_its_rule",
        "test_modeling.py::test_the_cached_walk_equals_the_sequential_walk",
    ),
    # the draft's head overwritten: vllm-project/vllm-ascend#11374
    "ask 11": (
        "test_modeling.py::test_the_state_dict_has_the_public_names_and_no_embedding_or_head",
        "test_modeling.py::test_a_bound_drafter_knows_its_target",
        "test_convert_refusals.py::test_mutation_is_refused_with_its_message",
    ),
    # a quantised head: sgl-project/sglang#35534
    "ask 12": (
        "test_pairing.py::test_caution_is_reported_and_does_not_refuse",
        "test_sglang.py::test_a_quantised_head_is_scored_through_its_own_method",
    ),
    # a quantised draft at zero acceptance: sgl-project/sglang#39087
    "ask 13": (
        "test_reports.py::test_a_drafter_that_is_never_accepted_fails_verify",
        "test_bundle.py::test_float32_checkpoint_is_published_in_bfloat16_but_a_basis_is_not",
        "test_modeling.py::test_a_basis_stays_float32_in_a_bfloat16_load",
        "test_quantize.py::test_linears_of_the_layers_are_rounded_and_nothing_else_is_touched",
        "test_quantize.py::test_push_asks_for_a_receipt_of_these_very_weights",
    ),
    # sampling that is not lossless or slow: z-lab/dflash#74
    "ask 16": (
        "test_generation.py::test_sampled_text_has_the_targets_distribution",
        "test_generation.py::test_q_equal_to_p_is_always_accepted",
        "test_kernels.py::test_walk_draws_from_q",
        "test_sglang_engine.py::test_samples_have_the_targets_distribution",
    ),
    # is it lossless?: sgl-project/sglang#38009, z-lab/dflash#159
    "ask 17": (
        "test_receipts.py::test_bad_receipt_is_refused",
        "test_cards.py::test_results_state_their_protocol",
        "test_pair.py::test_greedy_text_equals_plain_decoding_token_for_token",
        "the logit gap where two texts part: comes with evaluation",
    ),
    # high accuracy in training, low acceptance in serving: sgl-project/SpecForge#455, #533
    "ask 18": (
        "test_training.py::test_packed_blocks_equal_each_block_alone",
        "test_generation.py::test_transformers_own_dflash_loop_gives_the_same_text",
        "test_sglang_engine.py::test_acceptance_is_that_of_the_transformers_loop",
    ),
    # other languages and domains, and which data: z-lab/dflash#7, #52
    "ask 19": (
        "test_cards.py::test_training_is_shown_without_paths_and_losses",
        "test_cards.py::test_sections_and_snippets",
        "acceptance by domain and the best block length: come with evaluation",
    ),
    # several GPUs: vllm-project/vllm#31886, #48392
    "ask 20": ("test_sglang_engine.py::test_two_ranks_draft_alike",),
    # flags of a result
    "also z-lab/dflash#35": (
        "test_cards.py::test_results_state_their_protocol",
        "test_receipts.py::test_bad_receipt_is_refused",
    ),
    # more targets
    "also z-lab/dflash#68": ("test_catalog.py::test_issue_targets_are_listed",),
    # one drafter for fine-tunes of its target
    "also z-lab/dflash#149": (
        "test_modeling.py::test_another_head_warns_with_codes_and_is_refused_with_a_basis",
        "test_pairing.py::test_caution_is_reported_and_does_not_refuse",
    ),
    # a strict map of keys
    "also verl-project/verl-SpeCo#62": ("test_reports.py::test_a_renamed_tensor_is_named_by_every_reader",),
    # a round trip is not a sufficient check
    "also vllm-project/speculators#1041": (
        "test_modeling.py::test_a_block_equals_the_oracle",
        "test_hub.py::test_independent_mirror_reads_what_was_pushed",
    ),
    # simulated acceptance
    "also sgl-project/sglang#32595": ("test_receipts.py::test_bad_receipt_is_refused",),
}


def named(entry):
    return [text for text in entry if "::" in text]


def test_every_row_is_in_the_table():
    """Catches a row that got lost, and one with neither test nor reason."""
    rows = [f"hub-facts 4.{n}" for n in BUG_ROWS] + [f"ask {n}" for n in ASK_ROWS] + [f"also {n}" for n in ALSO_ROWS]
    assert list(REPORTS) == rows
    assert all(isinstance(entry, tuple) and entry and all(entry) for entry in REPORTS.values())
    assert all(len(entry) - len(named(entry)) <= 1 for entry in REPORTS.values()), "one reason a row"


@pytest.mark.parametrize("row", REPORTS)
def test_every_named_test_exists(row):
    """Catches a test that was renamed or removed together with the only guard of a report."""
    for test in named(REPORTS[row]):
        file, name = test.split("::")
        tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_rows_without_a_full_test_are_listed_with_their_reason():
    """Catches an open row that CONTRIBUTING.md does not list, and a line that stays when the row is closed."""
    listed = re.findall(
        r"^- `((?:hub-facts|ask|also) [^`]+)`.*: .", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert listed == [row for row, entry in REPORTS.items() if len(entry) > len(named(entry))]


# loading

# loads folders in a fresh process that hides this package; writes buffers, stray tensors and a copy of each
LOADER = """
import json, sys
sys.modules["dspine_hub"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModel
torch.set_num_threads(1)
source, copy = sys.argv[1:]
report = {}
for storage in ("codes", "basis"):
    drafter = AutoModel.from_pretrained(f"{source}/{storage}", trust_remote_code=True)
    save_file({name: buffer.clone() for name, buffer in drafter.named_buffers()}, f"{copy}-{storage}.safetensors")
    stray = [key for part in drafter.modules() for key, value in vars(part).items() if torch.is_tensor(value)]
    report[storage] = {"module": type(drafter).__module__.split(".")[0], "stray": stray}
    drafter.save_pretrained(f"{copy}/{storage}")
print(json.dumps(report))
"""


def load_fresh(source, copy, home):
    # another value than zero in unfilled memory, where the allocator is glibc's
    env = {**os.environ, "PYTHONPATH": "", "HF_MODULES_CACHE": str(home), "MALLOC_PERTURB_": "165"}
    command = [sys.executable, "-c", LOADER, str(source), str(copy)]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=home.parent)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def tiny_bundle(target, place, **fields):
    drafter = build_drafter(target, **fields)
    drafter.config.target = target_record(target)
    drafter.save_pretrained(place.with_name(f"{place.name}-checkpoint"))
    return build_bundle(place.with_name(f"{place.name}-checkpoint"), place)


@pytest.fixture(scope="module")
def fresh(target, tmp_path_factory):
    """Bundles of both storages, what a fresh process loads, and what another loads of its copies."""
    place = tmp_path_factory.mktemp("fresh")
    for storage in ("codes", "basis"):
        tiny_bundle(target, place / "bundle" / storage, transfer_storage=storage)
    first = load_fresh(place / "bundle", place / "copy", place / "home")
    (place / "bundle").rename(place / "moved")
    second = load_fresh(place / "copy", place / "copy-of-copy", place / "other-home")
    return place, {"copy": first, "copy-of-copy": second}


@pytest.mark.parametrize("storage", ["codes", "basis"])
@pytest.mark.parametrize("name", ["copy", "copy-of-copy"], ids=["loaded", "saved-and-loaded"])
def test_every_buffer_of_a_fresh_load_equals_a_built_one(fresh, name, storage):
    """Catches buffers that `__init__` fills and a load leaves as noise (transformers#48892), persistent or not."""
    place, reports = fresh
    folder = place / "moved" / storage
    built = DSpineForSpeculation(DSpineConfig.from_pretrained(folder))
    built.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    expected, found = dict(built.named_buffers()), load_file(place / f"{name}-{storage}.safetensors")
    assert set(found) == set(expected)
    for key, buffer in expected.items():
        assert torch.equal(found[key].to(buffer.dtype), buffer), key
    assert reports[name][storage] == {"module": "transformers_modules", "stray": []}


@pytest.mark.parametrize("name", ["copy", "copy-of-copy"])
def test_a_saved_copy_carries_its_own_code(fresh, name):
    """Catches a re-saved model without its code, or with an `auto_map` into its origin (transformers#24737)."""
    place, _ = fresh
    for storage in ("codes", "basis"):
        assert json.loads((place / name / storage / "config.json").read_text())["auto_map"] == AUTO_MAP
        for file, source in SHIPPED.items():
            # `custom_generate/` is no part of the model's own code
            if "/" not in file:
                assert (place / name / storage / file).read_bytes() == source.read_bytes(), file


MODELS = [
    value
    for value in vars(modeling_dspine).values()
    if isinstance(value, type) and issubclass(value, PreTrainedModel) and value is not PreTrainedModel
]


@pytest.mark.parametrize("model", MODELS)
def test_ties_are_a_dictionary_or_absent(model):
    """Catches the list of transformers 4: `'list' object has no attribute 'keys'` (transformers#44861)."""
    assert isinstance(getattr(model, "_tied_weights_keys", None), dict | None)


def test_post_init_has_run(drafter):
    """Catches a constructor that ends without it: no load works then (transformers#43883)."""
    assert drafter.all_tied_weights_keys == {}


def test_names_are_nobody_elses():
    """Catches an architecture or model type under which a loader builds another class (vllm#52197)."""
    assert DSpineForSpeculation.__name__ == "DSpineForSpeculation" and not hasattr(
        transformers, "DSpineForSpeculation"
    )
    assert DSpineConfig.model_type not in configuration_auto.CONFIG_MAPPING_NAMES
    tables = {name: table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}
    assert len(tables) > 10
    assert not [name for name, table in tables.items() if "DSpine" in str(table.values())]


def test_a_tie_flag_copied_from_the_target_changes_nothing(make_target, taps, tmp_path):
    """Catches a head replaced by the embedding, or a failed load, after the flag was copied (SpecForge#139)."""
    target = make_target(tie_word_embeddings=False)
    plain, tied = build_drafter(target), build_drafter(target, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    loaded = DSpineForSpeculation.from_pretrained(tmp_path).eval().bind(target)
    assert loaded.config.tie_word_embeddings and set(loaded.state_dict()) == set(plain.state_dict())
    context = taps(PROMPT, plain, target=target)
    scores = [each.draft(context, torch.tensor([7])).scores for each in (plain, tied, loaded)]
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])


def renamed(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["codebook.weight"] = tensors.pop("transfer_codes")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def one_tap_less(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "target_layer_ids": config["target_layer_ids"][:-1]}))


def refusals(folder, target):
    """What every reader of a bundle says: the checkpoint loader, `verify`, and the load for decoding."""
    report = Report()
    check_tensors(report, folder, DSpineConfig.from_pretrained(folder))
    with pytest.raises(DSpineHubError) as checkpoint:
        load_drafter_checkpoint(folder)
    with pytest.raises(DSpineHubError) as bundle:
        load_bundle(folder, target, None)
    return str(checkpoint.value), {finding.rule for finding in report.findings}, str(bundle.value)


def test_a_renamed_tensor_is_named_by_every_reader(target, tmp_path):
    """Catches a table that stays at its initial value with only a line in a log (verl-SpeCo#62)."""
    folder = tiny_bundle(target, tmp_path / "bundle")
    renamed(folder)
    checkpoint, rules, bundle = refusals(folder, target)
    assert "transfer_codes" in checkpoint and "transfer_codes" in bundle
    assert rules == {"missing-tensor", "unknown-tensor"}


def test_a_wrong_count_of_taps_is_refused_by_every_reader(target, tmp_path):
    """Catches taps that do not fit the projection they feed: its width is their count (z-lab/dflash#156)."""
    folder = tiny_bundle(target, tmp_path / "bundle")
    one_tap_less(folder)
    checkpoint, rules, bundle = refusals(folder, target)
    assert "could not be loaded" in checkpoint and "could not be used" in bundle and rules == {"shape"}


# blocks, caches, acceptance


@pytest.mark.parametrize("size", [2, 5])
def test_a_block_counts_its_anchor(target, taps, size):
    """Catches the other convention, with which acceptance falls to 1 and nothing fails (sglang#40144)."""
    drafter = build_drafter(target, block_size=size)
    assert drafter.draft(taps(PROMPT, drafter), torch.tensor([7])).tokens.shape == (1, size - 1)
    rows = []
    text = target.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)[0].tolist()
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    try:
        output = drafter.spec_generate(target, torch.tensor([PROMPT]), 8, temperature=0, return_dict_in_generate=True)
    finally:
        handle.remove()
    assert output.sequences[0].tolist() == text and output.statistics.slots == size - 1
    # the target judges the whole block at once, and its first row is the last committed token
    assert rows[0] == PROMPT and all(len(block) == size for block in rows[1:])
    assert rows[1][0] == text[len(PROMPT)]


def test_caches_are_rolled_back_by_negative_counts_only(target, drafter, script, monkeypatch):
    """Catches a count that releases read differently: 0 kept no row in 5.12, positive ones changed twice."""
    plan, counts, lengths = [4, 0, 2, 4, 4, 1], [], []
    text = target.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False)[0].tolist()
    scripted = script(drafter, drafts_with_errors(text, plan, 4, 97), PROMPT)
    real = DynamicCache.crop

    def crop(cache, count):
        real(cache, count)
        counts.append(count)
        # the text before the anchor, the anchor, and what was accepted of the block
        lengths.append(cache.get_seq_length() - len(scripted.text) - 1 - plan[(scripted.calls - 1) % len(plan)])

    monkeypatch.setattr(DynamicCache, "crop", crop)
    output = drafter.spec_generate(target, torch.tensor([PROMPT]), 20, temperature=0, return_dict_in_generate=True)
    assert output.sequences[0].tolist() == text[: len(PROMPT) + 20]
    assert output.statistics.accepted[:4] == plan[:4] and lengths == [0] * len(counts)
    assert {-4, -2} <= set(counts) and max(counts) < 0


WHOLE_BLOCKS = """
import sys
import torch, transformers
from conftest import ScriptedDraft, build_drafter, build_target, drafts_with_errors
target = build_target()
drafter, prompt = build_drafter(target), [3, 1, 4, 15, 92]
text = target.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0].tolist()
drafter.draft = ScriptedDraft(drafter, drafts_with_errors(text, [4, 4, 1], 4, 97), prompt)
found = drafter.spec_generate(target, torch.tensor([prompt]), 20, temperature=0, return_dict_in_generate=True)
assert transformers.__version__ == sys.argv[1]
assert found.sequences[0].tolist() == text[: len(prompt) + 20]
assert found.statistics.accepted[:3] == [4, 4, 1], found.statistics.accepted
"""


@pytest.mark.overlay
@pytest.mark.skipif(OVERLAY_FOLDER is None, reason="needs DSPINE_OVERLAYS, see tests/helpers/overlays.py")
@pytest.mark.parametrize("version", OVERLAYS)
def test_blocks_accepted_whole_keep_the_text_on_every_supported_transformers(version):
    """Catches a rollback by 0 rows, which once meant `keep 0 rows`: the text is no longer the target's."""
    path = [str(Path(OVERLAY_FOLDER).resolve() / version), str(ROOT), str(ROOT / "tests")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", WHOLE_BLOCKS, version]
    result = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_drafter_that_is_never_accepted_fails_verify(tmp_path, monkeypatch):
    """Catches 0 % acceptance that nothing reports (sglang#39087): the text stays right."""
    # a few short answers are enough to tell 1.0 from 1.3
    (tmp_path / "prompts.jsonl").write_text("".join(CANARY_PROMPTS.read_text().splitlines(keepends=True)[:3]))
    monkeypatch.setattr("dspine_hub.evaluation.canary.CANARY_PROMPTS", tmp_path / "prompts.jsonl")
    monkeypatch.setattr("dspine_hub.evaluation.canary.CANARY_NEW_TOKENS", 8)
    checkpoint = Path(shutil.copytree(MINI / "drafter", tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["norm.weight"] = -tensors["norm.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    report = Report()
    check_canary(report, build_bundle(checkpoint, tmp_path / "bundle"), MINI / "target")
    assert [finding.rule for finding in report.findings if finding.severity == "error"] == ["canary"]
    assert "must be at least 1.3, got 1.0" in "\n".join(report.lines())


# publishing

CARDS = {
    "no-license": (lambda text: re.sub(r"(?m)^license:.*\n", "", text), "license"),
    "claim": (lambda text: text + "\nDecodes 9.9x faster.\n", "9.9"),
}


@pytest.mark.parametrize(("edit", "named_by"), CARDS.values(), ids=CARDS)
def test_push_refuses_a_card_without_license_or_with_numbers_of_nobody(target, tmp_path, monkeypatch, edit, named_by):
    """Catches a card that does not say what it must (speculators#1055), or says what nobody measured."""
    # loads in a process of its own, which tests of `verify` cover
    monkeypatch.setattr("dspine_hub.publish.verify.check_clean_load", lambda report, folder: None)
    folder = tiny_bundle(target, tmp_path / "bundle")
    card = (folder / "README.md").read_text().replace("---\n", "---\nlicense: apache-2.0\n", 1)
    (folder / "README.md").write_text(card)
    sound = hub.push(folder, "org/tiny", dry_run=True).report
    assert sound.ok, sound.lines()
    (folder / "README.md").write_text(edit(card))
    report = hub.push(folder, "org/tiny", dry_run=True).report
    errors = [finding.message for finding in report.findings if finding.severity == "error"]
    assert len(errors) == 1 and named_by in errors[0].lower()


XET = """
import sys
from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report
from dspine_hub.publish.hub import pull, push
what, folder = sys.argv[1:]
try:
    if what == "push":
        push(folder, "org/mini", tag="v1", check=lambda path: Report())
    else:
        pull("org/mini", folder, revision="v1")
except DSpineHubError as error:
    print("refused:", error)
"""


def test_damaged_xet_storage_names_the_way_around(tmp_path):
    """Catches `failed to fill whole buffer` and a traceback in place of advice (xet-core#928)."""
    pytest.importorskip("hf_xet")
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A drafter\n")
    save_file({"weight": torch.rand(256, 1024, generator=torch.Generator().manual_seed(0))}, folder / "a.safetensors")
    (folder / "provenance.json").write_text('{"files": {}}')

    with HubServer(tmp_path / "server", xet=True) as server:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env = {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_owner", "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT)}

        def run(what, place, home):
            command = [sys.executable, "-c", XET, what, str(place)]
            env_of = {**kept, **env, "HF_HOME": str(tmp_path / home)}
            return subprocess.run(command, capture_output=True, text=True, env=env_of, cwd=tmp_path)

        pushed = run("push", folder, "home")
        assert pushed.returncode == 0 and pushed.stdout == "", pushed.stderr[-2000:]
        (stored,) = (path for path in (tmp_path / "server").rglob("default.*") if path.suffix != ".tagset")
        stored.chmod(0o644)
        stored.write_bytes(stored.read_bytes()[:1000].ljust(stored.stat().st_size, b"\0"))
        pulled = run("pull", tmp_path / "out", "other-home")
    assert pulled.returncode == 0, pulled.stderr[-2000:]
    assert re.search(r"refused: `org/mini`: .*`HF_HUB_DISABLE_XET=1 dspine-hub pull ", pulled.stdout), pulled.stdout
    assert not (tmp_path / "out").exists()
