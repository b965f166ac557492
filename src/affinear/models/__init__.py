"""The vision families, registered with timm: `import affinear.models`, then `timm.create_model("mavit_tiny")`."""

from .dit import DiT
from .inline_cswin import InLineCSwin
from .inline_deit import InLineDeiT
from .inline_pvt import InLinePVT
from .inline_swin import InLineSwin
from .mavit import MAViT
from .mila import MILA
from .nalaformer import NaLaFormer
from .ravlt import RAVLT
from .rmt import RMT
from .secvit import SECViT

__all__ = [
    "MILA",
    "RAVLT",
    "RMT",
    "DiT",
    "InLineCSwin",
    "InLineDeiT",
    "InLinePVT",
    "InLineSwin",
    "MAViT",
    "NaLaFormer",
    "SECViT",
]
