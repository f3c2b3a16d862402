"""Who is trained when: the roads of all losses side by side, as many jobs under way as there are hands."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from nearkin.compare.executor import Hands
from nearkin.compare.loss_search import Found, Jobs
from nearkin.compare.protocol import Job
from nearkin.compare.study import Study
from nearkin.core.errors import OutOfTime
from nearkin.training.loop import Callback

__all__ = ["Schedule", "each"]


def each(hands: Hands, jobs: list[Job], deadline: float | None = None) -> Iterator[tuple[Job, Any]]:
    """Every job with its result, in whatever order they end."""
    waiting, under_way = deque(jobs), 0
    while waiting or under_way:
        while waiting and hands.free():
            hands.submit(waiting.popleft())
            under_way += 1
        for job, result in hands.wait(deadline):
            under_way -= 1
            yield job, result


class Schedule:
    """Walks every road to its end. What a training gave goes into the study first, then to its road."""

    def __init__(self, roads: dict[str, Jobs], study: Study, total: int, callback: Callback) -> None:
        self.roads, self.study, self.total, self.callback = roads, study, total, callback
        self.found: dict[str, Found] = {}
        self.done = 0
        self._batch: dict[str, list[Job]] = {}  # of each road the jobs that it waits for
        self._results: dict[str, dict[int, Any]] = {}
        self._queue: deque[tuple[str, int]] = deque()

    def run(self, hands: Hands, deadline: float | None) -> bool:
        """Whether everything is done; False where time ran out."""
        for loss in self.roads:
            self._step(loss, None)
        self.callback({"event": "begun", "done": self.done, "total": self.total})
        under_way: dict[tuple[str, int], Job] = {}
        try:
            while self._queue or under_way:
                while self._queue and hands.free():
                    place = self._queue.popleft()
                    under_way[place] = self._batch[place[0]][place[1]]
                    hands.submit(under_way[place])
                for job, result in hands.wait(deadline):
                    place = next(place for place, one in under_way.items() if one == job)
                    del under_way[place]
                    self._take(place, job, result)
        except OutOfTime:
            return False
        return True

    def _take(self, place: tuple[str, int], job: Job, result: Any) -> None:
        loss, i = place
        self.study.keep(job, result)
        self._results[loss][i] = result
        self.done += 1
        self.callback({"event": "trained", "job": job, "result": result, "done": self.done, "total": self.total})
        if len(self._results[loss]) == len(self._batch[loss]):
            self._step(loss, [self._results[loss][k] for k in range(len(self._batch[loss]))])

    def _step(self, loss: str, answer: list[Any] | None) -> None:
        """The next jobs of a road; those that the study knows are answered at once."""
        while True:
            try:
                jobs = next(self.roads[loss]) if answer is None else self.roads[loss].send(answer)
            except StopIteration as end:
                self.found[loss] = end.value
                self.callback({"event": "chosen", "found": end.value})
                return
            known = {i: result for i, job in enumerate(jobs) if (result := self.study.result(job)) is not None}
            self.done += len(known)
            self._batch[loss], self._results[loss] = jobs, known
            self._queue.extend((loss, i) for i in range(len(jobs)) if i not in known)
            if len(known) < len(jobs):
                return
            answer = [known[i] for i in range(len(jobs))]
