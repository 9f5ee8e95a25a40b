"""The errors of the package, with one base class. Each is constructed from a message alone, so it can be pickled."""

from __future__ import annotations


class AccumulationError(Exception):
    """The base class of all errors of this package. Each is also a built-in type of error, such as ValueError."""


class DoesNotAddUpError(AccumulationError, ValueError):
    """The weighted losses or gradients of the parts of a batch do not add up to those of the whole batch."""


class UnreadableLossError(AccumulationError, ValueError):
    """The graph of the loss shows no denominator."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(found)


class UnsplittableBatchError(AccumulationError, ValueError):
    """The package cannot tell which parts of a batch are its rows."""

    @classmethod
    def because(cls, found: str) -> UnsplittableBatchError:
        """The error with its fix."""
        return cls(
            f"The batch cannot be split into micro-batches: {found}. Say how to split it: GradientAccumulation(split=...) takes a"
            " function split(batch, size) that returns the micro-batches as a list."
        )


class RowWiseError(AccumulationError, RuntimeError):
    """A submodule cannot run in micro-batches."""

    @classmethod
    def of(cls, name: str, problem: str) -> RowWiseError:
        """The error of the submodule with this name."""
        return cls(f"row_wise={name!r}: {problem}")


class SeamError(AccumulationError, RuntimeError):
    """Another library behaves differently from the versions for which this package was written."""


# --- without a public name of their own ---------------------------------------------------------------------------------


class ArgumentError(AccumulationError, ValueError):
    """An argument, or the return value of a user's function, has a wrong value."""


class WrongTypeError(AccumulationError, TypeError):
    """An argument, or the return value of a user's function, has a wrong type."""


class UsageError(AccumulationError, RuntimeError):
    """The program does something that windows do not allow."""


class NotFiniteError(AccumulationError, FloatingPointError):
    """A loss or a gradient is infinite or NaN."""


class MissingEntryError(AccumulationError, KeyError):
    """A batch has no entry of that name."""
