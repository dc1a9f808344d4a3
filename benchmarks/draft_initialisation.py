"""
Where a fresh draft should start: held-out loss of pass 0 before and after a few updates, for three starts.

Policy and task are the demo's (SmolLM2-135M-Instruct, word problems). All starts train on the same rollouts in the
same order; the loss is in nats per token over the whole vocabulary, so smaller is better and ln(49152) = 10.8 is a
uniform guess. One seed.

    python benchmarks/draft_initialisation.py --updates 20
"""

import argparse
import sys
from pathlib import Path

import torch
from measuring import machine
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.initialization import fill_at_random, tap_log_scales
from trl_codraft.modeling.losses import draft_loss
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.packing import pack_rows
from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from demo.model import smollm2_path
from demo.task import word_problems


NUM_PASSES = 3


def packed_rollouts(policy, tokenizer, recorder, prompts, new_tokens):
    """One batch of rollouts at T=1, as a draft sees it."""
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        ids = policy.generate(**inputs, do_sample=True, top_k=0, temperature=1.0, max_new_tokens=new_tokens)
        width = inputs["input_ids"].shape[1]
        # Everything up to the first end of turn; pad and end of turn are one token in this tokenizer.
        ended = (ids[:, width:] == tokenizer.eos_token_id).cumsum(1)
        completion = (ended == 0) | ((ended == 1) & (ids[:, width:] == tokenizer.eos_token_id))
        mask = torch.cat([inputs["attention_mask"].bool(), completion], dim=1)
        with recorder.record() as record:
            policy(input_ids=ids, attention_mask=mask.long(), use_cache=False, logits_to_keep=1)
    trained = torch.cat([torch.zeros_like(inputs["attention_mask"]).bool(), completion], dim=1)
    return pack_rows(ids, mask, trained, record.taps, record.last_hidden, NUM_PASSES)


def start(kind, policy, head, scales):
    """A fresh draft in one of the three starts."""
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config))
    draft.initialize_from_policy(head, tap_scales=scales)
    if kind != "chosen":
        draft.norm.weight.data.copy_(policy.model.norm.weight)
    if kind == "random fc, policy's norm":
        fill_at_random([draft.fc], seed=0)
        for piece, scale in zip(draft.fc.weight.data.split(policy.config.hidden_size, dim=1), scales, strict=True):
            piece.div_(scale)
    return draft


def held_out_loss(draft, head, batch):
    with torch.no_grad():
        counters = draft_loss(draft, head, batch, num_passes=NUM_PASSES, decay=0.8, chunk_size=512).counters
    return float(counters["loss"][0] / counters["rows"][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8, help="rollouts per update")
    parser.add_argument("--new_tokens", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    path = smollm2_path()
    policy = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    head = PolicyHead(policy)
    recorder = TapRecorder(policy, Eagle3DraftConfig.from_policy(policy.config).tap_layers)
    train, test = word_problems(args.updates * args.rows, 16)

    def batch_of(rows):
        return packed_rollouts(policy, tokenizer, recorder, rows["prompt"], args.new_tokens)

    held_out = batch_of(test[:16])
    batches = [batch_of(train[i : i + args.rows]) for i in range(0, len(train), args.rows)]
    num_taps = len(recorder.tap_layers)
    scales = (tap_log_scales(batches[0].taps, num_taps) / len(batches[0].taps)).exp().tolist()
    print(f"{machine()}, {torch.get_num_threads()} threads; tap sizes {scales}")
    print(f"{'start':40s} {'before':>8s} {f'after {args.updates}':>10s}")
    for kind in ("chosen", "last tap passed on, policy's norm", "random fc, policy's norm"):
        draft = start(kind, policy, head, scales)
        before = held_out_loss(draft, head, held_out)
        settings = DraftTrainingArguments(num_passes=NUM_PASSES, learning_rate=1e-3, warmup_steps=0)
        trainer = DraftTrainer(draft, head, settings, num_training_steps=args.updates)
        for batch in batches:
            trainer.accumulate(batch)
            trainer.step()
        print(f"{kind:40s} {before:8.2f} {held_out_loss(draft, head, held_out):10.2f}", flush=True)


if __name__ == "__main__":
    main()
