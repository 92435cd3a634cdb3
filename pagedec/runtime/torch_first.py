"""torch, imported before all that needs it: none of it is garbage, and looking for some takes a fifth of the time."""

from __future__ import annotations

import gc

_was_enabled = gc.isenabled()
gc.disable()
try:
    import torch  # noqa: F401
finally:
    if _was_enabled and not gc.get_freeze_count():  # what the program has frozen stays so
        gc.freeze()
        gc.unfreeze()  # what there is counts as old now: not looked at three times before it does
    if _was_enabled:
        gc.enable()
