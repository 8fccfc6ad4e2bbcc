"""A user's script that defines an operation and the initial weights of its model, and trains in
worker processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import piper


@torch.library.custom_op("own::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


double.register_autograd(lambda context, gradient: gradient * 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with piper.annotate("layer"):
                x = double(layer(x).tanh())
        return x


def init(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    tensor.normal_(generator=generator)


def main() -> None:
    with torch.device("meta"):
        model = Net()
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, 4, generator=draw)
    program = piper.compile(
        model,
        piper.strategies.mesh(pp=2, microbatches=2),
        inputs=(x,),
        targets=(y,),
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        init=init,
    )
    for on in ("virtual", "processes"):
        with piper.launch(program, on=on) as trainer:
            print(*(float(trainer.step(x, y).loss).hex() for _ in range(2)))


if __name__ == "__main__":
    main()
