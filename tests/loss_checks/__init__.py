"""What every loss keeps to, each property once: `check_loss(case)`, or by `every(cases)` each as a test of its own.

`values`: the loop, derivatives, relations, identities. `batches`: degenerate and bad input. `blocks`: bounded memory.
`around`: memories, several lengths. `compiled`, `devices`: other ways to run. A case is a row of `cases.py`.
"""

from loss_checks import around, batches, blocks, compiled, devices, values
from loss_checks.properties import PROPERTIES, check_loss, every

__all__ = ["PROPERTIES", "around", "batches", "blocks", "check_loss", "compiled", "devices", "every", "values"]
