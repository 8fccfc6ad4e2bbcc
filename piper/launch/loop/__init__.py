"""Training on batches: ``Trainer.fit`` and ``Trainer.iterate``."""
