"""One thread for torch in every test process: several processes share the cores, and some CPU
kernels (``index_put`` with ``accumulate``) give the same bits only on one thread."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
