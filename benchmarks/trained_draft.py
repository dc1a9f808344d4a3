"""
The draft that the rollout benchmarks use: trained on the policy's own completions, once, within a stated budget.

Policy and task are the demo's (SmolLM2-135M-Instruct, word problems). Completions of training prompts are sampled at
temperature 1 and, one in three, greedily; the draft then takes a fixed number of updates. Tokens and processor time
are printed and kept in `budget.json` beside the draft, which is cached under `~/.cache/trl_codraft`.

    OMP_NUM_THREADS=1 python benchmarks/trained_draft.py
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel, export_draft
from trl_codraft.modeling.initialization import tap_log_scales
from trl_codraft.modeling.packing import pack_rows
from trl_codraft.modeling.taps import TapRecorder
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.modeling.vocab import choose_draft_vocab
from trl_codraft.training.draft_trainer import DraftTrainer, DraftTrainingArguments


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from demo.model import cache_dir, smollm2_path
from demo.task import word_problems


NUM_TRAIN_PROMPTS, NUM_TEST_PROMPTS = 2048, 256
MAX_NEW_TOKENS = 64
ROLLOUT_ROWS, UPDATE_ROWS = 32, 8
NUM_PASSES = 4
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
GREEDY = {"do_sample": False}


def load_policy():
    """The policy in fp32 (no bf16 matmuls on CPUs without AVX-512) and its tokenizer, padding on the left."""
    path = smollm2_path()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), tokenizer


def prompts_of(split: str) -> list[list[dict]]:
    """Chats of the `"train"` or the held-out (`"test"`) problems."""
    train, test = word_problems(NUM_TRAIN_PROMPTS, NUM_TEST_PROMPTS, seed=1)
    return list((train if split == "train" else test)["prompt"])


def tokenized(tokenizer, chats: list[list[dict]]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of chats, left-padded."""
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


@torch.no_grad()
def completions(policy, tokenizer, chats, **sampling) -> list[tuple[list[int], list[int]]]:
    """`(prompt, completion)` ids of one completion per chat, the end of turn included."""
    batch = tokenized(tokenizer, chats)
    ids = policy.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, pad_token_id=tokenizer.pad_token_id, **sampling)
    width, pairs = batch["input_ids"].shape[1], []
    for prompt, mask, new in zip(batch["input_ids"], batch["attention_mask"], ids[:, width:].tolist(), strict=True):
        end = new.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in new else len(new)
        pairs.append((prompt[mask.bool()].tolist(), new[:end]))
    return pairs


@torch.no_grad()
def packed(policy, recorder, pairs, num_passes: int = NUM_PASSES):
    """What the draft learns from `(prompt, completion)` pairs, by one forward of the policy."""
    width = max(len(prompt) + len(completion) for prompt, completion in pairs)
    ids, mask, trained = (torch.zeros(len(pairs), width, dtype=torch.long) for _ in range(3))
    for row, (prompt, completion) in enumerate(pairs):
        size = len(prompt) + len(completion)
        ids[row, :size] = torch.tensor(prompt + completion)
        mask[row, :size] = 1
        trained[row, len(prompt) : size] = 1
    with recorder.record() as record:
        policy(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    return pack_rows(ids, mask, trained, record.taps, record.last_hidden, num_passes)


def rollouts(policy, tokenizer, count: int) -> list[tuple[list[int], list[int]]]:
    """`count` completions of training prompts, two of three sampled and one greedy, in random order."""
    chats = prompts_of("train")[:count]
    pairs = []
    for start in range(0, count, ROLLOUT_ROWS):
        sampling = GREEDY if start // ROLLOUT_ROWS % 3 == 2 else SAMPLED
        pairs += completions(policy, tokenizer, chats[start : start + ROLLOUT_ROWS], **sampling)
        print(f"[rollouts] {len(pairs)}/{count}, {time.process_time():.0f} CPU s", flush=True)
    random.Random(0).shuffle(pairs)
    return pairs


def cached_rollouts(policy, tokenizer, count: int) -> tuple[list[tuple[list[int], list[int]]], float]:
    """`rollouts`, kept in the cache folder, and the processor seconds that they took when they were made."""
    path = cache_dir() / f"rollout-completions-{count}.json"
    if not path.is_file():
        torch.manual_seed(0)
        began = time.process_time()
        pairs = rollouts(policy, tokenizer, count)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"seconds": time.process_time() - began, "pairs": pairs}))
        partial.rename(path)
    kept = json.loads(path.read_text())
    return [tuple(pair) for pair in kept["pairs"]], kept["seconds"]


