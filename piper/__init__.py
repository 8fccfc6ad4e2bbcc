"""Piper: distributed training of PyTorch models from named regions and a few directives."""

from piper.capture.regions import annotate
from piper.errors import CaptureError, PiperError

__all__ = ["CaptureError", "PiperError", "annotate"]
