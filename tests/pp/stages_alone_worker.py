"""
Ranks of `test_stages_alone.py`: `python stages_alone_worker.py OUT WORLD_SIZE SIZES CASE...` trains on the rollouts of
a (fake) vLLM server without a pipeline and with pipelines in which no rank has the whole policy, and saves what ranks
and server saw.
"""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from peft import PeftModel
from pp.trainer_cases import IMPOSSIBLE, SERVED_CASES
from pp.trainer_worker import build, release, save_policies, weights_here
from replay_worker import run_all
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from trl_codraft.vllm import generation as vllm_rollouts


SERVED = {
    "speculates": True,
    "dtype": "float32",
    "use_vllm": True,
    "vllm_mode": "server",
    "draft_pretrain_steps": 2,
    "draft_pretrain_learning_rate": 0.1,
    "max_completion_length": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "evaluate": True,
    "metric_for_best_model": "eval_reward",
    "load_best_model_at_end": True,
}


class FakeClient:
    """
    A server that answers each prompt with tokens drawn from the number of the call, and notes what is pushed to it.
    """

    pushes: list
    drafts: list

    def __init__(self, **settings):
        self.base_url, self.session, self.calls = "", self, 0
        self.receives = self.pushes

    def init_communicator(self, device):
        pass

    def reset_prefix_cache(self):
        pass

    def get_server_info(self):
        return {
            "speculative_config": {"num_speculative_tokens": 2},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }

    def get(self, url):
        paths = {"paths": {"/start_draft_weight_update": {}}}
        return SimpleNamespace(ok=True, json=lambda: paths, text="", raise_for_status=lambda: None)

    def _post(self, url, json):
        assert url == "/start_draft_weight_update"
        self.receives = self.drafts

    def _finish_weight_update(self):
        self.receives = self.pushes

    def generate(self, prompts, n, max_tokens, **settings):
        numbers = torch.Generator().manual_seed(self.calls)
        self.calls += 1
        lengths = torch.randint(1, max_tokens + 1, (len(prompts) * n,), generator=numbers).tolist()
        completions = [torch.randint(8, 90, (length,), generator=numbers).tolist() for length in lengths]
        logprobs = [[[-4.0] for _ in ids] for ids in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}

    def update_named_params(self, metadata, named_params):
        pushed = [(name, tensor.clone()) for name, tensor in named_params]
        described = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in pushed]
        assert metadata == described
        self.receives.append(dict(pushed))


def run(case, out, world_size, size):
    """One training run, what the server was sent, and the policy as a user reads it from the run's folder."""
    FakeClient.pushes, FakeClient.drafts = [], []
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(out / "run", ignore_errors=True)
    torch.distributed.barrier()
    case = {**SERVED, **case}
    if not case.get("use_draft", True):
        case = {name: value for name, value in case.items() if not name.startswith("draft_")}
    trainer = build(case, out, world_size, size, rollout_func=None)
    trainer.train()
    best = weights_here(trainer)
    trainer.vllm_generation.sync_weights()
    trainer.save_model()
    torch.distributed.barrier()
    folder = out / "run"
    seen = {
        **trainer.seen,
        "window": trainer.args.gradient_accumulation_steps,
        "logs": trainer.state.log_history,
        "weights": best,
        "whole": trainer.args.holds_whole_policy,
        "best": trainer.state.best_model_checkpoint,
        "pushes": FakeClient.pushes,
        "drafts": FakeClient.drafts,
        "files": {
            path.name: sorted(file.name for file in path.iterdir()) for path in (folder, *folder.glob("*-[0-9]"))
        },
    }
    if torch.distributed.get_rank() == 0:
        source = out / case.get("model_type", "llama")
        saved = AutoModelForCausalLM.from_pretrained(source if case.get("lora") else folder, dtype=torch.float32)
        if case.get("lora"):
            saved = PeftModel.from_pretrained(saved, folder)
        seen["saved"] = saved.state_dict()
        seen["disk"] = sorted(name for file in folder.glob("*.safetensors") for name in load_file(file))
    release(trainer)
    torch.distributed.barrier()
    return seen


def serve_with(client):
    """Makes the trainers of this process talk to a client of this class."""
    vllm_generation.VLLMClient = client
    vllm_generation.is_vllm_available = lambda: True
    vllm_rollouts.CPU_SAMPLES_WRONGLY = False


def run_served(case, out, world_size, size):
    serve_with(FakeClient)
    # Pretraining too without full steps of rounding.
    torch.optim.AdamW = lambda groups, lr, betas: torch.optim.SGD(groups, lr=lr)
    return run(case, out, world_size, size)


if __name__ == "__main__":
    save_policies(Path(sys.argv[1]))
    run_all(run_served, SERVED_CASES, impossible=IMPOSSIBLE)
