"""`gradcheck` as a tool: what it accepts, what it refuses, what it says, and that it leaves everything as it was."""
import numpy as np
import pytest
from device import host, placed, xp

import tinygrad_tf as tt
from tinygrad_tf.autograd import Function
from tinygrad_tf.gradcheck import EVERY_ELEMENT, GradcheckError, gradcheck, gradcheck_module, gradient_error


def normal(*size):
    return tt.randn(*size, dtype=tt.float64, requires_grad=True)


class Square(Function):
    """y = x²; backward is what the test says."""

    def forward(self, x, how):
        self.saved, self.how = x, how
        return x * x

    def backward(self, dy):
        return self.how(dy, self.saved)


def square(how):
    def function(x):
        return Square.apply(x, how)
    return function


# --- what passes ----------------------------------------------------------------------------------------------------

def right(dy, x):
    return 2 * x * dy


@pytest.mark.parametrize("size", [(), (1,), (3, 4), (0,), (2, 0), (EVERY_ELEMENT + 1,), (40, 50)])
def test_a_right_gradient_passes_at_every_size(size):
    assert gradcheck(square(right), (normal(*size),)) is True
    assert gradient_error(square(right), (normal(*size),)) < 1e-7


def test_inputs_may_be_one_tensor_a_list_or_hold_constants():
    x, c = normal(3), tt.randn(3, dtype=tt.float64)
    assert gradcheck(tt.exp, x) and gradcheck(tt.mul, [x, c]) and gradcheck(lambda x, n: x ** n, (x, 3))
    assert gradcheck(tt.mul, (x, x)) and gradcheck(lambda x, i: x[i], (x, tt.tensor([0, 0, 2])))


def test_several_outputs_and_outputs_that_are_no_numbers():
    def function(x):
        values, indices = x.max(dim=1)
        return values, indices, x.exp(), tt.ones(2, dtype=tt.float64)
    assert gradcheck(function, (normal(3, 4),))


def test_results_of_other_operations_may_be_inputs():
    x = normal(3, 4)
    assert gradcheck(tt.tanh, (x.T,)) and gradcheck(tt.tanh, (x * 2,)) and x.grad is None
    assert gradcheck(lambda x: x.sin(), (tt.randn(4, requires_grad=True).double(),))


def test_parameters_that_the_function_closes_over_may_be_inputs():
    layer = tt.nn.Linear(3, 2).double()
    x = normal(4, 3)
    assert gradcheck(lambda *_: layer(x), (x, *layer.parameters()))


def test_a_function_that_ignores_an_input_gives_it_no_gradient():
    assert gradcheck(lambda x, y: x * 2, (normal(2), normal(3)))


def test_everything_is_left_as_it_was():
    x, y = normal(3, 4), normal(4)
    y.grad = tt.ones(4, dtype=tt.float64)
    before, grad = host(x).copy(), y.grad
    gradcheck(tt.mul, (x, y))
    assert np.array_equal(host(x), before) and x.grad is None and y.grad is grad and grad.tolist() == [1] * 4
    assert x.version.written == 0
    with tt.no_grad():
        assert gradcheck(tt.mul, (x, y))
        assert not tt.is_grad_enabled()


def test_the_state_is_restored_after_an_error_too():
    x, calls = normal(3), []

    def fails_later(x):
        calls.append(1)
        if len(calls) > 3:
            raise OSError
        return x * x
    before = host(x).copy()
    with pytest.raises(OSError):
        gradcheck(fails_later, (x,))
    assert np.array_equal(host(x), before) and x.grad is None


# --- what fails, and what it says -----------------------------------------------------------------------------------

@pytest.mark.parametrize("how, words", [
    (lambda dy, x: 0 * dy, "gives zeros"), (lambda dy, x: -2 * x * dy, "sign is flipped"),
        (lambda dy, x: x * dy, "0.5 times the right one"),
    (lambda dy, x: (2 * x * dy)[::-1], "other places"), (lambda dy, x: 2 * x * dy + 1.5, "sum or mean over that axis"),
    (lambda dy, x: xp().where(xp().arange(x.size).reshape(x.shape) == 3, 0, 2 * x * dy), "Only some elements"),
        (lambda dy, x: 2 * x, "factor dy"),
    (lambda dy, x: 2 * x * dy / 0.0 * 0.0, "NaN"), (lambda dy, x: None, "returns? None"), (lambda dy, x: 2 * x * dy * 1.01, "1.01 times"),
])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_wrong_gradient_is_described(how, words):
    x = normal(3, 4)
    with pytest.raises(GradcheckError, match=words) as caught:
        gradcheck(square(how), (x,))
    assert isinstance(caught.value, RuntimeError)
    assert gradcheck(square(how), (x,), raise_exception=False) is False
    assert gradcheck(square(how), (x,), raise_exception=False, fast_mode=True) is False
    assert gradient_error(square(how), (x,)) > 1e-3


def test_the_message_names_the_function_the_input_the_worst_element_and_both_values():
    x = normal(2, 3)

    def wrong_at_one_place(dy, x):
        g = 2 * x * dy
        g[1, 2] += 5.0
        return g

    def second(a, b):
        return a + Square.apply(b, wrong_at_one_place)
    with pytest.raises(GradcheckError) as caught:
        gradcheck(second, (normal(2, 3), x))
    message = str(caught.value)
    for words in ("gradcheck of second", "input 1", "shape (2, 3)", "index (1, 2)", "backward says", "central differences say", "1 of 6"):
        assert words in message
    said, reference = (float(message.split(f"{who} ")[1].split()[0].rstrip(",")) for who in ("backward says", "differences say"))
    assert said - reference == pytest.approx(5.0, abs=1e-5)


