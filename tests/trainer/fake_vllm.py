"""
A stand-in for vLLM's engine with the names, arguments and habits that TRL and this package rely on; a test marked
`vllm` compares its signatures with an installed vLLM (tests/vllm_golden/live_engine.py).

It has copies of its own of policy and draft, changed by `load_weights` only, and speculates with them for real, so
stale or overwritten weights show in what it generates and counts. Like vLLM, it makes the draft's head one with the
policy's if the two are equal when it starts, and sleep level 2 loses all weights.
"""

from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from trl_codraft import Eagle3DraftModel, speculative_generate
from trl_codraft.rollout.stats import SpeculativeStats


class EngineDraft(Eagle3DraftModel):
    """A draft that is loaded as vLLM's `Eagle3LlamaForCausalLM` is."""

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if name == "d2t":
                self.set_vocab(torch.arange(len(tensor)) + tensor)
            elif name not in own:
                raise ValueError(f"There is no module or parameter named {name!r}")
            else:
                own[name].data.copy_(tensor)
        return set(own)


class FakeLLM:
    """Created by `engine_class`, which sets `events` and `level`."""

    events: list
    level: int | None = None

    def __init__(self, *, model, speculative_config=None, disable_log_stats=True, **kwargs):
        self.kwargs = {"model": model, **kwargs}
        self.speculative_config, self.log_stats = speculative_config, not disable_log_stats
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.policy.load_weights = self._load_policy
        self.draft = None
        if speculative_config is not None:
            self.draft = EngineDraft.from_pretrained(speculative_config["model"], policy=self.policy).eval()
            if torch.equal(self.draft.lm_head.weight, self.policy.lm_head.weight):
                self.draft.lm_head.weight = self.policy.lm_head.weight
            load_draft = self.draft.load_weights
            self.draft.load_weights = lambda weights: self.events.append("load draft") or load_draft(weights)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self.policy), get_draft_model=lambda: self.draft)
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.stats = SpeculativeStats()
        self.generator = torch.Generator().manual_seed(kwargs["seed"])
        self.asleep = set()

    def _load_policy(self, weights):
        if self.events[-1:] != ["load policy"]:
            self.events.append("load policy")
        for name, tensor in weights:
            self.policy.get_parameter(name).data.copy_(tensor)

    def sleep(self, level=1):
        self.events.append(f"sleep {level}")
        level = self.level or level
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            models = [self.policy] + ([self.draft] if self.draft is not None else [])
            for parameter in [parameter for module in models for parameter in module.parameters()]:
                parameter.data.fill_(torch.nan)

    def wake_up(self, tags=None):
        self.events.append(f"wake {','.join(tags or ['all'])}")
        self.asleep -= set(tags or self.asleep)

    def reset_prefix_cache(self):
        self.events.append("reset cache")

    def get_metrics(self):
        assert self.log_stats, "Stat logging disabled"
        names = {"num_drafts": "verifications", "num_draft_tokens": "drafted", "num_accepted_tokens": "accepted"}
        counters = [
            SimpleNamespace(name=f"vllm:spec_decode_{name}", value=getattr(self.stats, field))
            for name, field in names.items()
        ]
        positions = self.stats.accepted_per_position[: self.speculative_config["num_speculative_tokens"]]
        return [
            *counters,
            SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=positions),
            SimpleNamespace(name="vllm:kv_cache_usage_perc", value=0.5),
        ]

    def generate(self, prompts, sampling_params, use_tqdm=True):
        assert not self.asleep, f"asleep: {self.asleep}"
        self.events.append("generate")
        return [self._complete(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    @torch.no_grad()
    def _complete(self, prompt, params):
        settings = {"do_sample": True, "temperature": params.temperature, "max_new_tokens": params.max_tokens}
        ids = torch.tensor([prompt])
        if self.draft is None:
            sequence = self.policy.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0]
        else:
            output = speculative_generate(
                self.policy,
                self.draft,
                ids,
                num_draft_tokens=self.speculative_config["num_speculative_tokens"],
                generator=self.generator,
                **settings,
            )
            self.stats.add(output.stats)
            sequence = output.sequences[0]
        completion = sequence[len(prompt) :].tolist()
        logits = self.policy(sequence[None]).logits[0, len(prompt) - 1 : -1] / params.temperature
        logprobs = logits.log_softmax(-1)
        rows = [
            {token: SimpleNamespace(logprob=row[token].item(), rank=1)}
            for token, row in zip(completion, logprobs, strict=True)
        ]
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=completion, logprobs=rows)])


def engine_class(level=None):
    """A fresh `FakeLLM` class; `level` overrides the level of every sleep."""
    return type("LLM", (FakeLLM,), {"events": [], "level": level})
