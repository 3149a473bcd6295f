"""Gradients: whom they reach, whom they must not, and that they stay finite."""

import math

import pytest
import torch
from helpers.tiny import build_drafter, build_target
from helpers.training import FLOAT32, REORDERED, batch_with_holes, seeded

from dspine_hub.training.config import ObjectiveConfig
from dspine_hub.training.objective import CausalLMObjective, DSpineObjective


def gradients(target, drafter, ids, loss_mask, step=150, **settings):
    config = ObjectiveConfig(anchors=5, **settings)
    objective = DSpineObjective(drafter, target, config, total_steps=600).train()
    drafter.zero_grad()
    loss, _ = objective(ids, loss_mask, step, seeded(7))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in drafter.named_parameters()}


def test_chunking_rows_changes_neither_loss_nor_gradients(pair):
    """Catches a mean of means, a lost last chunk and a recomputation that draws other numbers."""
    ids, loss_mask = batch_with_holes()
    whole, whole_grads = gradients(*pair, ids, loss_mask)
    for rows in (1, 7):
        loss, grads = gradients(*pair, ids, loss_mask, rows_per_chunk=rows)
        torch.testing.assert_close(loss, whole, **REORDERED)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, whole_grads[name], rtol=1e-3, atol=1e-5, msg=name)


def test_every_drafter_parameter_learns_and_nothing_else(pair):
    """Catches a target left trainable, a module tree that owns the target, a detached layer, and a code table or flag
    that training moves."""
    target, drafter = pair
    before = {name: value.clone() for name, value in target.state_dict().items()}
    buffers = {name: value.clone() for name, value in drafter.named_buffers()}
    objective = DSpineObjective(drafter, target, ObjectiveConfig(anchors=5), total_steps=600)
    mine = {id(parameter) for parameter in objective.parameters()}
    assert mine == {id(parameter) for parameter in drafter.parameters()}
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    ids, loss_mask = batch_with_holes()
    loss, grads = gradients(target, drafter, ids, loss_mask)
    optimizer.step()
    assert math.isfinite(loss)
    for name, grad in grads.items():
        assert grad is not None and bool(grad.isfinite().all()) and bool(grad.any()), name
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in target.parameters())
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert buffers.keys() == {"transfer_codes", "transfer_ready"}
    for name, value in drafter.named_buffers():
        assert torch.equal(value, buffers[name]), name


def test_a_silent_drafter_can_start_to_write(pair):
    """With zero writes a gradient must reach the writes, or the injection would stay silent for ever."""
    target, _ = pair
    drafter = build_drafter(target, writes=False).train()
    ids, loss_mask = batch_with_holes()
    _, grads = gradients(target, drafter, ids, loss_mask)
    assert all(bool(grad.isfinite().all()) for grad in grads.values())
    for layer in range(drafter.config.num_hidden_layers):
        assert bool(grads[f"injection.writes.{layer}.weight"].any())


def test_alignment_does_not_train_through_its_own_scale(pair):
    """The cross entropy that scales the alignment is detached: no feature depends on the final norm, so neither may
    its gradient depend on the alignment weight."""
    ids, loss_mask = batch_with_holes()
    without, silent = gradients(*pair, ids, loss_mask, alignment_weight=0.0)
    within, loud = gradients(*pair, ids, loss_mask, alignment_weight=0.5)
    assert float(within) > float(without) + 0.1
    torch.testing.assert_close(loud["norm.weight"], silent["norm.weight"], rtol=0, atol=0)
    assert not torch.equal(loud["injection.readouts.0.weight"], silent["injection.readouts.0.weight"])


@pytest.mark.parametrize("supervised", [0, 1])
def test_gradients_stay_finite_without_supervised_slots(pair, supervised):
    """A batch of padding must not divide by zero; one supervised token must not either."""
    ids, loss_mask = batch_with_holes()
    loss_mask = torch.zeros_like(loss_mask)
    loss_mask[0, 4] = bool(supervised)
    loss, grads = gradients(*pair, ids, loss_mask)
    assert math.isfinite(loss) and (float(loss) > 0) == bool(supervised)
    assert all(grad is None or bool(grad.isfinite().all()) for grad in grads.values())


def test_gradients_stay_finite_at_zero_states(pair):
    """The norms of a zero state have no finite derivative unless they are guarded."""
    target, drafter = pair
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        target.get_input_embeddings().weight[drafter.config.mask_token_id] = 0
    ids, loss_mask = batch_with_holes()
    loss, grads = gradients(target, drafter, ids, loss_mask)
    assert math.isfinite(loss)
    for name, grad in grads.items():
        assert bool(grad.isfinite().all()), name


def test_without_injection_only_the_backbone_learns(pair, taps):
    """The ablation must drop refinement and alignment from the loss, leave the injection untouched, and draft exactly
    the backbone's first choices."""
    target, _ = pair
    drafter = build_drafter(target, writes=False).train()
    config = ObjectiveConfig(anchors=5, injection=False)
    objective = DSpineObjective(drafter, target, config, total_steps=600)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in drafter.injection.named_parameters()}
    ids, loss_mask = batch_with_holes()
    for step in range(3):
        loss, metrics = objective(ids, loss_mask, step, seeded(step))
        loss.backward()
        assert all(p.grad is None for p in drafter.injection.parameters())
        assert all(p.grad.any() for name, p in drafter.named_parameters() if not name.startswith("injection."))
        optimizer.step()
        optimizer.zero_grad()
    total = 0.1 * metrics["backbone_ce"] + 0.9 * metrics["backbone_l1"]
    torch.testing.assert_close(metrics["loss"], total)
    assert metrics["refinement"] == metrics["alignment"] == 0
    for name, parameter in drafter.injection.named_parameters():
        assert torch.equal(parameter, before[name]), name
    drafter.eval()
    text = ids[0].tolist()
    context, anchor = taps(text[:-1], drafter, target), ids[0, -1:]
    draft = drafter.draft(context, anchor)
    block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    block[:, 0] = anchor
    with torch.no_grad():
        output = drafter(target.get_input_embeddings()(block), context, anchor_ids=anchor)
        logits = target.get_output_embeddings()(output.last_hidden_state[:, 1:])
    assert torch.equal(draft.tokens, logits.argmax(dim=-1))


def test_causal_lm_loss_counts_supervised_tokens_only():
    """Catches labels shifted by one and a mean over masked tokens."""
    model = build_target()
    ids, loss_mask = batch_with_holes()
    loss, metrics = CausalLMObjective(model)(ids, loss_mask, 0, None)
    log_p = model(ids).logits.double().log_softmax(dim=-1)
    losses = [
        -log_p[row, position - 1, ids[row, position]]
        for row in range(2)
        for position in range(1, ids.shape[1])
        if loss_mask[row, position]
    ]
    torch.testing.assert_close(loss, (sum(losses) / len(losses)).float(), **FLOAT32)
    assert not metrics["loss"].requires_grad
