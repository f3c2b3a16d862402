"""Every exception class of the package: caught by class, never recognised by name."""

__all__ = ["CorruptCheckpoint", "Diverged", "EnrolmentStopped", "ExcessiveText", "ForeignCheckpoint"]
__all__ += ["CorruptBackup", "EncoderChanged", "LabelConflict", "MalformedRequest"]
__all__ += ["MissingRow", "NoPicture", "OutOfTime", "QueueFull", "RankFailed", "RefusedBody", "RefusedVectors"]
__all__ += ["FactsChanged", "NotAllowed", "RowsAdded"]
__all__ += [
    "ReloadRefused",
    "RequestTooLarge",
    "Stopped",
    "StoreUnavailable",
    "StoreUnreachable",
    "Terminated",
    "UnfittingWeights",
]
__all__ += ["TablesExchanged", "UnreadablePicture", "UnsupportedMedia"]


class Diverged(ValueError):
    """Training has diverged; the message says why and what to try."""


class Stopped(Exception):
    """Training was stopped by a signal (Ctrl-C, SIGTERM) and has saved a checkpoint."""

    def __init__(self, signal_number: int, step: int, command: str) -> None:
        super().__init__(f"stopped and saved at step {step}; go on with {command}")
        self.number = signal_number


class CorruptCheckpoint(ValueError):
    """The checkpoint file is incomplete or corrupt."""


class CorruptBackup(ValueError):
    """A point of a gallery's backup is incomplete or corrupt; the message begins with its file."""


class ForeignCheckpoint(ValueError):
    """The checkpoint is intact but belongs to another run."""


class RankFailed(ValueError):
    """One rank has failed; every rank raises this with the same message."""


class MalformedRequest(ValueError):
    """The request is not in the required form."""


class UnsupportedMedia(ValueError):
    """The media type or picture format is not accepted."""


class RequestTooLarge(ValueError):
    """The request exceeds a limit: bytes, pictures or pixels."""


class NotAllowed(ValueError):
    """What a file asks for and only the user may allow: code to be run, a path out of its folder."""


class NoPicture(ValueError):
    """The row has no picture: it was enrolled as a vector."""


class QueueFull(RuntimeError):
    """The queue is full or too slow; the client should retry later."""


class ReloadRefused(ValueError):
    """The service does not take the run as it is now; the one before goes on."""


class UnfittingWeights(ValueError):
    """The weights are those of another architecture than the description names."""


class LabelConflict(ValueError):
    """The item is already enrolled under another label."""

    def __init__(self, name: str, id: int, label: str, new_label: str) -> None:
        what = name or "this item"
        super().__init__(
            f'{what} is enrolled as "{label}" already (id {id}), not as "{new_label}"; relabel or remove that row first'
        )


class StaleGroups(ValueError):
    """The groups have changed since the version that a step was decided on."""

    def __init__(self, version: int, current: int) -> None:
        super().__init__(f"the groups have changed meanwhile (version {current}, not {version}); look at them again")


class MissingRow(ValueError):
    """No row has this id, or no group this number."""

    def __init__(self, id: int, what: str = "row") -> None:
        super().__init__(f"no row has the id {id}" if what == "row" else f"there is no {what} {id}")


class StoreUnavailable(OSError):
    """The gallery's store is missing or has been replaced since it was opened."""


class EncoderChanged(StoreUnavailable):
    """The gallery was upgraded to another encoder since the item was embedded; embed it again."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: was upgraded to another encoder meanwhile; send the item again")


class RowsAdded(Exception):
    """Rows that were enrolled during an upgrade need a bridge, or more time than a transaction should take."""


class StoreUnreachable(StoreUnavailable, ValueError):
    """The database is down, does not answer, or refuses the statement."""


class TablesExchanged(StoreUnavailable):
    """Other tables took the place of those that were read: the gallery was upgraded, restored or copied over."""

    def __init__(self, where: str) -> None:
        super().__init__(f"{where}: was replaced while it was read; try again")


class EnrolmentStopped(Exception):
    """The service ends while it enrols; what is enrolled stays."""


class OutOfTime(Exception):
    """The time budget is used up."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C: temporary files and progress bars are removed on the way out."""


class RefusedVectors(ValueError):
    """A vector file is refused with a complete message that needs no wrapping."""


class UnreadablePicture(ValueError):
    """The picture cannot be read; the message completes a sentence that begins with the picture's name."""


class ExcessiveText(ValueError):
    """The text would cost its reader more memory or recursion than any well-meant file needs."""


class RefusedBody(Exception):
    """Stops reading a request body; the response is already decided."""


class FactsChanged(Exception):
    """The description of a gallery is not as it was when it was last read."""
