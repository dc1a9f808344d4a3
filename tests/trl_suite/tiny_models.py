"""Classes and sizes of the tiny models that TRL's GRPO tests load, as on the Hub; the vocabularies are our own."""

from dataclasses import dataclass, field
from typing import Any


Sizes = dict[str, Any]

TEXT: Sizes = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NARROW = {**TEXT, "head_dim": 2}
EXPERTS = {**NARROW, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
REWARD = {"num_labels": 1}
# Heads of width 8, so that the rotary sections of the Qwen vision-language models have room.
VISION_TEXT = {**TEXT, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
LLAMA_TEXT = {**VISION_TEXT, "model_type": "llama"}
QWEN_TEXT = {
    **VISION_TEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
QWEN3_5_TEXT = {
    **VISION_TEXT,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
PATCHES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
SIGLIP = {**PATCHES, "vision_use_head": False}
CLIP = {**PATCHES, "model_type": "clip_vision_model", "projection_dim": 16}
QWEN_VISION = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_5_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 4,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}
LLAVA_FEATURES = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
LLAVA_PATCHES = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
GRID = [[28, 56], [56, 28], [56, 56]]
CROP = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


def processor_files(processor: str, image: Sizes, video: str | None = None, **others) -> dict[str, Sizes]:
    """The JSON files of a processor: its class, its image processor and its video processor."""
    files = {"preprocessor_config.json": image, "processor_config.json": {"processor_class": processor, **others}}
    if video is not None:
        files["video_preprocessor_config.json"] = {"video_processor_type": video}
    return files


@dataclass(frozen=True)
class TextModel:
    """A causal or reward model: `tokenizer` is a family of `hub.tokenizer_of`, `template` a file of TRL."""

    class_name: str
    model_type: str
    tokenizer: str
    template: str | None
    sizes: Sizes = field(default_factory=lambda: TEXT)


@dataclass(frozen=True)
class VisionModel:
    """A vision-language model. String values of `others` that look like a token stand for its id."""

    class_name: str
    model_type: str
    tokenizer: str
    template: str
    text: Sizes
    vision: Sizes
    files: dict[str, Sizes]
    others: Sizes = field(default_factory=dict)


QWEN_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 56 * 56}
QWEN3_5_FILES = processor_files(
    "Qwen3VLProcessor",
    {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "min_pixels": 64 * 64},
    "Qwen3VLVideoProcessor",
)

TEXT_MODELS = {
    "tiny-Qwen2ForCausalLM-2.5": TextModel("Qwen2ForCausalLM", "qwen2", "qwen", "qwen2_5"),
    "tiny-Qwen2ForSequenceClassification-2.5": TextModel(
        "Qwen2ForSequenceClassification", "qwen2", "qwen", "qwen2_5", {**TEXT, **REWARD}
    ),
    "tiny-Qwen3ForCausalLM": TextModel("Qwen3ForCausalLM", "qwen3", "qwen", "qwen3", NARROW),
    "tiny-Qwen3ForSequenceClassification": TextModel(
        "Qwen3ForSequenceClassification", "qwen3", "qwen", "qwen3", {**NARROW, **REWARD}
    ),
    "tiny-Qwen3MoeForCausalLM": TextModel(
        "Qwen3MoeForCausalLM", "qwen3_moe", "qwen", "qwen3", {**EXPERTS, "num_experts": 4}
    ),
    "tiny-Gemma2ForCausalLM": TextModel("Gemma2ForCausalLM", "gemma2", "padded", "gemma", NARROW),
    "tiny-MistralForCausalLM-0.2": TextModel("MistralForCausalLM", "mistral", "unpadded", None),
    "tiny-LlamaForSequenceClassification-3.2": TextModel(
        "LlamaForSequenceClassification", "llama", "unpadded", "llama3_2", {**TEXT, **REWARD}
    ),
    "tiny-Cohere2ForCausalLM": TextModel("Cohere2ForCausalLM", "cohere2", "padded", "cohere2"),
    "tiny-Glm4MoeForCausalLM": TextModel(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        "padded",
        "glm4moe",
        {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "tiny-GptOssForCausalLM": TextModel(
        "GptOssForCausalLM",
        "gpt_oss",
        "padded",
        "gptoss",
        {**NARROW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "tiny-NemotronHForCausalLM-nano": TextModel(
        "NemotronHForCausalLM",
        "nemotron_h",
        "padded",
        "nemotron_3_nano",
        {
            **{key: value for key, value in EXPERTS.items() if key != "num_hidden_layers"},
            "layers_block_type": ["mamba", "full_attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 4,
            "n_groups": 1,
            "ssm_state_size": 8,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
}

VISION_MODELS = {
    "tiny-Gemma3ForConditionalGeneration": VisionModel(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        "gemma3",
        "gemma3",
        VISION_TEXT,
        SIGLIP,
        processor_files(
            "Gemma3Processor",
            {
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": 28, "width": 28},
                "image_seq_length": 4,
            },
            image_seq_length=4,
        ),
        {"mm_tokens_per_image": 4, "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
    ),
    "tiny-LlavaForConditionalGeneration": VisionModel(
        "LlavaForConditionalGeneration",
        "llava",
        "llava",
        "llava_next",
        LLAMA_TEXT,
        CLIP,
        processor_files("LlavaProcessor", {"image_processor_type": "CLIPImageProcessor", **CROP}, **LLAVA_PATCHES),
        {**LLAVA_FEATURES, "image_seq_length": 4},
    ),
    "tiny-LlavaNextForConditionalGeneration": VisionModel(
        "LlavaNextForConditionalGeneration",
        "llava_next",
        "llava",
        "llava_next",
        LLAMA_TEXT,
        CLIP,
        processor_files(
            "LlavaNextProcessor",
            {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": GRID, **CROP},
            **LLAVA_PATCHES,
        ),
        {**LLAVA_FEATURES, "image_grid_pinpoints": GRID},
    ),
    "tiny-Qwen2VLForConditionalGeneration": VisionModel(
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        "qwen",
        "qwen2_5_vl",
        QWEN_TEXT,
        {**QWEN_VISION, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2},
        processor_files("Qwen2VLProcessor", QWEN_IMAGES, "Qwen2VLVideoProcessor"),
    ),
    "tiny-Qwen2_5_VLForConditionalGeneration": VisionModel(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        "qwen",
        "qwen2_5_vl",
        QWEN_TEXT,
        {
            **QWEN_VISION,
            "hidden_size": 16,
            "out_hidden_size": 16,
            "intermediate_size": 32,
            "fullatt_block_indexes": [1],
        },
        processor_files("Qwen2_5_VLProcessor", QWEN_IMAGES, "Qwen2VLVideoProcessor"),
    ),
    "tiny-Qwen3_5ForConditionalGeneration-NoThink": VisionModel(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        "qwen3_5",
        "qwen3_5_nothink",
        QWEN3_5_TEXT,
        QWEN3_5_VISION,
        QWEN3_5_FILES,
    ),
    "tiny-Qwen3_5MoeForConditionalGeneration-3.6": VisionModel(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        "qwen3_5",
        "qwen3_6",
        {
            **QWEN3_5_TEXT,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        QWEN3_5_VISION,
        QWEN3_5_FILES,
    ),
}
