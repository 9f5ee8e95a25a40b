"""Images."""

from typing import Any

from . import Case, package


@package("torch-uncertainty", "vision", "lightning", "torch-uncertainty[image]", "rich", "huggingface-hub", "timm")
def torch_uncertainty() -> list[Case]:
    import torch
    from torch import nn
    from torch_uncertainty.layers.bayesian import BayesLinear
    from torch_uncertainty.losses import DistributionNLLLoss, ELBOLoss
    from torch_uncertainty.models.mlp import mlp
    from torch_uncertainty.routines import ClassificationRoutine, RegressionRoutine, SegmentationRoutine

    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(24, 5, generator=generator)
    classes = list(zip(inputs, torch.randint(4, (24,), generator=generator), strict=True))
    numbers = list(zip(inputs, inputs[:, :2].square(), strict=True))
    masks = torch.randint(4, (24, 1, 6, 6), generator=generator)
    for index, mask in enumerate(masks):
        mask[:, index % 6 :] = 255  # not labelled
    images = list(zip(torch.randn(24, 3, 6, 6, generator=generator), masks, strict=True))

    def classification(kind: Any, loss: Any) -> Any:
        net = nn.Sequential(kind(5, 8), nn.Tanh(), kind(8, 4))
        return ClassificationRoutine(net, 4, loss(net))

    def segmentation() -> Any:
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 1))
        return SegmentationRoutine(net, 4, nn.CrossEntropyLoss())

    normal = {"dist_family": "normal"}
    regression = lambda: RegressionRoutine(mlp(5, 2, [8], **normal), 2, DistributionNLLLoss(), **normal)  # noqa: E731
    elbo = lambda net: ELBOLoss(net, nn.CrossEntropyLoss(), kl_weight=1e-3, num_samples=1)  # noqa: E731
    return [
        Case("ClassificationRoutine", lambda: classification(nn.Linear, lambda _: nn.CrossEntropyLoss()), classes),
        Case("SegmentationRoutine, unlabelled pixels", segmentation, images),
        Case("RegressionRoutine, likelihood", regression, numbers),
        Case("ClassificationRoutine, Bayesian", lambda: classification(BayesLinear, elbo), classes),
    ]


@package("lightly", "vision, metric learning", "pytorch_lightning")
def lightly() -> list[Case]:
    import torch
    from lightly.embedding import SelfSupervisedEmbedding
    from lightly.loss import BarlowTwinsLoss, NegativeCosineSimilarity, NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.utils.benchmarking import LinearClassifier
    from torch import nn

    generator = torch.Generator().manual_seed(8)
    views = torch.randn(24, 2, 3, 8, 8, generator=generator)
    pairs = [((first, second), index, f"{index}.png") for index, (first, second) in enumerate(views)]
    labelled = list(zip(views[:, 0], torch.randint(4, (24,), generator=generator), strict=True))

    class TwoViews(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten())
            self.head = SimCLRProjectionHead(288, 16, 8, batch_norm=False)

        def forward(self, *images: Any) -> Any:
            return tuple(self.head(self.backbone(image)) for image in images)

    def self_supervised(loss: Any) -> Case:
        name = f"SelfSupervisedEmbedding, {loss.__name__}"
        return Case(name, lambda: SelfSupervisedEmbedding(TwoViews(), loss(), None, None), pairs)

    def classifier() -> Any:
        return LinearClassifier(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()), 8, feature_dim=288, num_classes=4, topk=(1, 2))

    return [
        *(self_supervised(loss) for loss in (NTXentLoss, NegativeCosineSimilarity, BarlowTwinsLoss)),
        Case("LinearClassifier", classifier, labelled),
    ]
