"""What a new user gets wrong: each mistake is refused with its cause and its cure, or warned of, or
does what was meant."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import piper
from piper.callbacks import CSV
from piper.capture.loss.labels import warn_of_labels
from piper.strategies import mesh

X = torch.ones(4, 4)
LEFT_OUT = object()


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            with piper.annotate("layer"):
                x = torch.tanh(layer(x))
        return x


def net() -> Net:
    return Net(nn.Linear(4, 4), nn.Linear(4, 4))


def hooked() -> Net:
    model = net()
    model[0].register_full_backward_hook(lambda *_: None)
    return model


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def compiled(**changes: Any) -> piper.Program:
    usual: dict[str, Any] = {
        "model": net(), "strategy": mesh(dp=2), "inputs": (X,), "targets": (X,), "loss": mse_loss,
        "optimizer": adamw,
    }  # fmt: skip
    given = {name: x for name, x in {**usual, **changes}.items() if x is not LEFT_OUT}
    return piper.compile(**given)


@pytest.fixture(scope="module")
def program() -> piper.Program:
    return compiled()


COMPILING: dict[str, tuple[Callable[[], object], str]] = {
    "no loss": (
        lambda: compiled(loss=LEFT_OUT),
        r"targets= needs a loss, and none is given: give loss=",
    ),
    "no targets": (
        lambda: compiled(targets=LEFT_OUT),
        r"it is given the model's output and 0 targets: give targets=\(y,\)",
    ),
    "the class of a loss": (
        lambda: compiled(loss=nn.MSELoss),
        r"loss=MSELoss is a class: give an instance, MSELoss\(\)",
    ),
    "the class of a model": (
        lambda: compiled(model=Net),
        r"must be an nn.Module, not the class Net: give an instance, Net\(...\)",
    ),
    "a loss for each element": (
        lambda: compiled(loss=lambda output, y: (output - y) ** 2),
        r"must return one real scalar \(a mean over the microbatch\).*: return its mean, loss.mean",
    ),
    "an optimizer that is made": (
        lambda: compiled(optimizer=adamw(net().parameters())),
        r"optimizer= is an AdamW: it must be a function from .*, such as lambda params",
    ),
    "a tensor for a tuple": (lambda: compiled(inputs=X), r"give a tuple, .* inputs=\(x,\)"),
    "all by position": (
        lambda: piper.compile(net(), mesh(dp=2), (X,), (X,), mse_loss),  # type: ignore[misc]
        r"By position it takes model, strategy, and the rest by name",
    ),
    "a strategy as text": (
        lambda: compiled(strategy="dp=2"),
        r"must be a piper.Strategy, such as piper.strategies.mesh\(dp=2\)",
    ),
    "a size without a unit": (
        lambda: compiled(memory_limit="80 gigs"),
        r"not a valid size: give bytes, or a number with a unit, such as '80GiB'",
    ),
    "a name that torch does not know": (
        lambda: compiled(device="gpu"),
        r"device='gpu' is not a device; on this machine there is cpu",
    ),
    "a misspelt axis": (
        lambda: mesh(ddp=2),  # type: ignore[call-arg]
        r"mesh\(\) has no argument 'ddp': did you mean dp\?",
    ),
    "the long name of an axis": (
        lambda: mesh(data_parallel=2),  # type: ignore[call-arg]
        r"mesh\(\) has no argument 'data_parallel': did you mean dp\?",
    ),
    "the stage of ZeRO": (
        lambda: mesh(dp=2, zero_stage=3),  # type: ignore[call-arg]
        r"mesh\(\) has no argument 'zero_stage': did you mean zero\?",
    ),
    "a learning rate": (
        lambda: compiled(learning_rate=0.1),
        r"'learning_rate': did you mean optimizer=lambda .*lr=3e-4\)\? Its arguments are model",
    ),
    "a loader for a batch": (
        lambda: compiled(inputs=DataLoader(TensorDataset(X), 4)),
        r"inputs is a DataLoader: give .* of one of its batches, next\(iter\(loader\)\)",
    ),
    "a ZeRO level that does not exist": (
        lambda: mesh(dp=2, zero=5),
        r"zero=5: must be 0, 1, 2 or 3",
    ),
    "more stages than layers": (
        lambda: compiled(strategy=mesh(pp=4)),
        r"4 parts of 2 regions 'layer': at most 2",
    ),
    "microbatches that do not divide": (
        lambda: compiled(strategy=mesh(dp=2, microbatches=3)),
        r"give microbatches= \(split: parts=\) one of \[1, 2\]",
    ),
    "a pattern of tags without a match": (
        lambda: compiled(tags={"layrs.*": "layer"}),
        r"the pattern 'layrs.\*' matches no module of Net; it has",
    ),
    "the name of a model": (
        lambda: compiled(model="gpt2"),
        r"not a str: load it, AutoModelForCausalLM.from_pretrained",
    ),
    "a wrapped model": (
        lambda: compiled(model=nn.DataParallel(net())),
        r"the model is a DataParallel, which distributes it already: give the module itself",
    ),
    "a scripted model": (
        lambda: compiled(model=torch.jit.trace(net(), X)),
        r"the model is a torch.jit.ScriptModule, .*: give the module that was traced or scripted",
    ),
    "a backward hook": (
        lambda: compiled(model=hooked()),
        r"0 has a backward hook, which would never be called",
    ),
    "layers of several dtypes": (
        lambda: compiled(model=Net(nn.Linear(4, 4), nn.Linear(4, 4).double())),
        r"or the whole model one dtype: its parameters are float32, float64",
    ),
    "keywords in a tuple": (
        lambda: compiled(model=Tagger(), inputs=({"input_ids": IDS, "labels": IDS},)),
        r"a tuple of one mapping, which would be .* of Tagger, input_ids: give the mapping itself",
    ),
    "text": (
        lambda: compiled(
            model=Tagger(),
            inputs={"input_ids": ["a"], "labels": ["b"]},
            targets=LEFT_OUT,
            loss=LEFT_OUT,
        ),
        r"hold no tensor: give tensors; a tokenizer makes them with return_tensors='pt'",
    ),
    "accumulated gradients": (
        lambda: compiled(gradient_accumulation_steps=4),
        r"'gradient_accumulation_steps': did you mean mesh\(..., microbatches=\)\?",
    ),
    "accumulated gradients, in short": (
        lambda: mesh(dp=2, accumulate=4),  # type: ignore[call-arg]
        r"no argument 'accumulate': did you mean microbatches\?",
    ),
    "half precision": (
        lambda: compiled(fp16=True),
        r"'fp16': did you mean precision='bf16', which needs no scaler\?",
    ),
    "labels in floating point": (
        lambda: compiled(loss=cross_entropy, targets=(torch.ones(4),)),
        r"targets\[0\] float32\[2\], one microbatch .*; class labels .* must be integers",
    ),
    "a scheduler for an optimizer": (
        lambda: compiled(optimizer=lambda params: StepLR(adamw(params), 1)),
        r"to a torch.optim optimizer, .* it returned a StepLR",
    ),
    "an optimizer of the model's parameters": (
        lambda: compiled(optimizer=lambda params: adamw(net().parameters())),
        r"is for 4 others, .*: make it from the list that the function is given",
    ),
    "a model that is frozen": (
        lambda: compiled(model=net().requires_grad_(False)),
        r"depends on no trainable parameter: check requires_grad",
    ),
    "a number for a loss": (
        lambda: compiled(loss=lambda output, y: mse_loss(output, y).item()),
        r"it returned a number: return the tensor, without .item\(\)",
    ),
    "a scheduler of another optimizer": (
        lambda: compiled(scheduler=lambda _: StepLR(adamw(net().parameters()), 1)),
        r"the StepLR .* is of another optimizer, .*: make it from the optimizer that the function",
    ),
    "a model for a program": (
        lambda: piper.launch(net()),  # type: ignore[arg-type]
        r"not a Net: piper.launch\(piper.compile\(model, strategy, ...\)\)",
    ),
}


@pytest.mark.parametrize("mistake", COMPILING)
def test_before_training(mistake: str) -> None:
    make, says = COMPILING[mistake]
    with pytest.raises(piper.PiperError, match=says):
        make()


def exported(trainer: piper.Trainer, path: Path) -> None:
    trainer.export(path / "out")
    trainer.load(path / "out")


def torch_saved(trainer: piper.Trainer, path: Path) -> None:
    torch.save(net().state_dict(), path / "net.pt")
    trainer.load(path / "net.pt")


def into_a_file(trainer: piper.Trainer, path: Path) -> None:
    (path / "file").touch()
    trainer.save(path / "file")


TRAINING: dict[str, tuple[Callable[[Any, Path], object], str]] = {
    "no target": (
        lambda t, _: t.step(X),
        r"is 1 input and 1 target, .*; 1 value given. Give the inputs, then the targets",
    ),
    "a mapping for a pair": (
        lambda t, _: t.fit([{"x": X, "y": X}]),
        r"is 1 input and 1 target, .*; 1 mapping of x, y given. Give .*, as a tuple",
    ),
    "another dtype": (
        lambda t, _: t.step(X.double(), X),
        r"inputs\[0\] is float64\[4, 4\], .*: convert it, .to\(torch.float32\)",
    ),
    "a smaller batch": (
        lambda t, _: t.fit([(X[:3], X[:3])]),
        r"drop the last, smaller batch \(drop_last=True\)",
    ),
    "a batch with a gradient": (
        lambda t, _: t.step(X.clone().requires_grad_(), X),
        r"inputs\[0\] requires grad, .*: give inputs\[0\].detach\(\)",
    ),
    "a copy of a trainer": (
        lambda t, _: copy.deepcopy(t),
        r"a trainer cannot be copied or pickled, since its devices run: save its state",
    ),
    "no epochs": (lambda t, _: t.fit([(X, X)], epochs=0), r"epochs=0 must be a .* at least 1"),
    "a misspelt option": (
        lambda t, _: t.fit([(X, X)], epoch=2),
        r"has no argument 'epoch': did you mean epochs\? Its arguments are batches, epochs",
    ),
    "an option of Hugging Face": (
        lambda t, _: t.fit([(X, X)], num_train_epochs=2),
        r"no argument 'num_train_epochs': did you mean epochs\? Its arguments are batches, epochs",
    ),
    "a batch for batches": (
        lambda t, _: t.fit(X, X),
        r"fit\(\): too many positional arguments. By position it takes batches, and the rest",
    ),
    "a dataset for a loader": (
        lambda t, _: t.fit(TensorDataset(X, X)),
        r"give an iterable of batches, such as a torch.utils.data.DataLoader of a dataset",
    ),
    "rows for batches": (
        lambda t, _: t.fit([(X[0], X[0]), (X[1], X[1])]),
        r"This is one row, and a batch has 4: give a DataLoader of the rows, with batch_size=4",
    ),
    "one callback": (
        lambda t, path: t.fit([(X, X)], callbacks=CSV(path / "log.csv")),
        r"callbacks= is one CSV: give a list, \[callback\]",
    ),
    "a loader that drops its only batch": (
        lambda t, _: t.fit(DataLoader(TensorDataset(X[:3], X[:3]), 4, drop_last=True), epochs=2),
        r"no batch to train on: the dataset has 3 rows, .* fewer than 4 \(drop_last=True\)",
    ),
    "one batch for many": (
        lambda t, _: t.fit((X, X)),
        r"batches is a tuple, one batch: give .*, fit\(\[batch\]\), or call trainer.step\(batch\)",
    ),
    "a batch by keywords": (
        lambda t, _: t.step(input_ids=X, labels=X),
        r"'input_ids': did you mean the batch as one mapping, trainer.step\(batch\)\?",
    ),
    "an option of a step": (
        lambda t, _: t.fit([(X, X)], accumulate=4),
        r"'accumulate': did you mean mesh\(..., microbatches=\), the argument of piper.compile\?",
    ),
    "a list for a tensor": (
        lambda t, _: t.step(X.tolist(), X),
        r"inputs\[0\] is a tuple or list, .*: give a tensor, .* from a tokenizer",
    ),
    "resuming from nowhere": (
        lambda t, _: t.fit([(X, X)], resume=True),
        r"resume=, .* need checkpoint=, a folder",
    ),
    "a file for a folder": (into_a_file, r"there is a file: a state is a folder, so use another"),
    "what torch.save wrote": (
        torch_saved,
        r"goes to trainer.load_state_dict\(torch.load\(path\)\)",
    ),
    "a model for a checkpoint": (exported, r"init=piper.weights\('.*out'\)"),
}


@pytest.mark.parametrize("mistake", TRAINING)
def test_while_training(mistake: str, program: piper.Program, tmp_path: Path) -> None:
    run, says = TRAINING[mistake]
    with piper.launch(program) as trainer, pytest.raises(piper.PiperError, match=says):
        run(trainer, tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on": "cuda"}, r"'cuda' is a kind of device, .* piper.compile\(..., device='cuda'\)"),
        ({"device": "cuda"}, r"no option device=. It is an argument of piper.compile"),
    ],
)
def test_a_device_for_a_launcher(
    options: dict[str, Any], says: str, program: piper.Program
) -> None:
    with pytest.raises(piper.PiperError, match=says):
        piper.launch(program, **options)


def test_names_of_other_libraries(program: piper.Program) -> None:
    with (
        piper.launch(program) as trainer,
        pytest.raises(AttributeError, match="in evaluation mode"),
    ):
        trainer.eval()  # type: ignore[attr-defined]
    with pytest.raises(
        AttributeError, match=r"piper.launch\(program\) returns a trainer, with fit"
    ):
        program.fit([(X, X)])  # type: ignore[attr-defined]


def test_a_loss_is_not_trained_a_second_time(program: piper.Program) -> None:
    with pytest.raises(RuntimeError) as caught, piper.launch(program) as trainer:
        trainer.step(X, X).loss.backward()
    assert "leave out loss.backward(), optimizer.step()" in caught.value.__notes__[0]


def test_a_model_that_is_trained_beside_the_trainer_is_warned_of(program: piper.Program) -> None:
    assert program.source is not None
    model, says = program.source.model, r"was changed after the launch, .* does not see that: train"
    optimizer = adamw(model.parameters())
    trainer = piper.launch(program)
    mse_loss(model(X), X).backward()
    optimizer.step()
    with pytest.warns(piper.PiperWarning, match=says):
        trainer.close()
    with piper.launch(program) as trainer:
        model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})
        with pytest.warns(piper.PiperWarning, match=r"trainer.load_state_dict\(model.state_dict"):
            trainer.fit([(X, X)], progress=False)
    with warnings.catch_warnings(), piper.launch(program) as trainer:
        warnings.simplefilter("error")
        trainer.step(X, X)
        model.load_state_dict(trainer.state_dict())


def test_weights_that_end_without_a_with_block_are_warned_of(program: piper.Program) -> None:
    trainer = piper.launch(program)
    trainer.step(X, X)
    with pytest.warns(piper.PiperWarning, match="nothing is saved: the trained weights end"):
        del trainer


def test_an_evaluation_without_a_target_is_warned_of() -> None:
    with (
        piper.launch(tagger(-100)) as trainer,
        pytest.warns(piper.PiperWarning, match="is nan: no target counts; are all labels -100?"),
    ):
        assert trainer.evaluate(IDS, IDS * 0 - 100).loss.isnan()


def pairs() -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(3):
        yield X, X


def test_what_does_what_was_meant(program: piper.Program) -> None:
    """A pair for two arguments, a list to evaluate, a function that yields batches."""
    with piper.launch(program) as trainer:
        first = trainer.evaluate([(X, X)] * 2)
        assert trainer.step((X, X)).loss == first.loss
        assert trainer.fit(pairs, epochs=2, progress=False).steps == 6


@pytest.mark.parametrize("batch", [{"x": X}, X], ids=["a dict", "a tensor"])
def test_a_list_may_have_one_batch_of_one_input(batch: Any) -> None:
    class Own(nn.Linear):
        """A model that computes its own loss."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    inputs = batch if isinstance(batch, dict) else (batch,)
    made = piper.compile(Own(X.shape[1], 4), piper.strategies.mesh(dp=2), inputs=inputs)
    with piper.launch(made) as trainer:
        loss = trainer.evaluate(batch).loss
        for given in ([batch], [batch, batch], [[batch]]):
            torch.testing.assert_close(trainer.evaluate(given).loss, loss)
        with pytest.warns(piper.PiperWarning, match="without optimizer="):
            assert trainer.step([batch]).loss == loss


