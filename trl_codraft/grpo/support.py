"""What works with what: refusals at construction, reasons why rollouts stay plain, warnings."""

import inspect
import math
from dataclasses import fields

from accelerate.utils import DistributedType, DynamoBackend, is_compiled_module, is_peft_model
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.utils import logging

from ..config import DRAFT_SOURCE, CoDraftGRPOConfig
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.policy import base_policy, decoder_of, name_of
from ..rollout.binding import reason_of_generate
from ..rollout.stats import SpeculativeStats
from ..vllm.generation import plain_vllm_reason
from .run import Run


logger = logging.get_logger(__name__)

# Below the first, rollouts accept nothing to speak of; from the second on, a draft is clearly of use. Fewer than so many
# verifications say nothing.
COLLAPSED_ACCEPT_LENGTH = 1.05
GOOD_ACCEPT_LENGTH = 1.5
MIN_VERIFICATIONS = 100
# Settings that only a draft gives a meaning, besides those that begin with `draft_`.
DRAFT_ONLY_SETTINGS = (
    "speculative_rollouts",
    "num_draft_tokens",
    "rollout_cuda_graphs",
    "context_parallel_trunk",
    "tap_channel_slots",
)
WITHOUT_DRAFT = "Set `use_draft=False` to train without a draft."


def is_compiled(run: Run) -> bool:
    """Whether `torch.compile` has to do with the policy: by the run's settings, or because the user called it."""
    if run.args.torch_compile or run.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        return True
    return any(is_compiled_module(part) or part._compiled_call_impl is not None for part in run.model.modules())


def refuse_contradictions(args: CoDraftGRPOConfig, draft_model: str | Eagle3DraftModel | None) -> None:
    """
    Raises for settings of the draft that cannot all be meant.

    Args:
        args ([`CoDraftGRPOConfig`]):
            The configuration.
        draft_model (`str` or [`Eagle3DraftModel`], *optional*):
            The argument of [`CoDraftGRPOTrainer`].

    Raises:
        ValueError: naming the settings and which to change.
    """
    if not isinstance(draft_model, Eagle3DraftModel):
        DRAFT_SOURCE.check("draft_model", draft_model)
    if draft_model is not None and args.draft_model_name_or_path is not None:
        raise ValueError("Both `draft_model` and `draft_model_name_or_path` are set. Keep one of them.")
    if draft_model is not None and not args.use_draft:
        raise ValueError("`draft_model` is set with `use_draft=False`. Drop one of the two.")
    fresh = draft_model is None and args.draft_model_name_or_path is None
    if args.use_draft and fresh and not args.draft_train and args.draft_pretrain_steps == 0:
        raise ValueError(
            "`draft_train=False` would freeze a fresh draft, which knows nothing. Start from a trained one "
            "(`draft_model_name_or_path`), or set `draft_pretrain_steps` to train it before the first GRPO step. To roll "
            "out without a draft, set `use_draft=False`."
        )
    if args.rollout_cuda_graphs and args.use_vllm:
        raise ValueError("`rollout_cuda_graphs=True` is for rollouts without vLLM, which records its own. Unset it.")


def refuse_unsupported(run: Run) -> None:
    """
    Raises for settings under which no draft can be trained.

    Args:
        run ([`~run.Run`]):
            The trainer, after `GRPOTrainer.__init__`.

    Raises:
        ValueError: naming the setting and what to change.
    """
    if is_peft_model(run.model) and run.model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{run.model.active_peft_config.peft_type} prepends virtual tokens, so hidden states and tokens no "
            f"longer line up. Use LoRA, or set `use_draft=False`."
        )
    accelerator = run.accelerator
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        stage = accelerator.state.deepspeed_plugin.zero_stage
        if stage == 3:
            raise ValueError(
                "DeepSpeed ZeRO-3 shards the head and the embedding that the draft's teacher reads outside the "
                f"policy's forward. Use FSDP2 (`fsdp_version: 2`) or ZeRO-2. {WITHOUT_DRAFT}"
            )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "FSDP1 flattens the policy's parameters, so the draft cannot read its head and embedding. Set "
            f"`fsdp_version: 2` in the Accelerate config. {WITHOUT_DRAFT}"
        )
    if run._is_vlm:
        raise ValueError(_takes_images(f"{name_of(base_policy(run.model))} with a processor"))
    refuse_policy(base_policy(run.model))
    # In a pipeline the loss of experts is refused as such, and a rank may have none.
    if run.aux_loss_enabled and run.args.pipeline_parallel_size == 1:
        refuse_balancing(base_policy(run.model))


