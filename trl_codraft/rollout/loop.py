"""
The batched speculative loop: draft, verify in one policy forward, commit, drop finished rows, repeat.

A row's newest token is *pending*: committed, but not yet read by the policy. A round feeds the pending token and the
drafted ones, so the policy's cache always covers all tokens but the pending one.

Shapes: `B` rows of the prompt batch, `n` rows still active, `w` drafted columns of a round, `q = w + 1`, `V`
vocabulary, `S` columns of the sequence buffer (left pads included).
"""

import math
from dataclasses import dataclass
from functools import partial
from itertools import compress

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ..modeling.policy import follows_length
from ..modeling.taps import TapRecorder
from . import accept
from .cache import PolicyMasks, compaction_order
from .controller import DraftLengthController, FixedDraftLength, Round
from .criteria import PositionwiseCriteria
from .decode_attention import decoding_attention
from .drafting import DraftRollout
from .processors import PositionwiseProcessors, Prefixes
from .prompts import prompt_blocks
from .static_shapes import LiveSteps
from .static_shapes import padded as pad
from .stats import MAX_DRAFT_TOKENS, SpeculativeStats
from .trace import RolloutTrace


# Slots allocated behind the longest prompt before the caches grow.
INITIAL_NEW_SLOTS = 128
# What a forward costs however few tokens it reads, in tokens: weights read on a CPU, kernels launched elsewhere.
MIN_SAVED_TOKENS_ON_CPU = 64
MIN_SAVED_TOKENS = 512


@dataclass
class SamplingRule:
    """How tokens are chosen: processors, sampling or greedy, source of randomness (None: the global generator)."""

    processors: PositionwiseProcessors
    do_sample: bool
    generator: torch.Generator | None


