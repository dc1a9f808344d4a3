"""
Rollouts by vLLM with the co-trained draft inside the engine.

TRL builds the engine and pushes the policy into it ([`~trl.generation.vllm_generation.VLLMGeneration`]); this subclass
gives the engine the draft, pushes the draft with every refit of the policy, and reads the acceptance that vLLM counts.
A policy of which each rank of a pipeline has a part is pushed from there.

The engine is built later than in TRL: when the draft exists, at the end of the trainer's construction. A draft in an
engine must not share its head with the policy's: vLLM makes them one tensor when a loaded draft's head equals the
policy's bit for bit, as a fresh draft's does, and a refit of one would then overwrite the other. So the folder that
the engine is built from carries a head of zeros; the real weights arrive with the first refit, before the first
rollout.
"""

import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from trl.generation.vllm_generation import VLLMGeneration

from ..group.members import attributes_set
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..pp.stages.weights import WholeStream
from ..rollout.stats import SpeculativeStats
from .counters import stats_from_metrics, stats_from_text
from .refit import (
    RaisesWhenRead,
    ServerFailure,
    push_draft_to_server,
    refit_tensors,
    refuse_shared_weights,
    reshard,
    run_while_alive,
    server_answers,
    write_engine_draft,
)
from .versions import unsupported_vllm_reason


# vLLM drafts a fixed number of tokens, chosen when the engine is built.
DEFAULT_DRAFT_TOKENS = 3
# On the CPU, vLLM's `expand_kernel` writes its result into a copy that is dropped, so drafted tokens are verified at
# the temperature that uninitialised memory happens to hold.
CPU_SAMPLES_WRONGLY = True
# Sampling parameters that vLLM leaves out, with a line in its log, once it speculates.
IGNORED_WITH_DRAFT = ("min_p", "logit_bias")


def plain_vllm_reason(
    device: torch.device, sampling: dict[str, Any], server_draft: dict[str, Any] | None = None
) -> str | None:
    """
    Why vLLM has to generate without a draft.

    Args:
        device (`torch.device`):
            Device of the run.
        sampling (`dict[str, Any]`):
            Parameters of its sampling, with `temperature`.
        server_draft (`dict[str, Any]`, *optional*):
            In server mode, [`DraftVLLMGeneration`]'s attribute of that name.

    Returns:
        `str` or `None`: the reason and what to change, or `None` if the draft can be used.
    """
    reason = unsupported_vllm_reason()
    if reason is not None:
        return reason
    ignored = [name for name in IGNORED_WITH_DRAFT if sampling.get(name)]
    if ignored:
        names = " and ".join(f"`{name}`" for name in ignored)
        return f"vLLM ignores {names} when it speculates, so it would sample from another distribution"
    if device.type == "cpu" and sampling["temperature"] > 0 and CPU_SAMPLES_WRONGLY:
        return (
            "vLLM's CPU backend (0.29 and 0.32 checked) samples from another distribution when it speculates at a "
            "temperature above 0; use a GPU"
        )
    if server_draft is not None and not server_draft["num_draft_tokens"]:
        return (
            "the vLLM server runs without a draft; export one and start the server with `--speculative-config "
            '\'{"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 3}\'`'
        )
    return None


def stats_of(generation: VLLMGeneration) -> SpeculativeStats:
    """
    What vLLM has counted since the last call. Nothing, if something else was put in the place of a
    [`DraftVLLMGeneration`] after the trainer was built: it generates without a draft of ours.
    """
    return generation.take_stats() if isinstance(generation, DraftVLLMGeneration) else SpeculativeStats()


