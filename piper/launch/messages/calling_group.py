"""A worker group whose devices are processes of their own, which get calls as messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from piper.base.errors import WorkerError
from piper.launch.device.weight_readers import FirstWeights
from piper.launch.device.worker_group import Each, OneTrainer, WorkerGroup
from piper.launch.launchers import WorkerOptions
from piper.launch.messages.calls import Call, dumped
from piper.launch.messages.pickling import Pickled, sendable
from piper.launch.workers.first_failure import FailedCall
from piper.runtime.torch_flags import Flags

DeviceAnswers = dict[int, Any] | FailedCall
"""The answer of each device, or why there are none."""


class CallingGroup(OneTrainer, WorkerGroup):
    """What worker processes have in common, wherever they run."""

    damaged = False  # a failed step ends the workers

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.started: list[int] = []
        """The devices for which the last ``seat`` started a process."""

    @property
    @abstractmethod
    def devices(self) -> list[int]: ...

    @property
    @abstractmethod
    def threads(self) -> int:
        """The CPU threads of each worker."""
        ...

    @property
    @abstractmethod
    def folder(self) -> Path:
        """A folder that this process and all workers see, removed at the end."""
        ...

    @abstractmethod
    def rename(self, devices: Mapping[int, int]) -> None:
        """Processes of these devices become those of others, which have none."""
        ...

    @abstractmethod
    def share(self, weights: FirstWeights) -> Callable[[int], FirstWeights]:
        """Put the initial weights into files that the workers see. Returns a function from a device
        to the weights in its file."""
        ...

    @abstractmethod
    def answers(self, message: Callable[[int], bytes]) -> DeviceAnswers:
        """Send each device its message, and wait for all answers."""
        ...

    @abstractmethod
    def keep_idle(self) -> None:
        """After a failed call, keep the workers that can take another one, and end the others."""
        ...

    @abstractmethod
    def end(self) -> None:
        """End all workers at once."""
        ...

    def call(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Send one call to all workers, and return their answers. Any interruption ends all
        workers: a call that only some received, or an unread answer, would be mistaken for another
        one later. After a failure with ``restarts`` those that can take another call stay."""
        flags, pickled = Flags.here(), Pickled()
        given = [Each(self.share(x)) if isinstance(x, FirstWeights) else x for x in arguments]

        def message(device: int) -> bytes:
            own = tuple(sendable(x, device, pickled) for x in given)
            return dumped(Call(method, own, flags, self.threads))

        try:
            answers = self.answers(message)
        except BaseException:
            self.end()
            raise
        if isinstance(answers, FailedCall):
            error = answers.error()
            if self.options.restarts and isinstance(error, WorkerError):
                self.keep_idle()
            else:
                self.end()
            raise error
        return [answers[device] for device in self.devices]
