"""
The tap channel: carries taps from the stages of a pipeline that capture them to the stage that trains the draft,
beside the pipeline and without touching its schedule.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .capture import Capture
from .message import TapChannelError, TapHeader
from .plan import TapPlan
from .step import ForwardTaps, Step
from .transport import Transport


# Seconds that a source waits longer than the draft's rank, so that faults which that rank finds elsewhere are
# reported.
SOURCE_PATIENCE = 3.0


class TapChannel:
    """
    Carries the taps of every microbatch of a step to the draft's stage, which is the last.

    Every rank of the pipeline makes one and calls, per step, [`~TapChannel.begin_step`], [`~TapChannel.forward`]
    around each forward of each of its stages, and [`~TapChannel.end_step`]; the draft's rank also
    [`~TapChannel.take`]. Between steps forwards leave nothing behind, so evaluations and generation need no care.
    Forwards that a backward recomputes (gradient checkpointing) are outside of `forward` and not sent again.

    A source waits only while all landing slots of its lane are full. The draft's rank takes the taps of a microbatch
    out of the slots at the end of the last stage's forward of it, where they have already arrived, so it does not wait
    for anything the pipeline did not wait for. When anything fails on one rank, its channel tells the others, and none
    can be used again.

    Args:
        plan ([`TapPlan`]):
            The taps and their way. The same on all ranks.
        stage (`int` or `Sequence[int]`):
            The (virtual) stages that this rank runs.
        transport ([`Transport`]):
            A new one over the ranks of the pipeline, such as a [`GlooTransport`].
        timeout (`float`, *optional*, defaults to `300.0`):
            Seconds after which a rank that waits for another gives up. It must exceed the time that a rank may
            legitimately be behind, such as the first step's compilation.
        device (`torch.device` or `str`, *optional*):
            Where captured taps are and taken ones are wanted. If that is not where the transport has them, each is
            copied when it is captured and again when it is taken, and the forward waits for its copy. If `None`, the
            CPU.

    Raises:
        ValueError: on all ranks alike if their plans differ; if the plan does not give this rank these stages.
        TransportUnavailable: on all ranks alike if the transport finds that taps cannot travel by it.
    """

    def __init__(
        self,
        plan: TapPlan,
        stage: int | Sequence[int],
        transport: Transport,
        *,
        timeout: float = 300.0,
        device: torch.device | str | None = None,
    ):
        self.plan = plan
        self.stages = (stage,) if isinstance(stage, int) else tuple(stage)
        self.transport = transport
        self.timeout = timeout
        self.device = torch.device("cpu" if device is None else device)
        planned = tuple(number for number, rank in enumerate(plan.stage_ranks) if rank == transport.rank)
        if tuple(sorted(self.stages)) != planned:
            raise ValueError(
                f"The plan gives rank {transport.rank} the stages {list(planned)}, but it was told to run "
                f"{list(self.stages)}. `stage_ranks` are ranks in the channel's group."
            )
        self.is_sink = plan.sink in self.stages
        self._patience = timeout if self.is_sink else timeout + SOURCE_PATIENCE
        self.epoch = 0
        self.bytes_sent = 0
        self.seconds_blocked = 0.0
        self.failure: str | None = None
        self.dead_ranks: list[int] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._step: Step | None = None
        # By microbatch and layer, taps of the last step that were not taken yet: they outlive it.
        self._queue: dict[int, dict[int, torch.Tensor]] = {}
        self._sequence = {lane.stage: 0 for lane in plan.lanes}
        transport.connect(plan.lanes, plan.fingerprint, timeout)

    # --------------------------------------------------------------------------------------------------- hooks

    def hook(self, layer: int, module: nn.Module, output: bool = False) -> None:
        """
        Captures a tap from a module whenever it runs inside [`~TapChannel.forward`].

        Args:
            layer (`int`), module (`nn.Module`):
                Id of the tap, and the module whose first argument (or `hidden_states`) it is.
            output (`bool`, *optional*, defaults to `False`):
                Whether its output (or the first of a tuple) is the tap instead.
        """
        capture = Capture(self._capture_in_forward, layer)
        if output:
            self._handles.append(module.register_forward_hook(capture.from_output))
        else:
            self._handles.append(module.register_forward_pre_hook(capture.from_input, with_kwargs=True))

    def hook_layers(self, stage: int, layers: nn.ModuleList) -> None:
        """
        Captures the taps of a stage from the decoder layers of a policy. Ids above the number of layers are left to
        [`~TapChannel.hook`].

        Args:
            stage (`int`), layers (`nn.ModuleList`):
                One of this rank's stages, and as many layers as in the whole policy.
        """
        for tap in self.plan.taps_of(stage):
            if tap.layer < len(layers):
                self.hook(tap.layer, layers[tap.layer])
            elif tap.layer == len(layers):
                self.hook(tap.layer, layers[-1], output=True)

    # --------------------------------------------------------------------------------------------------- steps

    def begin_step(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """
        Begins a step. All ranks call it, with the same shapes.

        Args:
            shapes (`Sequence[tuple[int, ...]]`):
                Leading dimensions of the taps of every microbatch, such as `(B, S)`. They may differ between
                microbatches and from step to step.

        Raises:
            ValueError: if so many microbatches would deadlock with the slots there are.
            RuntimeError: if taps of the last step were neither taken nor discarded, or it was not ended.
        """
        with self._poisoning():
            if self._step is not None or self._queue:
                raise RuntimeError(
                    f"Step {self.epoch} is not over: `end_step` was not called, or the taps of microbatches "
                    f"{sorted(self._queue)} were not taken. Call `take` for each, or `discard`."
                )
            if not shapes:
                raise ValueError("A step needs at least one microbatch. Do not begin one without.")
            self.plan.require_slots(len(shapes))
            self.epoch += 1
            step = self._step = Step(self.plan, self.epoch, tuple(tuple(shape) for shape in shapes))
            self._timed(self.transport.begin_step, self.plan.step_bytes(step.shapes), step.digest, self._patience)

    @contextmanager
    def forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """
        The forward of one of this rank's stages on one microbatch runs inside. Sends the taps of the stage when it
        ends; on the last stage, collects those of all stages. Does nothing between steps.

        Args:
            stage (`int`), microbatch (`int`):
                The stage and the microbatch. On every stage microbatches come in the order 0, 1, 2, ...

        Raises:
            TapTimeout: if no landing slot becomes free, or taps do not arrive, in time.
            TapChannelError: if another rank fails or something else arrives than planned.
        """
        step = self._step
        if step is None:
            yield
            return
        with self._poisoning():
            if step.running is not None or (stage, microbatch) in step.captured:
                raise RuntimeError(f"The forward of stage {stage} on microbatch {microbatch} runs twice in one step.")
            step.running = ForwardTaps(stage, microbatch)
            try:
                yield
                self._finish(step, step.running)
            finally:
                step.running = None

    @torch.no_grad()
    def capture(self, layer: int, hidden: torch.Tensor) -> None:
        """
        Takes one tap of the forward that is running. Hooks call it.

        Args:
            layer (`int`), hidden (`torch.Tensor` of the microbatch's shape and the tap's width):
                Id of the tap, and the hidden state. It is copied, so it may change afterwards.
        """
        step = self._step
        if step is None or step.running is None:
            raise RuntimeError(f"Tap {layer} was captured outside `forward`.")
        forward = step.running
        if layer in forward.seen:
            raise RuntimeError(
                f"Tap {layer} of microbatch {forward.microbatch} was captured twice in one forward: its layer ran "
                "twice."
            )
        taps = {tap.layer: tap for tap in self.plan.taps_of(forward.stage)}
        if layer not in taps:
            raise RuntimeError(f"Stage {forward.stage} captured tap {layer}, but the plan has {sorted(taps)} there.")
        rows = step.shapes[forward.microbatch]
        if hidden.device.type != self.device.type:
            raise ValueError(
                f"Tap {layer} is on {hidden.device}, but the channel was made for {self.device}. Pass `device`."
            )
        if tuple(hidden.shape) != taps[layer].shape(rows) or hidden.dtype != taps[layer].dtype:
            raise ValueError(
                f"Tap {layer} of microbatch {forward.microbatch} is {hidden.dtype} of shape {tuple(hidden.shape)}, "
                f"but {taps[layer].dtype} of shape {taps[layer].shape(rows)} was planned: `begin_step` and the plan "
                "say so."
            )
        if forward.views is None:
            forward.views = self._space_for(forward, rows)
        forward.views[layer].copy_(hidden)
        forward.seen.add(layer)

    def _capture_in_forward(self, layer: int, hidden: torch.Tensor) -> None:
        """Takes a tap from a hook if a forward is running whose taps are wanted."""
        if self._step is not None and self._step.running is not None:
            self.capture(layer, hidden)

    def take(self, microbatch: int) -> list[torch.Tensor]:
        """
        Returns the taps of a microbatch, on the draft's rank, once each, in any order after the last stage's forward
        of it. On a GPU they are for the stream of this rank's forwards.

        Args:
            microbatch (`int`):
                The microbatch.

        Returns:
            `list[torch.Tensor]`: in the order of the plan, each of the microbatch's shape and the tap's width.

        Raises:
            TapTimeout, TapChannelError: as in [`~TapChannel.forward`].
        """
        with self._poisoning():
            if not self.is_sink:
                raise RuntimeError(f"Taps arrive on the rank of stage {self.plan.sink}, not here.")
            if self._step is not None:
                self._drain(self._step, microbatch)
            if microbatch not in self._queue:
                raise RuntimeError(
                    f"The taps of microbatch {microbatch} were taken before, or it is none of this step."
                )
            taps = self._queue.pop(microbatch)
            missing = [tap.layer for tap in self.plan.taps if tap.layer not in taps]
            if missing:
                raise RuntimeError(
                    f"The taps of layers {missing} of microbatch {microbatch} were not captured yet on this rank: "
                    "call `take` after the last stage's forward."
                )
            return [taps[tap.layer].to(self.device) for tap in self.plan.taps]

    def discard(self) -> None:
        """Drops the taps that were not taken."""
        self._queue.clear()

    def end_step(self) -> None:
        """
        Ends a step: a source waits until the draft's rank has copied out everything that it sent. The taps can still
        be taken until the next step begins.

        Raises:
            RuntimeError: if a forward of this rank did not run.
            TapTimeout, TapChannelError: as in [`~TapChannel.forward`].
        """
        with self._poisoning():
            if self._step is None:
                raise RuntimeError("`end_step` without `begin_step`.")
            self._step.require_whole(self.stages)
            if self.is_sink:
                self._drain(self._step, len(self._step.shapes) - 1)
            self._timed(self.transport.end_step, self._patience)
            self._step = None

    def close(self) -> None:
        """Removes the hooks and frees the transport. Safe to call twice, and after a failure."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._step = None
        self._queue.clear()
        self.transport.close()
        self.failure = self.failure or "it was closed"

    def fail(self, reason: str) -> None:
        """
        Makes the channel unusable and tells the other ranks the reason. For failures outside of it, as in the
        pipeline.
        """
        if self.failure is None:
            self.dead_ranks = self.transport.dead_ranks()
            ended = f" (processes that have ended: rank {self.dead_ranks})" if self.dead_ranks else ""
            self.failure = reason + ended
            self.transport.fail(self.failure)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the taps that have arrived and were not taken: at most those of one step."""
        return sum(tensor.nbytes for taps in self._queue.values() for tensor in taps.values())

    # ------------------------------------------------------------------------------------------------ internal

    def _space_for(self, forward: ForwardTaps, rows: tuple[int, ...]) -> dict[int, torch.Tensor]:
        """Returns tensors to copy the taps of a forward to: in a message, or on the draft's rank in its queue."""
        if forward.stage in self._sequence:
            num_bytes = self.plan.message_bytes(forward.stage, rows)
            with self._naming(forward.stage, forward.microbatch):
                message = self._timed(self.transport.reserve, forward.stage, num_bytes, self._patience)
            return self.plan.views(forward.stage, rows, message)
        queued = self._queue.setdefault(forward.microbatch, {})
        for tap in self.plan.taps_of(forward.stage):
            queued[tap.layer] = torch.empty(tap.shape(rows), dtype=tap.dtype, device=self.transport.device)
        return queued

    def _finish(self, step: Step, forward: ForwardTaps) -> None:
        """Sends the taps of a forward that has ended, and collects all taps of the microbatch on the last stage."""
        stage, microbatch = forward.stage, forward.microbatch
        taps = self.plan.taps_of(stage)
        missing = [tap.layer for tap in taps if tap.layer not in forward.seen]
        if missing:
            raise RuntimeError(
                f"The forward of stage {stage} on microbatch {microbatch} did not run layers {missing}."
            )
        step.captured.add((stage, microbatch))
        if stage in self._sequence and forward.seen:
            with self._naming(stage, microbatch):
                self.transport.publish(stage, step.header(stage, microbatch, self._sequence[stage]))
            self._sequence[stage] += 1
            self.bytes_sent += sum(tap.num_bytes(step.shapes[microbatch]) for tap in taps)
        if stage == self.plan.sink:
            self._drain(step, microbatch)

    def _drain(self, step: Step, microbatch: int) -> None:
        """Copies the messages of all microbatches up to this one out of their slots."""
        while step.drained <= min(microbatch, len(step.shapes) - 1):
            current = step.drained
            taps = self._queue.setdefault(current, {})
            for lane in self.plan.lanes:
                with self._naming(lane.stage, current):
                    content, payload = self._timed(self.transport.receive, lane.stage, self._patience)
                    expected = step.header(lane.stage, current, self._sequence[lane.stage])
                    TapHeader.unpack(content).require(expected)
                    message = self._timed(self.transport.collect, expected, payload)
                self._sequence[lane.stage] += 1
                taps.update(self.plan.views(lane.stage, step.shapes[current], message))
            step.drained += 1

    @contextmanager
    def _naming(self, stage: int, microbatch: int) -> Iterator[None]:
        """Says in an error of the transport which taps were on their way."""
        try:
            yield
        except TapChannelError as error:
            rank = self.plan.stage_ranks[stage]
            raise type(error)(
                f"{error} (at the taps of stage {stage}, rank {rank}, microbatch {microbatch}, step {self.epoch})"
            ) from error

    def _timed(self, wait, *arguments):
        """Calls a method that may wait, and adds its time to the time blocked."""
        start = time.perf_counter()
        try:
            return wait(*arguments)
        finally:
            self.seconds_blocked += time.perf_counter() - start

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Ends the channel on all ranks with whatever is raised inside."""
        if self.failure is not None:
            raise TapChannelError(
                f"The tap channel of rank {self.transport.rank} cannot be used any more: {self.failure}"
            )
        try:
            yield
        except BaseException as error:
            self.fail(f"rank {self.transport.rank} (stages {list(self.stages)}): {error or type(error).__name__}")
            raise
