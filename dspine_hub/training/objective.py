"""The drafter's objective: backbone, refinement and layer-wise supervision against a frozen target.

    backbone    (1 - a) * |p_draft - p_target|_1 + a * CE                          a = ce_weight
    refinement  the same mix over the K candidates, refined with the true predecessor; CE only where the label is a
                candidate, L1 against the target renormalised on the candidates, only above a mass threshold
    alignment   beta * CE.detach() * sum over layers of (1 - cos(feature, code of the label)), features after the write

Each slot `j` weighs `exp(-(j - 1) / slot_decay)`; every term is the weighted mean over supervised slots. Source of the
method: arXiv 2609.36173; schedules and defaults are the public recipe's.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dspine_hub.generation_dspine import TapRecorder
from dspine_hub.kernels import inject_message, predicted_feature
from dspine_hub.training.blocks import build_blocks, sample_anchors
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
        drafter, config = self.drafter, self.config
        bound, model = drafter.bound(), drafter.config
        context, last = self.target_states(input_ids)
        anchors, real = sample_anchors(loss_mask, config.anchors, generator)
        blocks = build_blocks(input_ids, loss_mask, anchors, real, model.block_size)
        size, slots = model.block_size, model.block_size - 1

        tokens = torch.full_like(blocks.labels, model.mask_token_id)
        tokens[..., 0] = blocks.labels[..., 0]
        labels = blocks.labels.flatten(0, 1)  # [B * A, N]
        codes = F.embedding(labels, drafter.transfer_codes)
        chance = replacement_probability(step, self.total_steps, config)
        teaching = self.training and config.injection and chance > 0
        replace = torch.rand(labels.shape[0], generator=generator, device=labels.device) < chance
        output = drafter.run_blocks(
            bound.embedding(tokens.flatten(1)),
            context,
            blocks.position_ids,
            blocks.mask,
            codes[:, 0],
            teacher=codes[:, :-1] if teaching else None,
            replace=replace if teaching else None,
            teacher_layers=config.replacement_layers if teaching else 0,
            output_features=config.injection,
        )

        def rows(states):  # [B, A * N, X] -> [B * A * S, X], anchors dropped
            return states.unflatten(1, (-1, size))[:, :, 1:].flatten(0, 2)

        weight = torch.exp(-torch.arange(slots, device=labels.device) / config.slot_decay)
        supervised = blocks.supervised.flatten(0, 1)
        before = (blocks.anchors[..., None] + torch.arange(slots, device=labels.device)).flatten(1)
        before = before.clamp(max=input_ids.shape[1] - 1)
        teacher_state = last.gather(1, before[..., None].expand(-1, -1, last.shape[-1])).flatten(0, 1)
        columns = [
            rows(output.last_hidden_state),
            rows(output.pre_injection_state),
            teacher_state,
            labels[:, 1:].flatten(),
            labels[:, :-1].flatten(),
            (supervised * weight).flatten(),
            supervised.flatten(),
            *[rows(feature) for feature in output.layer_features or ()],
        ]
        # the vocabulary-wide rows are recomputed in the backward pass, chunk by chunk: they dwarf everything else
        sums = None
        for chunk in zip(*(column.split(config.rows_per_chunk) for column in columns), strict=True):
            part = checkpoint(self._terms, *chunk, use_reentrant=False)
            sums = part if sums is None else sums + part
        norm = (supervised * weight).sum().clamp_min(1e-6)
        ce, l1, refinement, alignment = (sums[:4] / norm).unbind()
        loss = config.ce_weight * ce + (1 - config.ce_weight) * l1
        if config.injection:
            loss = loss + refinement + alignment_scale(step, config) * ce.detach() * alignment
        count = supervised.sum().clamp_min(1)
        metrics = {
            "loss": loss,
            "backbone_ce": ce,
            "backbone_l1": l1,
            "refinement": refinement,
            "alignment": alignment,
            "coverage": sums[4] / count,
            "accuracy": sums[5] / count,
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _terms(self, last, state, teacher_state, labels, predecessors, weight, supervised, *features):
        """Sum every term over a chunk of rows; returns `[6]`."""
        drafter, config = self.drafter, self.config
        head = drafter.bound().head
        with torch.no_grad():
            target = head(teacher_state.to(head.weight.dtype)).float().softmax(dim=-1)
        logits = head(last.to(head.weight.dtype)).float()
        log_p = logits.log_softmax(dim=-1)
        ce = -log_p.gather(1, labels[:, None]).squeeze(1)
        l1 = (log_p.exp() - target).abs().sum(dim=-1)
        candidates = logits.detach().topk(drafter.config.num_candidates, dim=-1).indices
        covered = candidates == labels[:, None]
        refinement, alignment = torch.zeros_like(ce), torch.zeros_like(ce)
        if config.injection:
            refinement = self._refinement(state, predecessors, candidates, covered, target, head.weight)
            code = F.embedding(labels, drafter.transfer_codes).float()
            for feature in features:
                alignment = alignment + 1 - F.cosine_similarity(feature.float(), code, dim=-1)
        hit = candidates[:, 0] == labels
        return torch.stack(
            [
                (ce * weight).sum(),
                (l1 * weight).sum(),
                (refinement * weight).sum(),
                (alignment * weight).sum(),
                (covered.any(dim=-1) & supervised).sum().float(),
                (hit & supervised).sum().float(),
            ]
        )

    def _refinement(self, state, predecessors, candidates, covered, target, head_weight):
        drafter, config = self.drafter, self.config
        injection = drafter.injection
        rank = drafter.config.transfer_rank
        weights = injection.weights(drafter.config.num_hidden_layers - 1)
        receiver = predicted_feature(state, weights.readout)
        predecessor = math.sqrt(rank) * F.embedding(predecessors, drafter.transfer_codes).to(state.dtype)
        refined = drafter.norm(inject_message(state, receiver, predecessor, weights))
        candidate_rows = F.embedding(candidates, head_weight)
        scores = torch.matmul(candidate_rows.float(), refined.float()[..., None]).squeeze(-1)
        log_p = scores.log_softmax(dim=-1)
        wanted = target.gather(1, candidates)
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
