"""
Hugging Face policies on shards of a microbatch against their plain forward on its padded rows: log-probs, entropies,
load-balancing loss, and every gradient.
"""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType, TorchDynamoPlugin
from forked_ranks import run_script
from grpo_runs import codraft_trainer
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import tiny_policy
from transformers import AutoConfig, AutoModelForCausalLM, T5ForConditionalGeneration

from trl_codraft.cp import ContextLayout
from trl_codraft.cp.planner import Segment
from trl_codraft.cp.probe import disagreement_with_plain, unsupported_by_shards
from trl_codraft.cp.routing import KEYWORD, RoutedPolicy, ShardForward, no_mask, sharded_attention
from trl_codraft.grpo import join_context as context_group
from trl_codraft.grpo.support import unsupported_with_shards


NAMES = [
    *(
        f"{family}, whole rows travel"
        for family in (
            "llama", "qwen3", "mistral", "gemma3_text", "gemma4_text", "phi3", "gpt_neox", "deepseek_v3", "gpt_oss",
            "mixtral",
        )
    ),
    *(f"{family}, {microbatch}" for family in ("llama", "mixtral") for microbatch in ("ragged", "tiny", "one")),
    *(f"{family}, reentrant {kind}" for family in ("llama", "mistral", "gpt_oss") for kind in (False, True)),
    "interleaved",
    "fsdp2",
]  # fmt: skip
# Transformers' experts run in fp32; for the others attention is in fp64, TRL's head and RoPE in fp32.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_script("policy_worker.py", tmp_path_factory.mktemp("two"), 2, timeout=240, folder="cp")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return run_script("policy_worker.py", tmp_path_factory.mktemp("four"), 4, timeout=600, folder="cp")


