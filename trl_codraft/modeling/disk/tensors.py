"""
Drafts on disk: the tensors of a checkpoint, read and written. `config.py` reads and writes their
`config.json`, `folder.py` their folder.

Shapes: `H` draft hidden size, `Ht` policy hidden size, `n` taps, `I` MLP size, `V` policy vocabulary, `Vd` draft
vocabulary, `Hq`/`Hkv` heads, `D` head dim.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..configuration_eagle3 import Eagle3DraftConfig
from ..naming import few, sentences
from ..policy import is_elsewhere
from .config import config_from_disk, config_to_disk, layer_section, logit_scale_from_disk
from .folder import CONFIG_NAME, read_config, read_tensors, resolve_folder, tensor_names, write_folder


VOCAB_MAPS = ("d2t", "t2d")
READABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """
    Name and shape of every tensor of a draft, in the order they are written, `d2t` and `t2d` included when
    `draft_vocab_size < vocab_size`.

    Args:
        config ([`Eagle3DraftConfig`]):
            Or anything with its sizes, flags and `tap_layers`.
    """
    hidden, features = config.hidden_size, len(config.tap_layers) * config.target_hidden_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {"fc.weight": (hidden, features)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    if config.fc_norm:
        for tap in range(len(config.tap_layers)):
            shapes[f"fc_norm.{tap}.weight"] = (config.target_hidden_size,)
    for index in range(config.num_hidden_layers):
        layer, width = f"layers.{index}", 2 * hidden if index == 0 else hidden
        if index == 0:
            shapes[f"{layer}.hidden_norm.weight"] = (hidden,)
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, width),
            f"{layer}.self_attn.k_proj.weight": (keys, width),
            f"{layer}.self_attn.v_proj.weight": (keys, width),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (config.intermediate_size, hidden),
            f"{layer}.mlp.up_proj.weight": (config.intermediate_size, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, config.intermediate_size),
        }
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}
    if config.draft_vocab_size < config.vocab_size:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return shapes


def canonical_name(name: str) -> str:
    """
    The name this package uses for a tensor: no `model.` prefix, `layers.0.` for `midlayer.` and `fc_norm.{0,1,2}` for
    SGLang's `aux_norm_{low,mid,high}`.
    """
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    for tap, legacy in enumerate(("aux_norm_low.", "aux_norm_mid.", "aux_norm_high.")):
        if name.startswith(legacy):
            return f"fc_norm.{tap}." + name.removeprefix(legacy)
    return name


def num_layers_of(names: Iterable[str]) -> int:
    """
    How many layers the tensors of these canonical names make up; 0 if there is none of a layer.

    Raises:
        ValueError: if a layer in between is missing.
    """
    indices = {name.split(".")[1] for name in names if name.startswith("layers.")}
    found = sorted(int(index) for index in indices if index.isdecimal())
    if found != list(range(len(found))):
        raise ValueError(
            f"The draft's tensors are of layers {few(found)}: layers count from 0 without a gap. Rename them."
        )
    return len(found)


def read_draft_config(path_or_repo: str | os.PathLike, policy_config: Any = None) -> Eagle3DraftConfig:
    """
    The configuration of a draft on disk, as [`load_draft`] reads it, without its weights.

    Args:
        path_or_repo (`str` or `os.PathLike`):
            Folder or Hub repository id.
        policy_config ([`~transformers.PreTrainedConfig`], *optional*):
            The policy's text configuration.

    Raises:
        ValueError: as in [`load_draft`].
    """
    folder = resolve_folder(path_or_repo)
    names = [canonical_name(name) for name in tensor_names(folder)]
    refuse_policy_folder(folder, names)
    return config_from_disk(read_config(folder), policy_config, num_layers_of(names))


def is_second_hidden_norm(name: str) -> bool:
    """Whether a tensor is the `hidden_norm` of a layer after the first, which only SGLang uses (`disk_tensors`)."""
    return name.startswith("layers.") and name.endswith(".hidden_norm.weight") and name.split(".")[1] != "0"


def disk_tensors(draft: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """
    The tensors of a draft as they are stored: detached CPU copies, floating-point ones in `dtype`.

    A layer after the first is normed by `input_layernorm` in vLLM and speculators and by `hidden_norm` in SGLang
    (`llama_eagle3.py` of each), so such a layer's norm is written under both names.
    """
    state = draft.state_dict()
    stored = {}
    for name in expected_shapes(draft.config):
        tensor = state[name].detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        stored[name] = tensor.to("cpu", copy=True).contiguous()
    for index in range(1, draft.config.num_hidden_layers):
        norm = stored[f"layers.{index}.input_layernorm.weight"]
        stored[f"layers.{index}.hidden_norm.weight"] = norm.clone()
    return stored


def save_draft(
    draft: nn.Module,
    path: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    base_model: str | None = None,
    base_architectures: Sequence[str] = (),
    num_draft_tokens: int = 3,
    texts: Mapping[str, str] | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """
    Writes a draft as one folder for vLLM, SGLang and speculators.

    Args:
        draft ([`Eagle3DraftModel`]):
            The draft.
        path (`str` or `os.PathLike`):
            Folder to write; an earlier draft in it is replaced.
        dtype (`torch.dtype`, *optional*):
            Dtype of floating-point tensors on disk. `None` keeps the parameters' own dtype, so the fp32 masters of a
            draft in training come back exactly; [`export_draft`] stores the policy's dtype, in which servers run.
        base_model (`str`, *optional*):
            Repository id or path of the policy.
        base_architectures (`Sequence[str]`, *optional*, defaults to `()`):
            `architectures` of the policy.
        num_draft_tokens (`int`, *optional*, defaults to `3`):
            Default of `vllm serve <draft>`.
        texts, check (*optional*):
            See [`write_folder`].

    Raises:
        ValueError: if the folder holds a model or an adapter that is no draft.
    """
    refuse_to_overwrite_policy(Path(path))
    tensors = disk_tensors(draft, dtype)
    disk_config = config_to_disk(
        draft.config,
        dtype=tensors["fc.weight"].dtype,
        base_model=base_model,
        base_architectures=base_architectures,
        num_draft_tokens=num_draft_tokens,
    )
    write_folder(path, disk_config, tensors, texts=texts, check=check)


def load_draft(
    model_class: type[nn.Module],
    path_or_repo: str | os.PathLike,
    *,
    policy: nn.Module | None = None,
    compute_dtype: torch.dtype | None = None,
    subfolder: str | None = None,
    **hub_kwargs: Any,
) -> nn.Module:
    """
    Reads a draft that this package, vLLM's users, SpecForge (SGLang) or speculators wrote.

    Args:
        model_class (`type`):
            [`Eagle3DraftModel`] or a subclass.
        path_or_repo (`str` or `os.PathLike`):
            Folder or Hub repository id.
        policy ([`~transformers.PreTrainedModel`], *optional*):
            The policy the draft is for. Needed when the file leaves something to the policy (its head, its tap
            layers); otherwise [`check_fits_policy`] can be called later.
        compute_dtype (`torch.dtype`, *optional*):
            Dtype of the draft's matmuls, see [`Eagle3DraftModel`].
        subfolder (`str`, *optional*):
            Folder inside `path_or_repo`.
        hub_kwargs (*optional*):
            `revision`, `token`, `cache_dir`, ... of [`~huggingface_hub.snapshot_download`].

    Returns:
        [`Eagle3DraftModel`] with the stored weights in its own (fp32) parameters.

    Raises:
        ValueError: naming the missing, extra or mis-shaped tensors, the unsupported feature, or the mismatch with the
            policy.
    """
    if torch.get_default_device().type == "meta":
        raise ValueError(
            "`from_pretrained` inside `torch.device('meta')` would throw the draft's weights away. Call it outside, "
            "or build `Eagle3DraftModel(config)` on the meta device and load weights after `to_empty`."
        )
    folder = resolve_folder(path_or_repo, subfolder=subfolder, **hub_kwargs)
    raw = read_config(folder)
    policy_config = policy.config.get_text_config() if policy is not None else None
    tensors = {canonical_name(name): tensor for name, tensor in read_tensors(folder).items()}
    refuse_policy_folder(folder, tensors)
    refuse_foreign_tensors(tensors)
    config = config_from_disk(raw, policy_config, num_layers_of(tensors))
    if policy is not None:
        check_config_fits_policy(config, policy_config)
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and policy is not None:
        check_embedding(embedding, policy)
    target_ids = read_vocab_map(config, tensors)
    if "lm_head.weight" not in tensors and config.draft_vocab_size == config.vocab_size and policy is not None:
        if layer_section(raw).get("tie_word_embeddings") and not policy_config.tie_word_embeddings:
            raise ValueError(
                "The draft's head is the embedding (`tie_word_embeddings: true` and no `lm_head.weight`), and the "
                "policy's head is not. Write the embedding as `lm_head.weight`, and false for the key."
            )
        tensors["lm_head.weight"] = policy.get_output_embeddings().weight.detach()
    check_tensors(config, tensors)
    if logit_scale_from_disk(raw) != 1.0:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].float() * logit_scale_from_disk(raw)

    draft = model_class(config, compute_dtype)
    if target_ids is not None:
        draft.set_vocab(target_ids)
    draft.load_state_dict({**draft.state_dict(), **tensors})
    if embedding is not None and policy is None:
        warnings.warn(
            f"{folder} ships its own `embed_tokens`, which this draft does not keep: it reads the policy's. Pass "
            "`policy=`, or call `check_fits_policy(draft, policy)`, to compare the two.",
            stacklevel=3,
        )
        draft.unchecked_embedding_folder = folder
    return draft


def check_fits_policy(draft: nn.Module, policy: nn.Module) -> None:
    """
    The checks that [`load_draft`] makes when it is given the policy, for a draft loaded without one.

    Raises:
        ValueError: naming the mismatch.
    """
    check_config_fits_policy(draft.config, policy.config.get_text_config())
    folder = vars(draft).pop("unchecked_embedding_folder", None)
    if folder is not None:
        tensors = {canonical_name(name): tensor for name, tensor in read_tensors(folder).items()}
        check_embedding(tensors["embed_tokens.weight"], policy)


def check_config_fits_policy(config: Eagle3DraftConfig, policy_config: Any) -> None:
    """Refuses a draft of other sizes than the policy's."""
    pairs = {
        "hidden_size": (config.hidden_size, policy_config.hidden_size),
        "target_hidden_size": (config.target_hidden_size, policy_config.hidden_size),
        "vocab_size": (config.vocab_size, policy_config.vocab_size),
    }
    for name, (own, wanted) in pairs.items():
        if own != wanted:
            raise ValueError(
                f"The draft's `{name}` is {own} but the policy's {name.removeprefix('target_')} is {wanted}: the "
                "draft reads the policy's embeddings and hidden states, so they must agree. Use a draft trained "
                "for this policy."
            )
    if max(config.tap_layers) > policy_config.num_hidden_layers:
        raise ValueError(
            f"The draft reads policy layers {list(config.tap_layers)} but the policy has only "
            f"{policy_config.num_hidden_layers} layers."
        )


