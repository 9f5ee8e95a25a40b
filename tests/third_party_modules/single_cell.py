"""Counts of genes in single cells."""

from __future__ import annotations

from typing import Any

from . import Case, package


@package("scvi-tools", "single-cell", "lightning")
def scvi_tools() -> list[Case]:
    import torch
    from scvi.module import VAE, Classifier
    from scvi.train import ClassifierTrainingPlan, TrainingPlan

    generator = torch.Generator().manual_seed(3)
    counts = torch.poisson(torch.rand(24, 12, generator=generator) * 5, generator=generator)
    labels = torch.randint(4, (24, 1), generator=generator)
    rows = [{"X": x, "batch": torch.tensor([0]), "labels": label} for x, label in zip(counts, labels, strict=True)]
    small: dict[str, Any] = {"n_input": 12, "n_batch": 1, "n_hidden": 8, "n_latent": 3}

    def vae(**kwargs: Any) -> Any:
        return TrainingPlan(VAE(**small, **kwargs), n_epochs_kl_warmup=4)

    def classifier() -> Any:
        return ClassifierTrainingPlan(Classifier(12, n_hidden=8, n_labels=4, logits=True, use_batch_norm=False))

    return [
        Case("VAE", vae, rows),
        Case("VAE, without BatchNorm", lambda: vae(use_batch_norm="none", gene_likelihood="nb"), rows),
        Case("Classifier", classifier, rows),
    ]
