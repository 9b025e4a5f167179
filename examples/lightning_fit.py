"""Lightning's Trainer with Onefold as its strategy: `python examples/lightning_fit.py`.

Lightning starts the second process itself. `torchrun --nproc-per-node 2 examples/lightning_fit.py`
runs the same. Needs the `lightning` extra.
"""

import tempfile

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from onefold.lightning import Strategy

TEXT = torch.tensor(list(b"the same bytes, over and over, until the model knows them. " * 40))


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loader(start: int, number: int) -> DataLoader:
    rows = torch.stack([TEXT[at : at + 33] for at in range(start, start + number)])
    return DataLoader(TensorDataset(rows), batch_size=8)


def main() -> None:
    pl.seed_everything(0)
    model = Net()
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, monitor="val_loss")  # in the folder of rank 0
        trainer = pl.Trainer(
            strategy=Strategy(stage=3),  # the one line
            accelerator="cpu",
            devices=2,
            max_epochs=2,
            gradient_clip_val=1.0,
            callbacks=[best],
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(model, loader(0, 320), loader(900, 32))
        found = trainer.validate(model, loader(900, 32), ckpt_path="best", verbose=False)
        trainer.strategy.barrier()  # until all have read
    trainer.print(f"val_loss {found[0]['val_loss']:.4f}")


if __name__ == "__main__":
    main()
