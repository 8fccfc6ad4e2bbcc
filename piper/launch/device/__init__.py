"""One loaded device, and the interface of worker groups that a trainer drives."""
