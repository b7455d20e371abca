"""Every error and warning that the library raises on purpose.

Users catch `SubnetActError` for everything, or one of its classes:

    SubnetActError
    ├── SpecError (ValueError)            a subnet specification or an argument of a family is malformed
    │   ├── IllegalChoice                 a value is not among an axis' choices
    │   └── ForeignSpec                   a specification belongs to another space
    ├── InsertError (ValueError)          an elastic description does not fit its network
    ├── ViewError (RuntimeError)          an operation that a zero-copy view must not do
    ├── CheckpointError (ValueError)      weights do not fit the family
    ├── FileFormatError (ValueError)      a file is truncated, tampered with, or of a newer schema
    │   └── MissingFile (FileNotFoundError)  a file, or the folder that it belongs in, does not exist
    ├── DeviceError (RuntimeError)        this machine or this torch does not have the device
    ├── EngineError (ValueError)          an engine cannot be made with these arguments
    ├── MissingExtra (ImportError)        a package that this feature needs is not installed
    ├── NotCalibrated (RuntimeError)      a subnet has no normalisation statistics of its own
    ├── ExportError (RuntimeError)        a network cannot be written in a format, or not on this machine
    ├── RecompileRefused (RuntimeError)   a compiled engine got an input it was not prepared for
    ├── SearchError (ValueError)          a search cannot run or resume with these arguments
    ├── TableError (ValueError)           a latency table is malformed
    ├── ResumeMismatch (ValueError)       saved work belongs to other weights, subnets, data or settings
    ├── ProfileMismatch (ValueError)      a latency table belongs to another supernet or other subnets
    ├── PolicyError (ValueError)          a scheduling policy is configured or answers wrongly
    ├── TraceError (ValueError)           arrivals cannot be simulated
    └── RequestError                      one request failed; no other request is affected
        ├── InvalidRequest (ValueError)   the input, the deadline or the minimum accuracy was refused
        ├── QueueFull                     the queue is full
        ├── DeadlinePassed                the request expired: no subnet can meet its deadline
        ├── BatchFailed                   the forward pass raised; the cause is chained
        │   └── WorkerHung                two workers hung over this request
        └── BatcherClosed                 the batcher no longer takes requests

UncalibratedSubnetWarning (UserWarning)
"""

__all__ = [
    "BatchFailed",
    "BatcherClosed",
    "CheckpointError",
    "DeadlinePassed",
    "DeviceError",
    "EngineError",
    "ExportError",
    "FileFormatError",
    "ForeignSpec",
    "IllegalChoice",
    "InsertError",
    "InvalidRequest",
    "MissingExtra",
    "MissingFile",
    "NotCalibrated",
    "PolicyError",
    "ProfileMismatch",
    "QueueFull",
    "RecompileRefused",
    "RequestError",
    "ResumeMismatch",
    "SearchError",
    "SpecError",
    "SubnetActError",
    "TableError",
    "TraceError",
    "UncalibratedSubnetWarning",
    "ViewError",
    "WorkerHung",
]


class SubnetActError(Exception):
    """Base of every error of this library."""


class SpecError(SubnetActError, ValueError):
    """A subnet specification is malformed, or a family cannot be built with these arguments."""


class IllegalChoice(SpecError):
    """A value is not among the choices of its axis."""


class ForeignSpec(SpecError):
    """A specification was made by another search space."""


class InsertError(SubnetActError, ValueError):
    """An elastic description does not fit the network it describes."""


class ViewError(SubnetActError, RuntimeError):
    """An operation on a view would change the weights that every subnet shares."""


class CheckpointError(SubnetActError, ValueError):
    """Weights are unreadable, or do not fit the family they were loaded as."""


class FileFormatError(SubnetActError, ValueError):
    """A file is truncated, tampered with, of another kind, or of a newer schema."""


class MissingFile(FileFormatError, FileNotFoundError):
    """A file, or the folder that it belongs in, does not exist."""


class DeviceError(SubnetActError, RuntimeError):
    """This machine, or this build of torch, does not have the device."""


class EngineError(SubnetActError, ValueError):
    """An engine cannot be made with these arguments."""


class MissingExtra(SubnetActError, ImportError):
    """A package that this feature needs is not installed."""


class NotCalibrated(SubnetActError, RuntimeError):
    """A subnet with BatchNorm has no statistics of its own."""


class ExportError(SubnetActError, RuntimeError):
    """A network cannot be written in a format, or this machine cannot write it; the message says what can."""


class RecompileRefused(SubnetActError, RuntimeError):
    """A compiled engine got an input of a shape that it was not prepared for."""


class SearchError(SubnetActError, ValueError):
    """A search cannot run with these arguments, or a saved state belongs to another search."""


class TableError(SubnetActError, ValueError):
    """A latency table is malformed."""


class ResumeMismatch(SubnetActError, ValueError):
    """A file of unfinished work belongs to other weights, subnets, data, settings or machines."""


class ProfileMismatch(SubnetActError, ValueError):
    """A latency table was measured on another supernet or on other subnets."""


class PolicyError(SubnetActError, ValueError):
    """A scheduling policy is configured wrongly or gave an impossible answer."""


class TraceError(SubnetActError, ValueError):
    """The given arrivals cannot be simulated or replayed."""


class RequestError(SubnetActError):
    """One request failed; its batch mates and the batcher are unharmed."""


class InvalidRequest(RequestError, ValueError):
    """The request was refused: its input, its deadline or its minimum accuracy is invalid."""


class QueueFull(RequestError):
    """The request was refused: `max_queue` requests were waiting when it arrived."""


class DeadlinePassed(RequestError):
    """The request expired: no registered subnet can meet its deadline any more."""


class BatchFailed(RequestError):
    """The forward pass of the request's batch raised; the cause is chained."""


class WorkerHung(BatchFailed):
    """Two workers in turn hung over the request; what they return later is discarded."""


class BatcherClosed(RequestError):
    """The batcher was closed before the request could run."""


class UncalibratedSubnetWarning(UserWarning):
    """A subnet with BatchNorm runs on statistics that belong to the whole supernet."""
