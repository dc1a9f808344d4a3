"""Configuration of [`CoDraftGRPOTrainer`]: the fields of `GRPOConfig`, plus those of the draft."""

import os
from dataclasses import MISSING, dataclass, field, fields, replace

from accelerate import ParallelismConfig
from trl import GRPOConfig

from .modeling.naming import shown
from .pp.order import SCHEDULES
from .rollout.stats import MAX_DRAFT_TOKENS
from .training.bounds import Bounds, Choice, Flag, Text, Whole, WholeNumbers, check_all
from .training.draft_trainer import TRAINING_BOUNDS
from .training.schedule import check_schedule


# The settings of a fresh draft's shape, by field of its configuration.
SHAPE_SETTINGS = {
    "tap_layers": "draft_tap_layers",
    "num_hidden_layers": "draft_num_hidden_layers",
    "draft_vocab_size": "draft_vocab_size",
    "fc_norm": "draft_fc_norm",
    "norm_output": "draft_norm_output",
}
# The settings of the draft's own training, by field of `DraftTrainingArguments`.
TRAINING_SETTINGS = {
    "num_passes": "draft_ttt_steps",
    "decay": "draft_ttt_decay",
    "detach_passes": "draft_detach_passes",
    "teacher_temperature": "draft_teacher_temperature",
    "learning_rate": "draft_learning_rate",
    "pretrain_learning_rate": "draft_pretrain_learning_rate",
    "lr_scheduler_type": "draft_lr_scheduler_type",
    "warmup_steps": "draft_warmup_steps",
    "weight_decay": "draft_weight_decay",
    "max_grad_norm": "draft_max_grad_norm",
    "loss_chunk_size": "draft_loss_chunk_size",
}
# Where a draft that is no model comes from.
DRAFT_SOURCE = Text(optional=True)
# What each field may be by itself; `_validate_draft` checks the others, and what does not go together.
BOUNDS: dict[str, Bounds] = {
    "use_draft": Flag(),
    "draft_model_name_or_path": DRAFT_SOURCE,
    "draft_train": Flag(),
    "draft_tap_layers": WholeNumbers(least=0, ascending=True, optional=True),
    "draft_num_hidden_layers": Whole(least=1),
    "draft_vocab_size": Whole(least=1, optional=True),
    "draft_fc_norm": Flag(),
    "draft_norm_output": Flag(),
    **{TRAINING_SETTINGS[name]: TRAINING_BOUNDS[name] for name in TRAINING_SETTINGS if name in TRAINING_BOUNDS},
    "draft_teacher_temperature": replace(TRAINING_BOUNDS["teacher_temperature"], optional=True),
    "draft_shard_optimizer": Flag(),
    "draft_save_optimizer": Flag(),
    "draft_train_on_prompt": Flag(),
    "draft_pretrain_steps": Whole(least=0),
    "rollout_cuda_graphs": Flag(),
    "draft_vllm_server_sync": Choice(choices=("push", "static")),
    "context_parallel_size": Whole(least=1),
    "context_parallel_layout": Choice(choices=("document", "hybrid")),
    "context_parallel_trunk": Choice(choices=("ring", "gather_once")),
    "pipeline_parallel_size": Whole(least=1),
    "pipeline_schedule": Choice(choices=tuple(SCHEDULES)),
    "layers_per_stage": WholeNumbers(least=1, optional=True, advice="Every stage needs at least one layer."),
    "pipeline_replica": Flag(optional=True),
    "pipeline_shard_optimizer": Flag(),
    "tap_channel_slots": Whole(least=1, optional=True),
}


