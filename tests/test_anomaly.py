"""Anomaly mode: who made the first NaN or Inf is named, with its line; what PyTorch lets pass runs on; off, nothing is watched."""
import inspect
import re
import threading
import warnings

import pytest

import tinygrad_tf as torch
from tinygrad_tf.anomaly import AnomalyWarning, first_anomaly
from tinygrad_tf.autograd import _mode, detect_anomaly, observing, set_detect_anomaly
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.utils.checkpoint import checkpoint


def leaf(t, *values):
    return t.tensor(values, requires_grad=True)


# What is computed with `t`, PyTorch or ours; who is warned of first; whose backward is refused.
CASES = {
    "log of 0, gradient 0": (lambda t: (leaf(t, 0.0, 1.0).log() * t.tensor([0.0, 1.0])).sum(), "Log", "Log"),
    "log of 0, forward only": (lambda t: leaf(t, 0.0, 1.0).log().sum(), "Log", None),
    "log of less than 0": (lambda t: leaf(t, -1.0, 1.0).log().sum(), "Log", None),
    "0 / 0": (lambda t: (leaf(t, 0.0, 1.0) / t.tensor([0.0, 1.0])).sum(), "Div", None),
    "0 / 0, gradient below": (lambda t: (t.tensor([0.0, 1.0]) / leaf(t, 0.0, 1.0)).sum(), "Div", "Div"),
    "sqrt'(0) times 0": (lambda t: (leaf(t, 0.0, 1.0) * 0).sqrt().sum(), "SqrtBackward", "Mul"),
    "sqrt'(0), gradient 0": (lambda t: t.where(t.tensor([False, True]), leaf(t, 0.0, 1.0).sqrt(), 0.0).sum(), None, "Sqrt"),
    "sqrt'(0) alone": (lambda t: leaf(t, 0.0, 1.0).sqrt().sum(), "SqrtBackward", None),
    "0 ** 0.5": (lambda t: (leaf(t, 0.0, 1.0) ** 0.5 * t.tensor([0.0, 1.0])).sum(), None, "Pow"),
    "exp that is too large": (lambda t: leaf(t, 1.0, 100.0).exp().sum(), "Exp", None),
    "float16 overflows": (lambda t: (leaf(t, 1.0, 300.0).half() * 300.0).sum(), "Mul", None),
    "a row with all keys masked": (lambda t: t.softmax(leaf(t, 0.0, 1.0).masked_fill(t.tensor([True, True]), -t.inf), dim=-1).sum(),
                                   "Softmax", "Softmax"),
    "inf - inf": (lambda t: (leaf(t, 1.0, 100.0).exp() - leaf(t, 1.0, 100.0).exp()).sum(), "Exp", None),
    "0 * inf": (lambda t: (leaf(t, 0.0, 1.0).log() * leaf(t, 0.0, 1.0)).sum(), "Log", "Log"),
}
cases = pytest.mark.parametrize("case", CASES)


def found(compute):
    """(names in the warnings, the name in backward's error or None), under anomaly mode."""
    with warnings.catch_warnings(record=True) as caught, detect_anomaly():
        warnings.simplefilter("always")
        error = refused(compute())
    assert all(issubclass(w.category, AnomalyWarning) for w in caught)
    return [re.match(r"(?:Function ')?(\w+)", str(w.message))[1] for w in caught], error


def refused(loss):
    try:
        loss.backward()
    except RuntimeError as error:
        return re.match(r"Function '(\w+?)Backward\d?' returned nan values in its \dth output", str(error))[1]


@cases
def test_the_operation_is_named(case):
    compute, first, last = CASES[case]
    names, error = found(lambda: compute(torch))
    assert names[:1] == [first] * (first is not None) and error == last


@cases
@pytest.mark.torch
def test_pytorch_refuses_the_same_operations(case):
    pytorch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytorch.autograd.detect_anomaly():
            assert refused(CASES[case][0](pytorch)) == CASES[case][2]


