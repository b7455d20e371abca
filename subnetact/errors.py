"""Every error and warning the library raises on purpose.

SubnetActError
├── SpecError (ValueError)            a subnet specification is malformed
│   ├── IllegalChoice                 a value is not among an axis' choices
│   └── ForeignSpec                   a specification of another space
├── InsertError (ValueError)          an elastic description does not fit its network
├── ViewError (RuntimeError)          something a zero-copy view must not do
├── CheckpointError (ValueError)      weights that do not fit the family
├── FileFormatError (ValueError)      a file is truncated, tampered with, or of a newer schema
│   └── MissingFile (FileNotFoundError)  a file, or the folder that it belongs in, does not exist
├── DeviceError (RuntimeError)        a device that this machine or this torch does not have
├── EngineError (ValueError)          an engine cannot be made with these arguments
├── MissingExtra (ImportError)        a package that this feature needs is not installed
├── NotCalibrated (RuntimeError)      a subnet has no normalisation statistics of its own
├── ExportError (RuntimeError)         a network, or this machine, that a format cannot be made from
├── RecompileRefused (RuntimeError)   a compiled engine got an input it was not prepared for
├── SearchError (ValueError)          a search cannot run, or not resume, with these arguments
├── TableError (ValueError)           a latency table is malformed
├── ResumeMismatch (ValueError)       unfinished work of other weights, subnets, data, settings or machines
├── ProfileMismatch (ValueError)      a latency table of another supernet or other subnets
├── PolicyError (ValueError)          a scheduling policy is configured or answers wrongly
├── TraceError (ValueError)           arrivals that cannot be simulated
└── RequestError                      one request failed; no other request is affected
    ├── InvalidRequest (ValueError)   refused at the door: input or deadline
    ├── QueueFull                     refused at the door: the queue is at its bound
    ├── DeadlinePassed                no subnet could answer in time any more
    ├── BatchFailed                   the forward pass raised
    │   └── WorkerHung                it did not come back, twice
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
    """A subnet specification is malformed."""


class IllegalChoice(SpecError):
    """A value is not among the choices of its axis."""


class ForeignSpec(SpecError):
    """A specification was made by another search space."""


class InsertError(SubnetActError, ValueError):
    """An elastic description does not fit the network it describes."""


class ViewError(SubnetActError, RuntimeError):
    """An operation that would change the weights every subnet shares."""


class CheckpointError(SubnetActError, ValueError):
    """Weights are unreadable, or do not fit the family they were loaded as."""


class FileFormatError(SubnetActError, ValueError):
    """A file is truncated, tampered with, of another kind, or of a newer schema."""


class MissingFile(FileFormatError, FileNotFoundError):
    """A file, or the folder that it belongs in, does not exist."""


class DeviceError(SubnetActError, RuntimeError):
    """A device that this machine, or this build of torch, does not have."""


class EngineError(SubnetActError, ValueError):
    """An engine cannot be made with these arguments."""


class MissingExtra(SubnetActError, ImportError):
    """A package that this feature needs is not installed."""


class NotCalibrated(SubnetActError, RuntimeError):
    """A subnet with BatchNorm has no statistics of its own."""


class ExportError(SubnetActError, RuntimeError):
    """A network cannot be written in a format, or this machine cannot write it; it says what can."""


class RecompileRefused(SubnetActError, RuntimeError):
    """A compiled engine got an input of a shape that it was not prepared for."""


class SearchError(SubnetActError, ValueError):
    """A search cannot run with these arguments, or a state is of another search."""


class TableError(SubnetActError, ValueError):
    """A latency table is malformed."""


class ResumeMismatch(SubnetActError, ValueError):
    """A file of unfinished work belongs to other weights, subnets, data, settings or machines."""


class ProfileMismatch(SubnetActError, ValueError):
    """A latency table was measured on another supernet or on other subnets."""


class PolicyError(SubnetActError, ValueError):
    """A scheduling policy is configured wrongly or gave an impossible answer."""


class TraceError(SubnetActError, ValueError):
    """Arrivals that cannot be simulated or replayed."""


class RequestError(SubnetActError):
    """One request failed; its batch mates and the batcher are unharmed."""


class InvalidRequest(RequestError, ValueError):
    """The request's input or deadline was refused at the door."""


class QueueFull(RequestError):
    """The queue was at its bound when the request arrived."""


class DeadlinePassed(RequestError):
    """No registered subnet could answer the request in time any more."""


class BatchFailed(RequestError):
    """The forward pass of the request's batch raised; the cause is chained."""


class WorkerHung(BatchFailed):
    """A worker did not come back from the request, the second one that tried; its result is discarded."""


class BatcherClosed(RequestError):
    """The batcher was closed before the request could run."""


class UncalibratedSubnetWarning(UserWarning):
    """A subnet with BatchNorm runs on statistics that belong to the whole supernet."""