def largest_error(result):
    (values, gradients), (plain_values, plain_gradients) = result
    assert gradients.keys() == plain_gradients.keys()
    pairs = [(values[name], plain_values[name]) for name in values]
    pairs += [(gradients[name], plain_gradients[name]) for name in gradients]
    return max(((ours - theirs).abs().max() / (1 + theirs.abs().max())).item() for ours, theirs in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_two_shards_equal_the_plain_forward(two_ranks, name):
    for rank in two_ranks:
        assert largest_error(rank[name]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", NAMES)
def test_four_shards_equal_the_plain_forward(four_ranks, name):
    for rank in four_ranks:
        assert largest_error(rank[name]) <= TOLERANCE


def test_attention_of_the_user_is_back_after_a_forward(two_ranks):
    assert all(rank["implementation stays"] for rank in two_ranks)


def test_labels_shifted_after_cutting_are_noticed(two_ranks):
    assert all(largest_error(rank["broken"]) > 1e-2 for rank in two_ranks)


# What cannot run on shards

HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
NAMED = [
    (lambda: tiny_policy("qwen3_next", **HYBRID), "layers of type \\['linear_attention'\\]"),
    (lambda: tiny_policy("gemma2"), "attn_logit_softcapping"),
    (lambda: tiny_policy("gemma3_text", use_bidirectional_attention=True), "attends to later tokens"),
    (lambda: tiny_policy(attention_chunk_size=16), "attends in chunks"),
    (lambda: AutoModelForCausalLM.from_config(small("gpt2", n_embd=16, n_layer=1, n_head=2)), "no list of `layers`"),
    (
        lambda: T5ForConditionalGeneration(small("t5", d_model=16, d_ff=16, d_kv=4, num_layers=1, num_heads=2)),
        "encoder-decoder",
    ),
]
PROBED = [
    # Its own attention module takes no further keyword arguments.
    (lambda: tiny_policy("stablelm"), "StableLmAttention was called without the layout"),
    # Alibi is a mask of its own.
    (lambda: tiny_policy("doge"), "DogeAttention asks for a mask of its own"),
    # Positions by the mask, which a shard does not have.
    (
        lambda: tiny_policy("opt", word_embed_proj_dim=32, scale=6.0),
        "hidden states of OPTForCausalLM on a shard differ",
    ),
    (lambda: bypassing(tiny_policy(scale=6.0)), "Layers \\[2\\] \\(LlamaDecoderLayer\\) .* do not attend"),
    (lambda: leaking(tiny_policy(scale=6.0)), "hidden states of LlamaForCausalLM on a shard differ"),
]


def small(model_type, **sizes):
    return AutoConfig.for_model(model_type, vocab_size=32, **sizes)


def bypassing(policy):
    """One layer attends by means of its own."""
    attention = policy.model.layers[2].self_attn
    attention.forward = lambda hidden_states, **kwargs: (attention.o_proj(attention.q_proj(hidden_states)), None)
    return policy


def leaking(policy):
    """One layer mixes neighbouring tokens outside its attention."""
    mlp = policy.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden + hidden.roll(1, dims=1))
    return policy


@pytest.mark.parametrize(("build", "reason"), NAMED)
def test_policy_whose_configuration_rules_out_shards_is_named(build, reason):
    with pytest.raises(ValueError, match=reason + ".*context_parallel_size=1"):
        raise ValueError(unsupported_by_shards(build()))


@pytest.mark.parametrize(("build", "reason"), PROBED)
def test_probe_notices_and_names(build, reason):
    policy = build()
    assert unsupported_by_shards(policy) is None
    with pytest.raises(ValueError, match=reason + ".*context_parallel_size=1"):
        raise ValueError(disagreement_with_plain(policy))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probe_passes_whole_policies_and_leaves_them_as_they_were(implementation, dtype):
    policy = tiny_policy("mistral", dtype=dtype, sliding_window=4, scale=6.0).train()
    policy.model.layers[1].eval()
    policy.set_attn_implementation(implementation)
    assert disagreement_with_plain(policy) is None
    assert policy.config._attn_implementation == implementation
    assert [policy.training, policy.model.layers[0].training, policy.model.layers[1].training] == [True, True, False]


def test_probe_looks_through_adapters():
    policy = get_peft_model(tiny_policy(), LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    assert disagreement_with_plain(policy.get_base_model()) is None


def states_on_one_rank(policy):
    """Two rows on the only rank there is."""
    layout = ContextLayout([6, 4], [[Segment(0, 0, 6), Segment(1, 0, 4)]])
    columns = torch.cat([torch.arange(6), torch.arange(4)])
    with RoutedPolicy(policy).forward_on(layout, 6) as route:
        return policy.base_model(
            input_ids=torch.arange(3, 13)[None], position_ids=columns[None], use_cache=False, **route
        ).last_hidden_state


def pickled(policy):
    return pickle.loads(pickle.dumps(policy))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copied_policy_runs_on_shards_and_leaves_the_original_as_it_is(duplicate):
    policy, seen = tiny_policy(scale=6.0), set()
    expected = states_on_one_rank(policy)
    twin = duplicate(policy)
    twin.model.layers[1].self_attn.register_forward_pre_hook(
        lambda *_: seen.add((twin.config._attn_implementation, policy.config._attn_implementation))
    )
    assert torch.equal(states_on_one_rank(twin), expected)
    assert seen == {(KEYWORD, "sdpa")}
    assert twin.config._attn_implementation == "sdpa"


def attention_call(**overrides):
    policy = RoutedPolicy(tiny_policy())
    layout = SimpleNamespace(doc_lens=[5], num_rows=5)
    arguments = {"attention_mask": None, KEYWORD: ShardForward(policy, layout), **overrides}
    query = torch.zeros(arguments.pop("rows", (1, 4, 5, 8)))
    key = torch.zeros(1, 2, arguments.pop("num_keys", 5), 8)
    module = policy.layers[0].self_attn
    return sharded_attention(module, query, key, key, arguments.pop("attention_mask"), **arguments)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({KEYWORD: None}, "without the layout"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "a mask of its own"),
        ({"dropout": 0.1}, "attention_dropout=0.0"),
        ({"softcap": 30.0}, "softcapped scores"),
        ({"is_causal": False}, "attention to later tokens"),
        ({"rows": (2, 4, 5, 8)}, "rows other than the shard's"),
        ({"rows": (1, 4, 6, 8)}, "rows other than the shard's"),
        ({"num_keys": 9}, "keys that are no rows of the shard"),
    ],
)
def test_attention_refuses_what_it_cannot_honour(overrides, reason):
    with pytest.raises(ValueError, match=f"LlamaAttention.*{reason}"):
        attention_call(**overrides)


