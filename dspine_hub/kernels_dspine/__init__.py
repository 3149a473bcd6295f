"""The three operations DSpine adds to a block drafter, and the choice of candidates; long kernels apart."""

from .adjacent_injection import (
    InjectedBlock,
    SlotProjection,
    adjacent_injection,
    adjacent_injection_reference,
    inject_message,
    predicted_feature,
)
from .candidate_walk import candidate_walk, candidate_walk_reference
from .top_candidates import top_candidates
from .transfer_tables import InjectionWeights, TransferTables, transfer_tables
from .transition_scores import (
    BackboneLogits,
    slot_projection,
    transition_scores,
    transition_scores_reference,
)
from .triton_support import use_triton

__all__ = [
    "BackboneLogits",
    "InjectedBlock",
    "InjectionWeights",
    "SlotProjection",
    "TransferTables",
    "adjacent_injection",
    "adjacent_injection_reference",
    "candidate_walk",
    "candidate_walk_reference",
    "inject_message",
    "predicted_feature",
    "slot_projection",
    "top_candidates",
    "transfer_tables",
    "transition_scores",
    "transition_scores_reference",
    "use_triton",
]