def refuse_policy(policy: PreTrainedModel) -> None:
    """
    Raises for kinds of policies that no draft can follow, as their own structure tells.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The causal language model.

    Raises:
        ValueError: naming the policy and what to set instead.
    """
    name, config = name_of(policy), policy.config.get_text_config()
    # `input_modalities` alone does not tell: text-only classes have it from their family.
    modalities, arguments = policy.input_modalities, inspect.signature(policy.forward).parameters
    modalities = {modalities} if isinstance(modalities, str) else set(modalities)
    if modalities & {"image", "video"} and any(
        "pixel_values" in argument or argument == "mm_encoder_outputs" for argument in arguments
    ):
        raise ValueError(_takes_images(name))
    decoder_of(policy)
    # Of a head that another stage owns there is nothing to see here; a configuration without a size is refused elsewhere.
    width = getattr(policy.get_output_embeddings(), "in_features", None)
    size = getattr(config, "hidden_size", None)
    if None not in (width, size) and width != size:
        raise ValueError(
            f"The head of {name} reads vectors of {width} numbers, its layers have {size}: a draft, which has a head like it "
            f"behind layers like them, fits neither. {WITHOUT_DRAFT}"
        )
    if not hasattr(config, "num_attention_heads"):
        return  # purely recurrent, as it should be
    layers = DynamicCache(config=config).layers
    if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise ValueError(
            f"{name} is a hybrid with linear attention or state-space layers alone (`layer_types={config.layer_types}`), with "
            "which `generate` of Transformers cannot tell how long a text is. Give it an attention layer: one in every few."
        )


def refuse_balancing(policy: PreTrainedModel) -> None:
    """
    Raises where TRL's load-balancing loss of experts reads what a family calls otherwise, which shows in the first loss.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            A policy that TRL takes for a mixture of experts.

    Raises:
        ValueError: naming the policy and what to set instead.
    """
    config = policy.config.get_text_config()
    missing = [name for name in ("num_experts", "num_experts_per_tok") if not hasattr(config, name)]
    if missing or not _has_routers(policy):
        what = f"`config.{missing[0]}`" if missing else "what its routers say"
        raise ValueError(
            f"TRL adds a load-balancing loss of experts (`router_aux_loss_coef`), for which it reads {what}, and "
            f"{name_of(policy)} has no such thing. Set `router_aux_loss_coef=0.0`."
        )


def _has_routers(policy: PreTrainedModel) -> bool:
    """Whether the policy has a module whose router logits Transformers records, as far as its code says which."""
    recorded = (decoder_of(policy)._can_record_outputs or {}).get("router_logits")
    if recorded is None:
        return True
    recorders = recorded if isinstance(recorded, (list, tuple)) else [recorded]
    kinds = tuple(getattr(recorder, "target_class", recorder) for recorder in recorders)
    return any(isinstance(module, kinds) for module in policy.modules())


def _takes_images(who: str) -> str:
    return (
        f"{who} takes images (vision-language model): their embeddings do not come from the token embedding that the draft "
        f"reads. {WITHOUT_DRAFT}"
    )


def refuse_cuda_graphs_elsewhere(run: Run) -> None:
    """
    Raises where the loop's forwards cannot be CUDA graphs, although they are asked for.

    Args:
        run ([`~run.Run`]):
            The trainer, whose rollouts are speculative.

    Raises:
        ValueError: naming the setting and what stands in its way.
    """
    accelerator = run.accelerator
    if not run.args.rollout_cuda_graphs:
        return
    if accelerator.device.type != "cuda":
        raise ValueError(
            f"`rollout_cuda_graphs=True` needs a CUDA device, and this run is on {accelerator.device}. Unset it."
        )
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            "`rollout_cuda_graphs=True`: graphs read weights where they lay when they were recorded, and FSDP gathers them "
            "anew in each forward. Unset it."
        )


