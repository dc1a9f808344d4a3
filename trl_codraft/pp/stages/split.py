"""
A policy split by decoder layers. A stage is the whole model, modules of other stages replaced by one that passes its
input on: the model's own forward runs on every stage, so masks, rotary embeddings and window patterns are its own, and
parameters keep their names and layers their indices.

Shapes: `B` rows, `S` columns, `H` hidden size, `V` vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...modeling.policy import SMALL_VOCABULARY, PassThrough, decoder_of, two_layer_copy
from ..shape import stages_of_layers


# The self-test compares rows of these lengths, padded on the left.
TEST_LENGTHS = (12, 7)
# Largest difference that the order of floating-point operations may make, in units of the dtype's precision.
TEST_TOLERANCE = 100


class HeadElsewhere(PassThrough):
    """Stands in for the head, with the attributes that TRL reads where it makes it fp32 (`cast_lm_head_to_fp32`)."""

    def __init__(self, head: nn.Module):
        super().__init__()
        # No parameter: it is in no checkpoint.
        self.weight, self.bias = torch.empty(0, dtype=head.weight.dtype), None


class PolicyStage(nn.Module):
    """
    One stage of a policy.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy, modules of other stages replaced: see [`split_policy`].
        index (`int`), num_stages (`int`):
            Which stage.
        score (`Callable`, *optional*):
            Makes the output of the last stage: called with the policy, the arguments of its forward (`inputs_embeds`,
            masks) and the other tensors of the microbatch. Return per-token values, not logits: a schedule keeps the
            outputs of several microbatches. If `None`, the logits.
    """

    def __init__(self, policy: nn.Module, index: int, num_stages: int, score: Callable | None = None):
        super().__init__()
        self.policy = policy
        self.index = index
        self.num_stages = num_stages
        self.score = score
        # The layers of other stages are replaced.
        self.own_layers = range(len(self.layers))
        # Number of the microbatch whose forward runs: a `Pipeline` sets it.
        self.microbatch: int | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers, as many as in the whole policy."""
        return decoder_of(self.policy).layers

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """On the last of several stages, if embeddings are tied: its copy of the first stage's embedding."""
        if self.is_first or not self.is_last or not self.policy.config.tie_word_embeddings:
            return None
        return self.policy.get_input_embeddings().weight

    def named_own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names in the whole policy, without `tied_copy`: over all stages, each of them once."""
        copy_of_first = self.tied_copy
        for name, parameter in self.policy.named_parameters():
            if parameter is not copy_of_first:
                yield name, parameter

    def named_own_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Buffers that checkpoints hold, such as biases that balance experts, by their names in the whole policy. Those
        outside of layers are the first stage's.
        """
        parameters = {name for name, _ in self.policy.named_parameters(remove_duplicate=False)}
        index_of = {layer: index for index, layer in enumerate(self.layers)}
        paths = {f"{path}.": index_of[module] for path, module in self.policy.named_modules() if module in index_of}
        for name, tensor in self.policy.state_dict().items():
            layer = next((index for path, index in paths.items() if name.startswith(path)), None)
            if name not in parameters and (self.is_first if layer is None else layer in self.own_layers):
                yield name, tensor

    def forward(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **extras: torch.Tensor,
    ) -> torch.Tensor:
        """
        Args:
            inputs (`torch.Tensor`):
                Token ids `(B, S)` on the first stage, the hidden states `(B, S, H)` of the stage before on others.
            attention_mask (`torch.LongTensor` of shape `(B, S)`), position_ids (`torch.LongTensor` of shape `(B, S)`):
                As the policy takes them.
            extras (`torch.Tensor`):
                For `score`, on the last stage.

        Returns:
            `torch.Tensor`: hidden states `(B, S, H)`; on the last stage, the output of `score`.
        """
        named = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        return self.run({"input_ids" if self.is_first else "inputs_embeds": inputs, **named}, extras)

    def run(self, arguments: dict[str, Any], extras: dict[str, torch.Tensor]) -> torch.Tensor:
        """The forward with the arguments that the policy gets."""
        if not self.is_last:
            return decoder_of(self.policy)(**arguments).last_hidden_state
        if self.score is None:
            return self.policy(**arguments).logits
        return self.score(self.policy, arguments, extras)


def split_policy(
    policy: nn.Module, layers_per_stage: Sequence[int], stage: int, score: Callable | None = None
) -> PolicyStage:
    """
    Makes a stage of a policy, in place: modules of other stages are dropped. Call it before optimizers, adapters and
    wrappers see the parameters.

    Tied embeddings are kept on the first and the last stage: see [`sum_tied_gradients`].

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            A causal language model.
        layers_per_stage (`Sequence[int]`):
            Number of decoder layers of every stage.
        stage (`int`):
            Which one to make.
        score (`Callable`, *optional*):
            As in [`PolicyStage`].

    Returns:
        [`PolicyStage`]

    Raises:
        ValueError: if the layers do not add up, or the model cannot be split.
    """
    keep_stages(policy, layers_per_stage, (stage,))
    return PolicyStage(policy, stage, len(layers_per_stage), score)


