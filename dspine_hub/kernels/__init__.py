"""The three operations DSpine adds to a block drafter, one file each: reference, kernel, public wrapper."""

from .adjacent_injection import adjacent_injection, adjacent_injection_reference, inject_message, predicted_feature
from .candidate_walk import candidate_walk, candidate_walk_reference
from .transition_scores import (
    transition_scores,
    transition_scores_message_reference,
    transition_scores_reference,
)
from .triton_support import use_triton

__all__ = [
    "adjacent_injection",
    "adjacent_injection_reference",
    "candidate_walk",
    "candidate_walk_reference",
    "inject_message",
    "predicted_feature",
    "transition_scores",
    "transition_scores_message_reference",
    "transition_scores_reference",
    "use_triton",
]
