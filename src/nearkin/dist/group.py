"""The process group: ranks that train, evaluate, embed or enrol together, share work, and fail together.

Every rank makes the same calls in the same order. Between them ranks work at their own pace: they wait for one another
by counting in a store, not in an exchange, so that a long share never runs into a time limit.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nearkin.core import checks
from nearkin.core.errors import RankFailed
from nearkin.dist import collectives
from nearkin.dist.calls import Call, Progress
from nearkin.dist.collectives import Group
from nearkin.dist.ending import end_all, one_line
from nearkin.dist.heartbeat import Heartbeat, seconds_of_patience

__all__ = ["ALONE", "ProcessGroup", "Progress"]

T = TypeVar("T")
_JOIN = 50.0  # seconds that ranks have to make their groups
_EXCHANGE = 300.0  # seconds for an exchange between ranks that are all there


class ProcessGroup:
    """All processes of an initialised torch.distributed, for the functions that take `group`.

        with dist.ProcessGroup() as group:
            scores = evaluation.retrieval(embeddings, labels, group=group)

    Every process makes one, and the same calls with it. They leave together. A world of one, or none, works alone.

    patience: seconds without a sign of life after which a rank is lost; `NEARKIN_RANK_TIMEOUT`, or 20, unless given.
    on_failure: what a failed or lost rank does to the others. "raise": `RankFailed` with the same sentence on every
    rank, at its next call of the group. "exit": the process ends, with exit code 4 for a lost rank, else with the code
    of the failed one, as training needs it: its main thread may hang in the exchanges of a step. `dist.join` makes one
    that exits.
    """

    def __init__(self, patience: float | None = None, *, on_failure: str = "raise", alone: bool = False) -> None:
        if patience is not None:
            checks.positive("patience", patience)
        checks.one_of("on_failure", on_failure, ("raise", "exit"))
        self.rank, self.size = (0, 1) if alone else (collectives.rank(), collectives.size())
        self.local_rank = 0 if alone else int(os.environ.get("LOCAL_RANK", self.rank))
        self._exits = on_failure == "exit"
        self.world: Group = dist.group.WORLD if self.size > 1 else None  # torch's own group, for the collectives
        self._calls = 0
        self._exchange_group: Group = None  # exchanges what is in main memory
        self._proposal: tuple[Tensor, Any] | None = None
        if self.size > 1:
            self._join(seconds_of_patience() if patience is None else patience)

    def _join(self, patience: float) -> None:
        self._store = _own_store("group")
        self.heartbeat = Heartbeat(self.rank, self.size, _own_store("heartbeat"), patience, self._exits)
        limit = max(_JOIN, 2.5 * patience)
        with self._failing_together():
            try:
                self.heartbeat.start(None if self._exits else limit)
            except RuntimeError:
                if self._exits:
                    raise
                absent = ", ".join(map(str, self.heartbeat.absent()))
                raise RankFailed(f"rank {absent} of {self.size} did not join within {limit:.0f} s") from None
            with self.work("joining"):
                pass
            if dist.get_backend() != "gloo":
                self._exchange_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=_EXCHANGE))

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes what all share."""
        return self.rank == 0

    # --- who does what

    def share(self, number: int, unit: int = 1) -> slice:
        """The part of `number` items that this rank does: whole units, one after another in the order of the ranks."""
        units = -(-number // unit)
        first, last = (units * place // self.size * unit for place in (self.rank, self.rank + 1))
        return slice(min(first, number), min(last, number))

    def share_sizes(self, number: int) -> tuple[int, ...]:
        """How many of `number` items each rank does: as evenly as possible."""
        return tuple(number * (rank + 1) // self.size - number * rank // self.size for rank in range(self.size))

    def first_on_machine(self, what: str, work: Callable[[], T], rank0_first: bool = False) -> T:
        """The same work on every rank, on one rank per machine before the others: these find its files.

        rank0_first: on rank 0 before those, for a disk that the machines share.
        """
        if self.size == 1:
            return work()
        result: T | None = None
        own_turn = (rank0_first and not self.first) + (self.local_rank > 0)
        for turn in range(2 + rank0_first):
            with self.work(what):
                if turn == own_turn:
                    result = work()
        return result  # type: ignore[return-value]

    def on_rank0(self, what: str, work: Callable[[], T]) -> T:
        """What the work of rank 0 returns, as JSON has it, on every rank; the others wait however long it takes."""
        result: Any = None
        with self.work(what):
            if self.first:
                result = work()
        value: T = self.values(result)[0]
        return value

    @contextmanager
    def work(self, what: str, progress: Progress | None = None, total: int = 0) -> Iterator[Progress]:
        """A part in which each rank works by itself; when it ends, all ranks have done theirs.

        Yields `report(done, of)`, to be called often with what is done of this rank's own share. Rank 0 then calls
        `progress(done, total)` for all ranks together.
        """
        if self.size == 1:
            yield progress or (lambda done, of: None)
            return
        self._calls += 1
        call = Call(self, self._calls, what, progress, total)
        try:
            yield call.report
            call.wait()
            self.heartbeat.progress += 1
        except Exception as error:
            if not self._exits:
                self._fail(error)
            raise

    def advance(self) -> None:
        """A part of a training step is done; a rank that stays behind for long is lost."""
        if self.size > 1:
            self.heartbeat.progress += 1

    def check(self) -> None:
        """Raises `RankFailed` where a rank has failed or is lost; if this group exits, its heartbeat does that."""
        if self._exits:
            return
        with self._naming_the_store():
            failure = self.heartbeat.failure or self.heartbeat.reported()
        if failure is not None:
            raise RankFailed(failure.sentence)

    # --- what all have

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of all ranks in the order of the ranks, on the device of this rank's."""
        return tensor if self.size == 1 else self._exchange(collectives.gather, tensor.detach().cpu()).to(tensor.device)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of integers over ranks."""
        return tensor if self.size == 1 else self._exchange(collectives.total, tensor.cpu()).to(tensor.device)

    def values(self, value: Any) -> list[Any]:
        """The value of every rank, as JSON has it, in the order of the ranks."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(f"{json.dumps(value)}\n".encode()), dtype=torch.uint8)
        return [json.loads(line) for line in bytes(self.rows(text).numpy()).splitlines()]

    def agree(self, **tensors: Tensor | None) -> None:
        """Refuses ranks that have different tensors, before they make a wrong number of them."""
        if self.size == 1:
            return
        digests = self.values({name: t if t is None else collectives.digest(t).tolist() for name, t in tensors.items()})
        for rank, name in ((rank, name) for rank in range(self.size) for name in digests[0]):
            if digests[rank].get(name) != digests[0][name]:
                raise RankFailed(f"{name} must be the same on all ranks; rank {rank} has others than rank 0")

    def propose(self, stop: int, save: bool) -> None:
        """Begins to ask all ranks whether to stop (a signal's number) or to save (rank 0 decides); see `decision`."""
        flags = torch.tensor([stop, int(save and self.first)])
        handle = dist.all_reduce(flags, dist.ReduceOp.MAX, self.world, async_op=True) if self.size > 1 else None
        self._proposal = flags, handle

    def decision(self) -> tuple[int, bool]:
        """The signal by which a rank was asked to stop, or 0; and whether to save: the same on every rank."""
        assert self._proposal is not None
        flags, handle = self._proposal
        if handle is not None:
            handle.wait()
        stop, save = flags.tolist()
        return stop, bool(save)

    def restarted(self) -> bool:
        """Whether torchrun has started any of the ranks again: it counts on the machine of the one that failed."""
        return any(self.values(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))

    def device(self, wanted: torch.device) -> torch.device:
        """The device of this rank where each has its own."""
        if self.size > 1 and wanted.type == "mps":
            raise ValueError(f"training.device=mps takes one process, got {self.size} ranks; use training.device=cpu")
        if self.size == 1 or wanted.type != "cuda":
            return wanted
        if "LOCAL_RANK" not in os.environ:  # not by torchrun: the launcher has chosen the devices
            return torch.device("cuda", torch.cuda.current_device())
        if self.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"training.device=cuda needs a GPU for each rank of a machine: it has {torch.cuda.device_count()}, and "
                f"this is rank {self.local_rank} on it; start fewer with --nproc-per-node, or use training.device=cpu"
            )
        return torch.device("cuda", self.local_rank)

    def _exchange(self, exchange: Callable[[Tensor, Group], T], tensor: Tensor) -> T:
        """Begins when all ranks are there, so that it lasts as long as the bytes take."""
        with self.work("exchanging"):
            pass
        try:
            return exchange(tensor, self._exchange_group)
        except RuntimeError as error:
            if self._exits:
                raise
            self.heartbeat.await_failure(exchange_failed=True)  # so that the lost rank is named
            self.check()
            raise RankFailed(f"rank {self.rank}: the exchange failed ({one_line(error)})") from None

    def count(self, name: str, number: int) -> int:
        """Adds to a count that all ranks see, and returns it."""
        with self._naming_the_store():
            return int(self._store.add(name, number))

    @contextmanager
    def _naming_the_store(self) -> Iterator[None]:
        """It lives in the launcher, or in rank 0."""
        try:
            yield
        except RuntimeError as error:
            if self._exits:
                raise
            lost = f"rank {self.rank} of {self.size} has lost the launcher, or rank 0 ({one_line(error)})"
            raise RankFailed(lost) from None

    # --- leaving

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessGroup":
        return self  # of a module that is copied with what it holds

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.size == 1:
            return
        try:
            if error is not None:
                self._fail(error)
                return
            with self._failing_together():
                with self.work("leaving"):  # together, when rank 0 has written everything
                    pass
                self.heartbeat.leave()
        finally:
            self.heartbeat.stop()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Tells the other ranks of an error of this one, which is raised then; if the group exits, by one rank only."""
        if self._exits:
            end_all(self.heartbeat, error)
        elif isinstance(error, Exception) and not isinstance(error, RankFailed):
            sentence = f"rank {self.rank}: {one_line(error)}"
            self.heartbeat.report(sentence, 2)
            if isinstance(error, ValueError | TypeError | OSError):
                raise RankFailed(sentence) from error


ALONE = ProcessGroup(alone=True)  # a group of one process, which never waits


def _own_store(kind: str) -> Any:
    """The store in which the ranks met, under names not used before, over a connection of its own where torch has one.

    Every rank must ask for one of a kind as often as the others.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    number = store.add(f"nearkin/{kind}/{dist.get_rank()}", 1)
    own = store.clone() if hasattr(store, "clone") else store
    return getattr(dist, "PrefixStore")(f"nearkin/{kind}/of/{number}", own)  # noqa: B009 - which torch does not export
