"""
What training the draft adds to a GRPO step, on SmolLM2-135M-Instruct with all weights trained.

Three trainers take turns step by step in one process: without a draft, with one of 4,096 tokens, and with one of the
full vocabulary. Rollouts are plain for all and have the same seeds, and the losses of every step must be equal before
a time counts: the draft changes nothing but time. Times are processor time of one thread. How long a step is apart
from the draft depends on how its rollouts are made, so that the share of a step is given as measured, and for a step
whose rollouts take half of it: `1 + draft / (2 * update)`, update being the step without draft and rollouts.

Multiply-adds of the draft on a microbatch are counted by torch while it runs and compared with the printed formula.
With T packed tokens, R rows that later passes need, K passes, N rows that count in all passes together, P teacher
positions (draft sizes H, I, Hq, Hkv, D, n taps of the policy's width Ht; Vd and V tokens):

    layer     (T + (K - 1) R) (2 H D (Hq + 2 Hkv) + H D Hq + 3 H I)    forward, and twice in the backward
    fc        T n Ht H                                                 forward, and once (taps are constants)
    attention sum over documents, with t tokens and r rows:
              Hq D (t^2 + (K - 1) r (2 t - r))                         forward, and 2.5 times in the backward
    head      N H Vd                                                   forward, and twice
    teacher   P Ht V                                                   forward

Three kinds of rollouts: short answers to the demo's word problems, answers of 192 tokens, and three turns of 24 tokens
with 40 tokens of a tool's output after the first two, on which nothing is trained.

    OMP_NUM_THREADS=1 python benchmarks/cotraining_overhead.py --turns 4
"""

import argparse
import statistics
import tempfile
import threading
import time

import torch
from datasets import Dataset
from measuring import machine
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from trained_draft import load_policy, prompts_of
from transformers import PrinterCallback, TrainerCallback

from trl_codraft import CoDraftGRPOConfig, CoDraftGRPOTrainer


PROMPTS, GENERATIONS = 2, 4
# Model tokens of each turn, and tokens of the tool after it.
TURNS = {"short answers": [(48, 0)], "long answers": [(192, 0)], "tool turns": [(24, 40), (24, 40), (24, 0)]}
FREE_LENGTH = ("short answers",)
ARMS = {"no draft": None, "4,096 tokens": 4096, "full vocabulary": 0}
NUM_PASSES = 4


class Turns:
    """Lets one of several threads run at a time, in the order in which they pass the turn on."""

    def __init__(self, names: list[str]):
        self.names, self.current, self.changed = names, 0, threading.Condition()
        self.active = set(names)

    def wait(self, name: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.names[self.current] == name)

    def pass_on(self) -> None:
        with self.changed:
            for _ in self.names:
                self.current = (self.current + 1) % len(self.names)
                if self.names[self.current] in self.active:
                    break
            self.changed.notify_all()

    def leave(self, name: str) -> None:
        with self.changed:
            self.active.discard(name)
        self.pass_on()


class StepClock(TrainerCallback):
    """Processor time and loss of each step; between two steps the other trainers have theirs."""

    def __init__(self, name: str, turns: Turns, rollouts: "Rollouts"):
        self.name, self.turns, self.rollouts = name, turns, rollouts
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step:
            self.turns.pass_on()
            self.turns.wait(self.name)
        torch.manual_seed(state.global_step)
        self.began = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.process_time() - self.began)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append((logs["loss"], logs["grad_norm"], logs["reward"]))


