"""Draft refits of a (fake) vLLM server over HTTP, with TRL's own client."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from grpo_runs import codraft_trainer
from trl.generation import vllm_client, vllm_generation

from trl_codraft.rollout.stats import SpeculativeStats
from trl_codraft.vllm.counters import stats_from_text
from trl_codraft.vllm.generation import DraftVLLMGeneration
from trl_codraft.vllm.refit import run_while_alive


CAN_UPDATE = {"paths": ["/start_draft_weight_update"]}
PATIENCE = {"doing": "it slept", "grace": 0.1, "interval": 0.05, "timeout": 30.0}


@pytest.fixture
def serve(tmp_path):
    """Starts fake servers; returns their process and address."""
    processes = []

    def start(**settings):
        port_file = tmp_path / f"port{len(processes)}"
        script = Path(__file__).parent / "fake_server.py"
        processes.append(subprocess.Popen([sys.executable, script, port_file, json.dumps(settings)]))
        deadline = time.monotonic() + 30
        while not (port_file.exists() and port_file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return processes[-1], f"http://127.0.0.1:{port_file.read_text()}"

    yield start
    for process in processes:
        process.kill()
        process.wait()


class Transfer:
    """In the place of vLLM's NCCL transfer: notes the tensors; with `forever`, never returns, as to a dead peer."""

    sent: list
    forever = False

    @classmethod
    def trainer_send_weights(cls, iterator, trainer_args):
        cls.sent.append(dict(iterator))
        if cls.forever:
            threading.Event().wait()


@pytest.fixture
def transfer(monkeypatch):
    kind = type("Transfer", (Transfer,), {"sent": []})
    monkeypatch.setattr(vllm_client, "NCCLWeightTransferEngine", kind, raising=False)
    monkeypatch.setattr(vllm_client, "NCCLTrainerSendWeightsArgs", SimpleNamespace, raising=False)
    monkeypatch.setattr(vllm_client, "_HAS_STATEFUL_TRAINER_ENGINE", False)
    monkeypatch.setattr(vllm_client, "_HAS_RESET_PREFIX_CACHE_SUCCESS", False)
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)
    # What a GPU would be: the CPU's refusal is about a colocated engine.
    monkeypatch.setattr("trl_codraft.vllm.generation.CPU_SAMPLES_WRONGLY", False)
    return kind


def server_trainer(tmp_path, address, **overrides):
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": address, **overrides}
    return codraft_trainer(tmp_path / "run", **{"speculative_rollouts": "true", **settings})


def asked(address):
    return [(path, set(names)) for path, names in requests.get(f"{address}/log").json()]


def test_draft_is_pushed_in_a_session_of_its_own_before_the_policy(tmp_path, serve, transfer):
    _, address = serve(**CAN_UPDATE)
    trainer = server_trainer(tmp_path, address, draft_vocab_size=40)
    trainer.vllm_generation.sync_weights()
    draft, policy = set(trainer.draft_model.state_dict()) - {"t2d"}, set(dict(trainer.model.named_parameters()))
    assert asked(address) == [
        ("/start_draft_weight_update", set()),
        ("/update_weights", draft),
        ("/finish_weight_update", set()),
        ("/start_weight_update", set()),
        ("/update_weights", policy),
        ("/finish_weight_update", set()),
        ("/reset_prefix_cache", set()),
    ]
    assert [set(sent) for sent in transfer.sent] == [draft, policy]
    sent, state = transfer.sent[0], trainer.draft_model.state_dict()
    assert all((sent[name].float() == state[name].float()).all() for name in draft)


def test_server_that_cannot_update_its_draft_is_refused_unless_static_is_said(tmp_path, serve, transfer):
    _, address = serve()
    with pytest.raises(ValueError, match='cannot update its draft.*draft_vllm_server_sync="static"'):
        server_trainer(tmp_path, address)
    with pytest.raises(ValueError, match="cannot update its draft"):
        server_trainer(tmp_path, address, speculative_rollouts="auto")
    trainer = server_trainer(tmp_path, address, draft_vllm_server_sync="static")
    trainer.vllm_generation.sync_weights()
    assert [path for path, _ in asked(address)][0] == "/start_weight_update"
    assert "/start_draft_weight_update" not in [path for path, _ in asked(address)]


def test_server_without_a_draft_generates_plainly(tmp_path, serve, transfer):
    _, address = serve(speculative_config=None)
    with pytest.raises(ValueError, match="runs without a draft.*--speculative-config"):
        server_trainer(tmp_path, address)
    assert not server_trainer(tmp_path, address, speculative_rollouts="auto").rollouts.possible


def test_acceptance_is_read_from_the_servers_counters(tmp_path, serve, transfer):
    _, address = serve(**CAN_UPDATE)
    generation = server_trainer(tmp_path, address).vllm_generation
    generation.take_stats()
    stats = generation.take_stats()  # ten more drafts in each of the two engines
    assert (stats.verifications, stats.drafted, stats.accepted) == (20, 60, 30)
    assert stats.accepted_per_position[:4] == [20, 10, 0, 0]
    assert stats.accept_length == 2.5


def test_restarted_server_is_noticed(tmp_path, serve, transfer):
    _, address = serve(**CAN_UPDATE)
    generation = server_trainer(tmp_path, address).vllm_generation
    generation._counted = SpeculativeStats(verifications=10**6)
    with pytest.raises(RuntimeError, match="restarted"):
        generation.take_stats()


def test_server_killed_in_a_refit_gives_an_error_soon(tmp_path, serve, transfer, monkeypatch):
    process, address = serve(hang=True, **CAN_UPDATE)
    trainer = server_trainer(tmp_path, address)
    transfer.forever = True
    monkeypatch.setattr(DraftVLLMGeneration, "server_grace", 0.6)
    monkeypatch.setattr(DraftVLLMGeneration, "health_interval", 0.2)
    threading.Timer(0.5, os.kill, (process.pid, signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="has not answered for .* while weights were sent"):
        trainer.vllm_generation.sync_weights()
    assert time.monotonic() - start < 30


def test_server_that_answers_but_never_takes_the_weights_is_given_up(tmp_path, serve, transfer):
    _, address = serve(**CAN_UPDATE)
    generation = server_trainer(tmp_path, address, ddp_timeout=10).vllm_generation
    assert generation.server_patience == math.inf  # nobody else waits
    generation.server_patience, generation.health_interval, transfer.forever = 0.5, 0.1, True
    with pytest.raises(RuntimeError, match="was given 0 s while weights were sent to it.*`ddp_timeout`"):
        generation.sync_weights()


def test_slow_refit_of_a_living_server_is_waited_for(transfer):
    import torch

    done = []
    run_while_alive(lambda: done.append(time.sleep(0.5)), lambda: True, torch.device("cpu"), **PATIENCE)
    assert done == [None]


def test_counters_of_a_server_without_speculation_are_zero():
    assert stats_from_text("vllm:num_requests_running 3.0\n") == SpeculativeStats()


def test_generation_put_in_its_place_later_trains_on_without_counters(tmp_path):
    # As TRL's own tests do, and users who bring a client of their own.
    def generate(prompts, images, num_generations, profiler):
        completions = [[9, 12, 10 + number] for number in range(len(prompts))]
        return prompts, completions, [[[-0.1]] * 3 for _ in completions], None

    trainer = codraft_trainer(tmp_path / "run", max_steps=1)
    trainer.use_vllm, trainer._last_loaded_step = True, 0
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None, generate=generate)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["rollout/speculation_on"] == 0
    assert logs["completions/mean_length"] == 3
    assert logs["draft/loss"] > 0
