"""Every error and warning that the library raises on purpose.

Users catch `SubnetActError` for everything, `RequestError` for what concerns one request and no other, or one
of the classes below; most are also the built-in error that fits, `ValueError` for example.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class SubnetActError(Exception):
    """Base of every error of this library."""


class SpecError(SubnetActError, ValueError):
    """A subnet specification or an argument of a family is malformed."""


class IllegalChoice(SpecError):
    """A value is not among the choices of its slot."""


class ForeignSpec(SpecError):
    """A specification belongs to another search space."""


class UserCodeError(SpecError):
    """A function that a command line names raised; the cause is chained."""


class InsertError(SubnetActError, ValueError):
    """A model cannot be made elastic, or not with this description."""


class ViewError(SubnetActError, RuntimeError):
    """An operation on a view would change the shared weights."""


class CacheMismatch(ViewError):
    """A subnet cannot continue on this key-value cache."""


class StaleWeights(SubnetActError, RuntimeError):
    """Copies or statistics belong to other weights than the present ones."""


class CheckpointError(SubnetActError, ValueError):
    """Weights are unreadable, or do not fit their family."""


class FileFormatError(SubnetActError, ValueError):
    """A file is damaged, of another kind, or of a newer schema."""


class MissingFile(FileFormatError, FileNotFoundError):
    """A file, or the folder that it belongs in, does not exist."""


class WriteError(SubnetActError, OSError):
    """A file or folder cannot be written; an earlier version is unchanged."""


class DeviceError(SubnetActError, RuntimeError):
    """This machine, or this build of torch, does not have the device."""


class PrecisionError(SubnetActError, RuntimeError):
    """The network or this machine cannot compute at this precision."""


class EngineError(SubnetActError, ValueError):
    """An engine cannot be made with these arguments."""


class MissingExtra(SubnetActError, ImportError):
    """A package that this feature needs is not installed."""


class NotCalibrated(SubnetActError, RuntimeError):
    """A subnet with BatchNorm has no BatchNorm statistics of its own."""


class ExportError(SubnetActError, RuntimeError):
    """A network cannot be written in this format, or not on this machine."""


class RecompileRefused(SubnetActError, RuntimeError):
    """A compiled engine got a shape that it was not prepared for."""


class SearchError(SubnetActError, ValueError):
    """A search cannot run with these arguments."""


class TableError(SubnetActError, ValueError):
    """A latency table is malformed."""


class ResumeMismatch(SubnetActError, ValueError):
    """Unfinished work belongs to other weights, data, settings or machines."""


class ProfileMismatch(SubnetActError, ValueError):
    """A latency table belongs to another supernet or to other subnets."""


class PolicyError(SubnetActError, ValueError):
    """A scheduling policy is configured or answers wrongly."""


class PipelineError(SubnetActError, ValueError):
    """The stages of a pipeline do not fit together or cannot be planned."""


class TraceError(SubnetActError, ValueError):
    """The arrivals cannot be simulated or replayed."""


class TrainingError(SubnetActError, RuntimeError):
    """A training cannot begin with these arguments, or cannot go on."""


class ServeError(SubnetActError, ValueError):
    """A server or a load test cannot run with these settings."""


class RequestError(SubnetActError):
    """One request failed; no other request and no batcher is affected."""


class InvalidRequest(RequestError, ValueError):
    """The input, the deadline or the minimum accuracy is invalid."""


class QueueFull(RequestError):
    """The request was refused, because the queue was full."""


class DeadlinePassed(RequestError):
    """The request expired: no subnet can meet its deadline any more."""


class BatchFailed(RequestError):
    """The forward pass of the request's batch raised; the cause is chained."""


class OutputNotFinite(BatchFailed):
    """The network's output for the request has NaN or an infinite number."""


class WorkerDied(BatchFailed):
    """Two workers in turn ended while they ran the request."""


class WorkerHung(BatchFailed):
    """Two workers in turn hung over the request."""


class BatcherClosed(RequestError):
    """The batcher was closed before the request could run."""


class LatencyTableWarning(UserWarning):
    """A latency table was measured on another machine or in another way, or its cells are unstable."""


class UncalibratedSubnetWarning(UserWarning):
    """A subnet with BatchNorm runs on statistics that belong to the whole supernet."""


class UnprovedInputWarning(UserWarning):
    """A subnet is called with an input of a form that no example had when the model was made elastic."""


_PUBLIC = SubnetActError, Warning
__all__ = [name for name, kind in vars().items() if isinstance(kind, type) and issubclass(kind, _PUBLIC)]
_LONGEST_TEXT = 2000


@contextmanager
def extra_needed(text: str) -> Iterator[None]:
    """Turn an error of imports inside the block into a `MissingExtra` that says what to install or repair.

    The package is absent, or it is there but raised while it was imported. `text` names it, and then what to
    install.
    """
    try:
        yield
    except (ImportError, RuntimeError, OSError) as error:
        cause: BaseException = error
        # transformers has an ImportError of its own for whatever went wrong.
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, ImportError):
            raise MissingExtra(f"{text} ({error})") from error
        needed, why = re.sub("[:;] (pip )?install .*", "", text), failure_text(cause)
        remedy = "install builds that fit each other, or remove the package that raised"
        text = f"{needed}, which is installed but cannot be imported ({why}); {remedy}"
        raise MissingExtra(text) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def failure_text(error: BaseException) -> str:
    """Return the class and the message of somebody else's exception, whatever its `__str__` does."""
    name = type(error).__name__
    try:
        text = str.__str__(str(error))
    except BaseException:  # the exception of a user must not end the thread that reports it
        return f"{name} (its __str__ raised)"
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]}... ({len(text)} characters)"
    return f"{name}: {text}"
