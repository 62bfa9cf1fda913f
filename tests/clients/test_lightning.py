"""Sparse and dense tables under lightning.Trainer, with one optimizer for the whole model."""

from pathlib import Path

import client_models
import lightning
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import sketchoptim as so

EPOCHS, MAX_NORM, LEARNING_RATE = 4, 0.2, 0.1

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # advice about speed
    # Lightning uses a name that torch deprecates.
    pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\):FutureWarning"),
]


class Classifier(lightning.LightningModule):
    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.model = client_models.Classifier(is_sparse=is_sparse)
        self.losses: list[float] = []
        self.learning_rates: list[float] = []

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(**batch)["loss"]
        self.losses.append(loss.item())
        self.learning_rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def configure_optimizers(self):
        optimizer = so.AdamW(client_models.parameters_of(self.model), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def fit(
    directory: Path,
    epochs: int = EPOCHS,
    *,
    is_sparse: bool,
    resume_from: Path | None = None,
    model_seed: int = 0,
) -> Classifier:
    so.enable_sparse_clipping()
    torch.manual_seed(model_seed)
    classifier = Classifier(is_sparse=is_sparse)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        gradient_clip_val=MAX_NORM,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,  # the test saves where and when it wants
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(client_models.examples(), batch_size=32)
    trainer.fit(classifier, data, ckpt_path=resume_from)
    return classifier


@pytest.fixture(scope="module", params=[True, False], ids=["sparse", "dense"])
def is_sparse(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def finished(is_sparse, tmp_path_factory) -> Classifier:
    with client_models.stepped_norms() as norms:
        classifier = fit(tmp_path_factory.mktemp("finished"), is_sparse=is_sparse)
    classifier.clipped_norms = norms
    return classifier


def test_lightning_lowers_the_loss(finished):
    assert sum(finished.losses[-16:]) < 0.7 * sum(finished.losses[:16])


def test_lightning_clips_the_gradient(finished):
    assert max(finished.clipped_norms) == pytest.approx(MAX_NORM, rel=1e-4)


def test_lightning_schedules_the_learning_rate(finished):
    per_epoch = finished.learning_rates[:: len(finished.learning_rates) // EPOCHS]
    assert per_epoch == pytest.approx([LEARNING_RATE * 0.8**epoch for epoch in range(EPOCHS)])


def test_lightning_compresses_the_table_alone(finished):
    client_models.assert_table_alone_is_compressed(finished.trainer.optimizers[0])


def test_lightning_resumes_bit_for_bit(finished, is_sparse, tmp_path):
    checkpoint = tmp_path / "half.ckpt"
    half = fit(tmp_path, EPOCHS // 2, is_sparse=is_sparse)
    half.trainer.save_checkpoint(checkpoint)
    # Other initial parameters, so that only what the checkpoint holds can bring the same result.
    resumed = fit(tmp_path, is_sparse=is_sparse, resume_from=checkpoint, model_seed=1)
    assert half.losses + resumed.losses == finished.losses
    client_models.assert_same_bits(resumed, finished)
