"""The seam with torch. The permission for AMX's tiles: test_matrix_tiles.py; NCCL's groups need a GPU."""

from datetime import timedelta

import torch
from torch import distributed, nn

from quartet.seams import torch as seam


def test_a_gloo_group_forms_beside_the_default_one_and_carries_bytes() -> None:
    group = seam.gloo_group(distributed.HashStore(), 0, 1, timedelta(seconds=20), "127.0.0.1")
    data = torch.arange(5, dtype=torch.uint8)
    group.broadcast([data], distributed.BroadcastOptions()).wait()
    assert data.tolist() == [0, 1, 2, 3, 4]
    assert not distributed.is_initialized() or group is not distributed.group.WORLD


def test_every_kind_of_dropout_is_found() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    model = nn.Sequential(*(kind(0.5) for kind in kinds), nn.Linear(1, 1))
    assert [type(found) for found in seam.dropouts(model)] == list(kinds)
