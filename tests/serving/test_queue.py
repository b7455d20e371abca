import tracemalloc
import weakref
from bisect import insort

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from subnetact.serving.scheduling.queue import NO_FLOOR, EDFQueue

DEADLINES = st.integers(0, 20).map(float)
FLOORS = st.sampled_from([NO_FLOOR, NO_FLOOR, 70.0, 75.0])


class QueueModel(RuleBasedStateMachine):
    """The queue beside a plain sorted list of (deadline, order of arrival, floor)."""

    def __init__(self):
        super().__init__()
        self.queue = EDFQueue(lambda item: item % 3)
        self.model = []
        self.count = 0

    def add(self, deadline, floor):
        insort(self.model, (deadline, self.count, floor))
        self.count += 1

    @rule(deadline=DEADLINES, floor=FLOORS)
    def push(self, deadline, floor):
        self.queue.push(deadline, self.count, floor)
        self.add(deadline, floor)

    @rule(entries=st.lists(st.tuples(DEADLINES, FLOORS), min_size=1, max_size=30), ascending=st.booleans())
    def push_several(self, entries, ascending):
        for deadline, floor in sorted(entries) if ascending else entries:
            self.push(deadline, floor)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def take(self, data):
        k = data.draw(st.integers(1, len(self.model)))
        items = self.queue.take(k)
        expected, self.model = self.model[:k], self.model[k:]
        assert items == [item for _, item, _ in expected]

    @precondition(lambda self: self.model)
    @rule(k=st.integers(1, 8), accuracy=st.sampled_from([60.0, 70.0, 80.0]))
    def take_satisfied(self, k, accuracy):
        items = self.queue.take_satisfied(k, accuracy)
        expected = [entry for entry in self.model if entry[2] <= accuracy][:k]
        self.model = [entry for entry in self.model if entry not in expected]
        assert items == [item for _, item, _ in expected]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        entry = data.draw(st.sampled_from(self.model))
        assert self.queue.remove(entry[0], entry[1])
        assert not self.queue.remove(entry[0], entry[1])
        self.model.remove(entry)

    @invariant()
    def agrees(self):
        assert len(self.queue) == len(self.model)
        assert self.queue.classes(1, 9) == [(deadline, floor) for deadline, _, floor in self.model[1:9]]
        assert self.queue.demanding == sum(floor > NO_FLOOR for _, _, floor in self.model)
        assert self.queue.prioritised == sum(item % 3 != 0 for _, item, _ in self.model)
        for i, (deadline, _, floor) in enumerate(self.model):
            assert self.queue.deadline(i) == deadline
            assert self.queue.floor(i) == floor
        assert self.queue.deadlines(1, 3) == [deadline for deadline, _, _ in self.model[1::3]]


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(max_examples=60, stateful_step_count=30)


def test_taken_items_are_released():
    class Input:
        pass

    queue, x = EDFQueue(), Input()
    seen = weakref.ref(x)
    queue.push(1.0, x)
    for i in range(2000):
        queue.push(2.0 + i, None)
    queue.take(1)
    del x
    assert seen() is None
    assert not queue.remove(2.0, "what is not queued")
    assert not queue.remove(0.0, None)
    assert len(queue) == 2000


def test_long_queues_are_compacted():
    queue, entry_bytes = EDFQueue(), 3 * 8  # deadline, item and floor
    tracemalloc.start()
    try:
        for block in range(200):
            for item in range(block * 100, block * 100 + 100):
                queue.push(float(block), item)
            queue.take(100 if block % 2 else 99)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 4000 * entry_bytes, "20,000 entries were queued"
    assert len(queue) == 100
