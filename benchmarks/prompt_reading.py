"""
What reading prompts together saves: the prefill of our loop in one forward over all rows, as `generate` reads them,
against each beginning once and the rest in a second forward, and against equal prompts as one row.

Prompts are random tokens of SmolLM2-135M-Instruct, of one length or ragged, that share their first ones. First greedy
tokens are compared, then medians of alternated calls for one new token, in processor time.

    OMP_NUM_THREADS=1 python benchmarks/prompt_reading.py
"""

import argparse
import statistics
import time
from unittest.mock import patch

import torch
from measuring import machine
from trained_draft import load_policy

from trl_codraft import Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.rollout import loop
from trl_codraft.rollout.prompts import PromptBlock, prompt_blocks
from trl_codraft.rollout.speculative import SpeculativeDecoder


# Rows, length of the longest, tokens that all share, how much shorter each row is than the one before.
CASES = [
    (4, 96, 96, 0),
    (4, 96, 24, 0),
    (4, 96, 48, 0),
    (4, 96, 72, 0),
    (4, 96, 24, 3),
    (4, 96, 72, 3),
    (2, 1024, 128, 0),
    (2, 1024, 512, 0),
    (2, 1024, 768, 0),
    (2, 1024, 128, 8),
    (2, 1024, 512, 8),
]


def whole(prompts, _=None):
    """All rows in one forward."""
    rows = list(range(len(prompts)))
    return [PromptBlock(list(prompts), [0] * len(rows), rows, rows)]


def together(shared):
    """Equal prompts as one row, others in two forwards parted where they part."""

    def blocks(prompts, _=None):
        if len(set(prompts)) == 1:
            return prompt_blocks(prompts, float("inf"))
        rows = list(range(len(prompts)))
        first = PromptBlock([prompts[0][:shared]], [0], [0] * len(rows), [0] * len(rows))
        return [first, PromptBlock([prompt[shared:] for prompt in prompts], [shared] * len(rows), rows, rows)]

    return blocks


def prompts_of(rows: int, length: int, shared: int, step: int, generator: torch.Generator):
    """Left-padded ids and mask, and the prompts as tuples."""
    stem = torch.randint(100, 40000, (shared,), generator=generator)
    ids, mask = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        size = length - row * step
        rest = torch.randint(100, 40000, (size - shared,), generator=generator)
        ids[row, length - size :] = torch.cat((stem, rest))
        mask[row, length - size :] = 1
    return ids, mask, [tuple(row[kept != 0].tolist()) for row, kept in zip(ids, mask, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy, _ = load_policy()
    policy.generation_config.eos_token_id = None
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, draft_vocab_size=4096))
    decoder = SpeculativeDecoder(policy, draft, num_draft_tokens=0)
    generate = decoder.bind(policy.generate)
    generator = torch.Generator().manual_seed(0)
    print(f"{machine()}, 1 thread, fp32, medians of {args.turns} turns")
    print(
        f"{'rows':>5}{'tokens':>8}{'shared':>8}{'lengths':>9}{'at once s':>11}{'together s':>12}"
        f"{'ratio':>7}{'chosen':>11}"
    )
    for rows, length, shared, step in CASES:
        ids, mask, prompts = prompts_of(rows, length, shared, step, generator)
        arms = {"at once": whole, "together": together(shared)}
        seconds, tokens = {name: [] for name in arms}, {}
        for turn in range(args.turns):
            for name in arms if turn % 2 == 0 else reversed(arms):
                with patch.object(loop, "prompt_blocks", arms[name]):
                    start = time.process_time()
                    tokens[name] = generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=1)
                    seconds[name].append(time.process_time() - start)
        assert torch.equal(*tokens.values())
        once, shares = (statistics.median(seconds[name]) for name in arms)
        plan = prompt_blocks(prompts, loop.MIN_SAVED_TOKENS_ON_CPU)
        joint = len(plan) == 2 or len(plan[0].tokens) < rows
        print(
            f"{rows:5}{length:8}{shared:8}{'ragged' if step else 'one':>9}{once:11.2f}{shares:12.2f}"
            f"{once / shares:7.2f}{'together' if joint else 'at once':>11}",
            flush=True,
        )
    decoder.close()


if __name__ == "__main__":
    main()