class Rollouts:
    """A `rollout_func`: plain rollouts of one kind, and the processor time of each call."""

    def __init__(self, tokenizer, kind: str):
        self.tokenizer, self.kind, self.seconds = tokenizer, kind, []

    def __call__(self, prompts, trainer) -> dict:
        began = time.process_time()
        texts = self.tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        inputs = self.tokenizer(
            texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
        )
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        prompt_ids = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
        completions: list[list[int]] = [[] for _ in prompts]
        env_mask: list[list[int]] = [[] for _ in prompts]
        tool = self.tokenizer(" The tool says: 3 + 4 = 7." * 20, add_special_tokens=False)["input_ids"]
        policy, eos = trainer.accelerator.unwrap_model(trainer.model), self.tokenizer.eos_token_id
        for tokens, tool_tokens in TURNS[self.kind]:
            shortest = 1 if self.kind in FREE_LENGTH else tokens
            with torch.no_grad():
                grown = policy.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=tokens,
                    min_new_tokens=shortest,
                    pad_token_id=self.tokenizer.pad_token_id,
                )
            for row, new in enumerate(grown[:, ids.shape[1] :].tolist()):
                new = new[: new.index(eos) + 1] if eos in new else new
                completions[row] += new + tool[:tool_tokens]
                env_mask[row] += [1] * len(new) + [0] * tool_tokens
            ids = torch.cat([grown, torch.tensor(tool[:tool_tokens]).expand(len(grown), -1).long()], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(mask), ids.shape[1] - mask.shape[1])], dim=1)
        self.seconds.append(time.process_time() - began)
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": env_mask}


class KeepsBatches(CoDraftGRPOTrainer):
    """Keeps what the draft last learned from, to count its multiply-adds."""

    last_batches: list = []

    def _train_draft(self):
        self.last_batches = list(self.learner._kept)
        super()._train_draft()


def distinct_tokens(completion_ids, **kwargs) -> list[float]:
    """A reward that differs between completions."""
    return [float(len(set(ids))) for ids in completion_ids]


def make_trainer(policy, tokenizer, kind: str, vocab: int | None, clock: StepClock, steps: int, folder: str):
    longest = sum(tokens + tool for tokens, tool in TURNS[kind])
    args = CoDraftGRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        max_steps=steps,
        learning_rate=1e-6,
        num_generations=GENERATIONS,
        per_device_train_batch_size=GENERATIONS,
        gradient_accumulation_steps=PROMPTS,
        max_completion_length=longest,
        use_draft=vocab is not None,
        **({} if vocab is None else {"draft_vocab_size": vocab or None, "draft_ttt_steps": NUM_PASSES}),
    )
    trainer = KeepsBatches(
        model=policy,
        reward_funcs=distinct_tokens,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompts_of("train")[: PROMPTS * steps]}),
        processing_class=tokenizer,
        rollout_func=clock.rollouts,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


# What torch does not count by itself: the CPU's flash kernel, of which a causal square is half of the full one, and
# sums of products in place.
def _causal_share(args, kwargs, position: int) -> float:
    causal = kwargs.get("is_causal", args[position] if len(args) > position else False)
    return 0.5 if causal else 1.0


def _flash(q, k, v, *args, out_shape=None, **kwargs) -> float:
    return sdpa_flop_count(q, k, v) * _causal_share(args, kwargs, 1)


def _flash_backward(dout, q, k, v, *args, out_shape=None, **kwargs) -> float:
    # After q, k, v: output, log-sum-exp, dropout, causal.
    return sdpa_backward_flop_count(dout, q, k, v) * _causal_share(args, kwargs, 3)


def _addmm(total, left, right, *args, out_shape=None, **kwargs) -> int:
    return 2 * left[0] * left[1] * right[1]


UNCOUNTED = {
    torch.ops.aten.addmm_: _addmm,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
}


def measured_multiply_adds(trainer: KeepsBatches) -> float:
    """Of the draft on one microbatch, as torch counts them."""
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        for batch in trainer.last_batches:
            trainer.draft_trainer.accumulate(batch)
    trainer.draft_trainer._discard()
    return counter.get_total_flops() / 2