def test_what_trains_less_than_was_meant_is_warned_of(program: piper.Program) -> None:
    with piper.launch(program) as trainer:
        fit = partial(trainer.fit, epochs=2, progress=False)
        with pytest.raises(piper.PiperError, match=r"epochs=2 is not possible: .*: give a list"):
            fit(pairs())
        with pytest.warns(piper.PiperWarning, match=r"ended after 3 of 9 steps, .*: give a list"):
            fit(pairs(), steps=9)
        with pytest.warns(piper.PiperWarning, match="never read, so it has trained nothing: loop"):
            trainer.iterate([(X, X)]).close()
    with (
        piper.launch(compiled(optimizer=LEFT_OUT)) as trainer,
        pytest.warns(piper.PiperWarning, match="update no parameter; give piper.compile an optim"),
    ):
        trainer.step(X, X)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.net(input_ids).mT, labels)}


IDS = torch.arange(12).reshape(4, 3) % 8


def tagger(ignored: int | None) -> piper.Program:
    """A classifier of tokens with its own loss, or with one that ignores this class."""
    if ignored is None:
        return compiled(
            model=Tagger(),
            inputs={"input_ids": IDS, "labels": IDS},
            targets=LEFT_OUT,
            loss=LEFT_OUT,
        )
    loss = partial(cross_entropy, ignore_index=ignored)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    return compiled(
        model=model, inputs=(IDS,), targets=(IDS,), loss=lambda output, y: loss(output.mT, y)
    )


