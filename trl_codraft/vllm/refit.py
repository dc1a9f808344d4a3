"""
Getting a draft into a running vLLM: the folder an engine starts from, the tensors of a refit, the way to a server.

Needs neither vLLM nor TRL to be installed.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..modeling.disk.config import config_to_disk
from ..modeling.disk.folder import write_folder
from ..modeling.disk.tensors import disk_tensors, expected_shapes
from ..modeling.modeling_eagle3 import Eagle3DraftModel


if TYPE_CHECKING:
    from trl.generation.vllm_client import VLLMClient


def write_engine_draft(draft: Eagle3DraftModel, dtype: torch.dtype, policy_name: str, folder: Path) -> None:
    """
    Writes the folder that a colocated engine is built from: the shape of the draft, its present weights, and a head of
    zeros. vLLM would make a head that equals the policy's one tensor with it, for good.

    Args:
        draft ([`Eagle3DraftModel`]):
            The draft, possibly not initialised yet: the first refit brings its weights.
        dtype (`torch.dtype`):
            The policy's.
        policy_name (`str`):
            The folder or repository that the engine loads the policy from.
        folder (`Path`):
            Folder to write.
    """
    tensors = disk_tensors(draft, dtype)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    disk_config = config_to_disk(draft.config, dtype=dtype, base_model=policy_name)
    write_folder(folder, disk_config, tensors)


def refit_tensors(draft: Eagle3DraftModel, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    """
    Returns the tensors that a refit sends: every tensor of the draft under its name on disk, where it lies,
    floating-point ones in `dtype`. `t2d` is left out, servers do not read it.
    """
    state = draft.state_dict()
    tensors = []
    for name in expected_shapes(draft.config):
        if name != "t2d":
            tensor = state[name].detach()
            tensors.append((name, tensor.to(dtype).contiguous() if tensor.is_floating_point() else tensor))
    return tensors


def reshard(policy: nn.Module) -> None:
    """
    Shards again what forwards have left whole, as one that skips the head does until a backward: TRL pushes shards
    only.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            if not all(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
                # FSDP2 still waits for the head, and takes it for a forward after which it was not to.
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()
                module.set_reshard_after_forward(False, recurse=False)


def refuse_shared_weights(policy: nn.Module, draft: nn.Module) -> None:
    """
    Checks that an engine's draft has tensors of its own, but for the token embedding, which is the policy's on
    purpose.

    Args:
        policy (`torch.nn.Module`), draft (`torch.nn.Module`):
            The two models inside the engine.

    Raises:
        RuntimeError: naming the shared tensors.
    """
    of_policy = {id(parameter) for parameter in policy.parameters()}
    shared = [
        name
        for name, parameter in draft.named_parameters()
        if id(parameter) in of_policy and "embed_tokens" not in name
    ]
    if shared:
        raise RuntimeError(
            f"vLLM made {', '.join(shared)} of the draft one with the policy's, so a refit of the draft would "
            "overwrite "
            'the policy. Roll out without the draft: set `speculative_rollouts="false"`.'
        )


def push_draft_to_server(client: "VLLMClient", tensors: list[tuple[str, torch.Tensor]]) -> None:
    """
    Sends a draft to a vLLM server: `/start_draft_weight_update`, the tensors over the group that TRL has opened for
    the policy, `/finish_weight_update`.

    Args:
        client ([`~trl.generation.vllm_client.VLLMClient`]):
            TRL's client, connected.
        tensors (`list[tuple[str, torch.Tensor]]`):
            See [`refit_tensors`].
    """
    metadata = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors]
    client._post(f"{client.base_url}/start_draft_weight_update", json={})
    # Inside a session that is already open, TRL's method opens none of its own (which would be the policy's).
    client._updating_weights = True
    try:
        client.update_named_params(metadata, iter(tensors))
    finally:
        client._updating_weights = False
    client._finish_weight_update()


def server_answers(client: "VLLMClient") -> bool:
    """Whether a server is there."""
    # TRL's client needs it too, and only a run with a server.
    import requests

    try:
        return requests.get(f"{client.base_url}/health", timeout=5).status_code == 200
    except requests.exceptions.RequestException:
        return False


class ServerFailure(RuntimeError):
    """Reports on all ranks an error of one rank with a server, or with a push to it."""


class RaisesWhenRead:
    """Stands in for a server's answer where it is handed on to ranks: raises a [`ServerFailure`] on each of them."""

    def __init__(self, message: str):
        self.message = message

    def __iter__(self) -> Iterator:
        raise ServerFailure(self.message)


def run_while_alive(
    work: Callable[[], None],
    is_alive: Callable[[], bool],
    device: torch.device,
    *,
    doing: str,
    grace: float,
    interval: float,
    timeout: float,
) -> None:
    """
    Waits for a server as long as it lives. A broadcast to a dead peer never returns, so the work runs in a thread of
    its own, which is left behind in that case.

    Args:
        work (`Callable`):
            The call that takes the server.
        is_alive (`Callable`):
            Whether the server answers.
        device (`torch.device`):
            Device of the work, made current in the thread.
        doing (`str`):
            The server's action, for messages: `"it generated"`.
        grace (`float`), interval (`float`):
            Seconds without an answer after which the server counts as dead, and seconds between questions.
        timeout (`float`):
            Seconds after which even a server that lives is given up.

    Raises:
        RuntimeError: if the server died, or did not come to an end.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            work()
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=run, name="vllm-server", daemon=True)
    thread.start()
    start, silent = time.monotonic(), 0.0
    while thread.is_alive():
        thread.join(interval)
        if thread.is_alive():
            silent = 0.0 if is_alive() else silent + interval
            if silent >= grace:
                raise RuntimeError(
                    f"The vLLM server has not answered for {silent:.0f} s while {doing}, so it is taken for dead. "
                    "Start it again, and the run from its last checkpoint."
                )
            if time.monotonic() - start >= timeout:
                raise RuntimeError(
                    f"The vLLM server was given {timeout:.0f} s while {doing}, which were not enough. Other ranks "
                    "wait no longer either: if it is only slow, raise `ddp_timeout`."
                )
    if errors:
        raise errors[0]
