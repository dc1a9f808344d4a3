"""
Runs the stages of a policy under a pipeline schedule of `torch.distributed.pipelining`.

Shapes: `n` microbatches of a step, `B` rows, `S` columns, `H` hidden size.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from .order import schedule_order
from .stages.split import PolicyStage
from .taps.channel import TapChannel


CLASSES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}
# Tensors that every stage needs; others go to the last one.
EVERYWHERE = ("attention_mask", "position_ids")

# In the plain errors of gloo's messages.
GLOO = "gloo/transport"

Microbatch = Mapping[str, torch.Tensor]


class Pipeline:
    """
    The stages of this rank, run in a pipeline with those of the others.

    Metadata is static and every step has one shape, so no forward is run to find it out. The stages and schedules of
    torch are kept for the shapes used last, apart for training and evaluation, and dropped after an exception.
    Gradients are never scaled: they are the sum over the microbatches.

    Args:
        stages (`Sequence[PolicyStage]`):
            The stages of this rank: stage `s` is on rank `s % p`.
        group (`ProcessGroup`):
            The ranks of the pipeline, in order. Used by nothing else while a step runs.
        hidden_size (`int`), dtype (`torch.dtype`), device (`torch.device`):
            Size, dtype and place of the hidden states between stages.
        schedule (`str`, *optional*, defaults to `"1F1B"`):
            `"GPipe"`, `"1F1B"` or `"Interleaved1F1B"`.
        channel ([`TapChannel`], *optional*):
            Carries the taps of training steps.
        max_shapes (`int`, *optional*, defaults to `4`):
            Shapes that are kept; each holds the activations that travel in a whole step, `n * B * S * H`.

    Raises:
        ValueError: if the schedule is not supported or does not fit the stages.
    """

    def __init__(
        self,
        stages: Sequence[PolicyStage],
        group: dist.ProcessGroup,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        schedule: str = "1F1B",
        channel: TapChannel | None = None,
        max_shapes: int = 4,
    ):
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_stages = stages[0].num_stages
        # Refuses schedules that are not supported; any number of microbatches that the schedule accepts will do here.
        schedule_order(schedule, self.num_ranks, self.num_stages, self.num_stages)
        numbers = [stage.index for stage in stages]
        if numbers != list(range(self.rank, self.num_stages, self.num_ranks)):
            raise ValueError(
                f"Rank {self.rank} of {self.num_ranks} was given the stages {numbers} of {self.num_stages}: stage s "
                f"belongs on rank s % {self.num_ranks}."
            )
        self.stages = list(stages)
        self.group = group
        self.schedule = schedule
        self.channel = channel
        self.hidden_size, self.dtype, self.device = hidden_size, dtype, device
        self.max_shapes = max_shapes
        self._prepared: OrderedDict[tuple, _Prepared] = OrderedDict()
        self._loss: Callable[[int, torch.Tensor], torch.Tensor] | None = None
        if channel is not None:
            for stage in self.stages:
                channel.hook_layers(stage.index, stage.layers)

    @property
    def has_last(self) -> bool:
        """Whether the last stage, with the head and the draft, is on this rank."""
        return self.stages[-1].is_last

    def step(
        self,
        microbatches: Sequence[Microbatch],
        loss: Callable[[int, torch.Tensor], torch.Tensor],
        tap_shapes: Sequence[tuple[int, int]] | None = None,
        *,
        with_taps: bool = True,
    ) -> list[torch.Tensor]:
        """
        Forward and backward of all microbatches. Collective in the group. With a channel, the taps of every microbatch
        can be taken afterwards on the last rank; earlier ranks may still be running backwards then.

        Args:
            microbatches (`Sequence[Microbatch]`):
                All of one shape, the same on every rank: `input_ids` and `attention_mask` of shape `(B, S)`, perhaps
                `position_ids`, and the further arguments of the last stage's `score`, every tensor with `B` rows.
            loss (`Callable`):
                Given the number of a microbatch and the output of the last stage for it, a scalar. Called on the rank
                of the last stage only, in the order of the microbatches.
            tap_shapes (`Sequence[tuple[int, int]]`, *optional*):
                Leading dimensions of the taps of each microbatch, where layers run on a part of `(B, S)`.
            with_taps (`bool`, *optional*, defaults to `True`):
                Whether the channel, if there is one, carries the taps.

        Returns:
            `list[torch.Tensor]`: the losses, detached, by microbatch; empty on ranks without the last stage.

        Raises:
            ValueError: if the microbatches do not fit together or are too few for the schedule.
        """
        losses: list[torch.Tensor] = []
        channel = self.channel if with_taps else None
        with self._poisoning():
            inputs, named = self._arrange(microbatches)
            shape = tuple(microbatches[0]["input_ids"].shape)
            schedule_order(self.schedule, self.num_ranks, self.num_stages, len(microbatches))
            prepared = self._prepare(len(microbatches), shape, training=True)
            # The number of a loss's microbatch is found by its rows: torch does not tell it.
            rows = torch.arange(len(microbatches) * shape[0])
            self._loss = loss
            if channel is not None:
                channel.begin_step([shape] * len(microbatches) if tap_shapes is None else tap_shapes)
            prepared.schedule.step(*inputs, target=rows, losses=losses, return_outputs=False, **named)
            if channel is not None:
                channel.end_step()
            prepared.clear()
        # The callable may hold the caller's tensors.
        self._loss = None
        return [value.detach() for value in losses]

    @torch.no_grad()
    def forward(
        self,
        microbatches: Sequence[Microbatch],
        tap_shapes: Sequence[tuple[int, int]] | None = None,
        *,
        with_taps: bool = False,
    ) -> list[torch.Tensor]:
        """
        Forward of all microbatches, without gradients. Collective in the group.

        Args:
            microbatches (`Sequence[Microbatch]`):
                As in [`~Pipeline.step`]. There may be any number.
            tap_shapes (`Sequence[tuple[int, int]]`, *optional*):
                As in [`~Pipeline.step`].
            with_taps (`bool`, *optional*, defaults to `False`):
                Whether the channel, if there is one, carries the taps, to be taken on the last rank afterwards.

        Returns:
            `list[torch.Tensor]`: the outputs of the last stage by microbatch; empty on ranks without it.
        """
        channel = self.channel if with_taps else None
        with self._poisoning():
            # The interleaved schedule wants as many microbatches for each rank.
            missing = -len(microbatches) % self.num_ranks if self.schedule == "Interleaved1F1B" else 0
            padded = [*microbatches, *[microbatches[-1]] * missing]
            inputs, named = self._arrange(padded)
            shape = tuple(microbatches[0]["input_ids"].shape)
            prepared = self._prepare(len(padded), shape, training=False)
            if channel is not None:
                shapes = [shape] * len(microbatches) if tap_shapes is None else list(tap_shapes)
                channel.begin_step([*shapes, *[shapes[-1]] * missing])
            outputs = prepared.schedule.step(*inputs, **named)
            if channel is not None:
                channel.end_step()
                for number in range(len(microbatches), len(padded)) if self.has_last else ():
                    channel.take(number)
            prepared.clear()
        return list(outputs.chunk(len(padded)))[: len(microbatches)] if self.has_last else []

    def _prepare(self, num_microbatches: int, shape: tuple[int, int], training: bool) -> "_Prepared":
        """Stages and schedule of torch for a shape, kept for the shapes used last."""
        key = (num_microbatches, shape, training)
        if key not in self._prepared:
            self._prepared[key] = self._build(num_microbatches, shape, training)
            if len(self._prepared) > self.max_shapes:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(key)
        return self._prepared[key]

    def _build(self, num_microbatches: int, shape: tuple[int, int], training: bool) -> "_Prepared":
        ids = torch.empty(shape, dtype=torch.long, device="meta")
        hidden = torch.empty(*shape, self.hidden_size, dtype=self.dtype, device="meta", requires_grad=training)
        stages = []
        for module in self.stages:
            stage = _TappedStage(
                module,
                module.index,
                self.num_stages,
                self.device,
                input_args=ids if module.is_first else hidden,
                output_args=hidden,
                group=self.group,
            )
            stage.channel = self.channel
            stages.append(stage)
        name, of_stages = self.schedule, stages
        if name != "Interleaved1F1B":
            of_stages = stages[0]
            # Without backwards 1F1B is GPipe, which runs any number of microbatches.
            name = name if training else "GPipe"

        def loss_of(output, rows):
            return self._loss(int(rows[0]) // shape[0], output)

        loss_fn = loss_of if training else None
        schedule = CLASSES[name](of_stages, num_microbatches, loss_fn=loss_fn, scale_grads=False)
        return _Prepared(stages, schedule)

    def _arrange(self, microbatches: Sequence[Microbatch]) -> tuple[tuple, dict[str, torch.Tensor]]:
        """All microbatches as one batch, which torch splits again: positional and named inputs of this rank."""
        shapes = [{name: (tuple(value.shape), value.dtype) for name, value in batch.items()} for batch in microbatches]
        for number, theirs in enumerate(shapes):
            if theirs != shapes[0]:
                raise ValueError(
                    f"The microbatches of a pipeline step have one shape, but number {number} has {theirs} and number "
                    f"0 {shapes[0]}. Bring them to one with `pad_microbatches`."
                )
        num_rows = microbatches[0]["input_ids"].shape[0]
        for name, value in microbatches[0].items():
            if value.dim() == 0 or value.shape[0] != num_rows:
                raise ValueError(
                    f"`{name}` of shape {tuple(value.shape)} needs {num_rows} rows like `input_ids`: microbatches are "
                    "split by rows. Expand it."
                )
        batch = {name: torch.cat([values[name] for values in microbatches]) for name in microbatches[0]}
        inputs = (batch["input_ids"],) if self.stages[0].is_first else ()
        return inputs, {name: value for name, value in batch.items() if self.has_last or name in EVERYWHERE}

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """After an exception torch's state is of no use any more, and the channel tells the other ranks."""
        try:
            yield
        except BaseException as error:
            self._prepared.clear()
            if self.channel is not None:
                stages = [stage.index for stage in self.stages]
                self.channel.fail(f"the pipeline failed on rank {self.rank} (stages {stages}): {error}")
                if self.channel.dead_ranks:
                    raise RuntimeError(
                        f"The pipeline broke on rank {self.rank} (stages {stages}) when the process of rank(s) "
                        f"{self.channel.dead_ranks} had ended: see the log of that one."
                    ) from error
            if isinstance(error, dist.DistError) or GLOO in str(error):
                near = sorted({(self.rank - 1) % self.num_ranks, (self.rank + 1) % self.num_ranks} - {self.rank})
                raise RuntimeError(
                    f"The pipeline broke on rank {self.rank}: a message from or to a neighbouring stage, on rank "
                    f"{' or '.join(map(str, near))} of the pipeline, did not get through in time. Look at their logs "
                    f"first; how long ranks wait is the timeout of the process group (`ddp_timeout`). ({error})"
                ) from error
            raise


class _TappedStage(PipelineStage):
    """A stage whose forwards the tap channel knows of. Recomputation happens in backwards, which are none."""

    channel: TapChannel | None = None

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        self.submod.microbatch = fwd_chunk_id
        if self.channel is None:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        with self.channel.forward(self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


class _Prepared:
    """Stages and schedule of torch for one shape."""

    def __init__(self, stages: list[_TappedStage], schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B):
        self.stages = stages
        self.schedule = schedule

    def clear(self) -> None:
        """Drops outputs and inputs of the last step, which torch would keep until the next."""
        for stage in self.stages:
            stage.clear_runtime_states()