def check_embedding(embedding: torch.Tensor, policy: nn.Module) -> None:
    """
    Refuses a draft embedding that differs from the policy's by more than the rounding of the stored dtype. A
    rank whose stage has no embedding does not look.
    """
    table = policy.get_input_embeddings()
    if is_elsewhere(table):
        return
    live = table.weight.detach().to("cpu")
    # Either may be padded beyond the vocabulary.
    vocab_size = policy.config.get_text_config().vocab_size
    if embedding.shape != live.shape and min(len(embedding), len(live)) >= vocab_size:
        embedding, live = embedding[:vocab_size], live[:vocab_size]
    if embedding.shape != live.shape:
        raise ValueError(
            f"The draft's own `embed_tokens` has shape {tuple(embedding.shape)}, the policy's {tuple(live.shape)}."
        )
    if torch.equal(embedding, live.to(embedding.dtype)) or torch.equal(embedding.to(live.dtype), live):
        return
    largest = (embedding.float() - live.float()).abs().max().item()
    raise ValueError(
        f"The draft has its own `embed_tokens` that differs from the policy's (largest difference {largest:.3e}). The "
        "draft reads the policy's live embedding, so its own would be lost. Use a draft trained with the policy's "
        "embedding, or remove `embed_tokens` from the checkpoint if the difference does not matter."
    )


