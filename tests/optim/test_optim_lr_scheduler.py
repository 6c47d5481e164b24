"""Learning-rate schedules."""
import math

import pytest

import tinygrad_tf as torch
from tinygrad_tf import nn
from tinygrad_tf.optim import SGD, AdamW
from tinygrad_tf.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, warmup_cosine


def optimizer(*rates):
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates])


def rates(o):
    return [group["lr"] for group in o.param_groups]


def test_lambda_is_asked_for_step_0_at_once():
    o, asked = optimizer(0.1, 0.2), []
    s = LambdaLR(o, lambda step: asked.append(step) or 1 / (1 + step))
    assert asked == [0, 0] and s.last_epoch == 0 and s.get_last_lr() == rates(o) == [0.1, 0.2]
    o.step()
    s.step()
    assert s.last_epoch == 1 and s.get_last_lr() == rates(o) == [0.05, 0.1] and asked[2:] == [1, 1]


def test_a_second_scheduler_starts_from_the_same_rates():
    o = optimizer(0.4)
    LambdaLR(o, lambda step: 0.0)
    assert LambdaLR(o, lambda step: 0.5).get_last_lr() == [0.2]


def test_one_lambda_for_each_group():
    o = optimizer(1.0, 1.0)
    s = LambdaLR(o, [lambda step: 0.5 ** step, lambda step: 1.0])
    s.step()
    assert rates(o) == [0.5, 1.0]
    with pytest.raises(ValueError, match="expected 2"):
        LambdaLR(o, [lambda step: 1.0])


def test_state_resumes():
    o = optimizer(0.4)
    s = LambdaLR(o, lambda step: 1 / (1 + step))
    for _ in range(3):
        s.step()
    state = s.state_dict()
    assert state["last_epoch"] == 3 and "optimizer" not in state and "lr_lambdas" not in state
    fresh = optimizer(0.4)
    again = LambdaLR(fresh, lambda step: 1 / (1 + step))
    again.load_state_dict({**state, "lr_lambdas": [None], "_step_count": 4})
    s.step(), again.step()
    assert rates(o) == rates(fresh) == pytest.approx([0.08]) and state["last_epoch"] == 3
    assert LambdaLR(o, lambda step: 0.5, last_epoch=5).last_epoch == 6
    with pytest.raises(KeyError, match="initial_lr"):
        LambdaLR(optimizer(0.1), lambda step: 1.0, last_epoch=5)


def test_cosine_annealing():
    o = optimizer(1.0, 0.5)
    s = CosineAnnealingLR(o, T_max=10, eta_min=0.1)
    seen = [rates(o)]
    for _ in range(10):
        s.step()
        seen.append(rates(o))
    assert seen[0] == [1.0, 0.5] and seen[5] == pytest.approx([0.55, 0.3]) and seen[10] == pytest.approx([0.1, 0.1])
    with pytest.raises(ValueError, match="T_max"):
        CosineAnnealingLR(o, T_max=0)


def test_warmup_cosine():
    f = [warmup_cosine(step, 100, 1000) for step in range(1201)]
    assert [f[i] for i in (0, 1, 50, 100, 1000, 1200)] == pytest.approx([0.0, 0.01, 0.5, 1.0, 0.0, 0.0]) and f[550] == pytest.approx(0.5)
    assert f[:101] == sorted(f[:101]) and f[100:] == sorted(f[100:], reverse=True)
    assert warmup_cosine(1000, 100, 1000, floor=0.1) == pytest.approx(0.1) and warmup_cosine(100, 100, 1000, floor=0.1) == 1.0
    assert warmup_cosine(0, 0, 10) == 1.0 and warmup_cosine(5, 5, 5) == 1.0 and warmup_cosine(6, 5, 5) == 0.0


def test_what_a_scheduler_needs():
    with pytest.raises(TypeError, match="not an Optimizer"):
        LambdaLR([1], lambda step: 1.0)
    with pytest.raises(NotImplementedError, match="get_lr"):
        LRScheduler(optimizer(0.1))


def test_a_group_added_later():
    o = optimizer(0.1)
    s = LambdaLR(o, lambda step: 0.5 ** step)
    o.add_param_group({"params": nn.Parameter(torch.ones(1)), "lr": 0.3})
    with pytest.raises(ValueError, match="LambdaLR: 1 learning rates for 2 parameter groups.*new scheduler"):
        s.step()
    assert rates(o) == [0.1, 0.3] and s.get_last_lr() == [0.1]
    o = optimizer(1.0)
    s = CosineAnnealingLR(o, T_max=4)
    o.add_param_group({"params": nn.Parameter(torch.ones(1)), "lr": 0.5})
    for _ in range(2):
        s.step()
    assert rates(o) == s.get_last_lr() == pytest.approx([0.5, 0.25])
    s.step(), s.step()
    with pytest.raises(ValueError, match="CosineAnnealingLR: 1 learning rates for 2"):
        s.step()                                # up again from the lowest point: towards which rate, for the second?


