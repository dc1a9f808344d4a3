"""
GRPO with rollouts by a vLLM server in a process of its own (cpu_server.py): policy and draft are sent to it before the
rollouts of each step over its HTTP routes. Prints one JSON object.

    $VLLM_TRL_PYTHON tests/vllm_golden/live_server.py FOLDER      (environment: README.md beside this file)

FOLDER gets the policy and the draft that the server starts from, its log, and `out`, what the run saved.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

from cpu_vllm import transfer_without_gpu  # noqa: I001
import requests
import torch
from golden_models import MAX_NEW_TOKENS, PROMPTS
from grpo_over_vllm import DRAFT_VOCAB_SIZE, build_trainer, ours, report, save, write_start
from trl.generation.vllm_client import VLLMClient

from trl_codraft.serving.export import export_draft
from trl_codraft.modeling.configuration_eagle3 import Eagle3DraftConfig
from trl_codraft.modeling.modeling_eagle3 import Eagle3DraftModel
from trl_codraft.modeling.teacher import PolicyHead
from trl_codraft.rollout.stats import SpeculativeStats
from trl_codraft.vllm.counters import stats_from_text


NUM_DRAFT_TOKENS = 3


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_server(policy: Path, draft: Path, log: Path) -> tuple[subprocess.Popen, str]:
    """`vllm serve` as docs/serving.md has it, with sizes for a CPU; returns when it answers."""
    port = free_port()
    speculation = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": NUM_DRAFT_TOKENS,
        "draft_sample_method": "probabilistic",
    }
    options = {
        "--model": policy,
        "--port": port,
        "--weight-transfer-config": '{"backend": "nccl"}',
        "--logprobs-mode": "processed_logprobs",
        "--speculative-config": json.dumps(speculation),
        "--dtype": "float32",
        "--max-model-len": 128,
        "--max-num-seqs": 16,
    }
    arguments = [str(part) for option in options.items() for part in option]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "cpu_server.py", "--enforce-eager", *arguments],
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
            stdout=output,
            stderr=output,
        )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
    while True:
        try:
            if requests.get(f"{address}/health", timeout=5).ok:
                return process, address
        except requests.exceptions.ConnectionError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the vLLM server did not start: {log.read_text()[-5000:]}")
        time.sleep(1)


def ask(address: str) -> dict:
    """
    Greedy completions of the golden prompts by the server, and what it counted meanwhile. One prompt after the other:
    where a prompt of one token joins others, vLLM counts a verification of placeholders.
    """
    before, outputs = counters(address), []
    model = requests.get(f"{address}/v1/models").json()["data"][0]["id"]
    for prompt in PROMPTS:
        question = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": MAX_NEW_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = requests.post(f"{address}/v1/completions", json=question)
        answer.raise_for_status()
        outputs.append(answer.json()["choices"][0]["token_ids"])
    counted = SpeculativeStats.from_tensor(counters(address) - before)
    numbers = [counted.verifications, counted.drafted, counted.accepted]
    return {"outputs": outputs, "counters": [*numbers, counted.accepted_per_position[:NUM_DRAFT_TOKENS]]}


def counters(address: str) -> torch.Tensor:
    return stats_from_text(requests.get(f"{address}/metrics").text).as_tensor()


def train(folder: Path, address: str):
    """The run, after which the server has the last policy and draft too; returns the trainer."""
    transfer_without_gpu()
    connect = VLLMClient.init_communicator
    # TRL refuses every device but a GPU, by name.
    VLLMClient.init_communicator = lambda self, device: connect(self, "cuda")
    trainer = build_trainer(folder, vllm_mode="server", vllm_server_base_url=address, vllm_group_port=free_port())
    trainer.train()
    trainer.vllm_generation.sync_weights()
    return trainer


def run(folder: Path) -> dict:
    policy = write_start(folder)
    taps = {"tap_layers": [1, 2, 3], "draft_vocab_size": DRAFT_VOCAB_SIZE}
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, **taps))
    draft.initialize_from_policy(PolicyHead(policy))
    export_draft(draft, policy, folder / "draft")
    server, address = start_server(folder / "policy", folder / "draft", folder / "server.log")
    try:
        started = {"server": ask(address), "ours": ours(policy, draft)}
        trainer = train(folder, address)
        results = {"started": started, "server": ask(address), **report(trainer)}
    finally:
        server.terminate()
        server.wait(timeout=60)
    save(trainer, folder)
    log = (folder / "server.log").read_text()
    results["requests"] = re.findall(r'"POST /(\w+_weight_update) HTTP/1.1" 200', log)
    return results


if __name__ == "__main__":
    print("\n" + json.dumps(run(Path(sys.argv[1]))))
