"""
The draft's loss and counters in the most literal form: one document at a time, every TTT pass on every row, full
logits, plain autograd. Shares no code with the package.

Shapes: `n` tokens of a document, `K` passes, `V` / `Vd` vocabularies.
"""

import torch
from modeling.reference import ReferenceDraft


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
    draft, loss_sum = ReferenceDraft(config, w), 0.0
    for doc in documents:
        n, trained = doc["input_ids"].numel(), doc["trained"].tolist()
        if n == 0:
            continue
        outputs = draft.unroll(doc["taps"], embedding[doc["input_ids"]], num_passes)
        students = [draft.logits(output) for output in outputs]
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
