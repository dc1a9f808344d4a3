"""
What the speculators library computes with our drafts, and writes back. Runs in its own environment and imports nothing
of ours.

    $SPECULATORS_PYTHON tests/vllm_golden/speculators_logits.py FOLDER NUM_PASSES

FOLDER/<case> holds `policy`, `draft` and `inputs.safetensors`; `logits.safetensors` and `resaved` are added.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.config import SpeculatorModelConfig


def load(folder: Path, **kwargs):
    model = SpeculatorModel.from_pretrained(folder, **kwargs)
    # Drafts carry no embedding. speculators fills it from the policy where it finds NaN, but under this transformers
    # tensors that a checkpoint lacks hold whatever the memory held.
    model._load_verifier_weights(overwrite_embed_tokens=True)
    return model


def run_case(folder: Path, num_passes: int) -> None:
    config = SpeculatorModelConfig.from_pretrained(folder / "draft")
    # Its default, flex attention, is compiled; this one is plain.
    config.transformer_layer_config._attn_implementation = "eager"
    model = load(folder / "draft", config=config).float().eval()
    nan = [name for name, tensor in model.state_dict().items() if tensor.is_floating_point() and tensor.isnan().any()]
    if nan:
        raise SystemExit(f"{folder.name}: not filled by the checkpoint: {nan}")
    inputs, logits = load_file(folder / "inputs.safetensors"), []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0].clone()))
    tokens = inputs["tokens"][None]
    with torch.no_grad():
        # Row p reads the taps at p and the token at p + 1.
        model(
            hidden_states=inputs["taps"][None, :-1],
            input_ids=tokens[:, 1:],
            document_ids=torch.zeros_like(tokens[:, 1:]),
            ttt_steps=num_passes,
        )
    save_file({f"pass_{index}": part for index, part in enumerate(logits)}, folder / "logits.safetensors")
    load(folder / "draft").save_pretrained(folder / "resaved")


if __name__ == "__main__":
    for case in sorted(Path(sys.argv[1]).iterdir()):
        if case.is_dir():
            run_case(case, int(sys.argv[2]))
            print(case.name, flush=True)
