"""A sparse embedding and dense layers under lightning.Trainer, with one optimizer for all."""

from pathlib import Path

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sketchoptim as so

ROWS, CLASSES, EPOCHS = 300, 7, 6

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # advice about speed
    # Lightning uses a name that torch deprecates.
    pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\):FutureWarning"),
]


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 16, sparse=True)
        self.dense = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.losses: list[float] = []
        self.learning_rates: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        ids, labels = batch
        loss = nn.functional.cross_entropy(self.dense(self.table(ids)), labels)
        self.losses.append(loss.item())
        self.learning_rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def configure_optimizers(self):
        optimizer = so.Adam(self.parameters(), lr=2e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        so.clip_grad_norm_(self.parameters(), gradient_clip_val)


def fit(
    directory: Path, epochs: int = EPOCHS, *, resume_from: Path | None = None, model_seed: int = 0
) -> Classifier:
    torch.manual_seed(model_seed)
    model = Classifier()
    ids = torch.randint(ROWS, (1024,), generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,  # the test saves where and when it wants
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(ids, ids % CLASSES), batch_size=32)
    trainer.fit(model, data, ckpt_path=resume_from)
    return model


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Classifier:
    return fit(tmp_path_factory.mktemp("finished"))


def test_lightning_lowers_the_loss(finished):
    assert sum(finished.losses[-32:]) < 0.5 * sum(finished.losses[:32])


def test_lightning_schedules_the_learning_rate(finished):
    per_epoch = finished.learning_rates[:: len(finished.learning_rates) // EPOCHS]
    assert per_epoch == pytest.approx([2e-2 * 0.8**epoch for epoch in range(EPOCHS)])


def test_lightning_compresses_the_sparse_table_alone(finished):
    table, *rest = so.memory_report(finished.trainer.optimizers[0]).parameters
    assert 0 < table.state_bytes < ROWS  # less than one byte a row
    assert all(parameter.state_bytes == parameter.exact_bytes for parameter in rest)


def test_lightning_resumes_bit_for_bit(finished, tmp_path):
    checkpoint = tmp_path / "half.ckpt"
    fit(tmp_path, EPOCHS // 2).trainer.save_checkpoint(checkpoint)
    # Other initial parameters, so that only what the checkpoint holds can bring the same result.
    resumed = fit(tmp_path, resume_from=checkpoint, model_seed=1)
    assert resumed.losses == finished.losses[len(finished.losses) // 2 :]
    for name, value in finished.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