def test_the_error_is_the_largest_difference_over_the_largest_reference():
    x = tt.tensor([1.0, -2.0, 4.0], dtype=tt.float64, requires_grad=True)
    assert gradient_error(square(lambda dy, x: 2 * x * dy * 1.25), (x,)) == pytest.approx(0.25, rel=1e-6)
    assert gradient_error(lambda x: x.round(), (x + 0.2,)) == 0.0


def test_a_large_input_is_wrong_in_one_place_only():
    def wrong(dy, x):
        g = 2 * x * dy
        g[1234] += 10.0
        return g
    with pytest.raises(GradcheckError, match="along a random direction"):
        gradcheck(square(wrong), (normal(5000),))


def test_a_backward_that_passes_with_ones_fails_with_random_numbers():
    class LazySoftmax(Function):
        def forward(self, x):
            e = xp().exp(x)
            return e / e.sum(-1, keepdims=True)

        def backward(self, dy):
            return xp().zeros_like(dy)
    x = normal(3, 4)
    LazySoftmax.apply(x).sum().backward()
    true = np.zeros((3, 4))                     # Σ softmax = 1 does not move
    assert np.allclose(host(x.grad), true)
    assert not gradcheck(LazySoftmax.apply, (x,), raise_exception=False)


@pytest.mark.parametrize("how, words", [
    (lambda dy, x: xp().multiply(dy, 2 * x, out=dy), "upstream gradient"),
    (lambda dy, x: xp().multiply(x, 2.0, out=x) * dy, "changed|two backward passes|two different outputs"),
    (lambda dy, x: 2 * x * dy + 1e-9 * placed(np.random.default_rng().random(x.shape)), "two backward passes"),
])
def test_a_backward_with_side_effects_fails(how, words):
    with pytest.raises(GradcheckError, match=words):
        gradcheck(square(how), (normal(3, 4),))


def test_a_forward_that_writes_into_its_input_fails():
    class Careless(Function):
        def forward(self, x):
            x += 1.0
            return x * 1.0

        def backward(self, dy):
            return dy
    with pytest.raises(GradcheckError, match="must not write into its inputs|two different outputs"):
        gradcheck(Careless.apply, (normal(3),))


def test_a_random_function_is_told_from_a_wrong_one():
    with pytest.raises(GradcheckError, match="manual_seed"):
        gradcheck(lambda x: tt.nn.functional.dropout(x, 0.5), (normal(20),))

    def same_numbers(x):
        tt.manual_seed(0)
        return tt.nn.functional.dropout(x, 0.5)
    assert gradcheck(same_numbers, (normal(20),))


# --- what cannot be checked -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("inputs, words", [
    ((tt.ones(3, requires_grad=True),), "input 0 has dtype torch.float32.*float64.*double"),
    ((tt.ones(3, dtype=tt.float64),), "requires_grad=True"), ((), "requires_grad=True"), ((2.0,), "requires_grad=True"),
    ((tt.ones(1, dtype=tt.float64, requires_grad=True).expand(3),), "expanded"),
])
def test_inputs_that_cannot_be_checked_say_what_to_do(inputs, words):
    for raise_exception in (True, False):
        with pytest.raises(ValueError, match=words):
            gradcheck(lambda *x: x[0] * 2, inputs, raise_exception=raise_exception)


@pytest.mark.parametrize("function", [lambda x: x.detach(), lambda x: x > 0, lambda x: 3.0, lambda x: tt.tensor(x.tolist())])
def test_a_function_that_cuts_the_graph_says_so(function):
    with pytest.raises(ValueError, match="graph was cut"):
        gradcheck(function, (normal(3),))


# --- modules --------------------------------------------------------------------------------------------------------

class Affine(tt.nn.Module):
    """y = x · scale + shift, with a backward that may forget the shift."""

    def __init__(self, right=True):
        super().__init__()
        self.scale, self.shift = (tt.nn.Parameter(tt.randn(3, dtype=tt.float64)) for _ in range(2))
        self.right = right

    def forward(self, x):
        return x * self.scale + (self.shift if self.right else self.shift.detach())


def test_a_module_is_checked_for_its_parameters_and_its_inputs():
    assert gradcheck_module(Affine(), normal(2, 3))
    with pytest.raises(GradcheckError, match="Affine: the gradient of parameter 'shift'"):
        gradcheck_module(Affine(right=False), normal(2, 3))
    assert gradcheck_module(Affine(right=False), normal(2, 3), raise_exception=False) is False


def test_frozen_parameters_are_constants_and_float32_ones_say_how():
    module = Affine(right=False)
    module.shift.requires_grad_(False)
    assert gradcheck_module(module, normal(2, 3))
    with pytest.raises(ValueError, match=r"parameter 'weight' has dtype torch.float32.*\.double\(\)"):
        gradcheck_module(tt.nn.Linear(3, 2), normal(2, 3))


def test_a_module_keeps_its_gradients():
    module = Affine()
    module(normal(2, 3)).sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    gradcheck_module(module, normal(2, 3))
    assert all(p.grad is grads[name] for name, p in module.named_parameters())
