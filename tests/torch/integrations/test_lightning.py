"""Lightning's Trainer on private batches: what it sees, what it saves, and when it ends."""

import logging

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.errors import InvalidValue, NotPrivate, Unsupported
from farthing.noise.lattice import SeededStream

pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from farthing.torch.integrations.lightning import Private

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers and folders
LOSS = nn.CrossEntropyLoss(reduction="none")
X = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
PUBLIC = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[:200], Y[:200]), batch_size=100)


class Net(LightningModule):
    """An ordinary module, with a training step that would leak."""

    def __init__(self, optimizer="sgd"):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer, self.called = optimizer, 0

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        self.called += 1
        loss = LOSS(self(batch[0]), batch[1]).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("right", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        if self.optimizer is None:
            return None
        if self.optimizer == "adam":
            return ft.torch.DPAdam(self.parameters(), 1e-2)
        sgd = torch.optim.SGD(self.parameters(), 0.5)
        if self.optimizer == "scheduled":
            return [sgd], [{"scheduler": torch.optim.lr_scheduler.StepLR(sgd, 2, 0.5), "interval": "step"}]
        if self.optimizer == "two":
            return [sgd, torch.optim.SGD(self.parameters(), 0.1)]
        if self.optimizer == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
            return {"optimizer": sgd, "lr_scheduler": {"scheduler": plateau, "monitor": "right"}}
        return sgd


class Watch(Callback):
    """All that a callback is handed."""

    def __init__(self):
        self.batches, self.outputs, self.steps = [], [], 0

    def on_train_end(self, trainer, pl_module):
        self.steps = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch)
        self.outputs.append(outputs)


def ledger_of(path=None, epsilon=20.0):
    return ft.Ledger(ft.Budget(epsilon, 1e-5), journal=path)


def private_of(ledger, steps=12, batches_per_epoch=5, **options):
    def begin(module, optimizer):
        return ft.torch.train(module, LOSS, (X, Y), ledger, optimizer=optimizer, steps=steps, **options)

    return Private(begin, batches_per_epoch=batches_per_epoch)


def trainer_of(tmp_path, *callbacks, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {"logger": False, "enable_checkpointing": False, "max_epochs": -1, **options}
    return Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adam", None])
def test_it_trains_until_the_budget_is_spent(tmp_path, optimizer):
    torch.manual_seed(0)
    module, ledger = Net(optimizer), ft.Ledger(ft.Budget(20.0, 1e-5), stream=SeededStream(1))
    private, watch = private_of(ledger, steps=30), Watch()
    trainer = trainer_of(tmp_path, private, watch)
    trainer.fit(module, private.batches, PUBLIC)
    assert watch.steps == private.training.t == 30
    assert trainer.current_epoch == 6
    assert ledger.share == 1.0
    assert module.called == 0
    with pytest.warns(NotPrivate):
        assert ft.torch.evaluate(module, (X, Y)) > 0.8


def test_the_same_as_the_plain_loop():
    """With the same noise: Lightning's steps are the run's own."""
    found = []
    for lightning in (True, False):
        torch.manual_seed(0)
        module, ledger = Net("adam"), ft.Ledger(ft.Budget(20.0, 1e-5), stream=SeededStream(3))
        if lightning:
            private = private_of(ledger)
            trainer_of(None, private).fit(module, private.batches)
        else:
            adam = module.configure_optimizers()
            list(ft.torch.train(module, LOSS, (X, Y), ledger, optimizer=adam, steps=12))
        found.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    assert not found[0].isnan().any()
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_a_schedule_of_steps_is_followed(tmp_path):
    module = Net("scheduled")
    private = private_of(ledger_of(), steps=6)
    trainer = trainer_of(tmp_path, private)
    trainer.fit(module, private.batches)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**3)


