"""The drafter's objective: backbone, refinement and layer-wise supervision against a frozen target.

    backbone    (1 - a) * |p_draft - p_target|_1 + a * CE                          a = ce_weight
    refinement  the same mix over the K candidates, refined with the true predecessor; CE only where the label is a
                candidate, L1 against the target renormalised on the candidates, only above a mass threshold
    alignment   beta * CE.detach() * sum over layers of (1 - cos(feature, code of the label)), features after the write

Each slot `j` weighs `exp(-(j - 1) / slot_decay)`; every term is the weighted mean over supervised slots. Source of the
method: arXiv 2609.36173; schedules and defaults are the public recipe's.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dspine_hub.generation_dspine import TapRecorder
from dspine_hub.kernels_dspine import inject_message, predicted_feature
from dspine_hub.training.blocks import Blocks, build_blocks, sample_anchors
from dspine_hub.training.config import ObjectiveConfig


def alignment_scale(step: int, config: ObjectiveConfig) -> float:
    """Return `beta`: linear from 0 to `alignment_weight` over the warm-up."""
    warmup = config.alignment_warmup_steps
    return config.alignment_weight * (min(step / warmup, 1.0) if warmup else 1.0)


def replacement_probability(step: int, total: int, config: ObjectiveConfig) -> float:
    """Return the chance that a block reads true predecessors: held, then linear to 0."""
    hold, end = config.replacement_hold_ratio, config.replacement_end_ratio
    fraction = (end - step / total) / (end - hold)
    return config.replacement_probability * min(max(fraction, 0.0), 1.0)


class TermSums(NamedTuple):
    """Sums over supervised slots: terms by weight, then slots whose label is a candidate, and the first candidate."""

    backbone_ce: torch.Tensor
    backbone_l1: torch.Tensor
    refinement: torch.Tensor
    alignment: torch.Tensor
    covered: torch.Tensor
    first: torch.Tensor


class Slots(NamedTuple):
    """The proposal slots of a batch, one a row.

    Args:
        final, state (`torch.Tensor` of shape `[m, H]`): Normed states, and those before the last injection.
        target (`torch.Tensor` of shape `[m, H]`): The target's states that predict the slots.
        label, predecessor (`torch.Tensor` of shape `[m]`, int64): Token of the slot and of the one before.
        weight (`torch.Tensor` of shape `[m]`), supervised (`torch.Tensor` of shape `[m]`, bool): What a slot counts.
        features (`tuple[torch.Tensor]` of shape `[m, R]`): Predicted features after every layer.
    """

    final: torch.Tensor
    state: torch.Tensor
    target: torch.Tensor
    label: torch.Tensor
    predecessor: torch.Tensor
    weight: torch.Tensor
    supervised: torch.Tensor
    features: tuple[torch.Tensor, ...]

    def chunks(self, rows: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the columns of at most `rows` slots at a time, features last."""
        columns = (*self[:-1], *self.features)
        return zip(*(column.split(rows) for column in columns), strict=True)


