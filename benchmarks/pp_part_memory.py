"""
Memory of a rank that loads its stages alone, against one that loads the whole policy:

    OMP_NUM_THREADS=1 python benchmarks/pp_part_memory.py

A random Llama is written to a temporary folder. Each load runs in a process of its own, in turns; printed is how far
the process's peak resident memory rises above what it was before, with every weight read once (files are mapped: until
then it would be hardly anything). Weights are compared with those in the file first.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from measuring import machine, reset_peak, resident_bytes
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from trl_codraft.pp.balance import balance_layers
from trl_codraft.pp.stages.split import keep_stages
from trl_codraft.pp.stages.weights import load_stage_weights


def load(folder: Path, num_stages: int, stage: int | None) -> tuple[int, int]:
    """Bytes of the weights that this process has, and how far its peak memory rose."""
    logging.disable_progress_bar()
    config = LlamaConfig.from_pretrained(folder)
    before = resident_bytes()
    reset_peak()
    if stage is None:
        policy = LlamaForCausalLM.from_pretrained(folder)
    else:
        layers = balance_layers(config.num_hidden_layers, num_stages)
        policy = load_stage_weights(LlamaForCausalLM, str(folder), lambda whole: keep_stages(whole, layers, (stage,)))
    for parameter in policy.parameters():
        parameter.detach().sum()
    rise = resident_bytes("VmHWM") - before
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in policy.named_parameters())
    return sum(parameter.nbytes for parameter in policy.parameters()), rise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        folder, stage = args.load
        print(*load(Path(folder), args.stages, None if stage == "whole" else int(stage)))
        return
    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=11 * args.hidden // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        vocab_size=32_000,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        names = ["whole", *map(str, range(args.stages))]
        seen: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        for _ in range(args.repeats):
            for name in names:
                command = [sys.executable, __file__, "--stages", str(args.stages), "--load", folder, name]
                weights, rise = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                seen[name].append((int(weights), int(rise)))
    print(machine())
    print(f"Llama, {args.layers} layers of {args.hidden}, vocabulary 32,000, fp32; {args.stages} stages")
    print(f"{'rank loads':<12}{'weights MiB':>12}{'peak rise MiB':>15}{'of the whole':>14}")
    rise_of_whole = statistics.median(rise for _, rise in seen["whole"])
    for name in names:
        rise = statistics.median(rise for _, rise in seen[name])
        label = name if name == "whole" else f"stage {name}"
        print(f"{label:<12}{seen[name][0][0] / 2**20:>12.0f}{rise / 2**20:>15.0f}{rise / rise_of_whole:>14.2f}")


if __name__ == "__main__":
    main()
