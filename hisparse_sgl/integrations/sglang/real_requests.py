"""How many requests of a decode batch are no padding, for the kernels of a step."""

from __future__ import annotations

import torch


class RealRequests:
    """SGLang calls ``fill_`` twice in each step, mostly with the number that is there: that launches nothing.

    ``count`` is ``on_device``, int32 [1], once the launches so far have run.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.zeros(1, dtype=torch.int32, device=device)
        self.count = 0

    def fill_(self, count: int) -> None:
        """On the current stream, which is that of the forwards."""
        if count != self.count:
            self.on_device.fill_(count)
            self.count = count
