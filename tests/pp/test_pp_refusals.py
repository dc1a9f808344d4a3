"""Which runs cannot have a pipeline, and stages that are views of a policy that stays whole."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType, TorchDynamoPlugin
from datasets import IterableDataset
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tiny import tiny_policy
from torch import nn

from trl_codraft import CoDraftGRPOConfig, Eagle3DraftConfig, Eagle3DraftModel
from trl_codraft.grpo import join_pipeline as pipeline_group
from trl_codraft.grpo.agreement import common_settings
from trl_codraft.grpo.join_context import mesh_of
from trl_codraft.grpo.join_pipeline import hidden_dtype
from trl_codraft.grpo.pretraining import longest_prompt
from trl_codraft.grpo.stage_optimizer import StageOptimizer
from trl_codraft.grpo.stage_weights import layers_of_stages, only_stage_weights
from trl_codraft.grpo.support import require_place_for_adapter, unsupported_in_stages
from trl_codraft.pp.shape import PipelineShape
from trl_codraft.pp.stages.split import keep_stages
from trl_codraft.pp.stages.view import Shard, StageView, plain_forward


LAYERS = (1, 2, 1)


def quantized_policy():
    """As Transformers marks one."""
    policy = tiny_policy()
    policy.quantization_method = "bitsandbytes"
    return policy


def policy_in_pieces(tp_size):
    """As Transformers marks one that it shards: in layers, or with 1 as FSDP does."""
    policy = tiny_policy()
    policy._tp_size = tp_size
    return policy


def fake_trainer(
    policy=None,
    aux_loss=False,
    vlm=False,
    dynamo="no",
    mesh=None,
    kind=DistributedType.MULTI_CPU,
    rollout_func=None,
    **settings,
):
    defaults = {
        "torch_compile": False,
        "neftune_noise_alpha": None,
        "use_vllm": False,
        "vllm_mode": "server",
        "use_transformers_continuous_batching": False,
        "optim": "adamw_torch",
        "holds_whole_policy": True,
        "use_draft": True,
        "draft_pretrain_steps": 0,
    }
    state = SimpleNamespace(dynamo_plugin=TorchDynamoPlugin(backend=dynamo), parallelism_config=mesh)
    return SimpleNamespace(
        model=tiny_policy() if policy is None else policy,
        accelerator=SimpleNamespace(distributed_type=kind, state=state),
        args=SimpleNamespace(**{**defaults, **settings}),
        aux_loss_enabled=aux_loss,
        rollout_func=rollout_func,
        _is_vlm=vlm,
    )


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"kind": DistributedType.FSDP}, "FSDP shards"),
        ({"kind": DistributedType.DEEPSPEED}, "DEEPSPEED shards"),
        ({"vlm": True}, "vision-language model"),
        ({"aux_loss": True}, "router_aux_loss_coef=0.0"),
        ({"torch_compile": True}, "torch_compile=False"),
        ({"dynamo": "inductor"}, "torch_compile=False"),
        ({"policy": policy_in_pieces(tp_size=2)}, "Load it without `tp_plan`"),
        ({"policy": policy_in_pieces(tp_size=1)}, "and `distributed_config`"),
        ({"mesh": ParallelismConfig(tp_size=2)}, "set `tp_size=1`"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"use_vllm": True, "vllm_mode": "colocate"}, "vllm_mode='server'"),
        (
            {"policy": quantized_policy(), "use_vllm": True, "holds_whole_policy": False},
            "sent packed bytes without their scales",
        ),
        ({"use_transformers_continuous_batching": True}, "continuous batching"),
        ({"holds_whole_policy": False}, "leaves no rank with a policy that could roll out"),
        (
            {"holds_whole_policy": False, "rollout_func": print, "draft_pretrain_steps": 2},
            "`draft_pretrain_steps` needs rollouts of the policy",
        ),
        ({"optim": "lomo"}, "inside the backward"),
        ({"optim": "galore_adamw_layerwise"}, "inside the backward"),
        ({"optim": "schedule_free_adamw"}, "`optim='schedule_free_adamw'` evaluates and saves other weights"),
        (
            {"policy": get_peft_model(tiny_policy(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))},
            "PROMPT_TUNING",
        ),
        (
            {
                "policy": get_peft_model(
                    tiny_policy(tie_word_embeddings=True), LoraConfig(target_modules=["embed_tokens", "q_proj"])
                )
            },
            "tied to the head and one of them carries an adapter",
        ),
        (
            {"policy": get_peft_model(tiny_policy(tie_word_embeddings=True), LoraConfig(modules_to_save=["lm_head"]))},
            "tied to the head and one of them carries an adapter",
        ),
    ],
)
def test_a_run_that_cannot_have_a_pipeline_is_named(overrides, reason):
    assert reason in unsupported_in_stages(fake_trainer(**overrides))


@pytest.mark.parametrize(
    "policy",
    [tiny_policy(), tiny_policy(tie_word_embeddings=True), get_peft_model(tiny_policy(), LoraConfig())],
)
def test_supported_runs_are_not_refused(policy):
    assert unsupported_in_stages(fake_trainer(policy)) is None
    assert unsupported_in_stages(fake_trainer(policy, use_vllm=True)) is None
    assert unsupported_in_stages(fake_trainer(policy, mesh=ParallelismConfig(dp_replicate_size=2))) is None
    in_parts = {"holds_whole_policy": False, "draft_pretrain_steps": 2}
    assert unsupported_in_stages(fake_trainer(policy, use_vllm=True, **in_parts)) is None
    in_parts = {"holds_whole_policy": False, "rollout_func": print}
    assert unsupported_in_stages(fake_trainer(policy, **in_parts)) is None


@pytest.mark.parametrize("settings", [{}, {"holds_whole_policy": False, "rollout_func": print}])
def test_quantised_policies_that_no_server_is_sent_are_not_refused(settings):
    assert unsupported_in_stages(fake_trainer(get_peft_model(quantized_policy(), LoraConfig()), **settings)) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "adapts `lm_head`"),
        ({"target_modules": r".*(embed_tokens|q_proj)"}, "adapts `model.embed_tokens`"),
        ({"trainable_token_indices": [3]}, "has `trainable_token_indices`"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 2]}, r"no layer on ranks \[2\]"),
    ],
)
def test_adapters_that_some_rank_has_no_module_for_are_refused_on_all(settings, reason):
    with pytest.raises(ValueError, match=reason):
        require_place_for_adapter(LoraConfig(**settings), tiny_policy(), (2, 1, 1), 3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 1]},
    ],
)
def test_adapters_that_every_rank_has_a_module_for_are_not_refused(settings):
    layers, num_ranks = (1, 1, 1, 1), 2
    require_place_for_adapter(LoraConfig(**settings), tiny_policy(), layers, num_ranks)
    adapted = set()
    for rank in range(num_ranks):
        policy = tiny_policy()
        keep_stages(policy, layers, range(rank, len(layers), num_ranks))
        model = get_peft_model(policy, LoraConfig(**settings))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert any("lora_" in name for name in trained)
        adapted |= trained
    whole = get_peft_model(tiny_policy(), LoraConfig(**settings))
    assert adapted == {name for name, parameter in whole.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"layers_per_stage": [1, 1]}, r"`layers_per_stage=\[1, 1\]` does not split 4 layers"),
        ({"layers_per_stage": [4, 0]}, "Every stage needs at least one"),
        ({"pipeline_parallel_size": 5}, "lower `pipeline_parallel_size`"),
    ],
)
def test_layers_that_do_not_add_up_are_refused_with_the_setting_to_change(settings, reason):
    with pytest.raises(ValueError, match=reason):
        layers_of_stages(pipeline_settings(**settings), tiny_policy())


def test_the_world_has_to_hold_whole_groups():
    args = SimpleNamespace(world_size=6, pipeline_parallel_size=2, context_parallel_size=2)
    with pytest.raises(ValueError, match="`pipeline_parallel_size=2` and `context_parallel_size=2` with 6 process"):
        mesh_of(args)
    args.world_size = 8
    assert mesh_of(args).num_replicas == 2


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_belongs_to_one_stage(tied, adapters):
    policy = tiny_policy(tie_word_embeddings=tied)
    names = [name for name, _ in policy.named_parameters()]
    if adapters:
        policy = get_peft_model(policy, LoraConfig()).get_base_model()
        names = [name for name, _ in policy.named_parameters()]
    views = [StageView(policy, LAYERS, index) for index in range(len(LAYERS))]
    owned = [name for view in views for name, _ in view.named_own_parameters()]
    assert sorted(owned) == sorted(names)
    embedding = policy.get_input_embeddings().weight
    assert [any(p is embedding for _, p in view.named_own_parameters()) for view in views] == [True, False, False]
    assert [view.tied_copy is embedding for view in views] == [False, False, tied]


def test_views_in_turn_are_the_whole_policy_and_leave_it_as_it_was():
    policy = tiny_policy().eval()
    ids = torch.randint(3, 90, (2, 7))
    expected = policy(input_ids=ids).logits
    modules = dict(policy.named_modules())
    hidden = ids
    for index in range(len(LAYERS)):
        hidden = StageView(policy, LAYERS, index)(hidden)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)
    assert all(policy.get_submodule(name) is module for name, module in modules.items())
    assert torch.equal(policy(input_ids=ids).logits, expected)


def test_a_policy_is_whole_again_after_a_forward_that_fails():
    policy = tiny_policy()
    view = StageView(policy, LAYERS, 0)
    with pytest.raises(ValueError, match="exactly one of"):
        view(None)
    assert len({type(layer) for layer in policy.model.layers}) == 1
    assert policy(input_ids=torch.ones(1, 2, dtype=torch.long)).logits.shape[-1] == policy.config.vocab_size


def test_a_shard_runs_on_its_rows_only_and_is_padded():
    policy = tiny_policy().eval()
    ids = torch.randint(3, 90, (1, 8))
    positions = torch.arange(8).unsqueeze(0)

    class Context:
        def __call__(self, microbatch, layers):
            assert list(layers) == [0]
            return self

        def __enter__(self):
            return Shard(5, {})

        def __exit__(self, *error):
            return None

    output = StageView(policy, LAYERS, 0, context=Context())(ids, position_ids=positions)
    alone = StageView(policy, LAYERS, 0)(ids[:, :5], position_ids=positions[:, :5])
    assert torch.equal(output[:, :5], alone)
    assert not output[:, 5:].any()


def test_a_frozen_stage_still_has_an_output_to_run_backward_from():
    policy = tiny_policy().requires_grad_(False)
    assert StageView(policy, LAYERS, 0)(torch.ones(1, 2, dtype=torch.long)).requires_grad
    with torch.no_grad():
        assert not StageView(policy, LAYERS, 0)(torch.ones(1, 2, dtype=torch.long)).requires_grad


def test_parameters_outside_of_the_known_parts_are_refused():
    policy = tiny_policy()
    policy.model.gate = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="`model.gate.weight` lies outside"):
        StageView(policy, LAYERS, 0)


def pipeline_settings(**settings):
    defaults = {"pipeline_parallel_size": 2, "gradient_checkpointing": False, "use_cpu": True, "bf16": False}
    return CoDraftGRPOConfig(**{**defaults, **settings})


def test_layers_are_those_given_or_balanced():
    policy = tiny_policy()
    assert layers_of_stages(pipeline_settings(layers_per_stage=[3, 1]), policy) == (3, 1)
    interleaved = pipeline_settings(pipeline_schedule="Interleaved1F1B")
    assert layers_of_stages(interleaved, policy) == (1, 1, 1, 1)


def test_layers_are_balanced_with_the_draft_that_is_trained():
    policy = tiny_policy(num_hidden_layers=16)
    few, many = {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 64}
    # The head takes 0.5 of a layer: not enough to matter.
    assert layers_of_stages(pipeline_settings(use_draft=False, **few), policy) == (8, 8)
    assert layers_of_stages(pipeline_settings(draft_train=False, **few), policy) == (8, 8)
    assert layers_of_stages(pipeline_settings(**few), policy) == (9, 7)
    # There is more to do between the draft's start and the end of the other rank's work.
    assert layers_of_stages(pipeline_settings(**many), policy) == (8, 8)


class Watched:
    """Settings, and which of them were read."""

    def __init__(self, args):
        self.args, self.read = args, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.args, name)


def test_ranks_compare_all_settings_that_layers_follow_from():
    """Ranks that cut a policy differently would wait for each other's layers."""
    args = Watched(pipeline_settings())
    layers_of_stages(args, tiny_policy())
    assert {"layers_per_stage", "gradient_accumulation_steps", "draft_ttt_steps"} < args.read
    compared = common_settings(pipeline_settings())
    assert {f"`{name}`" for name in args.read} <= compared.keys()