@cases
def test_off_nothing_is_refused_or_told(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CASES[case][0](torch).backward()
        with detect_anomaly(check_nan=False):
            assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()
            CASES[case][0](torch).backward()


def test_an_error_tells_the_line_the_numbers_and_the_source():
    x, z = leaf(torch, 0.0, 2.0), torch.tensor([0.0, 1.0])
    with pytest.raises(RuntimeError) as caught, pytest.warns(AnomalyWarning), detect_anomaly():
        y, line = (x / z).relu().exp(), inspect.currentframe().f_lineno
        y.sum().backward()
    said = str(caught.value)
    assert said.startswith("Function 'ExpBackward' returned nan values in its 0th output. It belongs to Exp (called at ")
    assert f"test_anomaly.py:{line})" in said and "given [2] float32 with NaN" in said
    assert f"in forward, Div (called at {__file__}:{line}) made NaN of finite numbers" in said


@pytest.mark.parametrize("case, part", [("log of 0, gradient 0", "clamp"), ("0 / 0, gradient below", "denominator"),
                                        ("sqrt'(0), gradient 0", "under the root"), ("a row with all keys masked", "keys are masked")])
def test_an_error_says_what_to_do(case, part):
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match=part), detect_anomaly():
        warnings.simplefilter("ignore")
        CASES[case][0](torch).backward()


def test_a_warning_shows_the_line_and_the_range_once():
    with warnings.catch_warnings(record=True) as caught, detect_anomaly():
        warnings.simplefilter("default")
        for _ in range(3):
            torch.tensor([0.0, 4.0]).log()
    (warning,) = caught
    assert warning.filename == __file__ and warning.lineno == inspect.currentframe().f_lineno - 2
    assert "given [2] float32 from 0 to 4, and made [2] float32 from -inf to 1.38629" in str(warning.message)


def test_as_an_error_a_warning_stops_at_the_operation():
    with warnings.catch_warnings(), pytest.raises(AnomalyWarning, match="Exp"), detect_anomaly():
        warnings.simplefilter("error", AnomalyWarning)
        torch.tensor([100.0]).exp()
    assert not torch.is_anomaly_enabled()


def test_what_was_broken_before_is_said_to_be():
    w = torch.tensor([torch.nan, 1.0], requires_grad=True)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="argument 1 of Mul held NaN from the start"), detect_anomaly():
        warnings.simplefilter("error")          # forward made nothing of it
        (leaf(torch, 1.0, 2.0) * w).sum().backward()
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="gradient that came in was .* with NaN"), detect_anomaly():
        leaf(torch, 1.0).exp().backward(torch.tensor([torch.nan]))


def test_a_graph_made_outside_is_checked_too():
    """As in PyTorch, where the mode need not hold but for backward."""
    loss = CASES["log of 0, gradient 0"][0](torch)
    with pytest.raises(RuntimeError, match=r"'LogBackward'.*test_anomaly.py:\d+.*outside anomaly mode"), detect_anomaly():
        loss.backward()


@cases
def test_the_first_of_all_as_a_sentence(case):
    compute, first, last = CASES[case]
    assert first_anomaly(lambda: compute(torch).backward()).removeprefix("Function '").startswith(first or f"{last}Backward'")
    assert state() == OFF


def test_no_sentence_where_all_is_well_and_other_errors_pass():
    assert first_anomaly(lambda: leaf(torch, 1.0).exp().backward()) is None
    with pytest.raises(RuntimeError, match="scalar outputs"):
        first_anomaly(lambda: leaf(torch, 1.0, 2.0).exp().backward())
    assert state() == OFF


# --- healthy passes ---------------------------------------------------------------------------------------------------------

def small():
    torch.manual_seed(0)
    return MiniGPT(11, 8, 8, 2, 16, 2, dropout=0.1)