def test_callbacks_and_loggers_see_public_numbers_only(tmp_path):
    private, watch = private_of(ledger_of()), Watch()
    logger = CSVLogger(tmp_path, name="runs")
    trainer = trainer_of(tmp_path, private, watch, logger=logger, log_every_n_steps=1)
    trainer.fit(Net(), private.batches, PUBLIC)
    assert watch.batches == [0, 1, 2, 3, 4] * 2 + [0, 1]
    assert not any(watch.outputs)
    logged = {name for row in logger.experiment.metrics for name in row}
    logged |= set((tmp_path / "runs" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(","))
    privacy = {f"privacy/{name}" for name in ("share", "left", "clip_norm", "noise_multiplier")}
    assert privacy | {"right"} <= logged
    assert "train_loss" not in logged


def test_a_loader_of_records_is_refused_before_it_is_read(tmp_path):
    class Counting(torch.utils.data.Dataset):
        read = 0

        def __len__(self):
            return 100

        def __getitem__(self, place):
            Counting.read += 1
            return X[place], Y[place]

    ledger = ledger_of()
    trainer = trainer_of(tmp_path, private_of(ledger))
    with pytest.raises(InvalidValue, match="batches"):
        trainer.fit(Net(), torch.utils.data.DataLoader(Counting(), batch_size=10))
    assert Counting.read == 0
    assert ledger.share == 0


WAYS_TO_LOG = {
    "log": lambda self, x: self.log("mean", x.mean()),
    "logger": lambda self, x: self.logger.log_metrics({"mean": x.mean()}),
    "trainer": lambda self, x: self.trainer.callback_metrics.update(mean=x.mean()),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("way", WAYS_TO_LOG)
def test_a_forward_that_logs_is_refused_before_any_charge(tmp_path, way, inside):
    class Talks(LightningModule):
        def forward(self, x):
            WAYS_TO_LOG[way](self, x)
            return x

    class Holds(Net):
        def __init__(self):
            super().__init__()
            self.talks = Talks()

        def forward(self, x):
            if inside:
                x = self.talks(x)
            else:
                WAYS_TO_LOG[way](self, x)
            return super().forward(x)

    ledger, module = ledger_of(), Holds()
    private = private_of(ledger)
    with pytest.raises(Unsupported, match="forward logs"):
        trainer_of(tmp_path, private, logger=CSVLogger(tmp_path)).fit(module, private.batches)
    assert ledger.share == 0
    assert "log" not in vars(module)


def test_a_forward_may_ask_the_trainer_how_far_it_is(tmp_path):
    class Anneals(Net):
        def forward(self, x):
            return super().forward(x) * (1 + self.current_epoch + self.trainer.global_step)

    private = private_of(ledger_of(), steps=6)
    trainer_of(tmp_path, private).fit(Anneals(), private.batches)
    assert private.training.t == 6


def test_validation_on_the_records_trained_on_is_warned_of(tmp_path):
    private = private_of(ledger_of(), steps=3)
    with pytest.warns(NotPrivate, match="trained on"):
        trainer_of(tmp_path, private).fit(Net(), private.batches, PUBLIC)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"precision": "bf16-mixed"}, "autocast"),
        ({"gradient_clip_val": 1.0}, "every example"),
        ({"accumulate_grad_batches": 2}, "accumulate"),
    ],
)
def test_what_the_trainer_would_do_beside_a_batch_is_refused(tmp_path, options, word):
    ledger = ledger_of()
    private = private_of(ledger)
    with pytest.raises(Unsupported, match=word):
        trainer_of(tmp_path, private, **options).fit(Net(), private.batches)
    assert ledger.share == 0


@pytest.mark.parametrize("optimizer", ["two", "plateau"])
def test_optimizers_that_do_not_fit_are_refused(tmp_path, optimizer):
    ledger = ledger_of()
    private = private_of(ledger)
    with pytest.raises(Unsupported):
        trainer_of(tmp_path, private).fit(Net(optimizer), private.batches)
    assert ledger.share == 0


def test_begin_must_hand_on_what_it_is_given(tmp_path):
    ledger = ledger_of()
    other = Private(lambda module, optimizer: ft.torch.train(module, LOSS, (X, Y), ledger, steps=3))
    with pytest.raises(InvalidValue, match="hand"):
        trainer_of(tmp_path, other).fit(Net(), other.batches)
    averaged = private_of(ledger_of(), average=0.9)
    with pytest.raises(InvalidValue, match="average"):
        trainer_of(tmp_path, averaged).fit(Net(), averaged.batches)


def test_the_module_is_as_it_was_afterwards(tmp_path):
    module = Net()
    private = private_of(ledger_of())
    trainer_of(tmp_path, private).fit(module, private.batches)
    assert module.automatic_optimization
    assert "training_step" not in vars(module)
    assert "configure_optimizers" not in vars(module)
    with pytest.raises(Unsupported):
        trainer_of(tmp_path, private, precision="bf16-mixed").fit(module, private.batches)
    failing = Private(lambda module, optimizer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer_of(tmp_path, failing).fit(module, failing.batches)
    assert "training_step" not in vars(module)
    assert module.automatic_optimization


def test_early_stopping_is_free(tmp_path):
    ledger = ledger_of()
    private = private_of(ledger, steps=50, batches_per_epoch=2)
    early = EarlyStopping("right", mode="max", patience=1, min_delta=1.0)
    trainer_of(tmp_path, private, early).fit(Net(), private.batches, PUBLIC)
    ledger.close()
    assert 0 < private.training.t < 50


def test_a_checkpoint_brings_weights_back_and_no_budget(tmp_path):
    path = tmp_path / "run.ledger"
    keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=4, save_top_k=-1)
    with ledger_of(path) as ledger:
        private = private_of(ledger)
        trainer = trainer_of(tmp_path, private, keep, enable_checkpointing=True, max_steps=8)
        trainer.fit(Net("adam"), private.batches)
        assert private.training.t == 8
    (saved,) = (tmp_path / "kept").glob("*step=4.ckpt")
    with ft.Ledger.open(path) as ledger:
        assert ledger.share == pytest.approx(8 / 12)
        private = private_of(ledger)
        trainer = trainer_of(tmp_path, private)
        trainer.fit(Net("adam"), private.batches, ckpt_path=saved)
        assert private.training.t == 4 + 4
        assert ledger.share == 1.0
