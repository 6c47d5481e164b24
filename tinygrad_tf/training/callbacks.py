"""What may look on while a run trains, and stop it: `Trainer(…, callbacks=[…])`."""


class Callback:
    """Subclass it, and define what you need; each is called with the trainer, in the order in which the callbacks were given.

    `numbers` is the row of a step: step, learning_rate, train_loss, gradient_norm, validation_loss and expert_load (None where they
    were not measured), "gradient_norm/<module>"; and what differs from run to run: tokens, seconds; a copy of it. `trainer.stop()` ends
    the run after this step, saved, as Ctrl-C does. What a callback draws from the default generator changes nothing in the run.
    """

    def on_start(self, trainer):
        """The folder is there and holds a checkpoint; the next step is trainer.step + 1."""

    def on_step(self, trainer, numbers):
        """After each step and its evaluation, if there was one; before its checkpoint."""

    def on_evaluation(self, trainer, loss):
        """After an evaluation: the validation loss in nats per token."""

    def on_save(self, trainer, path):
        """After a checkpoint was written to `path`."""

    def on_end(self, trainer, complete):
        """The loop has ended, the last checkpoint is written. complete: whether all steps were made. Not called after an error."""