def keep_stages(
    policy: nn.Module, layers_per_stage: Sequence[int], stages: Sequence[int], *, embedding: bool = False
) -> list[str]:
    """
    Keeps the modules of some stages of a policy and drops the others, in place. Their memory is free once nothing else
    refers to it.

    Args:
        policy ([`~transformers.PreTrainedModel`]), layers_per_stage (`Sequence[int]`):
            As in [`split_policy`].
        stages (`Sequence[int]`):
            The stages that stay.
        embedding (`bool`, *optional*, defaults to `False`):
            Whether the last stage keeps a frozen copy of the input embedding even if it is not tied to the head: a
            draft that is trained there reads it.

    Returns:
        `list[str]`: paths of the modules that were dropped.

    Raises:
        ValueError: if the layers do not add up, or the model cannot be split.
    """
    require_split(policy, layers_per_stage)
    decoder, last = decoder_of(policy), len(layers_per_stage) - 1
    paths = {module: path for path, module in policy.named_modules()}
    owners = stages_of_layers(layers_per_stage)
    layers, head, table = list(decoder.layers), policy.get_output_embeddings(), decoder.embed_tokens
    dropped: list[nn.Module] = []
    for index, layer in enumerate(layers):
        if owners[index] not in stages:
            decoder.layers[index] = PassThrough()
            dropped.append(layer)
    if 0 not in stages and not (last in stages and (embedding or policy.config.tie_word_embeddings)):
        decoder.embed_tokens = PassThrough()
        dropped.append(table)
    elif 0 not in stages and not policy.config.tie_word_embeddings:
        table.requires_grad_(False)
    if last not in stages:
        dropped.append(decoder.norm)
        decoder.norm = PassThrough()
        # One that is tied to an embedding that stays costs nothing, and changes as the embedding does.
        if 0 not in stages or not policy.config.tie_word_embeddings:
            dropped.append(head)
            policy.set_output_embeddings(HeadElsewhere(head))
    if {head, table} & set(dropped):
        # One of two tied modules is gone: loading must not look for the other.
        policy.all_tied_weights_keys = {}
    return [paths[module] for module in dropped]


def require_split(policy: nn.Module, layers_per_stage: Sequence[int]) -> None:
    """
    Refuses numbers of layers that do not add up, and models that [`require_layers_alone`] refuses.

    Raises:
        ValueError: saying which.
    """
    num_layers = len(decoder_of(policy).layers)
    if sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"`layers_per_stage={list(layers_per_stage)}` does not split {num_layers} layers: every stage needs at "
            f"least one and their sum must be {num_layers}."
        )
    require_layers_alone(policy)


def require_layers_alone(policy: nn.Module) -> None:
    """
    Refuses, by name, models whose layers pass more than hidden states on. [`verify_split`] finds other obstacles.

    Raises:
        ValueError: naming the obstacle and the setting to change.
    """
    decoder, config = decoder_of(policy), policy.config
    children = dict(decoder.named_children())
    reasons = {
        "its decoder has no `embed_tokens` and `norm`": not {"embed_tokens", "norm"} <= set(children),
        "its layers share keys and values across stages": bool(getattr(config, "num_kv_shared_layers", 0)),
        "its layers read inputs per layer": bool(getattr(config, "hidden_size_per_layer_input", 0)),
        "its experts have a load-balancing loss over all layers": bool(getattr(config, "output_router_logits", False)),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(
                f"{type(policy).__name__} cannot be split into pipeline stages: {reason}. Set "
                "`pipeline_parallel_size=1` (and `context_parallel_size` for long sequences)."
            )


@torch.no_grad()
def verify_split(policy: nn.Module) -> None:
    """
    Splits a copy of the policy that has two layers, and compares with its whole forward on rows padded on the left.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy; only its class, config, device and dtype matter.

    Raises:
        ValueError: if the split model computes something else.
    """
    require_layers_alone(policy)
    whole = two_layer_copy(policy).eval()
    device, dtype = whole.device, whole.dtype
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SMALL_VOCABULARY, (len(TEST_LENGTHS), max(TEST_LENGTHS)), generator=numbers).to(device)
    lengths = torch.tensor(TEST_LENGTHS, device=device)
    mask = (torch.arange(ids.shape[1], device=device) >= ids.shape[1] - lengths[:, None]).long()
    expected = whole(input_ids=ids, attention_mask=mask, use_cache=False).logits
    hidden = ids
    for stage in range(2):
        # Parameters are shared with the whole model, not copied.
        shared = {id(parameter): parameter for parameter in whole.parameters()}
        hidden = split_policy(copy.deepcopy(whole, shared), (1, 1), stage)(hidden, attention_mask=mask)
    real = mask.bool()
    difference = (hidden - expected)[real].abs().max().item()
    if not difference <= TEST_TOLERANCE * torch.finfo(dtype).eps * expected[real].abs().max().item():
        raise ValueError(
            f"{type(policy).__name__} cannot be split into pipeline stages: on a copy with two layers the logits of "
            f"two stages differ from those of the whole model by up to {difference:.3g}. Its forward does more than "
            "pass hidden states from layer to layer, such as scaling embeddings. Set `pipeline_parallel_size=1`."
        )


def sum_tied_gradients(weight: nn.Parameter, rank_of_first: int, rank_of_last: int, group: dist.ProcessGroup) -> None:
    """
    Adds up the gradients of the two copies of a tied embedding. Called by the first and the last stage, after all
    backwards of a step and before gradients are clipped. The result is the same to the bit on both.

    Args:
        weight (`nn.Parameter` of shape `(V, H)`):
            This stage's copy. Its `.grad` is changed; a missing one counts as zero.
        rank_of_first (`int`), rank_of_last (`int`):
            Ranks in the group of the two stages.
        group (`ProcessGroup`):
            The ranks of the pipeline, between steps.
    """
    own = torch.zeros_like(weight) if weight.grad is None else weight.grad
    is_first = dist.get_rank(group) == rank_of_first
    peer = rank_of_last if is_first else rank_of_first
    other = torch.empty_like(own)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
        ]
    )
    for work in works:
        work.wait()
    weight.grad = own + other