def test_a_draft_that_is_loaded_counts_as_it_is_whatever_is_asked_of_a_fresh_one(tmp_path, monkeypatch):
    policy, one_pass = tiny_policy(num_hidden_layers=32), {"gradient_accumulation_steps": 2, "draft_ttt_steps": 1}
    draft = Eagle3DraftModel(Eagle3DraftConfig.from_policy(policy.config, num_hidden_layers=4))
    draft.save_pretrained(tmp_path)
    assert layers_of_stages(pipeline_settings(**one_pass), policy) == (16, 16)
    for source in (draft, str(tmp_path)):
        assert layers_of_stages(pipeline_settings(**one_pass), policy, source) == (17, 15)
        # More tokens than the policy has.
        assert layers_of_stages(pipeline_settings(draft_vocab_size=105, **one_pass), policy, source) == (17, 15)
    # With the policy cut down before the draft is loaded, the same.
    in_parts = pipeline_settings(pipeline_replica=False, **one_pass)
    monkeypatch.setattr(CoDraftGRPOConfig, "world_size", 2)
    with only_stage_weights(in_parts, policy, draft=str(tmp_path)) as parts:
        assert parts.layers == (17, 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_between_stages_is_that_of_the_residual_stream(dtype):
    policy = tiny_policy().to(dtype)
    assert hidden_dtype(policy, lambda: plain_forward(None, ())) == dtype
    assert hidden_dtype(policy, lambda: torch.autocast("cpu", torch.bfloat16)) == dtype


# Prompts of up to 8 tokens and completions of 10.
@pytest.mark.parametrize(("context", "columns"), [(1, 18), (4, 5)])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("in_parts", [False, True])
def test_the_plan_is_for_what_a_rank_runs(context, columns, learns, in_parts, monkeypatch):
    """
    Columns of a shard of the longest prompt and completion, taps only where a draft learns from them, state that ranks
    share, a copy that rolls out, a reference policy unless it is in the parts.
    """
    planned = {}
    monkeypatch.setattr(pipeline_group, "plan_memory", lambda *arguments, **sizes: planned.update(sizes))
    args = SimpleNamespace(
        pipeline_parallel_size=2,
        context_parallel_size=context,
        gradient_accumulation_steps=3,
        per_device_train_batch_size=2,
        max_completion_length=10,
        pipeline_schedule="1F1B",
        gradient_checkpointing=False,
        pipeline_shard_optimizer=learns,
        draft_shard_optimizer=learns,
        world_size=8,
        use_draft=True,
        draft_train=learns,
        draft_pretrain_steps=4,
        holds_whole_policy=True,
        use_vllm=not learns,
    )
    trainer = SimpleNamespace(
        args=args,
        model=tiny_policy(),
        ref_model=nn.Linear(5, 7, bias=False),
        learner=SimpleNamespace(draft=nn.Linear(2, 3, bias=False), recorder=SimpleNamespace(tap_layers=(0, 2))),
        train_dataset=[{"prompt": "three"}, {"other": 1}, {"prompt": "longest."}],
        environment_factories=None,
        rollout_func=None,
        _tokenize_prompts=lambda prompts: ([[*prompt] for prompt in prompts], None),
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=False),
    )
    shape = PipelineShape(LAYERS, 2, 3 * 2 * context)
    pipeline_group._announce_plan(trainer, shape, [(3, 2), (1, 1)] if in_parts else None)
    holdings = planned["holdings"]
    assert holdings.state_sharers == (4 if learns else 1)
    assert planned["columns"] == columns
    assert holdings.reference_bytes == (0 if in_parts else 5 * 7 * 4)
    assert planned["tap_layers"] == ((0, 2) if learns else ())
    assert holdings.draft_bytes == (2 + 2 / 8 + 1 if learns else 4) * 6 * 4


def test_prompts_that_cannot_be_read_before_the_run_are_not_planned_for():
    def tokenize(prompts):
        raise AssertionError("read")

    trainer = {"environment_factories": None, "rollout_func": None, "_tokenize_prompts": tokenize}
    stream = {"train_dataset": IterableDataset.from_generator(tokenize)}
    environments = {"train_dataset": [{"prompt": "a"}], "environment_factories": {}}
    tasks = {"train_dataset": [{"prompt": {"task": 3}}], "rollout_func": print}
    for case in (stream, environments, tasks, {"train_dataset": None}):
        assert longest_prompt(SimpleNamespace(**{**trainer, **case}), 5) == 0


def test_an_optimizer_of_an_unknown_kind_is_not_shared():
    policy = nn.Linear(2, 2)
    trainer = SimpleNamespace(
        args=None,
        model=policy,
        optimizer_cls_and_kwargs=None,
        get_optimizer_cls_and_kwargs=lambda args, model: (torch.optim.AdamW, {}),
    )
    with pytest.raises(
        ValueError, match="does not know how to share the state of this SGD.*pipeline_shard_optimizer=False"
    ):
        StageOptimizer(trainer, None)._share_state(torch.optim.SGD(policy.parameters(), lr=0.1))
