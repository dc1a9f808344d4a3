"""
What needs this package and a real vLLM in one process: refits of a live draft, vLLM's counters beside `score_draft`,
GRPO with rollouts by vLLM, the signatures that the stand-ins of tests/trainer copy. Prints one JSON object.

    $VLLM_TRL_PYTHON tests/vllm_golden/live_engine.py FOLDER      (environment: README.md beside this file)

Two functions of vLLM's CPU backend are replaced, see cpu_vllm.py.
"""

import functools
import inspect
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path


# Before the import of vLLM: the engine lives in this process, where its weights can be looked at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1]))

from cpu_vllm import expand_properly, keep_weights_loadable  # noqa: I001
import torch
from golden_models import CASES, MAX_NEW_TOKENS, PROMPTS, build_draft, build_policy, write_case
from grpo_over_vllm import DRAFT_VOCAB_SIZE, build_trainer, ours, report, save, write_start
from trl.generation import vllm_generation
from vllm import LLM, SamplingParams

from trl_codraft import score_draft
from trl_codraft.vllm.counters import stats_from_metrics
from trl_codraft.vllm.refit import refit_tensors, refuse_shared_weights, write_engine_draft


EAGER = {"enforce_eager": True, "dtype": "float32"}
SAMPLES = 1500


def start(policy: Path, draft: Path, num_draft_tokens: int = 3) -> LLM:
    speculation = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": num_draft_tokens,
        "draft_sample_method": "probabilistic",
    }
    return LLM(
        model=str(policy),
        max_model_len=128,
        skip_tokenizer_init=True,
        max_num_seqs=16,
        gpu_memory_utilization=0.05,
        logprobs_mode="processed_logprobs",
        speculative_config=speculation,
        disable_log_stats=False,
        **EAGER,
    )


def ask(llm: LLM, stop: int | None = None) -> tuple[list[list[int]], list]:
    """Greedy completions of the golden prompts, and what vLLM counted meanwhile."""
    before = stats_from_metrics(llm.get_metrics()).as_tensor()
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_NEW_TOKENS,
        ignore_eos=True,
        detokenize=False,
        stop_token_ids=None if stop is None else [stop],
    )
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], sampling, use_tqdm=False)
    counted = type(stats_from_metrics([])).from_tensor(stats_from_metrics(llm.get_metrics()).as_tensor() - before)
    numbers = [counted.verifications, counted.drafted, counted.accepted, counted.accepted_per_position[:3]]
    return [list(output.outputs[0].token_ids) for output in outputs], numbers


def scored(policy, draft, stop: int | None = None) -> list:
    scores = score_draft(policy, draft, PROMPTS, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=stop, pad_token_id=0)
    return [scores[name] for name in ("verifications", "drafted", "accepted", "accepted_per_position")]


def counters(folder: Path) -> dict:
    """`score_draft` and vLLM on the same prompts, to the length limit and to a stop token in the middle of a block."""
    result = {}
    for name in ("trained", "reduced_vocab"):
        write_case(name, folder / name)
    llm = start(folder / "trained" / "policy", folder / "trained" / "draft")
    policy = build_policy(CASES["trained"])
    draft = build_draft(CASES["trained"], policy)
    completions, counted = ask(llm)
    result["to the limit"] = {"vllm": counted, "ours": scored(policy, draft)}
    stop = completions[0][7]
    stopped, counted = ask(llm, stop)
    result["to a stop token"] = {"vllm": counted, "ours": scored(policy, draft, stop)}
    result["lengths"] = [len(completion) for completion in stopped]
    return result


def refit(folder: Path) -> dict:
    """A live engine's draft: untrained head, trained weights, then noise; the policy and the output never change."""
    keep_weights_loadable()
    policy = build_policy(CASES["trained"])
    draft = build_draft(CASES["trained"], policy)
    write_case("trained", folder)
    write_engine_draft(draft, torch.float32, str(folder / "policy"), folder / "engine")
    llm = start(folder / "policy", folder / "engine")
    worker = llm.llm_engine.model_executor.driver_worker
    refuse_shared_weights(worker.model_runner.model, worker.get_draft_model())
    trained, random = draft.lm_head.weight.detach().clone(), torch.Generator().manual_seed(0)
    noise = torch.randn(trained.shape, generator=random)
    heads = {"trained": trained, "disturbed": trained + 3.0 * trained.std() * noise, "noise": noise}
    outputs, counted = ask(llm)
    result = {"built": {"vllm": counted}, "outputs": [outputs]}
    for stage, head in heads.items():
        draft.lm_head.weight.data.copy_(head)
        worker.get_draft_model().load_weights(refit_tensors(draft, torch.float32))
        llm.reset_prefix_cache()
        outputs, counted = ask(llm)
        result[stage] = {"vllm": counted, "ours": scored(policy, draft)}
        result["outputs"].append(outputs)
    return result


