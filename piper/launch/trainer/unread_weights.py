"""Trained weights that nobody has read, and weights that nobody trains.

The trainer has the weights, and the model given to compile is never changed. A run whose weights
end with it unread, or whose caller changes that model in place of the trainer's, is warned of.
"""

from __future__ import annotations

from piper.launch.trainer.notices import Notice, Notices
from piper.state.weights.source import Source


class UnreadWeights:
    """Follows whether weights are trained, and whether they are read."""

    def __init__(self, notices: Notices, source: Source | None) -> None:
        """``source`` has the model given to compile."""
        self._notices = notices
        self._source = source
        self._version: int | None = _version_of(source)
        self._trained = False

    def train(self) -> None:
        """Steps have changed the weights."""
        self._trained = True

    def read(self) -> None:
        """The weights are saved or read: the caller may copy them into the model."""
        self._trained, self._version = False, None

    def forget(self) -> None:
        """An error ends the run: nothing is lost that was not lost with it."""
        self.read()

    def end(self) -> None:
        """Warn of weights that end unread."""
        if self._trained:
            self._notices.give(
                Notice.WEIGHTS,
                "nothing is saved: the trained weights end with the trainer, and the model given "
                "to compile has those from before. Inside the with block, call "
                "trainer.export(folder), .state_dict(), .model() or .save(folder), or give fit "
                "checkpoint=",
            )
        self.look_at_model()
        self.forget()

    def look_at_model(self) -> None:
        """Warn of a model that was changed after the launch."""
        if self._version is not None and _version_of(self._source) != self._version:
            self._notices.give(
                Notice.MODEL,
                "the model given to compile was changed after the launch, and the trainer, which "
                "has weights of its own, does not see that: train with trainer.fit or "
                "trainer.step, without backward() and an optimizer of the model, and replace "
                "weights with trainer.load_state_dict(model.state_dict())",
            )


def _version_of(source: Source | None) -> int | None:
    """A number that grows with each change of a parameter in place; None if that is not known."""
    if source is None:
        return None
    parameters = [p for _, p in source.parameters()]
    if any(p.is_inference() for p in parameters):
        return None
    return sum(p._version for p in parameters)