def refuse_policy_folder(folder: Path, tensors: Iterable[str]) -> None:
    """Refuses a folder that holds a policy, with its draft in a folder inside, as a run leaves them."""
    if "fc.weight" not in tensors and (folder / "draft" / CONFIG_NAME).is_file():
        raise ValueError(f"{folder} holds a policy. Its draft lies in {folder / 'draft'}: give that folder.")


def refuse_to_overwrite_policy(folder: Path) -> None:
    """Refuses to write a draft over the files of a policy or an adapter, which would be lost."""
    try:
        config = read_config(folder) if (folder / CONFIG_NAME).is_file() else {}
    except ValueError:
        config = {}  # damaged, such as that of an earlier draft
    is_draft = "speculators_model_type" in config or any("Eagle" in name for name in config.get("architectures") or ())
    if (folder / "adapter_config.json").is_file() or (config and not is_draft):
        raise ValueError(
            f"{folder} holds a policy, whose files a draft would replace. Write the draft into a folder of its own, "
            f"such as {folder / 'draft'}."
        )


def refuse_foreign_tensors(tensors: dict[str, torch.Tensor]) -> None:
    """
    Refuses tensors of features this draft does not have, and drops tensors that are no weights of the draft
    (RoPE buffers, the policy's head and norm that speculators trains against, SGLang's second `hidden_norm`).
    """
    for name in list(tensors):
        if "rotary_emb." in name or name.startswith("verifier_") or is_second_hidden_norm(name):
            del tensors[name]
    named = {
        "biases": [name for name in tensors if name.endswith(".bias")],
        "q_norm and k_norm": [name for name in tensors if ".q_norm." in name or ".k_norm." in name],
        "parallel drafting (P-EAGLE)": [name for name in tensors if name == "mask_hidden"],
    }
    for feature, names in named.items():
        if names:
            raise ValueError(f"The draft has {feature}, which is not supported: {few(sorted(names))}.")