class DSpineObjective(nn.Module):
    """A drafter wrapped with its loss; the target stays outside the module tree and is never trained.

    Args:
        drafter (`DSpineForSpeculation`): Bound to `target`.
        target (`PreTrainedModel`): Frozen.
        config ([`ObjectiveConfig`]): Weights and schedules.
        total_steps (`int`): Length of the run, for the schedules.
    """

    def __init__(self, drafter, target, config: ObjectiveConfig, total_steps: int):
        super().__init__()
        self.drafter = drafter
        self.config = config
        self.total_steps = total_steps
        self._target = (target.eval().requires_grad_(False),)  # in a tuple: not a submodule
        if not config.injection:
            # the backbone alone: zero writes keep it exactly causal, and scores no longer depend on the predecessor
            drafter.injection.requires_grad_(False)

    @torch.no_grad()
    def target_states(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target once: tapped states `[B, n, T * H]` and last hidden states `[B, n, H]`."""
        decoder = self._target[0].get_decoder()
        with TapRecorder(self._target[0], self.drafter.config.target_layer_ids) as taps:
            last = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
            return taps.take(), last

    def forward(
        self, input_ids: torch.Tensor, loss_mask: torch.Tensor, step: int, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of a batch.

        Args:
            input_ids (`torch.Tensor` of shape `[B, n]`, int64), loss_mask (`torch.Tensor` of shape `[B, n]`, bool).
            step (`int`): Optimizer step, for the schedules.
            generator (`torch.Generator`): Source of anchors and replaced blocks.

        Returns:
            `tuple` of the loss and the terms, each detached: `backbone_ce`, `backbone_l1`, `refinement`, `alignment`
            (weighted means), `coverage` (share of supervised slots whose label is a candidate), `accuracy` (share
            whose label is the backbone's first choice).
        """
        config = self.config
        context, last = self.target_states(input_ids)
        anchors, real = sample_anchors(loss_mask, config.anchors, generator)
        blocks = build_blocks(input_ids, loss_mask, anchors, real, self.drafter.config.block_size)
        slots = self._slots(blocks, self._run(blocks, context, step, generator), last)
        # the vocabulary-wide rows are recomputed in the backward pass, chunk by chunk: they dwarf everything else
        parts = [checkpoint(self._terms, *chunk, use_reentrant=False) for chunk in slots.chunks(config.rows_per_chunk)]
        sums = TermSums(*map(sum, zip(*parts, strict=True)))
        weight, count = slots.weight.sum().clamp_min(1e-6), slots.supervised.sum().clamp_min(1)
        ce, l1 = sums.backbone_ce / weight, sums.backbone_l1 / weight
        refinement, alignment = sums.refinement / weight, sums.alignment / weight
        loss = config.ce_weight * ce + (1 - config.ce_weight) * l1
        if config.injection:
            loss = loss + refinement + alignment_scale(step, config) * ce.detach() * alignment
        metrics = {
            "loss": loss,
            "backbone_ce": ce,
            "backbone_l1": l1,
            "refinement": refinement,
            "alignment": alignment,
            "coverage": sums.covered / count,
            "accuracy": sums.first / count,
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _run(self, blocks: Blocks, context: torch.Tensor, step: int, generator: torch.Generator):
        """Run the drafter over all blocks; some of them read their true predecessors."""
        drafter, config = self.drafter, self.config
        tokens = torch.full_like(blocks.labels, drafter.config.mask_token_id)
        tokens[..., 0] = blocks.labels[..., 0]
        codes = F.embedding(blocks.labels.flatten(0, 1), drafter.transfer_codes)  # [B * A, N, R]
        chance = replacement_probability(step, self.total_steps, config)
        replaced = torch.rand(codes.shape[0], generator=generator, device=codes.device) < chance
        teaching = {}
        if self.training and config.injection and chance > 0:
            teaching = {
                "true_codes": codes[:, :-1],
                "replaced": replaced,
                "replaced_layers": config.replacement_layers,
            }
        return drafter.run_blocks(
            drafter.bound().embedding(tokens.flatten(1)),
            context,
            blocks.position_ids,
            blocks.mask,
            drafter.injection.from_weights(codes[:, 0], **teaching),
            output_features=config.injection,
        )

    def _slots(self, blocks: Blocks, output, last: torch.Tensor) -> Slots:
        """Put the slots of all blocks one below the other; `last` holds the target's states `[B, n, H]`."""
        size, slots = self.drafter.config.block_size, self.drafter.config.block_size - 1
        labels, supervised = blocks.labels.flatten(0, 1), blocks.supervised.flatten(0, 1)

        def rows(states):  # [B, A * N, X] -> [B * A * S, X], anchors dropped
            return states.unflatten(1, (-1, size))[:, :, 1:].flatten(0, 2)

        offsets = torch.arange(slots, device=labels.device)
        # what the target predicts at slot j stands where slot j - 1 is read
        before = (blocks.anchors[..., None] + offsets).flatten(1).clamp(max=last.shape[1] - 1)
        return Slots(
            final=rows(output.last_hidden_state),
            state=rows(output.pre_injection_state),
            target=last.gather(1, before[..., None].expand(-1, -1, last.shape[-1])).flatten(0, 1),
            label=labels[:, 1:].flatten(),
            predecessor=labels[:, :-1].flatten(),
            weight=(supervised * torch.exp(-offsets / self.config.slot_decay)).flatten(),
            supervised=supervised.flatten(),
            features=tuple(rows(feature) for feature in output.layer_features or ()),
        )

    def _terms(self, final, state, target, label, predecessor, weight, supervised, *features) -> TermSums:
        """Sum every term over a chunk of slots, given as columns of [`Slots`]."""
        drafter, config = self.drafter, self.config
        head = drafter.bound().head
        with torch.no_grad():
            wanted = head(target.to(head.weight.dtype)).float().softmax(dim=-1)
        logits = head(final.to(head.weight.dtype)).float()
        log_p = logits.log_softmax(dim=-1)
        ce = -log_p.gather(1, label[:, None]).squeeze(1)
        l1 = (log_p.exp() - wanted).abs().sum(dim=-1)
        candidates = logits.detach().topk(drafter.config.num_candidates, dim=-1).indices
        covered = candidates == label[:, None]
        refinement, alignment = torch.zeros_like(ce), torch.zeros_like(ce)
        if config.injection:
            refinement = self._refinement(state, predecessor, candidates, covered, wanted, head.weight)
            code = F.embedding(label, drafter.transfer_codes).float()
            for feature in features:
                alignment = alignment + 1 - F.cosine_similarity(feature.float(), code, dim=-1)
        return TermSums(
            backbone_ce=(ce * weight).sum(),
            backbone_l1=(l1 * weight).sum(),
            refinement=(refinement * weight).sum(),
            alignment=(alignment * weight).sum(),
            covered=(covered.any(dim=-1) & supervised).sum().float(),
            first=((candidates[:, 0] == label) & supervised).sum().float(),
        )

    def _refinement(self, state, predecessor, candidates, covered, wanted, head_weight):
        drafter, config = self.drafter, self.config
        weights = drafter.injection.weights(drafter.config.num_hidden_layers - 1)
        receiver = predicted_feature(state, weights.readout)
        code = F.embedding(predecessor, drafter.transfer_codes).to(state.dtype)
        feature = math.sqrt(drafter.config.transfer_rank) * code
        refined = drafter.norm(inject_message(state, receiver, feature, weights))
        rows = F.embedding(candidates, head_weight)
        scores = torch.matmul(rows.float(), refined.float()[..., None]).squeeze(-1)
        log_p = scores.log_softmax(dim=-1)
        wanted = wanted.gather(1, candidates)
        mass = wanted.sum(dim=-1, keepdim=True)
        l1 = (log_p.exp() - wanted / mass.clamp_min(1e-30)).abs().sum(dim=-1)
        l1 = l1 * (mass.squeeze(-1) > config.candidate_mass_threshold)
        ce = -(log_p * covered).sum(dim=-1)
        return config.ce_weight * ce + (1 - config.ce_weight) * l1


class CausalLMObjective(nn.Module):
    """Next-token cross entropy, for training a small target from nothing."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, loss_mask, step, generator):
        """Return the mean cross entropy over supervised tokens and the metrics; shapes as in [`DSpineObjective`]."""
        logits = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1]
        labels = input_ids[:, 1:].masked_fill(~loss_mask[:, 1:], -100)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        return loss, {"loss": loss.detach()}
