"""Errors a user can cause and fix.

Every message names what was wrong, what was found, what is allowed and what to do. The command
line prints them without a traceback and exits with code 2; anything else is a bug.
"""

from __future__ import annotations


class MlaQuantError(ValueError):
    """Base class of errors caused by the user's input."""


class ConfigError(MlaQuantError):
    """A model configuration, recipe or settings file is invalid."""


class UnsupportedModelError(MlaQuantError):
    """The model has no MLA layer that can be quantized, or has one that is refused by name."""


class DataError(MlaQuantError):
    """A data set cannot be read, or holds nothing to calibrate on."""


class CalibrationError(MlaQuantError):
    """Calibration cannot start, continue or finish with what it was given."""


class CheckpointError(MlaQuantError):
    """A checkpoint is incomplete, inconsistent or does not match its settings."""


class RecordError(MlaQuantError):
    """A KV-cache record, its cache or what is to be stored in it does not fit its format."""
