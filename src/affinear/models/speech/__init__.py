"""Networks that hear: log-mel features and the Conformer, whole recordings or as they come."""

from .conformer import Conformer, Stream
from .features import LogMel

__all__ = ["Conformer", "LogMel", "Stream"]
