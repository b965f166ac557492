"""The vision families, registered with timm: `import affinear.models`, then `timm.create_model("mavit_tiny")`."""

from .inline_cswin import InLineCSwin
from .inline_deit import InLineDeiT
from .inline_pvt import InLinePVT
from .inline_swin import InLineSwin
from .mavit import MAViT
from .nalaformer import NaLaFormer

__all__ = ["InLineCSwin", "InLineDeiT", "InLinePVT", "InLineSwin", "MAViT", "NaLaFormer"]
