"""
Makes every change of a run to a global of TRL or of the process's environment. Each holds within one `with` only.

`GRPOTrainer.__init__` builds what it needs from names of its module and has no argument for them, so those names are
replaced while it runs. `tests/trainer/test_trl_patches.py` checks that the installed TRL still reads them there.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from ..config import CoDraftGRPOConfig
from ..group.members import attributes_set
from ..vllm.generation import DraftVLLMGeneration


# Modules of TRL, and the names in them that are replaced.
REPLACED = (
    (grpo_trainer, "VLLMGeneration"),
    (grpo_trainer, "create_model_from_path"),
    (grpo_trainer, "gather"),
    (vllm_generation, "LLM"),
)
# TRL's own function, which a replacement calls.
create_model_from_path = grpo_trainer.create_model_from_path


def generation_made_by(make: Callable) -> AbstractContextManager[None]:
    """Within it, `GRPOTrainer.__init__` calls this for its generation with vLLM, in place of `VLLMGeneration`."""
    return attributes_set(grpo_trainer, VLLMGeneration=make)


def generation_with_draft(args: CoDraftGRPOConfig) -> AbstractContextManager[None]:
    """Within it, `GRPOTrainer.__init__` prepares vLLM for a draft, or for a policy that ranks push together."""
    served_group = args.pipeline_parallel_size * args.context_parallel_size > 1 and args.vllm_mode == "server"
    if not args.use_vllm or not (args.use_draft or served_group):
        return nullcontext()
    # The engine itself is built when the draft exists.
    return generation_made_by(
        partial(DraftVLLMGeneration, timeout=args.ddp_timeout, engine_arguments=engine_arguments)
    )


def models_loaded_by(load: Callable) -> AbstractContextManager[None]:
    """Within it, `GRPOTrainer.__init__` calls this for policies and reference policies, with a path and arguments."""
    return attributes_set(grpo_trainer, create_model_from_path=load)


def engine_arguments(**arguments: Any) -> AbstractContextManager[None]:
    """Within it, TRL's call of vLLM's `LLM` gets these arguments too."""
    return attributes_set(vllm_generation, LLM=partial(vllm_generation.LLM, **arguments))


def rewards_gathered_by(wrap: Callable[[Callable], Callable]) -> AbstractContextManager[None]:
    """Within it, TRL gathers rewards with what this makes of `gather`."""
    return attributes_set(grpo_trainer, gather=wrap(grpo_trainer.gather))


@contextmanager
def not_sharded_by_accelerate(context_parallel_size: int) -> Iterator[None]:
    """Within it, an `Accelerator` does not take over the context parallelism that `accelerate launch` has set."""
    name = "ACCELERATE_USE_PARALLELISM_CONFIG"
    before = os.environ.get(name)
    if context_parallel_size > 1 and before is not None:
        os.environ[name] = "false"
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