def shared_head(folder: Path) -> dict:
    """An engine built from a draft whose head equals the policy's: vLLM makes the two one, and we notice."""
    write_case("plain", folder)
    policy = build_policy(CASES["plain"])
    draft = build_draft(CASES["plain"], policy)
    draft.lm_head.weight.data.copy_(policy.lm_head.weight)
    draft.save_pretrained(folder / "equal")
    worker = start(folder / "policy", folder / "equal").llm_engine.model_executor.driver_worker
    try:
        refuse_shared_weights(worker.model_runner.model, worker.get_draft_model())
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": None}


def distribution(folder: Path) -> dict:
    """Chi-square of the second sampled token, which a verified draft decides, against its exact distribution."""
    expand_properly()
    write_case("trained", folder)
    llm = start(folder / "policy", folder / "draft")
    prompt = list(PROMPTS[0])
    sampling = SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt}] * SAMPLES, sampling, use_tqdm=False)
    with torch.no_grad():
        policy = build_policy(CASES["trained"])
        first = policy(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        rows = torch.tensor([[*prompt, token] for token in range(len(first))])
        expected = SAMPLES * (first[:, None] * policy(rows).logits[:, -1].double().softmax(-1)).sum(0)
    tokens = torch.tensor([output.outputs[0].token_ids[1] for output in outputs])
    found = torch.bincount(tokens, minlength=len(expected)).double()
    rare = expected < 5  # pooled, as the test wants
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    found = torch.cat([found[~rare], found[rare].sum()[None]])
    return {
        "chi_square": ((found - expected) ** 2 / expected).sum().item(),
        "cells": len(expected),
        "accepted": stats_from_metrics(llm.get_metrics()).accepted,
    }


def grpo(folder: Path) -> dict:
    """GRPO on a tiny policy, colocated: what the engine holds and does at the end. Saves the run."""
    keep_weights_loadable()
    expand_properly()
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **EAGER)
    start = write_start(folder)
    trainer = build_trainer(folder, vllm_mode="colocate", vllm_gpu_memory_utilization=0.05, vllm_max_model_length=128)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    engine, head = trainer.vllm_generation._draft_in_engine(), trainer.draft_model.lm_head.weight
    trainer.vllm_generation.llm.reset_prefix_cache()
    outputs, counted = ask(trainer.vllm_generation.llm)
    save(trainer, folder)
    return {
        "vllm": {"outputs": outputs, "counters": counted},
        "draft_head_difference": (engine.lm_head.weight[:DRAFT_VOCAB_SIZE] - head).abs().max().item(),
        "vocabulary_moved": bool((engine.draft_id_to_target_id != 0).any()),
        "started": ours(start, trainer.draft_model),
        **report(trainer),
    }


def signatures(folder: Path) -> dict:
    """What the stand-in engine and server of tests/trainer copy."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
    from vllm.v1.worker.gpu_worker import Worker

    def parameters(function):
        return list(inspect.signature(function).parameters)

    engine, speculation = set(EngineArgs.__dataclass_fields__), set(SpeculativeConfig.__dataclass_fields__)
    return {
        "LLM.sleep": parameters(LLM.sleep),
        "LLM.wake_up": parameters(LLM.wake_up),
        "LLM.get_metrics": parameters(LLM.get_metrics),
        "load_weights": parameters(Eagle3LlamaForCausalLM.load_weights),
        "get_draft_model": parameters(Worker.get_draft_model),
        "LLM.start_draft_weight_update": parameters(LLM.start_draft_weight_update),
        "engine": sorted(engine & {"speculative_config", "disable_log_stats"}),
        "speculation": sorted(
            speculation & {"method", "model", "num_speculative_tokens", "draft_sample_method", "enforce_eager"}
        ),
    }


CHECKS = (counters, refit, shared_head, distribution, grpo, signatures)


def in_child(check, folder: Path):
    """vLLM keeps process-wide state, so every engine gets a process; forking after the imports saves their time."""

    def run() -> None:
        try:
            sender.send(check(folder))
        except BaseException:
            sender.send({"failed": traceback.format_exc()})

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run)
    child.start()
    result = receiver.recv()
    child.join(timeout=60)
    if child.is_alive():
        child.terminate()
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    chosen = [check for check in CHECKS if not sys.argv[2:] or check.__name__ in sys.argv[2:]]
    results = {}
    for check in chosen:
        (folder / check.__name__).mkdir(parents=True, exist_ok=True)
        results[check.__name__] = in_child(check, folder / check.__name__)
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
