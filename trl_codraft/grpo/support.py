"""
Says what works with what: every combination of features that a run refuses, and every reason for plain rollouts.

A new refusal goes beside its kind:

- settings, policies and devices that no draft can follow: `refuse_*`;
- ranks that cannot compute losses together: [`unsupported_in_groups`] however they split the work,
  [`unsupported_with_shards`] with context parallelism, [`unsupported_in_stages`] in a pipeline;
- rollouts that stay plain: [`plain_rollout_reason`].

Functions that begin with `refuse` or `require` raise a `ValueError`. The others return a text, or `None` if nothing
stands in the way. Either text names the setting and says what to set instead. A `run` is the trainer after
`GRPOTrainer.__init__`.

A policy or a call of `generate` is judged in `rollout/support.py`, a policy on shards in `cp/probe.py`; data where it
is read (`prompt_column.py`, `pretraining.py`, `saved_draft.py`). Settings that work but are rarely meant are in
`warnings.py`.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend, is_compiled_module, is_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.training_args import OptimizerNames

from ..config import DRAFT_SOURCE, CoDraftGRPOConfig
from ..cp.probe import unsupported_by_shards
from ..modeling.modeling_eagle3 import Eagle3DraftModel
from ..modeling.policy import base_policy, decoder_of, dropout_reason, name_of
from ..pp.shape import stages_of_layers
from ..rollout.binding import reason_of_generate
from ..vllm.generation import plain_vllm_reason
from .run import Run


WITHOUT_DRAFT = "Set `use_draft=False` to train without a draft."
WITHOUT_SHARDS = "Set `context_parallel_size=1`."
WITHOUT_PIPELINE = "Set `pipeline_parallel_size=1`."


def is_compiled(run: Run) -> bool:
    """Whether `torch.compile` runs the policy, by the run's settings or because the user called it."""
    if run.args.torch_compile or run.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        return True
    return any(is_compiled_module(part) or part._compiled_call_impl is not None for part in run.model.modules())


# The draft


def refuse_contradictions(args: CoDraftGRPOConfig, draft_model: str | Eagle3DraftModel | None) -> None:
    """Refuses settings of the draft that cannot all be meant; `draft_model` is the argument of the trainer."""
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
            "(`draft_model_name_or_path`), or set `draft_pretrain_steps` to train it before the first GRPO step. To "
            "roll out without a draft, set `use_draft=False`."
        )
    if args.rollout_cuda_graphs and args.use_vllm:
        raise ValueError("`rollout_cuda_graphs=True` is for rollouts without vLLM, which records its own. Unset it.")


def refuse_unsupported(run: Run) -> None:
    """Refuses settings and policies under which no draft can be trained."""
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
    # A pipeline refuses the loss of experts as such, and its ranks may have none.
    if run.aux_loss_enabled and run.args.pipeline_parallel_size == 1:
        refuse_balancing(base_policy(run.model))


def refuse_policy(policy: PreTrainedModel) -> None:
    """Refuses policies that no draft can follow, as their own structure tells."""
    name, config = name_of(policy), policy.config.get_text_config()
    # `input_modalities` alone does not tell: text-only classes have it from their family.
    modalities, arguments = policy.input_modalities, inspect.signature(policy.forward).parameters
    modalities = {modalities} if isinstance(modalities, str) else set(modalities)
    if modalities & {"image", "video"} and any(
        "pixel_values" in argument or argument == "mm_encoder_outputs" for argument in arguments
    ):
        raise ValueError(_takes_images(name))
    decoder_of(policy)
    # This rank may not have the head: another stage owns it. A configuration without a size is refused elsewhere.
    width = getattr(policy.get_output_embeddings(), "in_features", None)
    size = getattr(config, "hidden_size", None)
    if None not in (width, size) and width != size:
        raise ValueError(
            f"The head of {name} reads vectors of {width} numbers, its layers have {size}: a draft, which has a head "
            f"like it behind layers like them, fits neither. {WITHOUT_DRAFT}"
        )
    if not hasattr(config, "num_attention_heads"):
        return  # purely recurrent, as it should be
    layers = DynamicCache(config=config).layers
    if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise ValueError(
            f"{name} is a hybrid with linear attention or state-space layers alone "
            f"(`layer_types={config.layer_types}`), with which `generate` of Transformers cannot tell how long a text "
            "is. Give it an attention layer: one in every few."
        )