def unsupported_in_groups(run: Run, instead: str) -> str | None:
    """
    Why ranks cannot compute losses together in this run, however they split the work.

    Args:
        run ([`~run.Run`]):
            The trainer, after `GRPOTrainer.__init__`.
        instead (`str`):
            What to set where nothing else helps.

    Returns:
        `str` or `None`: what stands in the way and what to set instead.
    """
    args, state = run.args, run.accelerator.state
    if run._is_vlm:
        return (
            f"the policy takes a processor (vision-language model), and images cannot be split over ranks. {instead}"
        )
    mesh = state.parallelism_config
    # Not None, and 1, of one that is sharded in other ways.
    if base_policy(run.model).tp_size is not None or (mesh is not None and mesh.tp_size > 1):
        return (
            "a policy that Transformers shards has pieces of layers where ranks are taken to have whole ones. Load it without "
            f"`tp_plan` and `distributed_config`, and set `tp_size=1` in Accelerate's `ParallelismConfig`. {instead}"
        )
    if is_peft_model(run.model) and run.model.active_peft_config.is_prompt_learning:
        return (
            f"{run.model.active_peft_config.peft_type} prepends virtual tokens that belong to no rank. Use LoRA. "
            f"{instead}"
        )
    if is_compiled(run):
        return (
            "`torch_compile` cannot trace a forward that other ranks take part in. Set `torch_compile=False`, and "
            "`dynamo_backend: 'NO'` in the Accelerate config, and pass a model that is not compiled."
        )
    if args.neftune_noise_alpha is not None:
        return "`neftune_noise_alpha` adds noise that depends on how long a forward is. Leave it unset."
    return None


def plain_rollout_reason(run: Run) -> str | None:
    """
    Why rollouts cannot be speculative in this run.

    Args:
        run ([`~run.Run`]):
            The trainer, after `GRPOTrainer.__init__`.

    Returns:
        `str` or `None`: the reason and what to change, or `None` if speculation is possible.
    """
    if run.use_vllm:
        sampling = {"min_p": run.min_p, "temperature": run.temperature, **(run.args.generation_kwargs or {})}
        served = run.vllm_generation.server_draft if run.vllm_generation.mode == "server" else None
        return plain_vllm_reason(run.accelerator.device, sampling, served)
    if run.use_transformers_continuous_batching:
        return "continuous batching (`use_transformers_continuous_batching=True`) has no speculative decoding"
    if run.rollout_func is not None:
        return "`rollout_func` generates the rollouts"
    if run.args.neftune_noise_alpha is not None:
        return (
            "`neftune_noise_alpha` adds noise to the embeddings in rollouts too, as strong as a forward is short, so "
            "verifying several tokens at once would sample from another distribution"
        )
    reason = reason_of_generate(base_policy(run.model), run.model.generate, run.generation_config, training=True)
    return None if reason is None else reason.removesuffix(".")


def warn_about_settings(args: CoDraftGRPOConfig, draft_is_fresh: bool) -> None:
    """Warns once about settings that work but are rarely meant."""
    if draft_is_fresh and args.draft_pretrain_steps == 0:
        logger.warning_once(
            "A fresh draft starts with `draft_pretrain_steps=0`: the first rollouts will accept almost nothing of "
            "what it proposes. Set `draft_pretrain_steps`, or start from a trained draft with "
            "`draft_model_name_or_path`."
        )
    if args.draft_shard_optimizer and args.world_size == 1:
        logger.warning_once("`draft_shard_optimizer=True` has no effect: there is one process.")
    window = args.steps_per_generation * args.num_iterations
    saves = args.save_strategy == "steps" and args.save_steps >= 1
    if saves and (args.save_steps * args.gradient_accumulation_steps) % window:
        logger.warning_once(
            f"`save_steps={args.save_steps}` does not fall on the boundary of a generation window "
            f"({window} micro-steps): a run resumed from such a checkpoint generates new rollouts in the middle of "
            "a window and does not repeat the uninterrupted run exactly."
        )


