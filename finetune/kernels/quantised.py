"""Import bitsandbytes' types and functions for 4-bit and 8-bit weights, or placeholders.

If bitsandbytes is not installed, nothing is an instance of the placeholder classes, and the
placeholder functions raise an error that names the missing extra.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from finetune.errors import FinetuneError
from finetune.version import missing

if TYPE_CHECKING:
    from bitsandbytes import matmul_4bit
    from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
    from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
    from peft.tuners.lora.bnb import Linear4bit as AdaptedLinear4bit
else:
    try:
        from bitsandbytes import matmul_4bit
        from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
        from bitsandbytes.nn import Linear4bit, Linear8bitLt, Params4bit
        from peft.tuners.lora.bnb import Linear4bit as AdaptedLinear4bit
    except ImportError:

        def _missing(*_: Any, **__: Any) -> Any:
            raise FinetuneError(f"weights in four or eight bits need {missing('bitsandbytes')}")

        class _Missing(nn.Module):
            __init__ = _missing

        Linear4bit = type("Linear4bit", (_Missing,), {})
        Linear8bitLt = type("Linear8bitLt", (_Missing,), {})
        AdaptedLinear4bit = type("AdaptedLinear4bit", (_Missing,), {})
        Params4bit = type("Params4bit", (nn.Parameter,), {})
        QuantState = type("QuantState", (), {"__init__": _missing})
        dequantize_4bit = quantize_4bit = matmul_4bit = _missing

__all__ = [
    "AdaptedLinear4bit",
    "Linear4bit",
    "Linear8bitLt",
    "Params4bit",
    "QuantState",
    "dequantize_4bit",
    "matmul_4bit",
    "quantize_4bit",
]