@dataclass
class CoDraftGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`CoDraftGRPOTrainer`].

    This class includes only the parameters that concern the draft. For the others, see [`~trl.GRPOConfig`] and
    [`~transformers.TrainingArguments`].

    Parameters:
        > Parameters that control the draft model

        use_draft (`bool`, *optional*, defaults to `True`):
            Whether to train a draft and roll out with it. `False` builds, saves and logs nothing: the run is the one
            of [`~trl.GRPOTrainer`], but for a resume of a mixture of experts, which is that of the uninterrupted run.
        draft_model_name_or_path (`str`, *optional*):
            EAGLE-3 checkpoint to start from (a Hub id or a folder in the format of vLLM, SGLang or speculators). If
            `None`, a fresh draft is built from the policy.
        draft_train (`bool`, *optional*, defaults to `True`):
            Whether to train the draft inside the GRPO step. `False` keeps it frozen, which is the baseline; it must
            then be a loaded one, or pretrained by `draft_pretrain_steps`.
        draft_tap_layers (`list[int]`, *optional*):
            Policy layers whose hidden states the draft reads, strictly ascending. Id `i` is the input of decoder layer
            `i`; the number of layers stands for the output of the last one. If `None`, `[2, n//2, n-3]` for a policy
            of `n >= 7` layers. A loaded draft keeps its own.
        draft_num_hidden_layers (`int`, *optional*, defaults to `1`):
            Number of decoder layers of a fresh draft.
        draft_vocab_size (`int`, *optional*):
            Size of the vocabulary of a fresh draft. If `None`, the policy's. A smaller one is chosen once from the
            prompts and one batch of rollouts, and makes drafting cheaper.
        draft_fc_norm (`bool`, *optional*, defaults to `False`):
            Whether a fresh draft normalises each tap before `fc` (EAGLE-3.1).
        draft_norm_output (`bool`, *optional*, defaults to `False`):
            Whether a fresh draft feeds its normalised output back to the next step (EAGLE-3.1).

        > Parameters that control the training of the draft

        draft_ttt_steps (`int`, *optional*, defaults to `4`):
            Number of passes `K` of the test-time-training unroll (EAGLE-3, section 3).
        draft_ttt_decay (`float`, *optional*, defaults to `0.8`):
            Pass `s` weighs `draft_ttt_decay ** s` in the loss; above 0 and at most 1.
        draft_detach_passes (`bool`, *optional*, defaults to `False`):
            Whether to stop the gradient between passes.
        draft_teacher_temperature (`float`, *optional*):
            Temperature of the teacher distribution. If `None`, 1.0, whatever the rollout temperature.
        draft_learning_rate (`float`, *optional*, defaults to `2e-4`):
            Learning rate of the draft inside the GRPO step.
        draft_pretrain_learning_rate (`float`, *optional*, defaults to `1e-3`):
            Learning rate of the draft during `draft_pretrain_steps`.
        draft_lr_scheduler_type (`str`, *optional*, defaults to `"constant_with_warmup"`):
            Schedule of the draft's learning rate, one of those of [`~transformers.SchedulerType`] that follow from the
            number of the step alone: `"linear"`, `"cosine"`, `"cosine_with_restarts"`, `"polynomial"`, `"constant"`,
            `"constant_with_warmup"` or `"inverse_sqrt"`.
        draft_warmup_steps (`int`, *optional*, defaults to `20`):
            Warmup of the draft's learning rate, in draft updates.
        draft_weight_decay (`float`, *optional*, defaults to `0.0`):
            Weight decay of the draft's AdamW.
        draft_max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Gradient clipping of the draft, apart from the policy's. 0 leaves gradients as they are.
        draft_shard_optimizer (`bool`, *optional*, defaults to `False`):
            Whether all ranks share the state of the draft's AdamW (ZeRO, stage 1), each that of an equal part of the
            weights. Checkpoints do not depend on it.
        draft_save_optimizer (`bool`, *optional*, defaults to `True`):
            Whether checkpoints hold the moments of the draft's AdamW, 8 bytes per weight. Without, they are a good
            deal smaller, and a resumed draft goes on with fresh moments: its weights in fp32, vocabulary, schedule,
            and the measurements behind `num_draft_tokens="auto"` are saved all the same.
        draft_loss_chunk_size (`int`, *optional*, defaults to `128`):
            Rows per chunk of the draft loss. Bounds the memory of teacher and student logits; on a GPU with room to
            spare, 1024 keeps its matmuls busier.
        draft_train_on_prompt (`bool`, *optional*, defaults to `False`):
            Whether prompt tokens are trained too. Otherwise only completion tokens that the policy sampled are.
        draft_pretrain_steps (`int`, *optional*, defaults to `0`):
            Number of draft-only updates on the policy's own rollouts before the first GRPO step.

        > Parameters that control speculative rollouts

        speculative_rollouts (`str`, *optional*, defaults to `"auto"`):
            Whether rollouts use the draft. `"auto"`: wherever supported, else plain generation with one warning that
            names the reason. `"true"`: raise where unsupported. `"false"`: plain generation. Booleans are accepted.
        num_draft_tokens (`str`, *optional*, defaults to `"auto"`):
            Number of tokens drafted per verification: an integer, or `"auto"` to choose it from measured acceptance
            and measured time. Both sample from the policy's exact distribution; `"auto"` is not reproducible sample
            by sample. vLLM drafts a fixed number: `"auto"` means 3 there. At most 16.
        rollout_cuda_graphs (`bool`, *optional*, defaults to `False`):
            Whether rollouts launch the forwards behind the prompt as CUDA graphs, in padded shapes: for policies so
            small that launching their kernels takes longer than running them. Caches are then allocated for the
            longest completion at once. Not with FSDP or DeepSpeed ZeRO-3.
        draft_vllm_server_sync (`str`, *optional*, defaults to `"push"`):
            What happens to the draft of a vLLM server (`vllm_mode="server"`) when the policy is pushed to it: `"push"`
            refreshes it too, and raises if the server has no way to; `"static"` leaves the draft that the server was
            started with.

        > Parameters that control context parallelism

        context_parallel_size (`int`, *optional*, defaults to `1`):
            Number of ranks that split the tokens of a microbatch. Divides the number of processes, whose batches,
            losses and metrics stay those of plain data parallelism. The `cp_size` of an Accelerate
            `ParallelismConfig` is taken for it.
        context_parallel_layout (`str`, *optional*, defaults to `"hybrid"`):
            How rows are split. `"document"`: every row over all ranks. `"hybrid"`: long rows over all ranks, short
            ones whole on one.
        context_parallel_trunk (`str`, *optional*, defaults to `"ring"`):
            How the keys and values of the draft's first pass reach its later ones: `"ring"`, they travel in every
            pass, or `"gather_once"`, they travel once and are held.

        > Parameters that control pipeline parallelism

        pipeline_parallel_size (`int`, *optional*, defaults to `1`):
            Number of ranks that split the layers of the policy. Its product with `context_parallel_size` divides the
            number of processes.
        pipeline_schedule (`str`, *optional*, defaults to `"1F1B"`):
            Order of forwards and backwards: `"GPipe"`, `"1F1B"` or `"Interleaved1F1B"` (several stages per rank).
        layers_per_stage (`list[int]`, *optional*):
            Decoder layers of each stage, as many numbers as ranks in a pipeline, or with `"Interleaved1F1B"` a
            multiple. If `None`, balanced with the policy's head and the draft counted.
        pipeline_replica (`bool`, *optional*):
            Whether every rank holds the whole policy, which rolls out, scores and evaluates. `False`: a rank loads and
            holds its own stages alone, scores and evaluates in the pipeline, and needs rollouts from elsewhere (a vLLM
            server or a `rollout_func`). If `None`, `False` with a vLLM server and `True` otherwise.
        pipeline_shard_optimizer (`bool`, *optional*, defaults to `False`):
            Whether the ranks that hold the same stage share its optimizer state (ZeRO, stage 1). Needs several
            pipelines.
        tap_channel_slots (`int`, *optional*):
            Landing slots per lane of the tap channel. If `None`, one more than a stage fills at equal stage times.
    """

    # Parameters that control the draft model
    use_draft: bool = field(
        default=True,
        metadata={"help": "Whether to train a draft and roll out with it. False is the run of `trl.GRPOTrainer`."},
    )
    draft_model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "EAGLE-3 checkpoint to start from (Hub id or folder). None builds a fresh draft."},
    )
    draft_train: bool = field(
        default=True, metadata={"help": "Whether to train the draft inside the GRPO step. False keeps it frozen."}
    )
    draft_tap_layers: list[int] | None = field(
        default=None,
        metadata={
            "help": "Policy layers the draft reads, strictly ascending. None: [2, n//2, n-3] for n >= 7 layers."
        },
    )
    draft_num_hidden_layers: int = field(default=1, metadata={"help": "Number of decoder layers of a fresh draft."})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Vocabulary size of a fresh draft. None: the policy's."}
    )
    draft_fc_norm: bool = field(
        default=False, metadata={"help": "Whether a fresh draft normalises each tap before `fc` (EAGLE-3.1)."}
    )
    draft_norm_output: bool = field(
        default=False, metadata={"help": "Whether a fresh draft feeds back its normalised output (EAGLE-3.1)."}
    )

    # Parameters that control the training of the draft
    draft_ttt_steps: int = field(
        default=4, metadata={"help": "Number of passes of the test-time-training unroll (EAGLE-3, section 3)."}
    )
    draft_ttt_decay: float = field(default=0.8, metadata={"help": "Pass s weighs `draft_ttt_decay ** s` in the loss."})
    draft_detach_passes: bool = field(default=False, metadata={"help": "Whether to stop the gradient between passes."})
    draft_teacher_temperature: float | None = field(
        default=None, metadata={"help": "Temperature of the teacher distribution. None: 1.0."}
    )
    draft_learning_rate: float = field(
        default=2e-4, metadata={"help": "Learning rate of the draft inside the GRPO step."}
    )
    draft_pretrain_learning_rate: float = field(
        default=1e-3, metadata={"help": "Learning rate of the draft during `draft_pretrain_steps`."}
    )
    draft_lr_scheduler_type: str = field(
        default="constant_with_warmup", metadata={"help": "Schedule of the draft's learning rate."}
    )
    draft_warmup_steps: int = field(
        default=20, metadata={"help": "Warmup of the draft's learning rate, in draft updates."}
    )
    draft_weight_decay: float = field(default=0.0, metadata={"help": "Weight decay of the draft's AdamW."})
    draft_max_grad_norm: float = field(
        default=1.0, metadata={"help": "Gradient clipping of the draft, apart from the policy's. 0: no clipping."}
    )
    draft_shard_optimizer: bool = field(default=False, metadata={"help": "Whether to shard the draft's AdamW state."})
    draft_save_optimizer: bool = field(
        default=True, metadata={"help": "Whether checkpoints hold the moments of the draft's AdamW."}
    )
    draft_loss_chunk_size: int = field(
        default=128, metadata={"help": "Rows per chunk of the draft loss: bounds the memory of its logits."}
    )
    draft_train_on_prompt: bool = field(default=False, metadata={"help": "Whether prompt tokens are trained too."})
    draft_pretrain_steps: int = field(
        default=0, metadata={"help": "Draft-only updates on the policy's own rollouts before the first GRPO step."}
    )

    # Parameters that control speculative rollouts
    speculative_rollouts: str = field(
        default="auto",
        metadata={"help": "'auto': where supported, else plain with one warning; 'true': raise; 'false': plain."},
    )
    num_draft_tokens: str = field(
        default="auto",
        metadata={"help": "Tokens drafted per verification: an integer, or 'auto' to choose it by measurement."},
    )
    rollout_cuda_graphs: bool = field(
        default=False, metadata={"help": "Whether to launch the forwards of rollouts as CUDA graphs (not with FSDP)."}
    )
    draft_vllm_server_sync: str = field(
        default="push",
        metadata={"help": "'push': refresh the draft of a vLLM server with the policy; 'static': leave it as it is."},
    )

    # Parameters that control parallelism
    context_parallel_size: int = field(
        default=1, metadata={"help": "Ranks that split the tokens of a microbatch; divides the number of processes."}
    )
    context_parallel_layout: str = field(
        default="hybrid",
        metadata={"help": "How rows are split: 'document' (every row over all ranks) or 'hybrid' (long rows only)."},
    )
    context_parallel_trunk: str = field(
        default="ring",
        metadata={"help": "How keys reach the draft's later passes: 'ring' (each time) or 'gather_once' (held)."},
    )
    pipeline_parallel_size: int = field(
        default=1, metadata={"help": "Ranks that split the layers of the policy. Divides the number of processes."}
    )
    pipeline_schedule: str = field(
        default="1F1B", metadata={"help": "Pipeline schedule: 'GPipe', '1F1B' or 'Interleaved1F1B'."}
    )
    layers_per_stage: list[int] | None = field(
        default=None, metadata={"help": "Decoder layers of each pipeline stage. If None, balanced."}
    )
    pipeline_replica: bool | None = field(
        default=None,
        metadata={"help": "Whether every rank holds the whole policy. None: not if a vLLM server generates."},
    )
    pipeline_shard_optimizer: bool = field(
        default=False, metadata={"help": "Whether ranks that hold the same stage share its optimizer state."}
    )
    tap_channel_slots: int | None = field(
        default=None, metadata={"help": "Landing slots per lane of the tap channel. If None, enough not to wait."}
    )

    def __post_init__(self):
        self._take_over_context_parallelism()
        super().__post_init__()
        self._validate_draft()

    @classmethod
    def from_grpo_config(cls, args: GRPOConfig) -> "CoDraftGRPOConfig":
        """
        The same run with the draft's defaults.

        Args:
            args ([`~trl.GRPOConfig`]):
                A configuration that has been through its own `__post_init__`. Of its fields only those of the draft
                are validated, also where they have been before and may have been set since: derived ones such as
                `generation_batch_size` would be refused the second time.

        Returns:
            [`CoDraftGRPOConfig`]: `args` itself if it is one already.
        """
        if isinstance(args, cls):
            args._validate_draft()
            return args
        config = cls.__new__(cls)
        config.__dict__.update(args.__dict__)
        for spec in fields(cls):
            if spec.name not in config.__dict__ and spec.init:
                config.__dict__[spec.name] = spec.default if spec.default is not MISSING else spec.default_factory()
        config._take_over_context_parallelism()
        config._validate_draft()
        return config

    def _validate_draft(self) -> None:
        """Checks the draft's fields, and normalises those that may be written in several ways."""
        check_all(self, BOUNDS)
        check_schedule("draft_lr_scheduler_type", self.draft_lr_scheduler_type)
        if self.draft_model_name_or_path is not None:
            self.draft_model_name_or_path = os.fspath(self.draft_model_name_or_path)
        self._normalise_rollout_fields()
        self._validate_pipeline()
        if self.use_draft:
            # Of a sampler without randomness there is no distribution to learn.
            TRAINING_BOUNDS["rollout_temperature"].check("temperature", self.temperature)

    def _normalise_rollout_fields(self) -> None:
        value = str(self.speculative_rollouts).lower()
        if value not in ("auto", "true", "false"):
            raise ValueError(
                f"`speculative_rollouts` must be 'auto', 'true' or 'false', got {shown(self.speculative_rollouts)}."
            )
        self.speculative_rollouts = value
        value = str(self.num_draft_tokens).lower()
        # One or two digits: Python refuses to read very long numbers.
        if value != "auto" and not (value.isdecimal() and len(value) <= 2 and 1 <= int(value) <= MAX_DRAFT_TOKENS):
            raise ValueError(
                f"`num_draft_tokens` must be 'auto' or an integer of at least 1 and at most {MAX_DRAFT_TOKENS}, got "
                f"{shown(self.num_draft_tokens)}. For plain rollouts set `speculative_rollouts='false'`."
            )
        self.num_draft_tokens = value if value == "auto" else int(value)
        rolls_out_plain = self.speculative_rollouts == "false"
        if self.full_determinism and self.use_draft and self.num_draft_tokens == "auto" and not rolls_out_plain:
            raise ValueError(
                "`full_determinism=True` with `num_draft_tokens='auto'`: the number of draft tokens would follow the "
                "clock, so samples would differ from run to run. Set `num_draft_tokens` to an integer."
            )

    def _take_over_context_parallelism(self) -> None:
        """
        Takes `cp_size` out of Accelerate's configuration, whose context parallelism does not know padding. What
        `accelerate launch` has set stays in the environment, for other configurations of this process; the trainer
        keeps it from Accelerate (`context_group.not_sharded_by_accelerate`).
        """
        given = self.parallelism_config
        if given is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
            given = ParallelismConfig()
        if given is None or given.cp_size == 1:
            return
        if self.context_parallel_size not in (1, given.cp_size):
            raise ValueError(
                f"`context_parallel_size={self.context_parallel_size}`, but `cp_size={given.cp_size}` in Accelerate's "
                "`ParallelismConfig`. Set one of them, or both to the same value."
            )
        if given.tp_size > 1:
            raise ValueError(
                f"`cp_size={given.cp_size}` with `tp_size={given.tp_size}` in Accelerate's `ParallelismConfig`: "
                "context parallelism does not split the layers of a tensor-parallel policy. Set `tp_size=1`."
            )
        self.context_parallel_size = given.cp_size
        # To Accelerate, the ranks that share a microbatch are data-parallel. Sharding over all of them is its default.
        self.parallelism_config = None
        if given.dp_replicate_size > 1:
            self.parallelism_config = ParallelismConfig(
                dp_replicate_size=given.dp_replicate_size,
                dp_shard_size=given.dp_shard_size * given.cp_size,
                tp_size=1,
                cp_size=1,
                sp_size=given.sp_size,
            )

    @property
    def holds_whole_policy(self) -> bool:
        """Whether every rank holds the whole policy: see `pipeline_replica`."""
        if self.pipeline_parallel_size == 1:
            return True
        if self.pipeline_replica is None:
            return not (self.use_vllm and self.vllm_mode == "server")
        return self.pipeline_replica

    def _validate_pipeline(self) -> None:
        size, layers = self.pipeline_parallel_size, self.layers_per_stage
        if size == 1:
            unset = {"layers_per_stage": None, "tap_channel_slots": None, "pipeline_replica": None}
            for name, default in {**unset, "pipeline_shard_optimizer": False}.items():
                if getattr(self, name) is not default:
                    raise ValueError(f"`{name}` is set with `pipeline_parallel_size=1`. Drop it, or set that too.")
            return
        if self.fp16:
            raise ValueError(
                "`fp16=True` with `pipeline_parallel_size > 1`: a gradient scaler would skip steps on some stages "
                "only. Set `bf16=True`."
            )
        if layers is not None and (
            len(layers) % size or (self.pipeline_schedule == "Interleaved1F1B") == (len(layers) == size)
        ):
            raise ValueError(
                f"`layers_per_stage={layers}` gives {len(layers)} stages to {size} ranks under "
                f"`pipeline_schedule={self.pipeline_schedule!r}`: one number per rank, or with 'Interleaved1F1B' two "
                "or more times as many."
            )
