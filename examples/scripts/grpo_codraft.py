# /// script
# dependencies = [
#     "trl-codraft[peft,demo]",
# ]
# ///

"""
GRPO with a speculative-decoding draft that is trained in the same step.

Without a model and a dataset, the demo runs: SmolLM2-135M-Instruct learns to end word problems in a required form, on
2 CPU cores in about 10 minutes (`make demo` also makes the environment). Its files are in `examples/demo/`, its
settings in `examples/demo/config.yaml`; any of them can be overridden on the command line.

python examples/scripts/grpo_codraft.py --output_dir outputs/demo

With any model and any dataset that has a `prompt` column:

accelerate launch \
    --config_file examples/accelerate_configs/ddp.yaml \
    examples/scripts/grpo_codraft.py \
    --model_name_or_path Qwen/Qwen3-4B \
    --dtype bfloat16 \
    --dataset_name trl-lib/DeepMath-103K \
    --reward_funcs accuracy_reward \
    --output_dir Qwen3-4B-grpo \
    --learning_rate 1e-6 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 4 \
    --num_generations 8 \
    --max_completion_length 2048 \
    --draft_vocab_size 32000 \
    --draft_pretrain_steps 200
"""

import sys
from pathlib import Path

from trl_codraft.scripts.grpo import main


def names_a_run(arguments: list[str]) -> bool:
    """Whether the arguments name a model, a dataset or a config file of the user's own."""
    names = ("--model_name_or_path", "--dataset_name", "--config")
    return any(argument.split("=")[0] in names for argument in arguments)


if __name__ == "__main__":
    if names_a_run(sys.argv[1:]) or {"-h", "--help"} & set(sys.argv[1:]):
        main()
    else:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from demo.run import run_demo

        run_demo(sys.argv[1:])