def gradients(model, tokens, **options):
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(tokens, tokens, **options)[1].backward()
    return [p.grad.tolist() for p in model.parameters()]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_healthy_model_is_silent_and_its_gradients_the_same(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    model, tokens = small().to(getattr(torch, dtype)), torch.randint(0, 11, (2, 8))
    options = {"valid_tokens": torch.tensor([[True] * 8, [True] * 5 + [False] * 3])}
    before = gradients(model, tokens, **options)
    with warnings.catch_warnings(), detect_anomaly():
        warnings.simplefilter("error")
        assert gradients(model, tokens, **options) == before


def test_inf_that_is_given_and_operations_on_nothing_are_silent():
    x = leaf(torch, 1.0, 2.0)
    with warnings.catch_warnings(), detect_anomaly():
        warnings.simplefilter("error")
        weights = x.masked_fill(torch.tensor([True, False]), -torch.inf).softmax(dim=-1)
        (weights + torch.zeros(2, 0).sum() + torch.tensor([1, 2]) // 1).sum().backward()
        assert (torch.tensor([torch.inf]) + 1).item() == torch.inf
    assert x.grad.tolist() == [0, 0]


def test_a_weight_that_a_learning_rate_blew_up():
    model, tokens = small().eval(), torch.randint(0, 11, (2, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    names = []
    for _ in range(3):
        optimizer.zero_grad()
        made, error = found(lambda: model(tokens, tokens)[1])
        names += made + [error]
        optimizer.step()
    assert names[0] is None and any(names[1:])


def test_a_checkpointed_function_is_watched_once():
    with warnings.catch_warnings(record=True) as caught, detect_anomaly():
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="'LogBackward'.*made Inf of finite numbers"):
            checkpoint(lambda x: (x.log() * torch.tensor([0.0, 1.0])).sum(), leaf(torch, 0.0, 1.0)).backward()
    assert ["Log (" in str(w.message) for w in caught] == [True, False]        # the second is the product, 0 · ∞


# --- the mode ---------------------------------------------------------------------------------------------------------------

def state():
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled(), _mode.step is not None, len(_mode.observers)


OFF, ON, LOOSE = (False, True, False, 0), (True, True, True, 1), (True, False, False, 0)


def test_blocks_nest_and_one_object_may_be_entered_twice():
    mode = detect_anomaly()
    with mode:
        with mode, detect_anomaly(False):
            assert state() == LOOSE
        assert state() == ON
        with set_detect_anomaly(False):
            assert state() == OFF
        assert state() == ON
    assert state() == OFF


def test_a_switch_without_a_block_stays():
    set_detect_anomaly(True)
    try:
        assert state() == ON
        set_detect_anomaly(True, check_nan=False)
        assert state() == LOOSE
    finally:
        set_detect_anomaly(False)
    assert state() == OFF


@pytest.mark.parametrize("make", [detect_anomaly, lambda: set_detect_anomaly(True)])
def test_an_exception_leaves_the_mode_off(make):
    with pytest.raises(RuntimeError, match="LogBackward"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with make():
            CASES["log of 0, gradient 0"][0](torch).backward()
    assert state() == OFF


def test_as_a_decorator_it_holds_inside():
    @detect_anomaly()
    def inside():
        return state()

    @detect_anomaly()
    def twice():
        yield state()
        yield state()

    assert inside() == ON and [(inner, state()) for inner in twice()] == [(ON, OFF)] * 2 and state() == OFF


def test_other_observers_stay_and_another_thread_is_not_watched():
    seen, other = [], []
    with observing(lambda node, args, out: seen.append(node.name)):
        with detect_anomaly():
            thread = threading.Thread(target=lambda: other.append(torch.is_anomaly_enabled()))
            thread.start()
            thread.join()
            torch.ones(2).exp()
        torch.ones(2).exp()
    assert seen == ["Exp", "Exp"] and other == [False] and state() == OFF


def test_switched_off_inside_a_trace_it_stays_off():
    set_detect_anomaly(True)
    with observing(lambda *seen: None), warnings.catch_warnings():
        warnings.simplefilter("error")
        set_detect_anomaly(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.zeros(1).log()
    set_detect_anomaly(False)                   # and takes the watcher off that the trace had put back
    assert state() == OFF


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_flags_are_bools(wrong):
    for call in (lambda: detect_anomaly(wrong), lambda: set_detect_anomaly(wrong), lambda: set_detect_anomaly(True, wrong)):
        with pytest.raises(TypeError, match="must be a bool"):
            call()
    assert state() == OFF


def test_where_pytorch_has_them():
    assert torch.autograd.detect_anomaly is detect_anomaly and torch.autograd.set_detect_anomaly is set_detect_anomaly
