"""
A Hub cache, built locally, with tiny stand-ins for the models that TRL's GRPO tests load: the same names, classes and
sizes, random weights. Hub ids resolve to it with `HF_HUB_OFFLINE=1`, so nothing of transformers or TRL is patched.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
import trl
from transformers import AutoConfig, PreTrainedConfig

from . import vocabularies, zen
from .tiny_models import TEXT, TEXT_MODELS, VISION_MODELS, TextModel, VisionModel


ORGANISATION = "trl-internal-testing"
REVISION = "0" * 40
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
IMAGE_TOKENS = {
    "gemma3": "<image_soft_token>",
    "llava": "<image>",
    "qwen": "<|image_pad|>",
    "qwen3_5": "<|image_pad|>",
}
QWEN_VOCABULARIES = {
    "qwen": (vocabularies.QWEN_WORDS, vocabularies.QWEN_FIRST_SPECIAL),
    "qwen3_5": (vocabularies.QWEN3_5_WORDS, vocabularies.QWEN3_5_FIRST_SPECIAL),
}
REMOTE_CODE = """from transformers import LlamaConfig, LlamaForCausalLM


class RemoteConfig(LlamaConfig):
    model_type = "remote"


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def tokenizer_of(family: str, template: str | None, short: bool):
    """The tokenizer of a family, with the chat template of that name from the installed TRL."""
    text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8") if template else ""
    corpus = " ".join([text, *zen.TRAIN, *zen.TEST, *(message["content"] for message in zen.messages_of(""))])
    if family in ("qwen", "qwen3_5"):
        words, first_special = QWEN_VOCABULARIES[family]
        tokenizer = vocabularies.qwen_tokenizer(corpus, words, vocabularies.SHORT_SIZE if short else first_special)
    elif family == "gemma3":
        images = {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        }
        tokenizer = vocabularies.family_tokenizer(
            text, corpus, list(images.values()), "<pad>", extra_special_tokens=images
        )
    elif family == "llava":
        images = {"image_token": "<image>"}
        tokenizer = vocabularies.family_tokenizer(text, corpus, ["<image>"], "<pad>", extra_special_tokens=images)
    elif family == "padded":
        tokenizer = vocabularies.family_tokenizer(text, corpus, [], "<pad>")
    elif family == "unpadded":
        # A test makes this token of Llama 3 the pad token.
        tokenizer = vocabularies.family_tokenizer(text, corpus, ["<|finetune_right_pad_id|>"], None)
    else:
        raise ValueError(f"No tokenizer family {family!r}.")
    if text:
        tokenizer.chat_template = text
    return tokenizer


def special_ids(tokenizer) -> dict[str, int | None]:
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def snapshot(root: Path, name: str) -> Path:
    """The folder of a repository in the cache, with the reference that makes `main` point to it."""
    repository = root / f"models--{ORGANISATION}--{name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    folder = repository / "snapshots" / REVISION
    folder.mkdir(parents=True)
    return folder


def save_model(folder: Path, class_name: str, config: PreTrainedConfig) -> None:
    """Random weights in bf16, as TRL's own tiny models: Xavier for matrices, so that no gradient vanishes."""
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(config).to(torch.bfloat16)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and id(parameter) not in embeddings:
                torch.nn.init.xavier_uniform_(parameter)
    model.save_pretrained(folder)


def build_text_model(root: Path, name: str, model: TextModel, short: bool) -> None:
    tokenizer = tokenizer_of(model.tokenizer, model.template, short)
    folder = snapshot(root, name)
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), **special_ids(tokenizer), **model.sizes}
    save_model(folder, model.class_name, AutoConfig.for_model(model.model_type, **sizes))


def build_vision_model(root: Path, name: str, model: VisionModel, short: bool) -> None:
    tokenizer = tokenizer_of(model.tokenizer, model.template, short)
    folder = snapshot(root, name)
    tokenizer.save_pretrained(folder)
    for file_name, content in model.files.items():
        (folder / file_name).write_text(json.dumps(content))
    tokens = {key: value for key, value in model.others.items() if str(value).startswith("<")}
    if model.tokenizer in ("qwen", "qwen3_5"):
        tokens["image_token_id"] = IMAGE_TOKENS[model.tokenizer]
        tokens["video_token_id"] = "<|video_pad|>"
        tokens["vision_start_token_id"] = "<|vision_start|>"
        tokens["vision_end_token_id"] = "<|vision_end|>"
    else:
        tokens["image_token_index"] = IMAGE_TOKENS[model.tokenizer]
    others = {**model.others, **{key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}}
    ids = special_ids(tokenizer)
    text = {**model.text, **ids, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(model.model_type, text_config=text, vision_config=model.vision, **ids, **others)
    save_model(folder, model.class_name, config)


def build_remote_model(root: Path) -> None:
    """A repository with code of its own, for `trust_remote_code`."""
    tokenizer = tokenizer_of("padded", None, short=True)
    folder = snapshot(root, "tiny-RemoteForCausalLM")
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **special_ids(tokenizer), **TEXT)
    save_model(folder, "LlamaForCausalLM", config)
    (folder / "modeling_remote.py").write_text(REMOTE_CODE)
    stored = json.loads((folder / "config.json").read_text())
    stored["model_type"] = "remote"
    stored["architectures"] = ["RemoteForCausalLM"]
    stored["auto_map"] = {
        "AutoConfig": "modeling_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(stored))


def build(root: Path, short: bool) -> None:
    """
    Fills a folder with every tiny repository.

    Args:
        root (`Path`): a `HF_HUB_CACHE`.
        short (`bool`): whether the Qwen models have a short vocabulary instead of ids as on the Hub. Enough for tests
            that name no ids.
    """
    for name, model in TEXT_MODELS.items():
        build_text_model(root, name, model, short)
    for name, model in VISION_MODELS.items():
        build_vision_model(root, name, model, short)
    build_remote_model(root)


if __name__ == "__main__":
    build(Path(sys.argv[1]), short=sys.argv[2] == "short")