def test_padding_that_counts_is_warned_of_once() -> None:
    few = {"input_ids": IDS[:3], "labels": IDS[:3]}
    with piper.launch(tagger(None)) as trainer:
        with pytest.raises(piper.PiperError, match=r"like \{'input_ids': 0, 'labels': -100\}"):
            trainer.step(few, pad={"input_ids": 0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            right = trainer.evaluate(few)
            found = trainer.evaluate(few, pad={"input_ids": 0, "labels": -100})
            # three rows in two sums, or each four times: equal up to reduction order
            assert float(found) == pytest.approx(float(right), rel=1e-6)
        wrong = {"input_ids": 0, "labels": 0}
        with pytest.warns(piper.PiperWarning, match=r"inputs\['labels'\] with 0.*them with -100"):
            trainer.fit([few], pad=wrong, progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.fit([few], pad=wrong, progress=False)


@pytest.mark.parametrize(("ignored", "pad"), [(0, 0), (-100, -100)])
def test_padding_that_does_not_count_is_silent(ignored: int, pad: int) -> None:
    with piper.launch(tagger(ignored)) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(IDS[:3], IDS[:3], pad=(0, pad))


@pytest.mark.parametrize("left", [1, 3])
def test_a_loader_whose_last_batch_is_smaller_is_refused_at_once(
    left: int, program: piper.Program
) -> None:
    rows = torch.ones(8 + left, 4)
    loader = DataLoader(TensorDataset(rows, rows), 4)
    with piper.launch(program) as trainer:
        with pytest.raises(piper.PiperError, match=rf"and this one {left}: drop the last, smaller"):
            trainer.fit(loader, epochs=2)
        assert trainer.steps == 0
        assert trainer.fit(loader, steps=2, progress=False).steps == 2  # it is not reached
        with pytest.raises(piper.PiperError, match="a mean over all rows"):
            trainer.fit(loader, pad=(0, 0))
        dropped = DataLoader(TensorDataset(rows, rows), 4, drop_last=True)
        assert trainer.fit(dropped, epochs=2, progress=False).steps == 4
        own = DataLoader(rows, 4, collate_fn=lambda x: (torch.stack(x), torch.stack(x)))
        with (
            pytest.warns(piper.PiperWarning, match=rf"last batch has {left} row.*its collate_fn"),
            pytest.raises(piper.PiperError, match=rf"and this one {left}: drop the last, smaller"),
        ):
            trainer.fit(own, progress=False)
        full = DataLoader(rows, 4, collate_fn=lambda x: (torch.stack(x * 4)[:4],) * 2)
        assert trainer.fit(full, progress=False).steps == 3


def test_a_smaller_last_batch_is_taken_where_it_can_be() -> None:
    loader = DataLoader(TensorDataset(IDS[:3].repeat(2, 1), IDS[:3].repeat(2, 1)), 4)
    with piper.launch(tagger(-100)) as trainer:
        assert trainer.fit(loader, pad=(0, -100), progress=False).steps == 2
    with piper.launch(tagger(-100), shapes=1) as trainer:
        assert trainer.fit(loader, progress=False).steps == 2


def test_a_method_of_another_library_has_its_name_here(program: piper.Program) -> None:
    with piper.launch(program) as trainer:
        with pytest.raises(AttributeError, match=r"Trainer has no 'train': fit\(batches\) trains"):
            trainer.train([(X, X)])  # type: ignore[attr-defined]
        assert not hasattr(trainer, "other")


def test_steps_without_a_learning_rate_are_warned_of() -> None:
    def scheduled(*rates: float) -> piper.Program:
        return compiled(
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: rates[step % len(rates)]
            )
        )

    with piper.launch(scheduled(0, 1)) as trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit([(X, X)] * 5, progress=False)
        trainer.state_dict()
    with (
        piper.launch(scheduled(1, 1, 0, 0)) as trainer,
        pytest.warns(piper.PiperWarning, match=r"rate of steps 3 and 4 is 0: they train nothing"),
    ):
        trainer.fit([(X, X)] * 5, progress=False)


def test_a_schedule_that_ends_too_early_is_named() -> None:
    program = compiled(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1, total_steps=2)
    )
    with piper.launch(program) as trainer:
        assert trainer.fit([(X, X)] * 2, progress=False).steps == 2
        with pytest.raises(piper.PiperError, match=r"OneCycleLR .* has no .* after step 3: Tried"):
            trainer.step(X, X)


def test_other_data_of_a_resumed_run_is_warned_of(program: piper.Program, tmp_path: Path) -> None:
    def resumed(batches: int) -> None:
        with piper.launch(program) as trainer:
            trainer.fit(
                [(X, X)] * batches, steps=3, checkpoint=tmp_path, resume=True, progress=False
            )

    resumed(2)
    with pytest.warns(piper.PiperWarning, match="a pass has 4 batches, and had 2 when .* step 3"):
        resumed(4)


def test_weights_that_nobody_reads_are_warned_of(program: piper.Program, tmp_path: Path) -> None:
    def fitted(read: Callable[[piper.Trainer], object], **options: Any) -> None:
        with piper.launch(program) as trainer:
            trainer.fit([(X, X)], progress=False, **options)
            read(trainer)

    with pytest.warns(piper.PiperWarning, match="nothing is saved: .* the model given to compile"):
        fitted(lambda trainer: trainer.evaluate(X, X))
    with (
        pytest.warns(piper.PiperWarning, match="nothing is saved: .* the model given to compile"),
        piper.launch(program) as trainer,
    ):
        trainer.step(X, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(lambda trainer: trainer.state_dict())
        fitted(lambda trainer: trainer.model())
        fitted(lambda trainer: None, checkpoint=tmp_path)


def test_a_sampler_that_hides_rows_is_warned_of(program: piper.Program) -> None:
    rows = TensorDataset(X.repeat(4, 1), X.repeat(4, 1))
    half: Any = DistributedSampler(rows, num_replicas=2, rank=0)
    with piper.launch(program) as trainer:
        with pytest.warns(piper.PiperWarning, match="DistributedSampler gives 1 of 2 parts"):
            trainer.fit(DataLoader(rows, 4, sampler=half), progress=False)
        trainer.state_dict()


def test_zero_without_replicas_is_warned_of() -> None:
    with pytest.warns(piper.PiperWarning, match="zero=3 shards .* and there is one, .*: give dp="):
        mesh(pp=2, zero=3)


def test_updates_in_half_precision_are_warned_of() -> None:
    half = {"model": net().bfloat16(), "inputs": (X.bfloat16(),), "targets": (X.bfloat16(),)}
    with pytest.warns(piper.PiperWarning, match=r"updated in torch.bfloat16.*: give precision='b"):
        compiled(**half)
    with warnings.catch_warnings():
        warnings.simplefilter("error", piper.PiperWarning)
        compiled(**half, precision="bf16")


def test_parameters_without_a_gradient_are_warned_of() -> None:
    class Spare(nn.Linear):
        """Its bias is read, but not trained."""

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight) + self.bias.detach()

    with pytest.warns(piper.PiperWarning, match="1 parameter of the model will not be .* for bias"):
        compiled(model=Spare(4, 4))


ROW = torch.arange(2, 8).repeat(2, 1)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"input_ids": ROW, "labels": ROW}, ""),
        ({"input_ids": ROW[:, :-1], "labels": ROW[:, 1:]}, "shifted by one, and .* shifts labels"),
        ({"input_ids": ROW, "labels": ROW, "attention_mask": ROW < 6}, "has 4 labels where .*mask"),
        ({"input_ids": ROW % 4, "labels": ROW % 4}, "has 2 labels where .* is the padding, 0"),
        ({"input_ids": ROW, "labels": ROW.where(ROW < 6, -100), "attention_mask": ROW < 6}, ""),
    ],
    ids=["right", "shifted", "masked", "padded", "ignored"],
)
def test_labels_that_mean_something_else_are_warned_of(batch: dict[str, Tensor], says: str) -> None:
    model = Tagger()
    vars(model).update(loss_type="ForCausalLM", config=SimpleNamespace(pad_token_id=0))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_of_labels(model, batch)
    assert re.search(says, " ".join(str(x.message) for x in seen))
    assert len(seen) == bool(says)
