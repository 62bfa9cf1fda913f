"""Small ensembles of MACH, and texts with labels to train them on."""

import torch
from torch import nn

from sketchoptim.nn import MACH, BagEncoder, FeatureHashing

PATHS = ["usr/bin/ls", "etc/passwd", "usr/lib/libc.so", "", "usr/share/doc", "bin/sh"]
LABELS = torch.tensor([0, 3, 59, 7, 7, 30])


def encoder() -> nn.Module:
    return BagEncoder(200, 8)


def bags(texts=PATHS):
    return FeatureHashing(features=200)(texts)


def ensemble(**options) -> MACH:
    return MACH(encoder, 8, 60, 10, **{"members": 3, **options})


def hidden_ensemble(classes: int, buckets: int, **options) -> MACH:
    """An ensemble over hidden vectors as they come, as wide as the buckets."""
    mach = MACH(nn.Identity, buckets, classes, buckets, **options)
    for head in mach.heads.values():
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
    return mach
