"""What turns the maps of a backbone into a label for every pixel: the heads of the papers' dense networks."""

from .segmenter import HEADS, Segmenter
from .semantic_fpn import SemanticFPN
from .upernet import FCN, UperNet

__all__ = ["FCN", "HEADS", "Segmenter", "SemanticFPN", "UperNet"]
