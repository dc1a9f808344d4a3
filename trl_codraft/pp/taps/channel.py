"""
The tap channel: carries taps from the stages of a pipeline that capture them to the stage that trains the draft, beside
the pipeline and without touching its schedule.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .capture import Capture, ForwardTaps
from .message import Header, Kind, TapChannelError
from .plan import TapPlan, digest
from .transport import Transport


# Seconds that a source waits longer than the draft's rank, so that what that one finds wrong elsewhere is reported.
SOURCE_PATIENCE = 3.0


class TapChannel:
    """
    Carries the taps of every microbatch of a step to the draft's stage, which is the last.

    Every rank of the pipeline makes one and calls, per step, [`~TapChannel.begin_step`], [`~TapChannel.forward`] around
    each forward of each of its stages, and [`~TapChannel.end_step`]; the draft's rank also [`~TapChannel.take`]. Between
    steps forwards leave nothing behind, so evaluations and generation need no care. What is recomputed in a backward
    (gradient checkpointing) is outside of `forward` and not sent again.

    A source waits only while all landing slots of its lane are full. The draft's rank takes the taps of a microbatch
    out of the slots at the end of the last stage's forward of it, where they have already arrived, so it does not wait
    for anything the pipeline did not wait for. When anything fails on one rank, its channel tells the others, and none
    can be used again.

    Args:
        plan ([`TapPlan`]):
            What travels. The same on all ranks.
        stage (`int` or `Sequence[int]`):
            The (virtual) stages that this rank runs.
        transport ([`Transport`]):
            A new one over the ranks of the pipeline, such as a [`CudaTransport`] or a [`SharedMemoryTransport`].
        timeout (`float`, *optional*, defaults to `300.0`):
            Seconds after which a rank that waits for another gives up. It must exceed the time that a rank may
            legitimately be behind, such as the first step's compilation.
        device (`torch.device` or `str`, *optional*):
            Where captured taps are and taken ones are wanted. If that is not where the transport has them, each is copied
            when it is captured and again when it is taken, and the forward waits for its copy. If `None`, the CPU.

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
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._digest = 0
        self._active = False
        self._scope: ForwardTaps | None = None
        self._sequence = {lane.stage: 0 for lane in plan.lanes}
        self._captured: set[tuple[int, int]] = set()
        self._queue: dict[int, dict[int, torch.Tensor]] = {}
        self._drained = 0
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
        capture = Capture(self, layer)
        if output:
            self._handles.append(module.register_forward_hook(capture.from_output))
        else:
            self._handles.append(module.register_forward_pre_hook(capture.from_input, with_kwargs=True))

    @property
    def captures(self) -> bool:
        """Whether a forward is running whose taps are wanted."""
        return self._scope is not None

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
            if self._active or self._queue:
                raise RuntimeError(
                    f"Step {self.epoch} is not over: `end_step` was not called, or the taps of microbatches "
                    f"{sorted(self._queue)} were not taken. Call `take` for each, or `discard`."
                )
            if not shapes:
                raise ValueError("A step needs at least one microbatch. Do not begin one without.")
            self.plan.require_slots(len(shapes))
            self._shapes = tuple(tuple(shape) for shape in shapes)
            self._digest = self.plan.fingerprint ^ digest(repr(self._shapes))
            self.epoch += 1
            self._captured, self._drained, self._active = set(), 0, True
            sizes = self.plan.step_bytes(self._shapes)
            self._timed(self.transport.begin_step, sizes, self._digest, self._patience)

    @contextmanager
    def forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """
        The forward of one of this rank's stages on one microbatch runs inside. Sends the taps of the stage when it
        ends; on the last stage, collects those of all stages. Does nothing between steps.

        Args:
            stage (`int`), microbatch (`int`):
                Which. On every stage microbatches come in the order 0, 1, 2, ...

        Raises:
            TapTimeout: if no landing slot becomes free, or taps do not arrive, in time.
            TapChannelError: if another rank fails or something else arrives than planned.
        """
        if not self._active:
            yield
            return
        with self._poisoning():
            if self._scope is not None or (stage, microbatch) in self._captured:
                raise RuntimeError(f"The forward of stage {stage} on microbatch {microbatch} runs twice in one step.")
            self._scope = ForwardTaps(stage, microbatch)
            try:
                yield
                self._finish(self._scope)
            finally:
                self._scope = None

    @torch.no_grad()
    def capture(self, layer: int, hidden: torch.Tensor) -> None:
        """
        Takes one tap of the forward that is running: what hooks call.

        Args:
            layer (`int`), hidden (`torch.Tensor` of the microbatch's shape and the tap's width):
                Id of the tap, and the hidden state. It is copied, so it may change afterwards.
        """
        scope = self._scope
        if scope is None:
            raise RuntimeError(f"Tap {layer} was captured outside `forward`.")
        if layer in scope.seen:
            raise RuntimeError(
                f"Tap {layer} of microbatch {scope.microbatch} was captured twice in one forward: its layer ran twice."
            )
        taps = {tap.layer: tap for tap in self.plan.taps_of(scope.stage)}
        if layer not in taps:
            raise RuntimeError(f"Stage {scope.stage} captured tap {layer}, but the plan has {sorted(taps)} there.")
        rows = self._shapes[scope.microbatch]
        if hidden.device.type != self.device.type:
            raise ValueError(
                f"Tap {layer} is on {hidden.device}, but the channel was made for {self.device}. Pass `device`."
            )
        if tuple(hidden.shape) != taps[layer].shape(rows) or hidden.dtype != taps[layer].dtype:
            raise ValueError(
                f"Tap {layer} of microbatch {scope.microbatch} is {hidden.dtype} of shape {tuple(hidden.shape)}, but "
                f"{taps[layer].dtype} of shape {taps[layer].shape(rows)} was planned: `begin_step` and the plan say so."
            )
        if scope.views is None:
            scope.views = self._space_for(scope)
        self.transport.pack(scope.views[layer], hidden)
        scope.seen.add(layer)

    def take(self, microbatch: int) -> list[torch.Tensor]:
        """
        The taps of a microbatch, on the draft's rank, once each, in any order after the last stage's forward of it. On a
        GPU they are for the current stream, which must not run ahead of the one of this rank's forwards.

        Args:
            microbatch (`int`):
                Which.

        Returns:
            `list[torch.Tensor]`: in the order of the plan, each of the microbatch's shape and the tap's width.

        Raises:
            TapTimeout, TapChannelError: as in [`~TapChannel.forward`].
        """
        with self._poisoning():
            if not self.is_sink:
                raise RuntimeError(f"Taps arrive on the rank of stage {self.plan.sink}, not here.")
            self._drain(microbatch)
            if microbatch not in self._queue:
                raise RuntimeError(
                    f"The taps of microbatch {microbatch} were taken before, or it is none of this step."
                )
            taps = self._queue.pop(microbatch)
            missing = [tap.layer for tap in self.plan.taps if tap.layer not in taps]
            if missing:
                raise RuntimeError(
                    f"The taps of layers {missing} of microbatch {microbatch} were not captured yet on this rank: call "
                    "`take` after the last stage's forward."
                )
            for stage in self._sequence:
                self.transport.hand_over(stage, microbatch, taps[self.plan.taps_of(stage)[0].layer])
            return [taps[tap.layer].to(self.device) for tap in self.plan.taps]

    def discard(self) -> None:
        """Drops what was not taken."""
        self._queue.clear()

    def end_step(self) -> None:
        """
        Ends a step: a source waits until the draft's rank has copied out everything that it sent. The taps can still be
        taken until the next step begins.

        Raises:
            RuntimeError: if a forward of this rank did not run.
            TapTimeout, TapChannelError: as in [`~TapChannel.forward`].
        """
        with self._poisoning():
            if not self._active:
                raise RuntimeError("`end_step` without `begin_step`.")
            stages = [stage for stage in self.stages if self.plan.taps_of(stage)]
            due = {(stage, microbatch) for stage in stages for microbatch in range(len(self._shapes))}
            if due - self._captured:
                stage, microbatch = min(due - self._captured)
                raise RuntimeError(f"Stage {stage} did not run microbatch {microbatch} inside `TapChannel.forward`.")
            if self.is_sink:
                self._drain(len(self._shapes) - 1)
            self._timed(self.transport.end_step, self._patience)
            self._active = False

    def close(self) -> None:
        """Removes the hooks and frees the transport. Safe to call twice, and after a failure."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._active = False
        self._queue.clear()
        self.transport.close()
        self.failure = self.failure or "it was closed"

    def fail(self, reason: str) -> None:
        """Makes the channel unusable and tells the other ranks the reason. For failures outside of it, as in the pipeline."""
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

    def _space_for(self, scope: ForwardTaps) -> dict[int, torch.Tensor]:
        """Where the taps of a forward are copied to: a landing slot, or on the draft's rank its queue."""
        rows = self._shapes[scope.microbatch]
        if scope.stage in self._sequence:
            num_bytes = self.plan.message_bytes(scope.stage, rows)
            with self._naming(scope.stage, scope.microbatch):
                slot = self._timed(self.transport.reserve, scope.stage, num_bytes, self._patience)
            return self.plan.views(scope.stage, rows, slot)
        queued = self._queue.setdefault(scope.microbatch, {})
        for tap in self.plan.taps_of(scope.stage):
            queued[tap.layer] = torch.empty(tap.shape(rows), dtype=tap.dtype, device=self.transport.device)
        return queued

    def _finish(self, scope: ForwardTaps) -> None:
        """After a forward: its taps are complete and go their way."""
        stage, microbatch = scope.stage, scope.microbatch
        missing = [tap.layer for tap in self.plan.taps_of(stage) if tap.layer not in scope.seen]
        if missing:
            raise RuntimeError(
                f"The forward of stage {stage} on microbatch {microbatch} did not run layers {missing}."
            )
        self._captured.add((stage, microbatch))
        if stage in self._sequence and scope.seen:
            header = self._header(stage, microbatch)
            with self._naming(stage, microbatch):
                self.transport.publish(stage, header)
            self._sequence[stage] += 1
            self.bytes_sent += sum(tap.num_bytes(self._shapes[microbatch]) for tap in self.plan.taps_of(stage))
        if stage == self.plan.sink:
            self._drain(microbatch)

    def _header(self, stage: int, microbatch: int) -> Header:
        """What announces the next message of a lane."""
        return Header(
            kind=Kind.TAPS,
            epoch=self.epoch,
            sequence=self._sequence[stage],
            microbatch=microbatch,
            stage=stage,
            num_bytes=self.plan.message_bytes(stage, self._shapes[microbatch]),
            plan=self._digest,
            slot=self.transport.slot(stage),
            num_taps=len(self.plan.taps_of(stage)),
        )

    def _drain(self, microbatch: int) -> None:
        """Copies the messages of all microbatches up to this one out of their slots."""
        while self._active and self._drained <= min(microbatch, len(self._shapes) - 1):
            current = self._drained
            taps = self._queue.setdefault(current, {})
            for lane in self.plan.lanes:
                with self._naming(lane.stage, current):
                    content, payload = self._timed(self.transport.receive, lane.stage, self._patience)
                    expected = self._header(lane.stage, current)
                    Header.unpack(content).require(expected)
                    message = self.transport.collect(expected, payload)
                self._sequence[lane.stage] += 1
                taps.update(self.plan.views(lane.stage, self._shapes[current], message))
            self._drained += 1

    @contextmanager
    def _naming(self, stage: int, microbatch: int) -> Iterator[None]:
        """Says in an error of the transport which taps it was about."""
        try:
            yield
        except TapChannelError as error:
            rank = self.plan.stage_ranks[stage]
            raise type(error)(
                f"{error} (at the taps of stage {stage}, rank {rank}, microbatch {microbatch}, step {self.epoch})"
            ) from error

    def _timed(self, wait, *arguments):
        """Calls what may wait, and adds the time to the time blocked."""
        start = time.perf_counter()
        try:
            return wait(*arguments)
        finally:
            self.seconds_blocked += time.perf_counter() - start

    @contextmanager
    def _poisoning(self) -> Iterator[None]:
        """Whatever is raised inside ends the channel on all ranks."""
        if self.failure is not None:
            raise TapChannelError(
                f"The tap channel of rank {self.transport.rank} cannot be used any more: {self.failure}"
            )
        try:
            yield
        except BaseException as error:
            self.fail(f"rank {self.transport.rank} (stages {list(self.stages)}): {error or type(error).__name__}")
            raise
