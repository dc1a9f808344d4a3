"""
Trains the draft of the golden file's `trained` case on the policy's own greedy tokens, so that the server accepts
several draft tokens in a row, and stores it beside the golden file (bf16, about 150 KB).

    python tests/vllm_golden/train_golden_draft.py
"""

import torch
from golden_models import CASES, GOLDEN, MAX_NEW_TOKENS, NUM_DRAFT_TOKENS, PROMPTS, build_policy

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import PackedLayout
from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.serving.export import export_draft


STEPS = 150


def main() -> None:
    policy = build_policy(CASES["trained"])
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, norm_output=True))
    documents, taps = [], []
    recorder = TapRecorder(policy, draft.config.tap_layers)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            ids = policy.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS + 5, do_sample=False
            )
            with recorder.record() as record:
                policy(ids)
        documents.append(ids[0])
        taps.append(torch.cat(record.taps, dim=-1)[0])
    tokens, features = torch.cat(documents), torch.cat(taps)
    embeds = policy.get_input_embeddings().weight.detach()[tokens]
    layout = PackedLayout([len(document) for document in documents])
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for step in range(STEPS):
        outputs = draft.unroll(features, embeds, layout, NUM_DRAFT_TOKENS)
        loss = 0.0
        for num_pass, hidden in enumerate(outputs):
            rows = layout.within(2 + num_pass).nonzero().flatten()
            logits = draft.compute_logits(hidden[rows])
            loss = loss + torch.nn.functional.cross_entropy(logits, tokens[rows + 2 + num_pass])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.4f}")
    export_draft(draft, policy, GOLDEN / "trained", dtype=torch.bfloat16)
    (GOLDEN / "trained" / "README.md").unlink()


if __name__ == "__main__":
    main()
