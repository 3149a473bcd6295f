"""A second DSpine, written from the method alone: float64, one slot at a time, no cache, no batch, no shared code.

It is slow and obvious on purpose. Weights are read by name from a drafter's `state_dict`.
"""

import math
from types import SimpleNamespace

import torch


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scale one vector to length 1; a zero vector stays zero."""
    return x / max(float(x.norm()), 1e-12)


def transfer_codes(head: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Build codes `[V, R]` and directions `[R, H]` from the head, row by row, in float64."""
    rows = [unit(row) for row in head.detach().double()]
    mean = sum(rows) / len(rows)
    covariance = sum(torch.outer(row - mean, row - mean) for row in rows) / len(rows)
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values[-rank:], vectors[:, -rank:].T
    codes = [unit(torch.stack([vectors[r] @ (row - mean) / values[r].sqrt() for r in range(rank)])) for row in rows]
    return torch.stack(codes), vectors


class Oracle:
    """One request, one block. `embedding` and `head` are the target's `[V, H]` tables."""

    def __init__(self, drafter, embedding: torch.Tensor, head: torch.Tensor):
        self.config = drafter.config
        self.w = {name: value.detach().double() for name, value in drafter.state_dict().items()}
        if "transfer_codes" not in self.w:
            self.w["transfer_codes"] = drafter.transfer_codes.double()
        self.embedding, self.head = embedding.detach().double(), head.detach().double()
        self.theta = self.config.rope_parameters["rope_theta"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + self.config.rms_norm_eps) * self.w[name]

    def rope(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half, out = len(x) // 2, x.clone()
        for i in range(half):
            angle = position * self.theta ** (-2 * i / len(x))
            cos, sin = math.cos(angle), math.sin(angle)
            out[i] = x[i] * cos - x[i + half] * sin
            out[i + half] = x[i + half] * cos + x[i] * sin
        return out

    def code(self, token: int) -> torch.Tensor:
        return math.sqrt(self.config.transfer_rank) * self.w["transfer_codes"][token]

    def feature(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        return math.sqrt(self.config.transfer_rank) * unit(self.w[f"injection.readouts.{layer}.weight"] @ h)

    def write(self, layer: int, h: torch.Tensor, receiver: torch.Tensor, predecessor: torch.Tensor) -> torch.Tensor:
        """Return `h` after a message of `predecessor`."""
        w = self.w
        gate = torch.sigmoid(
            w["injection.receiver_gate.weight"] @ receiver
            + w["injection.predecessor_gate.weight"] @ predecessor
            + w["injection.bias"]
        )
        rms = h.norm() / math.sqrt(len(h))
        return h + rms * (
            w[f"injection.writes.{layer}.weight"] @ (gate * (w["injection.message.weight"] @ predecessor))
        )

    def inject(self, layer: int, states: list[torch.Tensor], anchor: int) -> list[torch.Tensor]:
        """Write to rows `1..S` of a block; every predecessor is read before any write."""
        features = [self.feature(layer, h) for h in states]
        out = [states[0]]
        for j in range(1, len(states)):
            predecessor = self.code(anchor) if j == 1 else features[j - 1]
            out.append(self.write(layer, states[j], features[j], predecessor))
        return out

    def layer(self, index: int, states: list, context: list, anchor_position: int) -> list[torch.Tensor]:
        """Run one Qwen3 layer: causal inside the block, every context row visible."""
        w, config = self.w, self.config
        name = f"layers.{index}"
        dim, heads = config.head_dim, config.num_attention_heads
        group = heads // config.num_key_value_heads
        normed = [self.norm(h, f"{name}.input_layernorm.weight") for h in states]
        sources = [(row, position) for position, row in enumerate(context)]
        sources += [(row, anchor_position + j) for j, row in enumerate(normed)]

        def project(kind, row, head):
            part = w[f"{name}.self_attn.{kind}_proj.weight"][head * dim : (head + 1) * dim] @ row
            bias = w.get(f"{name}.self_attn.{kind}_proj.bias")
            return part if bias is None else part + bias[head * dim : (head + 1) * dim]

        out = []
        for j, h in enumerate(states):
            seen = sources[: len(context) + j + 1]
            mixed = []
            for head in range(heads):
                query = self.norm(project("q", normed[j], head), f"{name}.self_attn.q_norm.weight")
                query = self.rope(query, anchor_position + j)
                logits, values = [], []
                for row, position in seen:
                    key = self.norm(project("k", row, head // group), f"{name}.self_attn.k_norm.weight")
                    logits.append(query @ self.rope(key, position) / math.sqrt(dim))
                    values.append(project("v", row, head // group))
                share = torch.softmax(torch.stack(logits), dim=0)
                mixed.append(sum(s * v for s, v in zip(share, values, strict=True)))
            attended = w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(mixed)
            bias = w.get(f"{name}.self_attn.o_proj.bias")
            h = h + (attended if bias is None else attended + bias)
            x = self.norm(h, f"{name}.post_attention_layernorm.weight")
            gate = w[f"{name}.mlp.gate_proj.weight"] @ x
            up = w[f"{name}.mlp.up_proj.weight"] @ x
            out.append(h + w[f"{name}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
        return out

    def block(self, anchor: int, taps: torch.Tensor) -> dict:
        """Run a block after `taps` (`[n, T * H]`, positions `0..n-1`).

        Returns:
            `dict`: `states` before the last injection, `final` normed states, `features` after every write.
        """
        context = [self.norm(self.w["fc.weight"] @ row.double(), "hidden_norm.weight") for row in taps]
        ids = [anchor] + [self.config.mask_token_id] * (self.config.block_size - 1)
        states, features, before = [self.embedding[i] for i in ids], [], None
        for index in range(self.config.num_hidden_layers):
            before = self.layer(index, states, context, len(context))
            states = self.inject(index, before, anchor)
            features.append([self.feature(index, h) for h in states])
        return {"states": before, "final": [self.norm(h, "norm.weight") for h in states], "features": features}

    def refine(self, h: torch.Tensor, predecessor: int) -> torch.Tensor:
        """Redo the last write of one slot for one concrete predecessor token, and norm the state."""
        last = self.config.num_hidden_layers - 1
        return self.norm(self.write(last, h, self.feature(last, h), self.code(predecessor)), "norm.weight")

    def sequential_walk(self, states, candidates, anchor: int, temperature: float, uniforms) -> list[int]:
        """Refine slot after slot; each slot sees the token really chosen before it."""
        tokens, previous = [], anchor
        for slot, ids in enumerate(candidates):
            r = self.refine(states[slot + 1], previous)
            scores = [float(r @ self.head[d]) for d in ids]
            if temperature == 0:
                pick = max(range(len(ids)), key=lambda k: scores[k])
            else:
                top = max(scores)
                weights = [math.exp((score - top) / temperature) for score in scores]
                bound, pick = uniforms[slot] * sum(weights), 0
                while pick < len(ids) - 1 and sum(weights[: pick + 1]) <= bound:
                    pick += 1
            previous = int(ids[pick])
            tokens.append(previous)
        return tokens

    @classmethod
    def from_tensors(cls, tensors: dict, settings: dict, embedding: torch.Tensor, head: torch.Tensor) -> "Oracle":
        """Build from plain tensors and numbers, without any drafter of the package."""
        rope = {"rope_theta": settings["rope_theta"]}
        config = SimpleNamespace(**settings, rope_parameters=rope)
        # a backbone has no codes
        plain = SimpleNamespace(config=config, state_dict=lambda: tensors, transfer_codes=torch.zeros(0))
        return cls(plain, embedding, head)

    def backbone_block(self, anchor: int, taps: torch.Tensor) -> list[torch.Tensor]:
        """Run the layers alone, causally, and norm the states: what a drafter is before it has an injection."""
        context = [self.norm(self.w["fc.weight"] @ row.double(), "hidden_norm.weight") for row in taps]
        ids = [anchor] + [self.config.mask_token_id] * (self.config.block_size - 1)
        states = [self.embedding[i] for i in ids]
        for index in range(self.config.num_hidden_layers):
            states = self.layer(index, states, context, len(context))
        return [self.norm(h, "norm.weight") for h in states]