def test_masks_other_than_causal_are_refused():
    no_mask(attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="no padding"):
        no_mask(attention_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(ValueError, match="mask of its own"):
        no_mask(use_vmap=True)


def phimoe(**noise):
    return tiny_policy(
        "phimoe", num_local_experts=4, **{"router_jitter_noise": 0.0, "input_jitter_noise": 0.0, **noise}
    )


def fake_trainer(policy=None, **overrides):
    accelerator = SimpleNamespace(
        distributed_type=overrides.pop("distributed_type", DistributedType.MULTI_GPU),
        is_fsdp2=overrides.pop("is_fsdp2", False),
        state=SimpleNamespace(
            dynamo_plugin=TorchDynamoPlugin(backend=overrides.pop("dynamo", "no")),
            parallelism_config=overrides.pop("mesh", None),
        ),
    )
    args = SimpleNamespace(torch_compile=False, neftune_noise_alpha=None, **overrides.pop("args", {}))
    vars(args).update(overrides.pop("set", {}))
    return SimpleNamespace(
        model=tiny_policy() if policy is None else policy, accelerator=accelerator, args=args, _is_vlm=False
    )


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"distributed_type": DistributedType.DEEPSPEED}, "FSDP2"),
        ({"distributed_type": DistributedType.FSDP}, "fsdp_version: 2"),
        ({"set": {"torch_compile": True}}, "torch_compile=False"),
        ({"dynamo": "inductor"}, "dynamo_backend: 'NO'"),
        ({"mesh": ParallelismConfig(tp_size=2)}, "set `tp_size=1`"),
        ({"set": {"neftune_noise_alpha": 5.0}}, "neftune_noise_alpha"),
        ({"policy": tiny_policy(attention_dropout=0.1)}, "attention_dropout=0.0"),
        ({"policy": tiny_policy("mixtral", router_jitter_noise=0.1)}, "router_jitter_noise"),
        ({"policy": phimoe(router_jitter_noise=0.01)}, "router_jitter_noise"),
        ({"policy": phimoe(input_jitter_noise=0.1)}, "input_jitter_noise"),
        ({"policy": get_peft_model(tiny_policy(), LoraConfig(lora_dropout=0.1))}, "disable_dropout=True"),
        (
            {"policy": get_peft_model(tiny_policy(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))},
            "PROMPT_TUNING",
        ),
    ],
)
def test_run_that_cannot_split_its_microbatches_is_named(overrides, reason):
    assert reason in unsupported_with_shards(fake_trainer(**overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"distributed_type": DistributedType.FSDP, "is_fsdp2": True},
        {"policy": tiny_policy("gpt_oss")},
        {"policy": phimoe()},
    ],
)
def test_supported_runs_are_not_refused(overrides):
    assert unsupported_with_shards(fake_trainer(**overrides)) is None


def test_any_error_of_the_probe_reaches_the_ranks_that_wait_for_its_verdict(monkeypatch):
    sent = []
    monkeypatch.setattr(context_group, "broadcast_object_list", sent.append)
    monkeypatch.setattr(context_group, "disagreement_with_plain", lambda policy: 1 / 0)
    settings = {"context_parallel_size": 2, "holds_whole_policy": True}
    trainer = fake_trainer(set=settings)
    trainer.accelerator.is_main_process = True
    with pytest.raises(ValueError, match="not possible: .* raised ZeroDivisionError: division by zero"):
        context_group.join_context_group(trainer, None)
    assert "ZeroDivisionError" in sent[0][0]


def test_processes_that_do_not_fill_groups_are_refused_before_a_policy_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"`context_parallel_size=2` with 1 process.*torchrun --nproc_per_node 2"):
        codraft_trainer(tmp_path, model="no/such-policy", context_parallel_size=2)
