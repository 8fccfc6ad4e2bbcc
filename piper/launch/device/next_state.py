"""A device's state under the next program of a switch."""

from __future__ import annotations

import torch

from piper.base.errors import PiperError
from piper.launch.device.loaded_device import LoadedDevice
from piper.launch.device.step_graph import refuse_uncapturable
from piper.state.checkpoint.index import Index
from piper.state.checkpoint.slices import Slice, at_device
from piper.state.device.checkpoint_parts import all_held
from piper.state.device.device_state import DeviceState
from piper.state.device.resharding import still_missing
from piper.state.device.restore import refusal, settle, wanted
from piper.state.device_program import DeviceProgram


class NextState:
    """A device's state under the next program, allocated beside its present one."""

    def __init__(
        self,
        program: DeviceProgram | None,
        where: torch.device,
        index: Index,
        present: DeviceState | None,
        *,
        capturable: bool,
    ) -> None:
        """Without ``program`` nothing is allocated. ``present`` is None if the device has no state
        now. With ``capturable``, steps will be captured as CUDA graphs."""
        self.program = program
        self.index = index
        self._capturable = capturable
        self.loaded: LoadedDevice | None = None
        """The device with ``program`` loaded, once all of the state has arrived."""
        self.state: DeviceState | None = None
        self.missing: list[Slice] = []
        """The slices that other devices must send."""
        self.refused: list[str] = []
        if program is None:
            return
        try:
            if capturable:
                refuse_uncapturable(program)
            self.state = DeviceState(program, where, None)
            if capturable:
                self.state.make_capturable()
        except PiperError as error:
            self.refused = [str(error)]
            return
        if (why := refusal(self.state, index)) is not None:
            self.refused = [why]
            return
        here = () if present is None else all_held(present)
        self.missing = still_missing(wanted(self.state, index), here)

    @property
    def requests(self) -> list[Slice]:
        """The slices that it needs, for other processes."""
        return at_device(self.missing, 0 if self.state is None else self.state.device)

    def settled(self) -> DeviceState:
        """The state, once all of it has arrived."""
        assert self.state is not None
        settle(self.state, self.index)
        if self._capturable:
            self.state.make_capturable()
        return self.state