@dataclass(frozen=True)
class RolloutCall:
    """
    One call of `generate`, as the loop sees it.

    Args:
        input_ids (`torch.LongTensor` of shape `(B, P)`):
            Left-padded prompts.
        attention_mask (`torch.LongTensor` of shape `(B, P)`):
            Zero at pads.
        rule ([`SamplingRule`]):
            How tokens are chosen.
        criteria ([`PositionwiseCriteria`]):
            When rows end.
        pad_token_id (`int` or `None`):
            Token that follows a finished row.
        synced (`bool`, *optional*, defaults to `False`):
            Whether all ranks must run the same number of policy forwards.
        counts_overrun (`bool`, *optional*, defaults to `False`):
            Whether a row's last block is drafted and counted in full, with the tokens behind its end.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    rule: SamplingRule
    criteria: PositionwiseCriteria
    pad_token_id: int | None
    synced: bool = False
    counts_overrun: bool = False


class Rollout:
    """
    Serves one call of `generate`.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy.
        recorder ([`TapRecorder`]):
            Recorder of the policy's taps.
        drafting ([`DraftRollout`] or `None`):
            The draft's state, None when the draft length is fixed at zero.
        controller ([`FixedDraftLength`] or [`DraftLengthController`]):
            Chooses the draft length.
        call ([`RolloutCall`]):
            The call.
        trace ([`RolloutTrace`], *optional*):
            Collects the hidden states of the tokens that are kept.
        steps ([`LiveSteps`], *optional*):
            How forwards behind the prompt run; as they come by default.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        recorder: TapRecorder,
        drafting: DraftRollout | None,
        controller: FixedDraftLength | DraftLengthController,
        call: RolloutCall,
        trace: RolloutTrace | None = None,
        steps: LiveSteps | None = None,
    ):
        self.policy, self.recorder, self.drafting, self.controller = policy, recorder, drafting, controller
        self.call, self.rule, self.criteria = call, call.rule, call.criteria
        self.trace = trace
        self.steps = LiveSteps() if steps is None else steps
        self.stats = SpeculativeStats(rows=len(call.input_ids))
        self.device = call.input_ids.device
        batch, prompt = call.input_ids.shape
        self.prompt_columns = prompt
        # Room behind the limit for draft columns that do not count in a row close to it.
        slots = self.criteria.max_length + MAX_DRAFT_TOKENS
        self.sequences = call.input_ids.new_zeros(batch, slots + 1)
        self.sequences[:, :prompt] = call.input_ids
        self.masks = PolicyMasks(policy)
        self.cache = self.steps.cache(batch, slots, prompt + INITIAL_NEW_SLOTS)
        # Per active row: index in the batch, columns so far, masked columns (position = column - pads).
        self.rows = list(range(batch))
        self.lengths = [prompt] * batch
        self.pads = (call.attention_mask == 0).sum(1).tolist()
        # Per batch row: columns when it left or stopped.
        self.final = [prompt] * batch
        self.stopped: list[int | None] = [None] * batch

    def run(self) -> torch.Tensor:
        """Rolls out every row: `(B, S)` ids as `generate` returns them."""
        self.controller.begin()
        self._prefill()
        # The first as `generate` does after its prefill.
        with self.policy._optimize_model_for_decode(), decoding_attention(self.policy):
            while self._keep_going():
                pass
        return self._padded()

    def _keep_going(self) -> bool:
        """One round; False when no row is left, in lockstep on any rank."""
        k = self.controller.choose(len(self.rows)) if self.rows and self.drafting is not None else 0
        active = len(self.rows) > 0
        if self.call.synced:
            active, k = agree(active, k, self.device)
        if self.rows:
            self._round(k)
        elif active:
            self._idle_forward()
        return active

    def _prefill(self) -> None:
        """Reads the prompts and commits the first token of each row."""
        scores, hidden, positions = self._read_prompts()
        batch, prompt = len(self.rows), self.prompt_columns
        rows = torch.arange(batch, device=self.device)
        scores = self.rule.processors(Prefixes(self.sequences, rows, torch.full_like(rows, prompt)), scores)
        tokens = self._pick(scores)
        self.sequences[:, prompt] = tokens
        self.stats.committed += batch
        if self.drafting is not None:
            self.drafting.vocab_size = scores.shape[-1]
        behind = positions + torch.tensor(self.pads, device=self.device)[:, None] + 1
        self._hand_over(hidden, rows, self.sequences.gather(1, behind), positions, positions.shape[1])
        ends = self.criteria.stops(
            self.sequences, self.rows, self.lengths, [1] * batch, self.criteria.eos_offsets(tokens[:, None]).tolist()
        )
        self._commit([1] * batch, ends)

    def _read_prompts(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """
        Reads the prompts, in one forward or two: fp32 scores `(B, V)` of the first token, hidden states as `_read`
        returns them, and the positions `(B, c)` of their columns.
        """
        ids = self.sequences[:, : self.prompt_columns].tolist()
        prompts = [tuple(compress(*row)) for row in zip(ids, self.call.attention_mask.tolist(), strict=True)]
        blocks, reads = prompt_blocks(prompts, self._worth_a_forward()), []
        for block in blocks:
            ids, positions = block.tensors(self.device)
            logits, *hidden = self._read(block.reach, not block.is_plain, True, ids, positions)
            self.cache.spread(block.continued)
            self.stats.policy_forwards += 1
            reads.append((positions, *hidden))
        if not self.cache.is_filled:
            raise RuntimeError(
                f"{type(self.policy).__name__} wrote no keys into the cache it was given, so drafted tokens cannot be "
                "verified against it. Set `speculative_rollouts=False`."
            )
        # A copy, so that the whole prompt's logits are not kept alive by models without `logits_to_keep`.
        scores = logits[blocks[-1].batch_rows, -1].float()
        if len(blocks) > 1 or len(block.tokens) < len(self.rows):  # else long prompts would be copied for nothing
            reads = [[part[block.batch_rows] for part in read] for block, read in zip(blocks, reads, strict=True)]
            reads = [[torch.cat(parts, 1) for parts in zip(*reads, strict=True)]]
        positions, *hidden = reads[0]
        return scores, hidden, positions

    def _worth_a_forward(self) -> float:
        """Tokens that a second forward over prompts has to save."""
        # Ranks in step run the same number of forwards. Keys of beginnings alone must be those of whole prompts.
        if self.call.synced or any(follows_length(module) for module in self.policy.modules()):
            return math.inf
        return MIN_SAVED_TOKENS_ON_CPU if self.device.type == "cpu" else MIN_SAVED_TOKENS

    def _round(self, k: int) -> None:
        """Drafts up to `k` tokens per row, verifies them and commits what holds."""
        start = self.controller.clock()
        active, backlog = len(self.rows), self.drafting is not None and self.drafting.backlog
        self.steps.just_recorded = False
        counts = [self._draft_count(k, length, pads) for length, pads in zip(self.lengths, self.pads, strict=True)]
        width = max(counts)
        rows = torch.tensor(self.rows, device=self.device)
        lengths = torch.tensor(self.lengths, device=self.device)
        drafts = self._draft(counts, rows, lengths) if width > 0 else None

        columns = lengths[:, None] - 1 + torch.arange(width + 1, device=self.device)
        counted = torch.arange(width + 1, device=self.device) <= torch.tensor(counts, device=self.device)[:, None]
        positions = columns - torch.tensor(self.pads, device=self.device)[:, None]
        known = [length - pads for length, pads in zip(self.lengths, self.pads, strict=True)]
        longest = max(known) + width
        ids = self.sequences[rows[:, None], columns]
        visible = self.steps.slots(longest, self.cache.max_slots)
        # One column per row, all at the end of what is visible, see everything.
        masked = width > 0 or min(known) < visible or self.masks.hides_old_slots
        seen = self._forward(visible, masked, ids, torch.where(counted, positions, -1))

        kept, tokens = self._verify(seen[0], rows, columns + 1, counts, drafts)
        self.sequences[rows, lengths + kept] = tokens
        block = self.sequences[rows[:, None], columns + 1]
        in_block = torch.arange(width + 1, device=self.device) <= kept[:, None]
        # The one transfer to the host per round.
        kept_host, eos = torch.stack((kept, self.criteria.eos_offsets(block))).tolist()
        caught_up = self._hand_over(seen[1:], rows, block, torch.where(in_block, positions, -1), longest)
        sizes = [count + 1 for count in kept_host]
        ends = self.criteria.stops(self.sequences, self.rows, self.lengths, sizes, eos)
        committed = [
            size if end is None or not self.criteria.has_eos else end + 1
            for size, end in zip(sizes, ends, strict=True)
        ]
        self.stats.count_round(counts, committed, kept_host if self.call.counts_overrun else None)
        self._commit(committed, ends)
        seconds = self.controller.clock() - start
        unusual = (backlog and width > 0) or caught_up or self.steps.just_recorded
        self.controller.observe(Round(active, counts, kept_host, sum(committed), seconds, unusual))

    def _draft_count(self, k: int, length: int, pads: int) -> int:
        """
        Draft tokens for a row: within its budget (one token always comes from the policy) and the draft's context.
        """
        if self.drafting is None:
            return 0
        budget = k if self.call.counts_overrun else self.criteria.max_length - length - 1
        return max(0, min(k, budget, self.drafting.room(length - pads)))

    def _draft(self, counts: list[int], rows: torch.Tensor, lengths: torch.Tensor) -> accept.Drafts:
        """
        Drafted tokens `(n, w)`, written into the buffer, with the distributions they came from if they are drawn.
        """
        # Processors that look at token ids need the policy's vocabulary, the others do their work on the draft's own.
        vocab = self.drafting.vocab if self.rule.processors.id_free else None
        choices, distributions = [], []

        def choose(step: int, own: torch.Tensor) -> torch.Tensor:
            raw = own if vocab is not None else self.drafting.widen(own)
            part = [index for index, count in enumerate(counts) if count > step]
            some = slice(None) if len(part) == len(counts) else torch.tensor(part, device=self.device)
            scores = self.rule.processors(Prefixes(self.sequences, rows[some], lengths[some] + step), raw[some])
            chosen = torch.zeros_like(rows)
            if self.rule.do_sample:
                q = torch.zeros_like(raw)  # stays zero in rows that draft no further
                q[some] = accept.draft_distribution(scores, raw[some])
                chosen[some] = accept.draw(q[some], self.rule.generator)
                distributions.append(q)
            else:
                chosen[some] = scores.argmax(-1)
            choices.append(chosen)
            tokens = chosen if vocab is None else vocab[chosen]
            self.sequences[rows, lengths + step] = tokens
            return tokens

        tokens = self.drafting.propose(counts, choose)
        q = torch.stack(distributions, 1) if distributions else None
        return accept.Drafts(tokens, torch.stack(choices, 1), q, vocab)

    def _pick(self, scores: torch.Tensor) -> torch.Tensor:
        """One token per row of processed scores `(N, V)`: `(N,)`."""
        if not self.rule.do_sample:
            return scores.argmax(-1)
        return accept.draw(scores.softmax(-1), self.rule.generator)

    def _verify(self, logits, rows, lengths, counts, drafts):
        """Kept draft tokens `(n,)` and the next token `(n,)`, from `(n, q, V)` logits at prefix lengths `(n, q)`."""
        shape = lengths.shape
        # Flat (row, column) pairs that count. From host values: a boolean index would wait for the device.
        pairs = [row * shape[1] + column for row, count in enumerate(counts) for column in range(count + 1)]
        some = slice(None) if len(pairs) == shape.numel() else torch.tensor(pairs, device=self.device)
        pair_rows = rows[:, None].expand(shape).flatten()[some]
        prefixes = Prefixes(self.sequences, pair_rows, lengths.flatten()[some])
        scores = self.rule.processors(prefixes, logits.flatten(0, 1)[some].float())
        if drafts is None:
            return torch.zeros_like(rows), self._pick(scores)
        wanted = torch.tensor(counts, device=self.device)
        if not self.rule.do_sample:
            best = _at(some, scores.argmax(-1), shape.numel()).view(shape)
            return accept.verify_greedy(best, drafts.tokens, wanted)
        p = _at(some, scores.softmax(-1), shape.numel()).view(*shape, -1)
        return accept.verify_sampled(p, drafts, wanted, self.rule.generator)

    def _forward(self, visible: int, padded: bool, ids, positions) -> list[torch.Tensor]:
        """What `_read` returns of a decoding round."""
        rows = self.steps.rows(len(ids))
        inputs = pad(ids, rows), pad(positions, rows, fill=-1)
        outputs = self.steps(("policy", visible, padded), partial(self._read, visible, padded, False), *inputs)
        return [output[: len(ids)] for output in outputs]

    def _read(self, visible: int, padded: bool, last_only: bool, ids, positions) -> tuple[torch.Tensor, ...]:
        """A forward of the policy: logits, and, where somebody wants them, each tap and the last hidden state."""
        self.cache.begin(positions, visible)
        decoding = self.cache.is_filled
        dtype = self.cache.key_dtype if decoding else self.policy.dtype
        arguments = {
            "input_ids": ids,
            "position_ids": positions.clamp(min=0),
            # Unpadded prompts leave the mask to the model, which then needs none.
            "attention_mask": self.masks(positions, visible, dtype, additive=decoding) if padded else None,
            "cache": self.cache,
            "use_cache": True,
        }
        if getattr(self.policy.config.get_text_config(), "output_router_logits", False):
            arguments["output_router_logits"] = False  # the balancing loss, unused here, does not read such masks
        if last_only and self.policy._supports_logits_to_keep():
            arguments["logits_to_keep"] = 1
        if self.drafting is None and self.trace is None:
            return (self.policy(**arguments).logits,)
        with self.recorder.record() as record:
            logits = self.policy(**arguments).logits
        return logits, *record.taps, record.last_hidden

    def _hand_over(self, hidden, rows, next_ids, positions, longest: int) -> bool:
        """
        Gives the hidden states of true rows (positions >= 0) to the draft, which may read them now, and to the trace.
        """
        if not hidden:
            return False
        *taps, last_hidden = hidden
        # Copies, and the trace first: the draft's own forwards overwrite what this one left.
        taps = torch.cat(taps, -1)
        if self.trace is not None:
            self.trace.add(rows, positions, taps, last_hidden)
        return self.drafting is not None and self.drafting.extend(taps, next_ids, positions, longest)

    def _idle_forward(self) -> None:
        """Keeps a rank without active rows in step with the others' collectives."""
        self.policy(input_ids=self.sequences[:1, :1], use_cache=False)
        self.stats.policy_forwards += 1

    def _commit(self, committed: list[int], ends: list[int | None]) -> None:
        """Advances the rows by their blocks and lets finished ones leave."""
        for index, row in enumerate(self.rows):
            start = self.lengths[index]
            self.lengths[index] += committed[index]
            if ends[index] is not None and self.stopped[row] is None:
                self.stopped[row] = start + ends[index] + 1
            self.final[row] = self.lengths[index]
        keep = [not leaves for leaves in self._leaving()]
        if all(keep):
            return
        if not any(keep):
            self.rows, self.lengths, self.pads = [], [], []
            return
        order = compaction_order(keep)
        self.cache.compact(keep)
        if self.drafting is not None:
            self.drafting.compact(keep)
        self.rows = [self.rows[old] for old in order]
        self.lengths = [self.lengths[old] for old in order]
        self.pads = [self.pads[old] for old in order]

    def _leaving(self) -> list[bool]:
        """
        Which active rows leave: stopped ones, or, where nothing pads them, all at once when the last has stopped.
        """
        if self.criteria.has_eos:
            return [self.stopped[row] is not None for row in self.rows]
        if any(stop is None for stop in self.stopped):
            return [length >= self.criteria.max_length for length in self.lengths]
        return [length >= max(self.stopped) for length in self.lengths]

    def _padded(self) -> torch.Tensor:
        """The sequences up to the last stop, with pads behind the rows that stopped before."""
        longest = max(self.stopped)
        if not self.criteria.has_eos:
            self.stats.committed -= sum(columns - longest for columns in self.final)
            return self.sequences[:, :longest].clone()
        stops = torch.tensor(self.stopped, device=self.device)[:, None]
        behind = torch.arange(longest, device=self.device) >= stops
        return self.sequences[:, :longest].masked_fill(behind, self.call.pad_token_id)


def _at(some, values: torch.Tensor, size: int) -> torch.Tensor:
    """`(size, ...)` with `values` at the flat places `some`, zero elsewhere."""
    if isinstance(some, slice):
        return values
    return values.new_zeros(size, *values.shape[1:]).index_copy_(0, some, values)


def agree(active: bool, k: int, device: torch.device) -> tuple[bool, int]:
    """Whether any rank has active rows, and the largest draft length a rank asks for (one all-reduce)."""
    flags = torch.tensor([int(active), k], device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    any_active, longest = flags.tolist()
    return any_active > 0, longest