def test_a_rate_that_was_changed_is_where_the_cosine_goes_on():
    o = optimizer(1.0, 1.0)
    s = CosineAnnealingLR(o, T_max=4)
    o.param_groups[0]["lr"] = 0.0
    for wanted in (0.853553, 0.5, 0.146447, 0.0, 0.146447):
        s.step()
        assert rates(o) == pytest.approx([0.0 if s.last_epoch < 5 else wanted, wanted], abs=1e-6)


def test_a_rate_that_is_a_tensor_stays_one():
    lr = torch.tensor(0.5, dtype=torch.float64)
    o = SGD([nn.Parameter(torch.ones(1))], lr=lr)
    s = LambdaLR(o, lambda step: 0.5 ** step)
    s.step(), s.step()
    assert o.param_groups[0]["lr"] is lr and lr.item() == 0.125 and s.base_lrs == [0.5] and s.get_last_lr() == [0.125]


def schedule_with_interventions(framework, make, tensor_lr):
    """The rates of 30 steps, in which the user changes one, adds a group, and begins again in the middle."""
    lr, schedulers = 0.3, framework.optim.lr_scheduler
    if tensor_lr:
        lr = framework.tensor(lr, dtype=framework.float64)
    o = framework.optim.SGD([framework.nn.Parameter(framework.ones(1))], lr=lr)
    s, seen = make(schedulers, o, -1), []
    for step in range(30):
        if step == 4:
            o.param_groups[0]["lr"] = 0.2
        if step == 10 and make is cosine:
            o.add_param_group({"params": framework.nn.Parameter(framework.ones(1)), "lr": 0.7})
        if step == 12:
            for group in o.param_groups:
                group.setdefault("initial_lr", 0.6)
            s = make(schedulers, o, s.last_epoch)
            seen.append([float(x) for x in s.get_last_lr()])
        o.step()
        s.step()
        seen.append([float(group["lr"]) for group in o.param_groups])
        assert [float(x) for x in s.get_last_lr()] == seen[-1]
    return [x for rates in seen for x in rates]


def cosine(schedulers, o, last_epoch):
    return schedulers.CosineAnnealingLR(o, 9, 0.01, last_epoch)


def decay(schedulers, o, last_epoch):
    return schedulers.LambdaLR(o, lambda step: 0.9 ** step, last_epoch)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [cosine, decay])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_what_the_user_changes_on_the_way_acts_as_in_pytorch(make, tensor_lr):
    theirs, mine = (schedule_with_interventions(f, make, tensor_lr) for f in (pytest.importorskip("torch"), torch))
    assert mine == pytest.approx(theirs, rel=1e-10) and len(set(mine)) > 15


@pytest.mark.torch
def test_a_group_added_later_is_refused_as_in_pytorch():
    for framework in (pytest.importorskip("torch"), torch):
        first, second = (framework.nn.Parameter(framework.ones(1)) for _ in range(2))
        o = framework.optim.SGD([first], lr=0.1)
        constant, wave = framework.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5), framework.optim.lr_scheduler.CosineAnnealingLR(o, 1)
        o.add_param_group({"params": second})
        o.step()
        with pytest.raises(ValueError):
            constant.step()
        wave.step()
        with pytest.raises(ValueError):
            wave.step()


@pytest.mark.torch
@pytest.mark.parametrize("make", [lambda s, o: s.LambdaLR(o, lambda step: 0.9 ** step), lambda s, o: s.CosineAnnealingLR(o, 7, 0.01)])
def test_rates_are_those_of_pytorch(make):
    theirs, seen = pytest.importorskip("torch"), []
    for framework in (theirs, torch):
        o = framework.optim.AdamW([framework.nn.Parameter(framework.ones(1))], lr=0.3)
        s, lrs = make(framework.optim.lr_scheduler, o), []
        for _ in range(7):
            o.step()
            s.step()
            lrs.append(s.get_last_lr()[0])
        seen.append(lrs)
    assert seen[0] == pytest.approx(seen[1], rel=1e-12) and not math.isclose(seen[0][0], seen[0][-1])


def test_a_schedule_moves_the_weights():
    p = nn.Parameter(torch.ones(1))
    o = AdamW([p], lr=0.1, weight_decay=0.0)
    s = LambdaLR(o, lambda step: warmup_cosine(step, 1, 3))
    moved = []
    for _ in range(4):
        p.grad = torch.ones(1)
        before = p.item()
        o.step()
        s.step()
        moved.append(before - p.item())
    assert moved == pytest.approx([0.0, 0.1, 0.05, 0.0], abs=1e-6)