def formula_multiply_adds(trainer: KeepsBatches) -> dict[str, float]:
    """Of the draft on the same microbatch, by the formula above."""
    config, head = trainer.draft_model.config, trainer.learner.head
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    width = config.head_dim
    per_row = (
        2 * hidden * width * (heads + 2 * kv_heads) + hidden * width * heads + 3 * hidden * config.intermediate_size
    )
    parts = dict.fromkeys(("layer", "fc", "attention", "head", "teacher"), 0.0)
    for batch in trainer.last_batches:
        tokens, later = batch.layout.num_rows, len(batch.layout.query_rows(1))
        counted = [batch.valid(s).nonzero()[:, 0] for s in range(NUM_PASSES)]
        positions = torch.unique(torch.cat([roots + 1 + s for s, roots in enumerate(counted)])).numel()
        rows = sum(len(roots) for roots in counted)
        parts["layer"] += 3 * (tokens + (NUM_PASSES - 1) * later) * per_row
        parts["fc"] += 2 * tokens * len(config.tap_layers) * config.target_hidden_size * hidden
        squares = sum(
            t * t + (NUM_PASSES - 1) * r * (2 * t - r)
            for t, r in zip(batch.layout.query_lens(0), batch.layout.query_lens(1), strict=True)
        )
        parts["attention"] += 3.5 * heads * width * squares
        parts["head"] += 3 * rows * hidden * config.draft_vocab_size
        parts["teacher"] += positions * config.target_hidden_size * head.weight.shape[0]
    return parts


def run_case(kind: str, turns: int) -> None:
    names = list(ARMS)
    baton = Turns(names)
    clocks, trainers, threads, failures = {}, {}, [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            policy, tokenizer = load_policy()
            clocks[name] = StepClock(name, baton, Rollouts(tokenizer, kind))
            # The first step of a trainer warms up and is left out.
            trainers[name] = make_trainer(policy, tokenizer, kind, ARMS[name], clocks[name], turns + 1, folder)

        def train(name: str) -> None:
            baton.wait(name)
            try:
                trainers[name].train()
            except BaseException as error:
                failures.append(error)
            finally:
                baton.leave(name)

        for name in names:
            threads.append(threading.Thread(target=train, args=(name,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    for name in names[1:]:
        assert clocks[name].losses[: turns + 1] == clocks[names[0]].losses[: turns + 1], (
            f"{kind}: {name} changed the policy"
        )
    report(kind, clocks, trainers)


def report(kind: str, clocks: dict[str, StepClock], trainers: dict[str, KeepsBatches]) -> None:
    plain = clocks["no draft"]
    steps = list(zip(plain.seconds, plain.rollouts.seconds, strict=True))[1:]
    rolling = statistics.median(rollout for _, rollout in steps)
    print(
        f"\n{kind}: losses, gradient norms and rewards of {len(plain.seconds)} steps equal; step without draft "
        f"{statistics.median(step for step, _ in steps):.1f} CPU s, {rolling:.1f} of it in rollouts"
    )
    for name in list(ARMS)[1:]:
        with_draft = clocks[name].seconds[1:]
        ratios = [seconds / step for seconds, (step, _) in zip(with_draft, steps, strict=True)]
        halves = [
            1 + (seconds - step) / (2 * (step - rollout))
            for seconds, (step, rollout) in zip(with_draft, steps, strict=True)
        ]
        parts = formula_multiply_adds(trainers[name])
        expected, measured = sum(parts.values()), measured_multiply_adds(trainers[name])
        shares = ", ".join(f"{part} {amount / expected:.0%}" for part, amount in parts.items())
        print(
            f"  {name:<16} step {statistics.median(ratios):.3f}x "
            f"(of {', '.join(f'{ratio:.3f}' for ratio in ratios)}); "
            f"with half a step in rollouts {statistics.median(halves):.3f}x\n"
            f"  {'':<16} multiply-adds {measured / 1e9:.1f}G measured, {expected / 1e9:.1f}G by the formula "
            f"({measured / expected:.3f}): {shares}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--turns", type=int, default=4, help="steps of each trainer that count")
    parser.add_argument("--cases", nargs="+", choices=list(TURNS), default=list(TURNS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, 1 thread, fp32; {PROMPTS * GENERATIONS} rollouts a step, {NUM_PASSES} TTT passes")
    for kind in args.cases:
        run_case(kind, args.turns)


if __name__ == "__main__":
    main()
