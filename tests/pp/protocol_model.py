"""
A pipeline with tap lanes as a state machine, small enough to explore every interleaving.

Each rank runs its order; the two ends of a lane are the library's own `SourceEnd` and `SinkEnd`; headers and credits
are queues in between. Writing and reading a slot take two steps each, so that an overlap shows. `GlooModel` is the
lane of symmetric memory, whose slots are given back by gloo's two-sided messages.
"""

from trl_codraft.pp.taps.lane import SinkEnd, SourceEnd


class Violation(AssertionError):
    """The protocol did something that must never happen."""


class Model:
    """
    Args:
        order: by rank, the actions of the schedule.
        num_stages: stages of the pipeline; the last one takes the taps.
        sources: stages with a lane.
        slots: landing slots of every lane.
    """

    def __init__(self, order, num_stages, sources, slots, source_end=SourceEnd, sink_end=SinkEnd):
        self.order, self.num_stages, self.sources, self.slots = order, num_stages, tuple(sources), slots
        self.source_end, self.sink_end = source_end, sink_end
        self.position = {action: (rank, i) for rank, actions in enumerate(order) for i, action in enumerate(actions)}

    def start(self):
        """(program counters, sub-steps, per lane (sent, credited, released, headers, credits, slot contents))."""
        lane = (0, 0, 0, (), (), (None,) * self.slots)
        return (0,) * len(self.order), (0,) * len(self.order), (lane,) * len(self.sources)

    def is_done(self, action, counters):
        rank, index = self.position[action]
        return counters[rank] > index

    def is_ready(self, action, counters):
        stage, microbatch, backward = action
        if not backward:
            return stage == 0 or self.is_done((stage - 1, microbatch, False), counters)
        last = stage == self.num_stages - 1
        return self.is_done((stage, microbatch, False), counters) and (
            last or self.is_done((stage + 1, microbatch, True), counters)
        )

    def successors(self, state):
        """Every state that one atomic step of one rank, or one delivery of a credit, leads to."""
        counters, substeps, lanes = state
        for index, lane in enumerate(lanes):
            if lane[4]:
                yield counters, substeps, _replaced(lanes, index, self.deliver_credit(lane))
        for rank, actions in enumerate(self.order):
            if counters[rank] == len(actions):
                continue
            action = actions[counters[rank]]
            step = self.step(action, counters, substeps[rank], lanes)
            if step is not None:
                substep, lanes_after, finished = step
                yield (
                    _replaced(counters, rank, counters[rank] + finished),
                    _replaced(substeps, rank, 0 if finished else substep),
                    lanes_after,
                )

    def step(self, action, counters, substep, lanes):
        """(next sub-step, lanes, finished), or `None` where the rank waits."""
        stage, microbatch, backward = action
        if substep == 0 and not self.is_ready(action, counters):
            return None
        if not backward and stage in self.sources:
            index = self.sources.index(stage)
            after = self.send(lanes[index], microbatch, substep)
            return after and (substep + 1, _replaced(lanes, index, after), substep == 2)
        if not backward and stage == self.num_stages - 1 and self.sources:
            # Lane after lane: header and first look, second look and credit.
            index, part = divmod(substep, 2)
            after = self.receive(lanes[index], microbatch, part)
            return after and (substep + 1, _replaced(lanes, index, after), substep + 1 == 2 * len(self.sources))
        return substep, lanes, True

    def ends(self, lane):
        source, sink = self.source_end(self.slots), self.sink_end(self.slots)
        source.sent, source.released, sink.released = lane[:3]
        return source, sink

    def send(self, lane, microbatch, substep):
        source, sink = self.ends(lane)
        sent, credited, released, headers, credits, contents = lane
        if substep == 0:
            if not source.has_free_slot:
                return None
            overwritten = contents[source.slot]
            if overwritten is not None and overwritten >= sink.released:
                raise Violation(f"slot {source.slot} is filled with {microbatch} while {overwritten} is still in it")
            return sent, credited, released, headers, credits, _replaced(contents, source.slot, -1)
        if substep == 1:
            return sent, credited, released, headers, credits, _replaced(contents, source.slot, microbatch)
        source.publish()
        return source.sent, credited, released, (*headers, microbatch), credits, contents

    def receive(self, lane, microbatch, part):
        source, sink = self.ends(lane)
        sent, credited, released, headers, credits, contents = lane
        if part == 0 and not headers:
            return None
        if contents[sink.slot] != microbatch:
            raise Violation(f"slot {sink.slot} holds {contents[sink.slot]} where {microbatch} was to be read")
        if part == 0:
            return sent, credited, released, headers[1:], credits, contents
        return sent, credited, sink.released + 1, headers, (*credits, sink.release()), contents

    def deliver_credit(self, lane):
        source, _ = self.ends(lane)
        source.credit(lane[4][0])
        return lane[0], source.released, lane[2], lane[3], lane[4][1:], lane[5]

    def is_over(self, state):
        return all(counter == len(actions) for counter, actions in zip(state[0], self.order, strict=True))

    def explore(self):
        """(number of states, deadlocked states): all that can be reached."""
        seen, deadlocks = {self.start()}, []
        stack = list(seen)
        while stack:
            state = stack.pop()
            after = list(self.successors(state))
            if not after and not self.is_over(state):
                deadlocks.append(state)
            for following in after:
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
        return len(seen), deadlocks


class GlooModel(Model):
    """
    A send of header `n` is complete when its receive was posted, which is when all but `slots` of the `n + 1` headers
    were received and their taps copied out. A source fills a landing slot when it has a free buffer to send a header
    from.

    Args:
        landing: landing slots of every lane; `slots` are the receives that are posted at a time.
    """

    def __init__(self, *arguments, landing, **named):
        super().__init__(*arguments, **named)
        self.landing = landing

    def start(self):
        counters, substeps, lanes = super().start()
        return counters, substeps, tuple((*lane[:5], (None,) * self.landing) for lane in lanes)

    def successors(self, state):
        for index, lane in enumerate(state[2]):
            sent, credited, released = lane[:3]
            if credited < min(sent, released + self.slots):
                credit = (*lane[:4], (credited,), lane[5])
                yield state[0], state[1], _replaced(state[2], index, self.deliver_credit(credit))
        yield from super().successors(state)

    def ends(self, lane):
        source, sink = super().ends(lane)
        return _Landing(source, lane[0] % self.landing), _Landing(sink, lane[2] % self.landing)

    def receive(self, lane, microbatch, part):
        after = super().receive(lane, microbatch, part)
        return after and (*after[:4], (), after[5])  # no credit travels but by the receive


class _Landing:
    """An end of a lane of which a message lands in another slot than its header."""

    def __init__(self, end, slot):
        self.__dict__.update(end=end, slot=slot)

    def __getattr__(self, name):
        return getattr(self.end, name)


def _replaced(values, index, value):
    return (*values[:index], value, *values[index + 1 :])