def refuse_balancing(policy: PreTrainedModel) -> None:
    """
    Refuses TRL's load-balancing loss of experts for a policy that has no such field or record under the name TRL
    reads.

    Without this the first loss would fail.
    """
    config = policy.config.get_text_config()
    missing = [name for name in ("num_experts", "num_experts_per_tok") if not hasattr(config, name)]
    if missing or not _has_routers(policy):
        read = f"`config.{missing[0]}`" if missing else "what its routers say"
        raise ValueError(
            f"TRL adds a load-balancing loss of experts (`router_aux_loss_coef`), for which it reads {read}, and "
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
    """Returns the text that refuses a policy with images."""
    return (
        f"{who} takes images (vision-language model): their embeddings do not come from the token embedding that the "
        f"draft reads. {WITHOUT_DRAFT}"
    )


def refuse_cuda_graphs_elsewhere(run: Run) -> None:
    """Refuses `rollout_cuda_graphs=True` for speculative rollouts whose forwards cannot be CUDA graphs."""
    accelerator = run.accelerator
    if not run.args.rollout_cuda_graphs:
        return
    if accelerator.device.type != "cuda":
        raise ValueError(
            f"`rollout_cuda_graphs=True` needs a CUDA device, and this run is on {accelerator.device}. Unset it."
        )
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            "`rollout_cuda_graphs=True`: graphs read weights where they lay when they were recorded, and FSDP gathers "
            "them anew in each forward. Unset it."
        )


# Ranks that compute losses together


