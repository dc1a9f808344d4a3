"""
What each rank of a pipeline would hold of a large policy, before anything is allocated: the table that the trainer
prints when it is built, for a policy of a given shape on a given number of GPUs, ranks holding their stages alone
(rollouts by a vLLM server). Calculated from shapes, nothing is run: see `trl_codraft/pp/memory.py` for what is counted
and what is not.

By default the shape of Mistral-Large-Instruct-2411 (123B weights, 88 layers) on 2 nodes of 8 GPUs of 131 GiB (H200),
bfloat16, microbatches of one row of 8,192 tokens, one micro-step, gradient checkpointing, a draft of the full
vocabulary on every rank. Below each table, what it comes to where all ranks share the state of the draft's optimizer
(`draft_shard_optimizer`).

    python benchmarks/pp_plan.py
"""

import argparse
from functools import partial
from types import SimpleNamespace

import torch
from measuring import commit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MistralConfig

from trl_codraft import CoDraftGRPOConfig, Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.grpo.stage_weights import layers_of_stages
from trl_codraft.pp.memory import Holdings, PipelineMemory, draft_memory, plan_memory
from trl_codraft.pp.shape import PipelineShape


SHAPE = {
    "hidden_size": 12288,
    "intermediate_size": 28672,
    "num_hidden_layers": 88,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32768,
    "sliding_window": None,
}


def bytes_of_stages(policy, layers: tuple[int, ...]) -> list[tuple[int, int]]:
    """By rank, the bytes of its stage and of what is trained of it."""
    base = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    stages, end = [], 0
    for count in layers:
        stages.append([p for layer in base.model.layers[end : end + count] for p in layer.parameters()])
        end += count
    stages[0].append(base.get_input_embeddings().weight)
    stages[-1] += [base.model.norm.weight, base.get_output_embeddings().weight]
    return [(sum(p.nbytes for p in stage), sum(p.nbytes for p in stage if p.requires_grad)) for stage in stages]


def verdict(plan: PipelineMemory, memory: float) -> str:
    most = max(rank.total for rank in plan.ranks) / 2**30
    return f"at most {most:.1f} GiB, {'fits' if most < memory else 'does not fit'} in {memory:.0f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--memory", type=float, default=131, help="GiB of a GPU")
    parser.add_argument("--columns", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--micro_steps", type=int, default=1, help="gradient_accumulation_steps")
    args = parser.parse_args()
    config = MistralConfig(**SHAPE)
    with torch.device("meta"):
        draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(config))
    print(f"commit {commit()}")
    print(f"draft of {sum(p.numel() for p in draft.parameters()) / 1e9:.2f}B weights, taps {draft.config.tap_layers}")
    settings = partial(CoDraftGRPOConfig, gradient_accumulation_steps=args.micro_steps, bf16=False, use_cpu=True)
    cases = [
        SimpleNamespace(name="all weights, p = 16", ranks=args.gpus, lora=False),
        SimpleNamespace(name="all weights, p = 8, state shared by 2 ranks", ranks=args.gpus // 2, lora=False),
        SimpleNamespace(name="LoRA of rank 16, p = 8", ranks=args.gpus // 2, lora=True),
    ]
    for case in cases:
        with torch.device("meta"):
            policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            layers = layers_of_stages(settings(pipeline_parallel_size=case.ranks), policy)
            adapted = get_peft_model(policy, LoraConfig(r=16, target_modules="all-linear")) if case.lora else policy
        shape = PipelineShape(layers, case.ranks, args.micro_steps * case.ranks)

        def plan_with(draft_bytes, policy=policy, shape=shape, sharers=args.gpus // case.ranks, adapted=adapted):
            holdings = Holdings(
                state_sharers=sharers,
                draft_bytes=draft_bytes,
                draft_everywhere=True,
                replica=False,
                stage_weights=bytes_of_stages(adapted, shape.layers),
            )
            sizes = {"rows": 1, "columns": args.columns, "tap_layers": draft.config.tap_layers}
            return plan_memory(policy, shape, gradient_checkpointing=True, holdings=holdings, **sizes)

        plan = plan_with(draft_memory(draft))
        print(f"\n{case.name}, layers {list(layers)}: {verdict(plan, args.memory)}")
        print(plan.table())
        shared = plan_with(draft_memory(draft, sharers=args.gpus))
        print(f"draft_shard_optimizer: draft {shared.ranks[0].draft / 2**30:.2f}; {verdict(shared, args.memory)}")


if __name__ == "__main__":
    main()