def warn_about_unused_settings(args: CoDraftGRPOConfig) -> None:
    """Warns once about settings of the draft that `use_draft=False` leaves without effect."""
    satisfied = {"draft_train": False, "speculative_rollouts": "false"}
    unused = [
        f"`{spec.name}={getattr(args, spec.name)!r}`"
        for spec in fields(args)
        if (spec.name.startswith("draft_") or spec.name in DRAFT_ONLY_SETTINGS)
        and getattr(args, spec.name) not in (spec.default, satisfied.get(spec.name))
    ]
    if unused:
        logger.warning_once(f"`use_draft=False`: {', '.join(unused)} without effect.")


def warn_about_metrics(metrics: dict[str, float], draft_is_fresh: bool, args: CoDraftGRPOConfig) -> None:
    """Warns once when a draft learns nothing, or trains happily and cannot be of use. The metrics are those of all ranks."""
    if not metrics["draft/rows"]:
        logger.warning_once(
            f"The draft learned nothing in a step: {_why_nothing_taught(metrics, args)} Such steps leave it as it is and log "
            "`draft/rows` 0 and no `draft/loss`."
        )
    if metrics.get("draft/vocab_coverage", 1.0) < 0.9:
        logger.warning_once(
            "Less than 90% of the policy's probability (`draft/vocab_coverage`) lies in the draft vocabulary: the rest can "
            "never be drafted. Raise `draft_vocab_size`."
        )
    if not draft_is_fresh and metrics.get("draft/accept_length_sim", math.inf) < 1.05:
        logger.warning_once(
            "The loaded draft's simulated accept length (`draft/accept_length_sim`) is below 1.05: it proposes almost "
            "nothing that the policy accepts. Check that it was trained for this policy and that its tap layers are "
            "numbered as in vLLM (`trl-codraft validate`)."
        )


def _why_nothing_taught(metrics: dict[str, float], args: CoDraftGRPOConfig) -> str:
    """Why no token of a step counted for the draft, and what to set."""
    if metrics["draft/masked_rows"]:
        return (
            "wherever it could have, the policy's first choice lies outside its vocabulary. Raise `draft_vocab_size`."
        )
    if args.mask_truncated_completions:
        return (
            "`mask_truncated_completions=True` hides truncated completions from policy and draft, and all were. Raise "
            f"`max_completion_length={args.max_completion_length}`, or set `mask_truncated_completions=False`."
        )
    return "no completion had a token that the policy chose itself and that follows two others."


def warn_about_collapse(stats: SpeculativeStats, simulated: float | None, speculated_well: bool) -> None:
    """
    Warns once when rollouts accept next to nothing of a draft that should do better.

    Args:
        stats ([`SpeculativeStats`]):
            Counters of one batch of rollouts, over all ranks.
        simulated (`float`, *optional*):
            The latest `draft/accept_length_sim`: what the draft reaches on the tokens it is trained on.
        speculated_well (`bool`):
            Whether earlier rollouts of this run accepted a fair share.
    """
    if stats.verifications < MIN_VERIFICATIONS or stats.accept_length >= COLLAPSED_ACCEPT_LENGTH:
        return
    if speculated_well or (simulated or 1.0) >= GOOD_ACCEPT_LENGTH:
        # Without measured numbers: another text would be another warning.
        logger.warning_once(
            f"The accept length of rollouts (`rollout/accept_length`) is below {COLLAPSED_ACCEPT_LENGTH}, although earlier "
            f"rollouts or the simulated one (`draft/accept_length_sim`) reached {GOOD_ACCEPT_LENGTH}: rollouts do not run "
            "with the draft that is trained, or sample from another distribution. See the checklist under 'Accept length "
            "near 1' in docs/troubleshooting.md."
        )