def unsupported_in_groups(run: Run, instead: str) -> str | None:
    """Says why ranks cannot compute losses together, however they split the work; `instead` is the way out."""
    args, state = run.args, run.accelerator.state
    if run._is_vlm:
        return (
            f"the policy takes a processor (vision-language model), and images cannot be split over ranks. {instead}"
        )
    mesh = state.parallelism_config
    # `tp_size` is 1, not None, for a policy that is sharded in other ways.
    if base_policy(run.model).tp_size is not None or (mesh is not None and mesh.tp_size > 1):
        return (
            "a policy that Transformers shards has pieces of layers where ranks are taken to have whole ones. Load it "
            "without `tp_plan` and `distributed_config`, and set `tp_size=1` in Accelerate's `ParallelismConfig`. "
            f"{instead}"
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


def unsupported_with_shards(run: Run) -> str | None:
    """Says why a run cannot split its microbatches over ranks, as far as settings and configurations tell."""
    accelerator, policy = run.accelerator, base_policy(run.model)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return "DeepSpeed reduces gradients in ways of its own. Use FSDP2 (`fsdp_version: 2`), or DDP."
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        return "FSDP1 is not supported. Set `fsdp_version: 2` in the Accelerate config."
    reason = unsupported_in_groups(run, WITHOUT_SHARDS)
    if reason is not None:
        return reason
    return _routing_reason(policy) or dropout_reason(policy, training=True) or unsupported_by_shards(policy)


def _routing_reason(policy: PreTrainedModel) -> str | None:
    """Says why experts are routed at random in training. Only some configuration classes declare these fields."""
    config = policy.config.get_text_config()
    for name in ("router_jitter_noise", "input_jitter_noise"):
        if getattr(config, name, 0.0):
            return f"the router adds noise (`{name}`), which would differ between splits. Set it to 0.0."
    return None


def unsupported_in_stages(run: Run) -> str | None:
    """Says why a run cannot split its policy into stages, as far as settings and configurations tell."""
    args, accelerator, policy = run.args, run.accelerator, base_policy(run.model)
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        return (
            f"{accelerator.distributed_type.value} shards the parameters that a stage holds whole. Use plain data "
            f"parallelism (DDP) around pipelines. {WITHOUT_PIPELINE}"
        )
    reason = unsupported_in_groups(run, WITHOUT_PIPELINE)
    if reason is not None:
        return reason
    if run.aux_loss_enabled:
        return "the load-balancing loss of experts needs all layers at once. Set `router_aux_loss_coef=0.0`."
    if args.use_vllm and args.vllm_mode == "colocate":
        return "vLLM in colocate mode is not supported. Set `vllm_mode='server'`, or `use_vllm=False`."
    if args.use_vllm and getattr(policy, "quantization_method", None) is not None:
        return (
            "its weights are quantised, and a vLLM server would be sent packed bytes without their scales. Set "
            "`use_vllm=False`, or load the policy in bf16."
        )
    if not args.holds_whole_policy and not args.use_vllm and run.rollout_func is None:
        return (
            "`pipeline_replica=False` leaves no rank with a policy that could roll out. Generate with a vLLM server "
            "(`use_vllm=True`, `vllm_mode='server'`) or a `rollout_func`, or set `pipeline_replica=True`."
        )
    if not args.holds_whole_policy and not args.use_vllm and args.use_draft and args.draft_pretrain_steps:
        return (
            "`draft_pretrain_steps` needs rollouts of the policy, which `rollout_func` does not give. Start from a "
            "trained draft (`draft_model_name_or_path`) with `draft_pretrain_steps=0`, use a vLLM server, or set "
            "`pipeline_replica=True`."
        )
    if args.use_transformers_continuous_batching:
        return "continuous batching is not supported. Set `use_transformers_continuous_batching=False`."
    optim = OptimizerNames(args.optim).value
    if "layerwise" in optim or "lomo" in optim:
        return f"`optim={optim!r}` steps inside the backward. Choose another, such as 'adamw_torch'."
    if optim.startswith("schedule_free"):
        return (
            f"`optim={optim!r}` evaluates and saves other weights than it trains, which only the rank of a stage "
            "would see. Choose another, such as 'adamw_torch'."
        )
    tied = policy.config.tie_word_embeddings
    embedding, head = policy.get_input_embeddings(), policy.get_output_embeddings()
    if tied and any(p is not embedding.weight for module in (embedding, head) for p in module.parameters()):
        return (
            "its embedding is tied to the head and one of them carries an adapter, which the first and the last stage "
            f"would train apart. Leave embedding and head out of the adapter's modules. {WITHOUT_PIPELINE}"
        )
    return None


def require_place_for_adapter(config: Any, policy: nn.Module, layers: Sequence[int], num_ranks: int) -> None:
    """
    Refuses LoRA that a rank with its stages alone has no module for: PEFT would fail there, and there only.

    Args:
        config (`PeftConfig`):
            Configuration of the adapter.
        policy ([`~transformers.PreTrainedModel`]):
            The policy, whole; weights do not matter.
        layers (`Sequence[int]`), num_ranks (`int`):
            Decoder layers of each stage, and ranks of a pipeline.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    if not isinstance(config, LoraConfig):
        return
    # PEFT itself chooses modules of all layers, and nothing else.
    chosen = config.target_modules not in (None, "all-linear")
    paths = {module: path for path, module in policy.named_modules()}
    targets = [path for path in paths.values() if chosen and check_target_module_exists(config, path)]
    outside = {paths[policy.get_input_embeddings()], paths[policy.get_output_embeddings()]} & set(targets)
    if outside or config.trainable_token_indices:
        conflict = f"adapts `{min(outside)}`" if outside else "has `trainable_token_indices`"
        raise ValueError(
            f"The LoRA configuration {conflict}, and no rank but its stage's has that module "
            "(`pipeline_replica=False`). Leave it out (`modules_to_save` trains embedding or head whole), or set "
            "`pipeline_replica=True`."
        )
    own = zip(stages_of_layers(layers), decoder_of(policy).layers, strict=True)
    served = {
        stage % num_ranks for stage, layer in own if any(path.startswith(f"{paths[layer]}.") for path in targets)
    }
    if chosen and len(served) < num_ranks:
        raise ValueError(
            f"The LoRA configuration adapts no layer on ranks {sorted(set(range(num_ranks)) - served)} of a pipeline, "
            f"which have layers {list(layers)} of the policy by stage (`pipeline_replica=False`). Change "
            "`target_modules`, `layers_to_transform` or `layers_per_stage` so that every rank has an adapter, or set "
            "`pipeline_replica=True`."
        )


def require_class_of_transformers(path: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Returns a checkpoint's class, to load it by stages; refuses one of the checkpoint's own code, or of no name."""
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is None:
        raise ValueError(
            f"{path} has the architecture {config.architectures}, which Transformers does not have itself: it "
            "cannot be loaded by stages. Pass a model object instead, or set `pipeline_replica=True`."
        )
    return architecture


def require_shareable_state(optimizer: Optimizer, kind: type, settings: dict[str, Any]) -> None:
    """Refuses an optimizer that is not of the class, or has settings by layer: ranks cannot share its state."""
    if type(optimizer) is not kind or {"params", "model", "optimizer_dict"} & settings.keys():
        raise ValueError(
            "`pipeline_shard_optimizer=True` does not know how to share the state of this "
            f"{type(optimizer).__name__}. Choose it with `optim` or `optimizer_cls_and_kwargs`, without settings by "
            "layer, or set `pipeline_shard_optimizer=False`."
        )


def require_averaged_gradients(accelerator: Accelerator, model: nn.Module) -> None:
    """
    Refuses to train a policy that nothing wraps: each rank would step with the gradients of its own tokens.

    Raises:
        RuntimeError: if neither DDP nor FSDP2 averages the gradients of `model` over the ranks.
    """
    if accelerator.num_processes > 1 and not accelerator.is_fsdp2 and not isinstance(model, DistributedDataParallel):
        raise RuntimeError(
            "The policy is not wrapped for data parallelism, so its gradients would not be averaged over ranks. "
            "Accelerate does so when `evaluate()` is called before `train()`. Set `eval_on_start=True` instead, or "
            "evaluate with a trainer of its own."
        )


# Rollouts


def plain_rollout_reason(run: Run) -> str | None:
    """Says why rollouts cannot be speculative in this run."""
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