def train_draft(policy, tokenizer, num_rollouts: int, num_updates: int, vocab_size: int, num_passes: int):
    """A draft trained from scratch, and what it cost."""
    pairs, rollout_seconds = cached_rollouts(policy, tokenizer, num_rollouts)
    torch.manual_seed(0)
    rolled_out = time.process_time()
    config = Eagle3DraftConfig.from_policy(policy.config, draft_vocab_size=vocab_size)
    draft, head, recorder = Eagle3DraftModel(config), PolicyHead(policy), TapRecorder(policy, config.tap_layers)
    groups = [pairs[i : i + UPDATE_ROWS] for i in range(0, len(pairs), UPDATE_ROWS)]
    batches = [packed(policy, recorder, group, num_passes) for group in groups]
    recorder.close()
    recorded = time.process_time()

    ids = torch.tensor([token for _, completion in pairs for token in completion])
    counts = torch.bincount(ids, minlength=config.vocab_size)
    draft.set_vocab(choose_draft_vocab(counts, vocab_size, tokenizer.all_special_ids))
    num_taps = len(config.tap_layers)
    scales = (tap_log_scales(batches[0].taps, num_taps) / len(batches[0].taps)).exp()
    draft.initialize_from_policy(head, tap_scales=scales)
    settings = DraftTrainingArguments(num_passes=num_passes, learning_rate=1e-3, lr_scheduler_type="cosine")
    trainer = DraftTrainer(draft, head, settings, num_training_steps=num_updates)
    order = random.Random(1)
    for update in range(num_updates):
        if update % len(batches) == 0:
            order.shuffle(batches)
        trainer.accumulate(batches[update % len(batches)])
        metrics = trainer.step()
        if update % 20 == 0 or update == num_updates - 1:
            shown = {name: round(metrics[f"draft/{name}"], 3) for name in ("loss", "accept_length_sim")}
            print(f"[training] update {update}/{num_updates}, {time.process_time():.0f} CPU s: {shown}", flush=True)
    budget = {
        "completions": len(pairs),
        "completion_tokens": len(ids),
        "prompt_tokens": sum(len(prompt) for prompt, _ in pairs),
        "updates": num_updates,
        "rows_per_update": UPDATE_ROWS,
        "ttt_passes": num_passes,
        "draft_vocab_size": vocab_size,
        "draft_parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "cpu_seconds_rollouts": round(rollout_seconds),
        "cpu_seconds_hidden_states": round(recorded - rolled_out),
        "cpu_seconds_training": round(time.process_time() - recorded),
        "threads": torch.get_num_threads(),
    }
    return draft, budget


def trained_draft(policy, tokenizer, path: str | None = None) -> tuple[Eagle3DraftModel, dict]:
    """The cached draft (or the one at `path`) and its budget; trains it if there is none."""
    folder = Path(path) if path is not None else cache_dir() / "rollout-draft"
    if not folder.is_dir():
        main(["--output", str(folder)])
    notes = folder / "budget.json"
    budget = json.loads(notes.read_text()) if notes.is_file() else {}
    return Eagle3DraftModel.from_pretrained(folder, policy=policy).eval(), budget


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rollouts", type=int, default=448)
    parser.add_argument("--updates", type=int, default=480)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--passes", type=int, default=NUM_PASSES)
    parser.add_argument("--output", default=str(cache_dir() / "rollout-draft"))
    args = parser.parse_args(arguments)
    target = Path(args.output)
    if target.is_dir():
        print(f"{target} is there already; remove it to train it anew.")
        return
    torch.set_num_threads(1)
    policy, tokenizer = load_policy()
    draft, budget = train_draft(policy, tokenizer, args.rollouts, args.updates, args.vocab, args.passes)
    partial = target.with_name(target.name + ".partial")  # a killed run must not look finished
    export_draft(draft, policy, partial)
    (partial / "budget.json").write_text(json.dumps(budget, indent=1))
    partial.rename(target)
    print(json.dumps(budget, indent=1))


if __name__ == "__main__":
    main()
