"""Speech."""

from __future__ import annotations

from typing import Any

from . import Case, package


@package(
    "asteroid",
    "speech",
    "pytorch_lightning",
    *("soundfile", "huggingface-hub", "pyyaml", "librosa"),
    # torchaudio, which it asks for, needs a torch with CUDA on some machines, and is only used for augmentation
    without_dependencies=(
        *("asteroid", "asteroid-filterbanks", "julius", "torch-optimizer", "pytorch-ranger", "pb-bss-eval", "torch-stoi"),
    ),
)
def asteroid() -> list[Case]:
    import torch
    from asteroid.engine import System
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr
    from asteroid.models import ConvTasNet

    generator = torch.Generator().manual_seed(6)
    sources = torch.randn(24, 2, 160, generator=generator)
    rows = [(source.sum(0), source) for source in sources]

    def module() -> Any:
        net = ConvTasNet(n_src=2, n_filters=8, kernel_size=8, bn_chan=8, hid_chan=8, skip_chan=8, n_blocks=2, n_repeats=1)
        return System(net, torch.optim.SGD(net.parameters(), 0.01), PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx"), None)

    return [Case("ConvTasNet, permutation invariant SI-SDR", module, rows)]