def read_vocab_map(config: Eagle3DraftConfig, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """
    Takes `d2t` and `t2d` out of `tensors` and returns the target ids `[Vd]`, ascending, or `None` for the full
    vocabulary. `d2t` wins; `t2d` alone serves when its count fits. Rows of `lm_head` follow the ids when a checkpoint
    lists them in another order.

    Raises:
        ValueError: if the map is missing, has the wrong length, leaves the vocabulary or names an id twice.
    """
    d2t, t2d = (tensors.pop(name, None) for name in VOCAB_MAPS)
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if d2t is None and t2d is not None:
        ids = t2d.to(torch.bool).nonzero().flatten()
    elif d2t is not None:
        if d2t.shape != (size,):
            raise ValueError(f"The draft's `d2t` has shape {tuple(d2t.shape)}, `draft_vocab_size` says ({size},).")
        ids = torch.arange(size) + d2t.long()
        check_vocab_ids(d2t, vocab_size)
    elif size < vocab_size:
        raise ValueError(
            f"The draft's vocabulary is reduced ({size} of {vocab_size}) but `d2t` is missing: no one can know which "
            "tokens its head means."
        )
    else:
        return None
    if len(ids) != size:
        raise ValueError(f"The draft's `t2d` selects {len(ids)} tokens but `draft_vocab_size` is {size}.")
    ids, order = ids.sort()
    if "lm_head.weight" in tensors and not torch.equal(order, torch.arange(size)):
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    return ids if size < vocab_size else None


def check_vocab_ids(d2t: torch.Tensor, vocab_size: int) -> None:
    """
    Checks that `arange(Vd) + d2t` are distinct ids of the vocabulary.

    Raises:
        ValueError: otherwise, recognising a `d2t` that holds ids in place of offsets.
    """
    ids = torch.arange(len(d2t)) + d2t.long()
    outside = ((ids < 0) | (ids >= vocab_size)).sum().item()
    repeated = len(ids) - len(ids.unique())
    if not outside and not repeated:
        return
    found = f"{outside} of them outside 0..{vocab_size - 1}" if outside else f"{repeated} of them repeated"
    absolute = bool((d2t >= 0).all() and (d2t < vocab_size).all() and len(d2t.unique()) == len(d2t))
    hint = " It looks like token ids; subtract `arange(draft_vocab_size)`." if absolute else ""
    raise ValueError(f"`d2t` holds offsets: target id = i + d2t[i]. Here that gives ids with {found}.{hint}")


def check_tensors(config: Eagle3DraftConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """
    Checks names, shapes and dtypes of the weights (without the vocabulary maps).

    Raises:
        ValueError: naming every tensor that is missing, extra, mis-shaped or quantised.
    """
    problems = shape_problems(expected_shapes(config), tensors, without=VOCAB_MAPS)
    unreadable = [
        f"`{name}` has dtype {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in READABLE_DTYPES
    ]
    problems += sentences(
        unreadable, "tensor {}, and quantised weights are not read", "quantised weights are not read"
    )
    if problems:
        raise ValueError("The draft checkpoint cannot be read: " + "; ".join(problems) + ".")


def shape_problems(
    expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], without: Iterable[str] = ()
) -> list[str]:
    """A sentence for each tensor that is missing, extra or mis-shaped, or, where they are many, one for them all."""
    skipped = set(without)
    wanted = {name: shape for name, shape in expected.items() if name not in skipped}
    missing = [f"`{name}`" for name in wanted if name not in tensors]
    extra = [f"`{name}`" for name in tensors if name not in expected and name not in skipped]
    misshaped = [
        f"`{name}` has shape {tuple(tensors[name].shape)}, expected {shape}"
        for name, shape in wanted.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    return [
        *sentences(missing, "missing tensor {}", "missing tensors"),
        *sentences(extra, "extra tensor {}", "extra tensors"),
        *sentences(misshaped, "tensor {}", "tensors of another shape"),
    ]
