"""
Speculative rollouts behind `generate`: the same calls, the same distribution, fewer policy forwards.

Shapes: `B` rows, `P` prompt columns, `S` columns of the result.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate.utils import is_peft_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.utils import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from ..modeling.taps import TapRecorder
from ..modeling.teacher import PolicyHead
from .binding import NOT_REACHED, decoding_by, refuse
from .controller import DraftLengthController, FixedDraftLength
from .criteria import PositionwiseCriteria
from .drafting import DraftRollout
from .loop import INITIAL_NEW_SLOTS, Rollout, RolloutCall, SamplingRule
from .processors import PositionwiseProcessors
from .prompts import refuse_empty_prompts
from .static_shapes import LiveSteps, steps_for
from .stats import MAX_DRAFT_TOKENS, SpeculativeOutput, SpeculativeStats
from .support import call_reason, refused_argument, refused_reason, unsupported_reason
from .trace import RolloutTrace


class SpeculativeDecoder:
    """
    Batched speculative decoding with a draft, behind the `generate` of the policy.

    The committed tokens have exactly the distribution `generate` gives them, whatever the draft (greedy decoding: the
    same tokens); the draft only decides how many policy forwards they take. Both models are read live at every call.

    Call `generate` through [`~SpeculativeDecoder.bind`], which sees what reaches Transformers' own decoding methods.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy (the base model of a `PeftModel`).
        draft ([`Eagle3DraftModel`]):
            The draft, on the policy's device.
        num_draft_tokens (`int` or `str`, *optional*, defaults to `"auto"`):
            Tokens drafted per verification, `0..16`; 0 is plain decoding. `"auto"` chooses by measured acceptance and
            measured time: the same distribution, but not the same samples from the same seed.
        generator (`torch.Generator`, *optional*):
            Source of randomness. By default the global generator of the policy's device, as in `generate`.
        recorder ([`TapRecorder`], *optional*):
            A recorder of the draft's tap layers that already hangs on the policy; one is made otherwise.
        counts_overrun (`bool`, *optional*, defaults to `False`):
            Whether a row's last block is drafted and counted in full, with what lies behind EOS or the length limit,
            as inference servers do. The sequences are the same.
        cuda_graphs (`bool`, *optional*, defaults to `False`):
            Whether forwards behind the prompt are recorded as CUDA graphs: see [`~rollout.static_shapes.StaticSteps`].

    Attributes:
        stats ([`SpeculativeStats`]):
            Counters summed over all calls since the last `stats.reset()`.
        controller ([`FixedDraftLength`] or [`DraftLengthController`]):
            Chooses the draft length; has a `state_dict`.

    Raises:
        ValueError: if the draft length is out of range or the draft does not fit the policy.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        draft: nn.Module,
        *,
        num_draft_tokens: int | str = "auto",
        generator: torch.Generator | None = None,
        recorder: TapRecorder | None = None,
        counts_overrun: bool = False,
        cuda_graphs: bool = False,
    ):
        if num_draft_tokens == "auto":
            self.controller = DraftLengthController()
        elif isinstance(num_draft_tokens, int) and 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            self.controller = FixedDraftLength(num_draft_tokens)
        else:
            raise ValueError(
                f'`num_draft_tokens` must be "auto" or an integer in 0..{MAX_DRAFT_TOKENS}, got {num_draft_tokens!r}.'
            )
        vocab_size = policy.config.get_text_config().vocab_size
        if draft.config.vocab_size != vocab_size:
            raise ValueError(
                f"The draft was made for a vocabulary of {draft.config.vocab_size} tokens, the policy has "
                f"{vocab_size}. "
                "Use a draft of this policy, or resize neither after creating it."
            )
        if recorder is not None and list(recorder.tap_layers) != list(draft.config.tap_layers):
            raise ValueError(
                f"The recorder records layers {list(recorder.tap_layers)}, the draft reads "
                f"{list(draft.config.tap_layers)}. Make the recorder with `draft.config.tap_layers`."
            )
        self.policy = policy
        self.draft = draft
        self.generator = generator
        self.stats = SpeculativeStats()
        self._owns_recorder = recorder is None
        self._recorder = recorder if recorder is not None else TapRecorder(policy, draft.config.tap_layers)
        self._head = PolicyHead(policy)
        self._trace: RolloutTrace | None = None
        self._counts_overrun = counts_overrun
        self._cuda_graphs = cuda_graphs

    @contextmanager
    def recording(self) -> Iterator[RolloutTrace]:
        """
        Keeps the hidden states of the one call of `generate` inside, for training the draft on it without another
        forward of the policy. The memory is that of the taps and the last hidden state of every token.

        Yields:
            [`RolloutTrace`]: filled when the call returns.
        """
        self._trace = RolloutTrace()
        try:
            yield self._trace
        finally:
            self._trace = None

    def close(self) -> None:
        """Removes the hooks this decoder put on the policy."""
        if self._owns_recorder:
            self._recorder.close()

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """
        The decoding loop, with the arguments `generate` hands to a decoding method.

        Returns:
            `torch.LongTensor` of shape `(B, S)`, or an output with such `sequences` for `return_dict_in_generate`.

        Raises:
            ValueError: if the policy or the call is not supported; the message says what to set instead.
        """
        if model is not self.policy:
            raise ValueError(
                "This decoder was made for another policy: call `generate` of the model it was made with."
            )
        prepared = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        refuse(call_reason(self.policy, generation_config=generation_config, **prepared, **model_kwargs))
        if self._trace is not None and not self._trace.is_empty:
            raise RuntimeError("`recording()` holds one call of `generate`: rows of a second one would be mixed up.")
        input_ids = input_ids.to(self.policy.device)
        attention_mask = self._attention_mask(input_ids, model_kwargs)
        pad = generation_config._pad_token_tensor
        call = RolloutCall(
            input_ids,
            attention_mask,
            SamplingRule(PositionwiseProcessors(logits_processor), generation_config.do_sample, self.generator),
            PositionwiseCriteria(stopping_criteria, generation_config.max_length, input_ids.device),
            None if pad is None else pad.item(),
            synced_gpus,
            self._counts_overrun,
        )
        steps = self._steps(synced_gpus)
        # Gathering a sharded embedding is collective: once, before rows of different ranks part ways.
        with self._head.gathered():
            drafting = self._drafting(call, steps)
            rollout = Rollout(self.policy, self._recorder, drafting, self.controller, call, self._trace, steps)
            sequences = rollout.run()
        self.stats.add(rollout.stats)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _steps(self, synced_gpus: bool) -> LiveSteps:
        """How the forwards of one call run."""
        if self._cuda_graphs and synced_gpus:
            raise ValueError(
                "CUDA graphs read weights where they lay when they were recorded, and a sharded policy gathers them "
                "anew in each forward. Set `rollout_cuda_graphs=False`."
            )
        return steps_for(self.policy.device, self._cuda_graphs)

    def _drafting(self, call: RolloutCall, steps: LiveSteps) -> DraftRollout | None:
        """The draft's state in one call, None if it is never asked."""
        if self.controller.max_draft_tokens == 0:
            return None
        rows, columns = call.input_ids.shape
        reach = call.criteria.max_length + (MAX_DRAFT_TOKENS if call.counts_overrun else 0)
        return DraftRollout(self.draft, self._head, rows, reach, columns + INITIAL_NEW_SLOTS, steps)

    def bind(self, generate: Callable, refused: Callable[[str], None] | None = None) -> Callable:
        """
        Wraps a policy's `generate` so that calls of it run speculatively.

        Args:
            generate (`Callable`):
                `policy.generate`, or what stands in its place (an FSDP2-aware wrapper, the `generate` of a
                `PeftModel`).
            refused (`Callable`, *optional*):
                Called with the reason where a call cannot be served; the call then runs as it would have without the
                decoder. By default such calls raise.

        Returns:
            `Callable`: takes what `generate` takes. Raises [`~rollout.binding.CallRefused`] for `assistant_model`,
            `streamer`, beams and whatever else the loop cannot honour, unless `refused` takes note of it.
        """

        refused = refuse if refused is None else refused

        @functools.wraps(generate)
        def speculative(*args, **kwargs):
            names = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            # Before `generate` refuses in its own words what is not even needed here.
            reason = refused_argument(**named)
            if reason is not None:
                refused(reason)
                return generate(*args, **kwargs)
            served: list[bool] = []  # whether the loop serves the call, known at the first reason or when it decodes

            def examine(config) -> None:
                reason = refused_reason(config)
                if reason is not None and False not in served:
                    served.append(False)
                    refused(reason)

            def decode(plain, input_ids, synced_gpus=False, **arguments):
                reason = None if False in served else call_reason(self.policy, **arguments)
                if reason is not None:
                    refused(reason)
                served.append(reason is None and False not in served)
                if not served[-1]:
                    return plain(input_ids, synced_gpus=synced_gpus, **arguments)
                return self(
                    self.policy,
                    input_ids,
                    synced_gpus=self._synced(synced_gpus or named.get("synced_gpus")),
                    **arguments,
                )

            with decoding_by(self.policy, examine, decode):
                result = generate(*args, **kwargs)
            if not served:
                refused(NOT_REACHED)
            return result

        return speculative

    def _synced(self, synced_gpus: bool | None) -> bool:
        """What `generate` would have computed for `synced_gpus`, had it known FSDP2."""
        if synced_gpus is not None:
            return synced_gpus
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        sharded = is_fsdp_managed_module(self.policy) or isinstance(self.policy, FSDPModule)
        return several and (is_deepspeed_zero3_enabled() or sharded)

    def _attention_mask(self, input_ids: torch.Tensor, model_kwargs: dict) -> torch.Tensor:
        """The `(B, P)` padding mask, after checking that the loop's positions are those of the call."""
        mask = model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
        real = mask != 0
        refuse_empty_prompts(real.sum(1).tolist())
        if not bool(real[:, -1].all()) or bool((real[:, :-1] & ~real[:, 1:]).any()):
            raise ValueError(
                "A prompt has pads behind or between its tokens. Pad prompts on the left (`padding_side='left'`)."
            )
        positions = model_kwargs.get("position_ids")
        if positions is not None:
            expected = (real.cumsum(1) - 1).clamp(min=0).expand(len(mask), -1)
            if positions.shape[-1] != expected.shape[1] or not bool((positions.to(mask.device) == expected).all()):
                raise ValueError("Custom `position_ids` are not supported: positions follow from `attention_mask`.")
        return mask


