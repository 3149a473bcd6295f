"""What the plugin adds to SGLang's own tables: a config class, two architectures, one algorithm name."""

from sglang.srt.models.registry import ModelRegistry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec
from transformers import AutoConfig

from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.sglang_plugin.draft_model import DSpineDraftModel
from dspine_hub.sglang_plugin.startup import ALGORITHM, check_pair_of, resolve_arguments

# ours, and the public trainer's
ARCHITECTURES = ("DSpineForSpeculation", "DSpineDraftModel")


class DSpineAlgorithm(CustomSpecAlgo):
    """The name DSPINE: it checks the pair, then hands over to the DFLASH worker of SGLang.

    Registered names lack methods the scheduler calls on every algorithm and miss its tests for the string "DFLASH", so
    from here on the arguments say DFLASH; the drafter's own class does what is different. CONTRIBUTING.md lists the
    holes and when this can go.
    """

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def handle_server_args(self, server_args) -> None:
        check_pair_of(server_args)
        resolve_arguments(server_args)
        server_args.speculative_algorithm = "DFLASH"


def _worker(server_args):
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    return DFlashWorkerV2


def register_all() -> None:
    """Fill SGLang's tables; entries that are there already stay."""
    AutoConfig.register(DSpineConfig.model_type, DSpineConfig, exist_ok=True)
    for name in ARCHITECTURES:
        ModelRegistry.models[name] = DSpineDraftModel
    if get_spec(ALGORITHM) is None:
        SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=DSpineAlgorithm)(_worker)
