"""Networks that hear: log-mel features, ours and Whisper's, and the Conformer, whole recordings or as they come."""

from .conformer import Conformer, Stream
from .features import LogMel
from .whisper import WhisperMel

__all__ = ["Conformer", "LogMel", "Stream", "WhisperMel"]