def speculative_generate(
    policy: PreTrainedModel,
    draft: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    num_draft_tokens: int | str = "auto",
    generator: torch.Generator | None = None,
    counts_overrun: bool = False,
    cuda_graphs: bool = False,
    **generate_kwargs,
) -> SpeculativeOutput:
    """
    Generates as `policy.generate` does, with a draft that saves policy forwards. The distribution of the result is
    that of `generate`, whatever the draft; greedy decoding returns the same tokens.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy, or a `PeftModel` around it.
        draft ([`Eagle3DraftModel`]):
            The draft.
        input_ids (`torch.LongTensor` of shape `(B, P)`):
            Left-padded prompts.
        attention_mask (`torch.LongTensor` of shape `(B, P)`, *optional*):
            Zero at pads. Inferred as in `generate` if absent.
        num_draft_tokens (`int` or `str`, *optional*, defaults to `"auto"`):
            Tokens drafted per verification, see [`SpeculativeDecoder`]. 0 decodes plainly in the same loop and never
            asks the draft: the baseline of a comparison.
        generator (`torch.Generator`, *optional*):
            Source of randomness, the global one by default.
        counts_overrun (`bool`, *optional*, defaults to `False`):
            Whether to count as inference servers do, see [`SpeculativeDecoder`].
        cuda_graphs (`bool`, *optional*, defaults to `False`):
            Whether to launch forwards as CUDA graphs, see [`SpeculativeDecoder`].
        **generate_kwargs:
            Arguments of `generate`.

    Returns:
        [`SpeculativeOutput`]: `sequences` as `generate` returns them, and the counters of the call.

    Raises:
        ValueError: if the policy or the call is not supported; the message says what to set instead.

    Example:

    ```python
    >>> output = speculative_generate(policy, draft, **tokenizer(prompts, return_tensors="pt"), max_new_tokens=64)
    >>> tokenizer.batch_decode(output.sequences), output.stats.accept_length
    ```
    """
    base = policy
    if is_peft_model(policy):
        if policy.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{policy.active_peft_config.peft_type} prepends virtual tokens, so hidden states and tokens no "
                "longer line up. Use LoRA to speculate."
            )
        base = policy.get_base_model()
    reason = unsupported_reason(base)
    if reason is not None:
        raise ValueError(f"Speculative rollouts are not possible here: {reason}")
    decoder = SpeculativeDecoder(
        base,
        draft,
        num_draft_tokens=num_draft_tokens,
        generator=generator,
        counts_overrun=counts_overrun,
        cuda_graphs=cuda_graphs,
    )
    try:
        result = decoder.bind(policy.generate)(input_ids, attention_mask=attention_mask, **generate_kwargs)
    finally:
        decoder.close()
    return SpeculativeOutput(result if isinstance(result, torch.Tensor) else result.sequences, decoder.stats)
