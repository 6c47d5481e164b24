"""Memory is flat while a model trains: graphs die by reference counting, with the collector switched off."""
import importlib.util
from pathlib import Path

import pytest
import runs

from tinygrad_tf.generation import generate
from tinygrad_tf.training import Trainer

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "benchmarks" / "memory.py"


@pytest.fixture(scope="module")
def memory():
    spec = importlib.util.spec_from_file_location("memory_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ctypes_cycles = pytest.mark.host("ctypes, by which the emulator calls kernels there, makes cycles of its own")
SLACK = 16_384              # traced bytes that the interpreter and NumPy may need for lists of freed small objects


@ctypes_cycles
def test_training_leaves_nothing_behind(memory):
    training = memory.Training(B=2, T=8, C=16, H=2, layers=1, V_vocab=20)
    (_, tensors, garbage, traced, _), (_, tensors_after, garbage_after, traced_after, _) = memory.measure(training, 200, 100)
    assert tensors == tensors_after > 0
    assert garbage == garbage_after == 0
    assert abs(traced_after - traced) < SLACK


def test_the_measurement_sees_a_leak(memory):
    """One kept loss a step, with its graph, is found by both counts."""
    class Leaking(memory.Training):
        kept = []

        def step(self):
            super().step()
            self.kept.append(self.model(self.tokens())[0])

        def tokens(self):
            import tinygrad_tf
            return tinygrad_tf.randint(0, self.V_vocab, (1, 2))
    training = Leaking(B=2, T=8, C=16, H=2, layers=1, V_vocab=20)
    (_, tensors, _, traced, _), (_, tensors_after, _, traced_after, _) = memory.measure(training, 40, 20)
    assert tensors_after >= tensors + 20
    assert traced_after > traced + 4 * SLACK


class Repeated:
    """Any action in the place of a training step."""

    def __init__(self, action):
        self.action = action

    def run(self, times):
        for _ in range(times):
            self.action()


@ctypes_cycles
def test_evaluating_saving_resuming_and_generating_leave_nothing_behind(memory, tmp_path):
    import tinygrad_tf
    trainer = runs.trainer(tmp_path, steps=3)
    trainer.run()
    prompt = tinygrad_tf.tensor(trainer.train_ids[None, :3])
    actions = {"evaluate": trainer.evaluate, "save": trainer.save, "resume": lambda: Trainer.resume(trainer.folder),
               "generate": lambda: generate(trainer.model, prompt, 12), "an abandoned graph": lambda: trainer.model(prompt, prompt)}
    for name, action in actions.items():
        growth = []
        for _ in range(3):                      # a leak comes back every time; what another thread, or the interpreter, takes once does not
            (_, tensors, _, traced, _), (_, tensors_after, garbage, traced_after, _) = memory.measure(Repeated(action), 16, 8)
            assert (tensors_after, garbage) == (tensors, 0), name
            growth.append(abs(traced_after - traced))
            if growth[-1] < SLACK:
                break
        assert min(growth) < SLACK, (name, growth)


def test_the_resident_size_is_that_of_a_process(memory):
    assert 10 * 2**20 < memory.resident_bytes() < 2**36
