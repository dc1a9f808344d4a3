"""
The draft's unroll, loss and counters in the most literal form: one document at a time, every TTT pass on every row, a
masked softmax over concatenated keys, full logits, plain autograd. Shares no code with the package.

Shapes: `n` tokens of a document, `K` passes, `H` width, `V` / `Vd` vocabularies.
"""

import torch


def rms_norm(x, weight, eps):
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, positions, theta):
    """`x` `(n, heads, D)` turned by Llama's rotary embedding."""
    half = x.shape[-1] // 2
    # Llama defines the frequencies in float32, as constants of the model.
    frequency = 1.0 / theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angle = (positions[:, None].to(x.dtype) * frequency.to(x.dtype))[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


def attend(q, keys, values, num_pass):
    """Row `r` sees trunk keys `<= r` and, of each later pass, its own row only."""
    n, num_heads, head_dim = q.shape
    k = torch.cat(keys).repeat_interleave(num_heads // keys[0].shape[1], dim=1)
    v = torch.cat(values).repeat_interleave(num_heads // keys[0].shape[1], dim=1)
    visible = torch.cat([torch.ones(n, n).tril()] + [torch.eye(n)] * num_pass, dim=1).bool()
    scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
    probs = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probs, v).reshape(n, -1)


def unroll_document(w, config, taps, embeds, num_passes):
    """`K` pre-norm outputs `(n, H)` of one document; `w` maps parameter names to tensors."""
    n, eps = taps.shape[0], config.rms_norm_eps
    theta = config.rope_parameters["rope_theta"]
    hidden = taps @ w["fc.weight"].T
    keys, values, outputs = [], [], []
    for s in range(num_passes):
        ahead = torch.zeros_like(embeds)
        ahead[: max(n - 1 - s, 0)] = embeds[1 + s :]
        x = torch.cat(
            [
                rms_norm(ahead, w["layers.0.input_layernorm.weight"], eps),
                rms_norm(hidden, w["layers.0.hidden_norm.weight"], eps),
            ],
            dim=-1,
        )
        heads = {}
        for name in "qkv":
            heads[name] = (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(n, -1, config.head_dim)
        positions = torch.arange(n) + s
        keys.append(rotate(heads["k"], positions, theta))
        values.append(heads["v"])
        attended = attend(rotate(heads["q"], positions, theta), keys, values, s)
        hidden = hidden + attended @ w["layers.0.self_attn.o_proj.weight"].T
        x = rms_norm(hidden, w["layers.0.post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(x @ w["layers.0.mlp.gate_proj.weight"].T)
        hidden = hidden + (gate * (x @ w["layers.0.mlp.up_proj.weight"].T)) @ w["layers.0.mlp.down_proj.weight"].T
        outputs.append(hidden)
    return outputs


def dense_loss(
    w,
    config,
    documents,
    teacher_logits,
    embedding,
    *,
    num_passes,
    decay,
    target_ids=None,
    teacher_temperature=1.0,
    rollout_temperature=1.0,
):
    """
    Loss and counters over `documents`, dicts of `input_ids`, `taps`, `last_hidden`, `trained`; `teacher_logits` maps
    `(n, Ht)` to `(n, V)`. Returns `(loss_sum, counters)`, `loss_sum` differentiable in the values of `w`.
    """
    counters = {name: [0.0] * num_passes for name in ("loss", "rows", "top1", "accept")}
    counters.update(accept_roots=0, coverage=0.0, positions=0, masked_rows=0)
    ids = torch.arange(config.vocab_size) if target_ids is None else target_ids
    loss_sum = 0.0
    for doc in documents:
        n, trained = doc["input_ids"].numel(), doc["trained"].tolist()
        if n == 0:
            continue
        outputs = unroll_document(w, config, doc["taps"], embedding[doc["input_ids"]], num_passes)
        students = [rms_norm(h, w["norm.weight"], config.rms_norm_eps) @ w["lm_head.weight"].T for h in outputs]
        teacher = teacher_logits(doc["last_hidden"])
        taught = set()
        for r in range(n):
            accepted, complete = 1.0, True
            products = []
            for s in range(num_passes):
                if r + 2 + s >= n or not trained[r + 2 + s]:
                    complete = False
                    continue
                z, t = students[s][r], teacher[r + 1 + s]
                taught.add(r + 1 + s)
                p_rollout = (t / rollout_temperature).softmax(-1)[ids]
                q_rollout = (z / rollout_temperature).softmax(-1)
                accepted *= float(torch.minimum(p_rollout, q_rollout).detach().sum())
                products.append(accepted)
                if int(t.argmax()) not in ids.tolist():
                    counters["masked_rows"] += 1
                    continue
                p = (t[ids] / teacher_temperature).softmax(-1)
                cross_entropy = -(p * (z / teacher_temperature).log_softmax(-1)).sum()
                loss_sum = loss_sum + decay**s * cross_entropy
                counters["loss"][s] += float(cross_entropy.detach())
                counters["rows"][s] += 1
                counters["top1"][s] += int(ids[z.argmax()] == t.argmax())
            if complete:
                counters["accept_roots"] += 1
                for s in range(num_passes):
                    counters["accept"][s] += products[s]
        for position in taught:
            counters["coverage"] += float((teacher[position] / teacher_temperature).softmax(-1)[ids].sum())
            counters["positions"] += 1
    return loss_sum, counters