class DraftVLLMGeneration(VLLMGeneration):
    """
    TRL's generation with vLLM, with a draft in the engine.

    `GRPOTrainer.__init__` makes it, in the place of TRL's; [`~DraftVLLMGeneration.start`] finishes it.

    Args:
        timeout (`float`):
            Seconds that ranks wait for each other.
        engine_arguments (`Callable`):
            Given keyword arguments, makes a context in which TRL's call of vLLM's `LLM` gets them too.

    Attributes:
        server_draft (`dict[str, Any]`):
            In server mode, `num_draft_tokens` (0: the server has no draft) and `can_update`.
        server_grace (`float`), health_interval (`float`):
            Seconds without an answer after which a server counts as dead, and between questions.
        server_patience (`float`):
            Seconds after which a server that answers is given up: before other ranks do, so that they hear why. Never
            if there are none.
    """

    server_grace = 60.0
    health_interval = 2.0

    server_draft: dict[str, Any] | None = None
    _draft: Eagle3DraftModel | None = None
    _pushes_draft = False
    _counted = SpeculativeStats()
    # Whether each rank has its stages of the policy alone, and the ranks of the pipeline that pushes them.
    _by_stages = False
    _pushing: dist.ProcessGroup | None = None
    _stream: WholeStream | None = None
    _pass: Iterator[tuple[str, torch.Tensor]] | None = None  # the last one over the policy

    def __init__(
        self, *args: Any, timeout: float, engine_arguments: Callable[..., AbstractContextManager], **kwargs: Any
    ):
        self._engine_arguments = engine_arguments
        super().__init__(*args, **kwargs)
        self.server_patience = 0.9 * timeout if self.accelerator.num_processes > 1 else math.inf

    def _init_vllm(self) -> None:
        if self.mode != "colocate":
            super()._init_vllm()
            found = [self._inspect_server() if self.accelerator.is_main_process else None]
            self.server_draft = broadcast_object_list(found, from_process=0)[0]

    def start(self, draft: Eagle3DraftModel | None, num_draft_tokens: int | str, server_sync: str) -> None:
        """
        Builds the colocated engine, or settles what a server's draft is.

        Args:
            draft ([`Eagle3DraftModel`] or `None`):
                The draft, read live at every refit; `None` generates as TRL does.
            num_draft_tokens (`int` or `str`):
                Draft tokens per verification; `"auto"` means 3. A server keeps its own number.
            server_sync (`str`):
                `"push"` refreshes a server's draft with each refit of the policy, `"static"` leaves it as it is.

        Raises:
            ValueError: if `server_sync` is `"push"` and the server cannot update its draft.
        """
        if self.mode == "colocate":
            if draft is None:
                super()._init_vllm()
            else:
                self._build_engine(draft, DEFAULT_DRAFT_TOKENS if num_draft_tokens == "auto" else num_draft_tokens)
        elif draft is not None and server_sync == "push" and not self.server_draft["can_update"]:
            raise ValueError(
                "The vLLM server cannot update its draft while it runs (its /openapi.json lists no "
                "/start_draft_weight_update), so the draft would stay as it is while the policy moves. Start the "
                "server from vLLM 0.27 or later with `VLLM_SERVER_DEV_MODE=1`, or accept that "
                'with `draft_vllm_server_sync="static"`.'
            )
        self._draft = draft
        self._pushes_draft = self.mode == "colocate" or server_sync == "push"
        if draft is not None:
            self._counted = self._read_counters()

    def push_by_stages(self, group: dist.ProcessGroup | None) -> None:
        """
        Pushes a policy from now on that no rank has whole, tensor by tensor through the main process.

        Args:
            group (`ProcessGroup` or `None`):
                The ranks of the pipeline that the main process belongs to; `None` on ranks of others.
        """
        self._by_stages, self._pushing = True, group

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._by_stages and self._stream is None:
            self._merge_and_unmerge()
            return iter(())
        self._pass = super()._iter_named_params()
        return self._pass if self._stream is None else self._stream.stream(self._pass)

    def _describe_stages(self) -> None:
        """Lists the tensors of a push before the first one is sent; TRL would iterate over the policy for that."""
        if self._stream is not None:
            self._stream.begin()
        elif self._by_stages and self._weight_metadata is None:
            self._weight_metadata = []
            if self._pushing is not None:
                own = super()._iter_named_params()
                self._stream = WholeStream(own, self._pushing, self.accelerator.device)
                self._weight_metadata = [
                    (info.name, str(info.dtype).removeprefix("torch."), list(info.shape))
                    for info in self._stream.tensors
                ]
            else:
                self._merge_and_unmerge()

    def _merge_and_unmerge(self) -> None:
        """
        What iterating over the policy does to weights that have adapters, which is to round them: without it, they
        would drift apart between the pipeline that pushes and ranks of others that hold the same stages.
        """
        deque(super()._iter_named_params(), maxlen=0)

    def sync_weights(self) -> None:
        """
        Pushes the policy and the draft.

        Raises:
            ServerFailure: on all ranks, if the server does not take them.
        """
        self._describe_stages()
        reshard(self.model)
        if self.mode == "server":
            self._sync_with_server()
            return
        super().sync_weights()
        if self._draft is not None and self.mode == "colocate":
            # After TRL's part, which wakes the engine: sleep discards the draft's weights as it does the policy's.
            self._draft_in_engine().load_weights(refit_tensors(self._draft, self._policy_dtype()))

    def take_stats(self) -> SpeculativeStats:
        """
        What vLLM has counted since the last call. Counters of a server are on the main process, those of a tensor
        parallel group on its first rank, so that a sum over ranks counts everything once.

        Raises:
            RuntimeError: if the server has been restarted since.
        """
        if self._draft is None:
            return SpeculativeStats()
        now = self._read_counters()
        difference = now.as_tensor() - self._counted.as_tensor()
        if (difference < 0).any():
            raise RuntimeError(
                "vLLM's counters went back, so the server has been restarted and holds its initial weights. Restart "
                "the run from its last checkpoint."
            )
        self._counted = now
        return SpeculativeStats.from_tensor(difference)

    # Colocated engine

    def _build_engine(self, draft: Eagle3DraftModel, num_draft_tokens: int) -> None:
        """TRL's engine, with a draft of the right shape that the first refit fills."""
        with tempfile.TemporaryDirectory(prefix="trl-codraft-") as scratch:
            folder = Path(scratch) / "draft"
            if self.accelerator.is_local_main_process:
                write_engine_draft(draft, self._policy_dtype(), self.model.name_or_path, folder)
            # One folder per node: that of its first rank, which is written when all have met here.
            folders = gather_object([str(folder)])
            first = self.accelerator.process_index - self.accelerator.local_process_index
            speculation = {
                "method": "eagle3",
                "model": folders[first],
                "num_speculative_tokens": num_draft_tokens,
                # vLLM's default, "greedy", accepts the draft's best guess with the policy's probability of it, far
                # less than two similar distributions have in common at a temperature that explores.
                "draft_sample_method": "probabilistic",
            }
            if self.enable_sleep_mode:
                # CUDA graphs of the draft can read freed memory after sleep level 2 (vllm-project/vllm#55013).
                speculation["enforce_eager"] = True
            # TRL's method waits for all ranks at its end, so the folder outlives every load.
            with self._engine_arguments(speculative_config=speculation, disable_log_stats=False):
                super()._init_vllm()
        refuse_shared_weights(self._driver().model_runner.model, self._draft_in_engine())

    def _driver(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker

    def _draft_in_engine(self) -> nn.Module:
        return self._driver().get_draft_model()

    def _policy_dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    # Server

    def _inspect_server(self) -> dict[str, Any]:
        """Reads the server's own description of its draft."""
        client = self.vllm_client
        speculation = client.get_server_info()["speculative_config"] or {}
        response = client.session.get(f"{client.base_url}/openapi.json")
        return {
            "num_draft_tokens": speculation.get("num_speculative_tokens", 0),
            "can_update": response.ok and "/start_draft_weight_update" in response.json()["paths"],
        }

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        """
        TRL's.

        Raises:
            ServerFailure: on all ranks, if the server does not generate.
        """
        if self.mode != "server" or not self.accelerator.is_main_process:
            return super().generate(*args, **kwargs)
        ask, answers = self.vllm_client.generate, []

        def ask_in_time(**request: Any) -> dict[str, Any]:
            try:
                # A connection that breaks is an error by itself.
                self._wait(lambda: answers.append(ask(**request)), lambda: True, "it generated")
            except Exception as error:  # of the server, the network, the client: any
                failed = RaisesWhenRead(f"The vLLM server did not generate. {type(error).__name__}: {error}")
                answers.append({"prompt_ids": failed, "completion_ids": failed, "logprobs": None})
            return answers[0]

        with attributes_set(self.vllm_client, generate=ask_in_time):
            return super().generate(*args, **kwargs)

    def _sync_with_server(self) -> None:
        """On all ranks, which hear of a failure of one of them."""
        failure = self._pass = None
        try:
            if self.accelerator.is_main_process:
                self._wait(self._sync_server, partial(server_answers, self.vllm_client), "weights were sent to it")
            else:
                super().sync_weights()
        except Exception as error:  # of the server, the network, the client, the policy's layers: any
            failure = error
            self._finish_passes()
        texts = gather_object([None if failure is None else f"{type(failure).__name__}: {failure}"])
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise ServerFailure(f"Weights were not pushed because of {'; '.join(failed)}") from failure

    def _finish_passes(self) -> None:
        """After a failure, what other ranks still wait for: gathering is collective."""
        if self._stream is not None:
            self._stream.give_up()
        elif self._dist.is_fsdp:
            for _ in range(1 if self._weight_metadata is not None else 2):  # the first of all only describes
                deque(self._pass or self._iter_named_params(), maxlen=0)
                self._pass = None

    def _wait(self, work: Callable[[], None], is_alive: Callable[[], bool], doing: str) -> None:
        run_while_alive(
            work,
            is_alive,
            self.accelerator.device,
            doing=doing,
            grace=self.server_grace,
            interval=self.health_interval,
            timeout=self.server_patience,
        )

    def _sync_server(self) -> None:
        # The draft first: should the server have made its head one with the policy's, the policy's push repairs the
        # policy, and only acceptance suffers.
        if self._draft is not None and self._pushes_draft:
            push_draft_to_server(self.vllm_client, refit_tensors(self._draft, self._policy_dtype()))
        super().sync_weights()

    def _read_counters(self) -> SpeculativeStats:
        """Empty where another rank reads the counters of what this one generated."""
        if self.mode == "server":
            if not self.accelerator.is_main_process:
                return SpeculativeStats()
            response = self.vllm_client.session.get(f"{self.vllm_client.base_url}/metrics")
            response.raise_for_status()
            return stats_from_text(response.text)
        if self.tensor_parallel_size > 1 and dist.get_rank(self.tp_group) > 0:
            return SpeculativeStats()
        return stats_from_metrics(self.llm.get_metrics())
