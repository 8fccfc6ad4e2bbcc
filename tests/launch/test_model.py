"""``trainer.model()``: the model with the present weights, while it is trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper.capture.loss.own_loss import own_loss
from piper.strategies import mesh
from tests.hugging_face import FAMILIES
from tests.training import Batch, sgd, steps

transformers = pytest.importorskip("transformers")
STEPS = 2


def trained(model: nn.Module, batches: list[Batch]) -> nn.Module:
    """Plain PyTorch on the whole batch."""
    optimizer = sgd(list(model.parameters()))
    for inputs, _ in batches:
        own_loss(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.slow
def test_it_generates_while_it_trains() -> None:
    """Two stages of two replicas with sharded gradients; rotary tables are in no state dict."""
    family = FAMILIES["Llama, tied"]
    torch.manual_seed(0)
    model = family.make(dropout=False, use_cache=True).double()
    batches: list[Batch] = [(family.batch(seed=step), ()) for step in range(STEPS)]
    program = piper.compile(
        model, mesh(pp=2, dp=2, zero=2, microbatches=2), inputs=batches[0][0], optimizer=sgd
    )
    prompt = batches[0][0]["input_ids"][:1, :3]
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = trained(copy.deepcopy(model), batches)
    with piper.launch(program) as trainer:
        run = steps(trainer, batches)
        found = trainer.model()
        assert not found.training
        assert found.lm_head.weight is found.model.embed_tokens.weight
        assert all(torch.equal(x, run.state[key]) for key, x in found.state_dict().items())
        for key, x in expected.state_dict().items():
            torch.testing.assert_close(run.state[key], x, rtol=1e-9, atol=1e-12)
        tokens = found.generate(prompt, **how)
        assert torch.equal(tokens, expected.generate(prompt, **how))
        with torch.no_grad():  # it is a copy
            found.lm_head.weight.zero_()
        again = steps(trainer, batches)
        assert float(again.losses[0]) < float(run.losses[0])
