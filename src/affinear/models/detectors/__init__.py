"""Detectors: RetinaNet, Faster and Mask R-CNN, Cascade (Mask) R-CNN over any backbone of timm."""

from .detector import Detector, fitting
from .settings import DetectorSettings

__all__ = ["Detector", "DetectorSettings", "fitting"]
