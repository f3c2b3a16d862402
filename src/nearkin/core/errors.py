"""Every exception class of the package: caught by class, never recognised by name."""


class Diverged(ValueError):
    """Training cannot go on; the message says why and what to try."""


class Stopped(Exception):
    """Asked to stop (Ctrl-C, SIGTERM); everything is saved."""

    def __init__(self, number: int, step: int, way_on: str) -> None:
        super().__init__(f"stopped and saved at step {step}; go on with {way_on}")
        self.number = number


class CorruptCheckpoint(ValueError):
    """The file is not a whole checkpoint."""


class ForeignCheckpoint(ValueError):
    """The file is a whole checkpoint, of another run."""


class RankFailed(ValueError):
    """A rank failed, and every rank knows: each raises this with the same sentence."""


class MalformedRequest(ValueError):
    """The request is not of the form it must have."""


class UnsupportedMedia(ValueError):
    """A format that is not taken."""


class RequestTooLarge(ValueError):
    """More than a request may bring."""


class NoPicture(ValueError):
    """A row that was enrolled as a vector."""


class QueueFull(RuntimeError):
    """The line is full, or too slow; come again a little later."""


class UnfittingWeights(ValueError):
    """Weights of another architecture than the description's."""


class LabelConflict(ValueError):
    """The same item is enrolled under another label."""

    def __init__(self, name: str, id: int, label: str, wanted: str) -> None:
        what = name or "this item"
        super().__init__(
            f'{what} is enrolled as "{label}" already (id {id}), not as "{wanted}"; relabel or remove that row first'
        )


class MissingRow(ValueError):
    """No row has this id."""

    def __init__(self, id: int) -> None:
        super().__init__(f"no row has the id {id}")


class StoreUnavailable(OSError):
    """The place of the gallery is not what it was when it was opened."""


class StoreUnreachable(StoreUnavailable, ValueError):
    """The database is down, does not answer, or refuses what it is asked."""


class OutOfTime(Exception):
    """The budget is used up."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends as Ctrl-C does, so that half-written files and bars are gone."""


class RefusedVectors(ValueError):
    """Already a sentence."""


class UnreadablePicture(ValueError):
    """A picture that cannot be had; the message completes a sentence that begins with its name."""


class ExcessiveText(ValueError):
    """Text that a reader would spend more memory or recursion on than any honest file needs."""


class RefusedBody(Exception):
    """Ends the reading of a body; what is answered is kept with the visit."""
