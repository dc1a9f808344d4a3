"""
A stage of a policy that stays whole on its rank. The trainer uses it: the same weights serve the pipeline's steps and,
whole, rollouts and evaluations.

Shapes: `B` rows, `S` columns, `T` rows of a shard, `H` hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ...modeling.policy import PassThrough, decoder_of
from ..shape import stages_of_layers
from .split import PolicyStage, require_split


class Shard(NamedTuple):
    """
    The first columns of a stage's input, which are real: the others only bring it to the shape of a pipeline step.

    Args:
        num_rows (`int`):
            `T`: the first so many of the `S` columns.
        arguments (`dict`):
            Further arguments of the policy's forward.
    """

    num_rows: int
    arguments: dict[str, Any]


# Given the number of a microbatch and the layers of a stage, makes the context in which the stage's forward runs.
StageContext = Callable[[int | None, Sequence[int]], AbstractContextManager[Shard | None]]


def plain_forward(microbatch: int | None, layers: Sequence[int]) -> AbstractContextManager[None]:
    """A [`StageContext`] that changes nothing."""
    return nullcontext()


class StageView(PolicyStage):
    """
    A stage of a policy that stays whole: modules of other stages are set aside while the stage's forward runs, and
    there for everything else. Parameters are shared with the policy, nothing is copied or dropped.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy, with adapters injected if there are any.
        layers_per_stage (`Sequence[int]`), index (`int`), score (`Callable`, *optional*):
            As in [`split_policy`].
        context (`StageContext`, *optional*):
            Makes the context of a forward, such as autocast. If it gives a [`Shard`], the forward runs on these
            columns of its input, and its output is padded with zeros.

    Raises:
        ValueError: if the layers do not add up, or the model cannot be split.
    """

    def __init__(
        self,
        policy: nn.Module,
        layers_per_stage: Sequence[int],
        index: int,
        score: Callable | None = None,
        context: StageContext = plain_forward,
    ):
        require_split(policy, layers_per_stage)
        super().__init__(policy, index, len(layers_per_stage), score)
        start = sum(layers_per_stage[:index])
        self.own_layers = range(start, start + layers_per_stage[index])
        self.context = context
        stage_of = _stages_of_parameters(policy, layers_per_stage)
        self._own_names = {name for name, stage in stage_of.items() if stage == index}
        decoder = decoder_of(policy)
        self._foreign = [(decoder.layers, str(i)) for i in range(len(decoder.layers)) if i not in self.own_layers]
        if not self.is_last:
            self._foreign.append((decoder, "norm"))

    def named_own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.policy.named_parameters():
            if name in self._own_names:
                yield name, parameter

    def run(self, arguments: dict[str, Any], extras: dict[str, torch.Tensor]) -> torch.Tensor:
        with _set_aside(self._foreign), self.context(self.microbatch, self.own_layers) as shard:
            if shard is None:
                output = super().run(arguments, extras)
            else:
                output = self._run_shard(shard, arguments, extras)
        if torch.is_grad_enabled() and not output.requires_grad:
            # All weights so far are frozen, and the schedule runs the backward of this stage all the same.
            output.requires_grad_()
        return output

    def _run_shard(self, shard: Shard, arguments: dict[str, Any], extras: dict[str, torch.Tensor]) -> torch.Tensor:
        cut = {
            name: value[:, : shard.num_rows] if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        output = super().run({**cut, **shard.arguments}, extras)
        num_columns = next(value.shape[1] for value in arguments.values() if isinstance(value, torch.Tensor))
        return nn.functional.pad(output, (0, 0, 0, num_columns - shard.num_rows))


def _stages_of_parameters(policy: nn.Module, layers_per_stage: Sequence[int]) -> dict[str, int]:
    """By name of a parameter, the stage that owns it. A tied embedding belongs to the first."""
    decoder, last = decoder_of(policy), len(layers_per_stage) - 1
    paths = {module: f"{path}." for path, module in policy.named_modules()}
    stages = stages_of_layers(layers_per_stage)
    owners = {paths[decoder.embed_tokens]: 0, paths[decoder.norm]: last, paths[policy.get_output_embeddings()]: last}
    owners |= {paths[layer]: stage for layer, stage in zip(decoder.layers, stages, strict=True)}
    found = {}
    for name, _ in policy.named_parameters():
        owner = [stage for path, stage in owners.items() if name.startswith(path)]
        if not owner:
            raise ValueError(
                f"{type(policy).__name__} cannot be split into pipeline stages: `{name}` lies outside of its "
                "embedding, layers, final norm and head. Set `pipeline_parallel_size=1`."
            )
        found[name] = owner[0]
    return found


@contextmanager
def _set_aside(children: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Within it, children of modules, by name, pass their input on."""
    before = [(module, name, module.get_submodule(name)) for module, name in children]
    for module, name in children:
        module.register_module(name, PassThrough())
    try:
        yield
    finally:
        for module, name, child in before:
            module.register_module(name, child)
