"""Shards of a batch: the gradients of the whole, the same bits each time, under the modes of who asked, and no trace of what failed."""
import _thread
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import runs

import tinygrad_tf as torch
from tinygrad_tf import amp, cli, nn
from tinygrad_tf.autograd import observing
from tinygrad_tf.data import LMBatch
from tinygrad_tf.models import MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.nn.moe import routings, update_biases
from tinygrad_tf.philox import draw_key
from tinygrad_tf.quantization.observers import MinMaxObserver
from tinygrad_tf.training import Shards, TrainConfig, Trainer

pytestmark = pytest.mark.host("threads share the cores of a CPU")
V, T = 11, 6
AT_ONCE = 2, 3, 8


def model_of(dropout=0.0, **options):
    torch.manual_seed(0)
    return MiniGPT(V, T, 16, 2, 32, 2, dropout=dropout, norm_first=True, **options)


def batch_of(rows=7):
    """Rows with more and with fewer targets that count."""
    ids = torch.randint(0, V, (rows, T + 1))
    targets = ids[:, 1:].clone()
    targets[:3, 2:] = -100
    return LMBatch(ids[:, :-1], targets)


def loss_of(model):
    return lambda batch: model(**batch)[1]


def gradients(model, backward, seed=3):
    """(what backward() returns, {name: gradient})"""
    model.zero_grad()
    torch.manual_seed(seed)
    result = backward()
    return result, {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}


def plain(model, batch):
    loss = model(**batch)[1]
    loss.backward()
    return loss.item()


def same_bits(one, other):
    return one[0] == other[0] and one[1].keys() == other[1].keys() and all(np.array_equal(one[1][name], other[1][name]) for name in one[1])


def assert_close(one, other, tolerance=1e-6):
    assert one[0] == pytest.approx(other[0], rel=1e-5) and one[1].keys() == other[1].keys()
    for name in one[1]:
        np.testing.assert_allclose(one[1][name], other[1][name], rtol=1e-4, atol=tolerance, err_msg=name)


# --- the gradients of the batch -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("threads", AT_ONCE)
def test_the_sum_of_the_parts_is_the_whole(threads):
    model, batch = model_of(), batch_of()
    whole = gradients(model, lambda: plain(model, batch))
    with Shards(threads) as shards:
        found = [gradients(model, lambda: shards.backward(loss_of(model), batch)) for _ in range(3)]
    assert_close(found[0], whole)
    assert all(same_bits(found[0], again) for again in found)


@pytest.mark.parametrize("threads", AT_ONCE)
def test_who_looks_on_sees_the_same_bits_in_its_own_thread(threads):
    model, batch, seen = model_of(dropout=0.2), batch_of(), set()
    with Shards(threads) as shards:
        def backward():
            return shards.backward(loss_of(model), batch)
        at_once = gradients(model, backward)
        with observing(lambda *_: seen.add(threading.get_ident())):
            watched = gradients(model, backward)
        with torch.autograd.detect_anomaly():
            checked = gradients(model, backward)
    assert seen == {threading.get_ident()} and same_bits(at_once, watched) and same_bits(at_once, checked)


def test_one_thread_is_nothing_at_all(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pytest.fail("BLAS was touched"))
    model, batch = model_of(dropout=0.3), batch_of()
    with Shards(1) as shards:
        assert same_bits(gradients(model, lambda: plain(model, batch)), gradients(model, lambda: shards.backward(loss_of(model), batch)))
        assert shards.map(threading.get_ident, [()]) == [threading.get_ident()]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_tensors_count_by_their_rows(rows):
    layer, x, y = nn.Linear(4, 3), torch.randn(rows, 4), torch.randint(0, 3, (rows,))

    def loss(x, y):
        return F.cross_entropy(layer(x), y)

    def at_once():
        value = loss(x, y)
        value.backward()
        return value.item()
    with Shards(3) as shards:
        assert_close(gradients(layer, lambda: shards.backward(loss, x, y)), gradients(layer, at_once))


def test_they_add_to_what_is_there_and_map_takes_any_number_of_parts():
    w = torch.ones(3, requires_grad=True)
    w.grad = torch.full((3,), 5.0)

    def work(factor, more):
        for _ in range(2):                      # tied: two ways to one leaf
            ((w + more) * w * factor).sum().backward()
        return factor
    with Shards(2) as shards:
        assert shards.map(work, [(float(i), 1) for i in range(5)]) == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert w.grad.tolist() == [5 + 2 * 3 * 10.0] * 3
        assert shards.map(work, []) == []


def test_hooks_of_a_leaf_see_the_sum_once_and_those_of_a_result_each_part():
    w, seen, inner = torch.ones(2, requires_grad=True), [], []
    w.register_hook(lambda g: seen.append(g.tolist()) or 2 * g)

    def loss(x):
        y = w * x
        y.register_hook(lambda g: inner.append(g.tolist()))
        return y.sum()
    with Shards(2) as shards:
        shards.backward(loss, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert seen == [[2.0, 3.0]] and w.grad.tolist() == [4.0, 6.0] and inner == [[[0.5, 0.5]]] * 2


def test_frozen_and_unused_leaves_stay_without_gradient():
    model, batch = model_of(), batch_of()
    model.embedding.requires_grad_(False)
    extra = torch.ones(2, requires_grad=True)
    with Shards(2) as shards:
        shards.backward(loss_of(model), batch)
    assert extra.grad is None and model.embedding.token.weight.grad is None and model.blocks[0].norm1.weight.grad is not None


# --- random numbers -------------------------------------------------------------------------------------------------------------

def test_dropout_is_that_of_the_seed_and_of_the_number_of_shards():
    model, batch = model_of(dropout=0.3), batch_of()

    def found(threads):
        with Shards(threads) as shards:
            return gradients(model, lambda: shards.backward(loss_of(model), batch)), torch.rand(3).tolist()
    results = {threads: found(threads) for threads in (2, 2, 3)}
    assert same_bits(results[2][0], found(2)[0]) and not same_bits(results[2][0], results[3][0])
    assert results[2][1] == results[3][1]               # the default stream goes on from the same place


def test_each_part_draws_from_a_stream_of_its_own():
    def draw():
        return torch.rand(2).tolist(), torch.randn(1).item(), draw_key(), torch.initial_seed(), F.dropout(torch.ones(8)).tolist()
    with Shards(3) as shards:
        torch.manual_seed(7)
        first = shards.map(draw, [()] * 3)
        assert len({str(part) for part in first}) == 3
        assert torch.initial_seed() == 7
        torch.manual_seed(7)
        assert shards.map(draw, [()] * 3) == first


# --- the modes of who asks --------------------------------------------------------------------------------------------------------

def modes():
    casts = amp.is_autocast_enabled("cpu"), amp.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), *casts, np.geterr()["over"], threading.get_ident()


def test_the_modes_of_the_caller_hold_in_each_thread_and_end_with_the_part():
    with Shards(2) as shards:
        with torch.no_grad(), amp.autocast("cpu", dtype=torch.float16), np.errstate(over="raise"):
            inside = shards.map(modes, [()] * 2)
        outside = shards.map(modes, [()] * 2)
    assert [m[:4] for m in inside] == [(False, True, torch.float16, "raise")] * 2
    assert [m[:4] for m in outside] == [modes()[:4]] * 2
    assert threading.get_ident() not in {m[4] for m in inside + outside}


def test_autocast_around_it_is_that_of_a_whole_batch():
    model, batch = model_of(), batch_of()
    with Shards(2) as shards, amp.autocast("cpu", dtype=torch.float16):
        whole, parts = (gradients(model, f) for f in (lambda: plain(model, batch), lambda: shards.backward(loss_of(model), batch)))
    assert parts[0] == pytest.approx(whole[0], rel=1e-2)
    for name in whole[1]:
        np.testing.assert_allclose(parts[1][name], whole[1][name], atol=2e-3, err_msg=name)


def test_without_gradients_the_usual_error_comes_out():
    model, batch = model_of(), batch_of()
    with Shards(2) as shards, torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        shards.backward(loss_of(model), batch)


def test_recomputed_blocks_draw_the_same_numbers():
    model, batch = model_of(dropout=0.3), batch_of()
    with Shards(2) as shards:
        kept = gradients(model, lambda: shards.backward(loss_of(model), batch))
        model.checkpoint_blocks = True
        assert same_bits(kept, gradients(model, lambda: shards.backward(loss_of(model), batch)))


def test_shards_within_a_shard_follow_one_another():
    w = torch.ones(1, requires_grad=True)
    with Shards(2) as outer, Shards(2) as inner:
        outer.map(lambda: inner.backward(lambda x: (w * x).mean(), torch.tensor([[1.0], [3.0]])), [()] * 2)
    assert w.grad.tolist() == [4.0]


# --- modules that write -----------------------------------------------------------------------------------------------------------

def test_experts_count_the_tokens_of_all_shards():
    model = model_of(ffn=lambda: nn.MoE(16, 32, 4, 2, bias_rate=0.1))
    batch, counted = batch_of(), []
    for threads in 1, 2, 4:
        with Shards(threads) as shards:
            shards.backward(loss_of(model), batch)
        counted.append([block.ffn._wanted.tolist() for block in model.blocks])
        for block in model.blocks:
            block.ffn._wanted = np.zeros(4)
    assert counted[0] == counted[1] == counted[2] and sum(counted[0][0]) == 2 * 7 * T
    update_biases(model)


def test_who_collects_routings_gets_those_of_all_parts_in_order():
    model, batch = model_of(ffn=lambda: nn.MoE(16, 32, 4, 2)), batch_of()
    with Shards(2) as shards, routings() as routed:
        shards.backward(loss_of(model), batch)
    assert [r.experts.shape[0] for r in routed] == [4, 4, 3, 3]


def test_a_buffer_that_forward_replaces_is_refused():
    layer = nn.Sequential(nn.Linear(4, 4), MinMaxObserver())
    with Shards(2) as shards, pytest.raises(RuntimeError, match=r"MinMaxObserver.min_val is a Tensor, and was assigned to while threads"):
        shards.backward(lambda x: layer(x).mean(), torch.randn(4, 4))
    assert layer[0].weight.grad is None and layer[1].batches.item() == 0


def test_a_graph_from_before_is_refused():
    w, x = torch.ones(4, requires_grad=True), torch.randn(4, 4)
    doubled, message = w * 2, r"backward came to Mul \(called at .*test_shards.py:\d+\), which ran before the shards began"
    for watching in nullcontext(), observing(lambda *_: None):
        with Shards(2) as shards, watching, pytest.raises(RuntimeError, match=message):
            shards.backward(lambda x: (doubled * x).mean(), x)
    assert w.grad is None


# --- errors, Ctrl-C, forks ----------------------------------------------------------------------------------------------------------

def test_the_first_error_by_order_comes_out_and_nothing_is_added():
    w, late, ended = torch.ones(1, requires_grad=True), threading.Event(), []

    def work(i):
        (w * 2).sum().backward()
        if i == 0:
            late.wait(5)
            raise ZeroDivisionError("part 0")
        late.set()
        ended.append(i)
        raise LookupError("part 1")
    with Shards(2) as shards:
        with pytest.raises(ZeroDivisionError, match="part 0"):
            shards.map(work, [(0,), (1,)])
        assert w.grad is None and ended == [1]
        shards.map(lambda: (w * 2).sum().backward(), [()] * 2)
    assert w.grad.tolist() == [4.0]


def press_ctrl_c():
    """A signal that wakes the main thread where it waits; `_thread.interrupt_main` only tells it when it has waited."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    else:                                               # Windows
        _thread.interrupt_main()


def test_ctrl_c_waits_for_the_parts_and_leaves_no_gradient():
    w, ended, begun = torch.ones(1, requires_grad=True), [], threading.Barrier(2)

    def work(i):
        begun.wait(5)
        (w * 2).sum().backward()
        if i == 0:
            press_ctrl_c()
        threading.Event().wait(0.2)
        ended.append(i)
    with Shards(2) as shards:
        with pytest.raises(KeyboardInterrupt):
            shards.map(work, [(0,), (1,)])
        assert sorted(ended) == [0, 1] and w.grad is None


@pytest.mark.parametrize("error, message, call", [
    (TypeError, "must be a Tensor, got list", lambda s: s.backward(lambda x: x.mean(), [1.0, 2.0])),
    (ValueError, "the same number of rows", lambda s: s.backward(lambda x, y: x.mean(), torch.ones(3), torch.ones(4))),
    (ValueError, "the same number of rows", lambda s: s.backward(lambda x: x.mean(), torch.ones(0, 2))),
    (ValueError, "the same number of rows", lambda s: s.backward(lambda: 0)),
    (ValueError, "the same number of rows", lambda s: s.backward(lambda x: x, torch.tensor(1.0))),
    (ValueError, "some targets are -100", lambda s: s.backward(lambda x, y: x.mean(), torch.ones(2, 2), torch.tensor([[1, -100], [1, 2]]))),
    (TypeError, "must return the loss, a Tensor of one number, got tuple", lambda s: s.backward(lambda x: (x, x), torch.ones(4))),
    (RuntimeError, "implicitly created only for scalar", lambda s: s.backward(torch.ones(2, requires_grad=True).mul, torch.ones(4, 2))),
    (ValueError, "at least 1", lambda s: Shards(0)), (TypeError, "threads", lambda s: Shards(1.5)),
])
def test_what_is_wrong_is_said(error, message, call):
    with Shards(2) as shards, pytest.raises(error, match=message):
        call(shards)


def test_a_gpu_is_refused(gpu):
    layer, x = nn.Linear(2, 1).to("cuda"), torch.ones(4, 2, device="cuda")
    batch = LMBatch(*(torch.ones(2, 3, dtype="int64", device="cuda") for _ in range(2)))
    with Shards(2) as shards:
        for call in (lambda: shards.backward(lambda x: layer(x).mean(), x), lambda: shards.map(len, [([x],)]),
                     lambda: shards.backward(len, batch)):
            with pytest.raises(RuntimeError, match="share the cores of a CPU, and this batch is on cuda"):
                call()


def test_without_threadpoolctl_the_environment_must_say_one(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "threadpoolctl" else found(name))
    for name, value in (("OPENBLAS_NUM_THREADS", "2"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    with Shards(2) as shards:
        with pytest.raises(ImportError, match="pip install threadpoolctl, or set OPENBLAS_NUM_THREADS=1 before"):
            shards.map(int, [()] * 2)
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
        assert shards.map(int, [()] * 2) == [0, 0]


def test_blas_has_one_thread_until_it_is_closed():
    threadpoolctl = pytest.importorskip("threadpoolctl")

    def counts():
        return {found["num_threads"] for found in threadpoolctl.threadpool_info() if found["user_api"] == "blas"}
    with threadpoolctl.threadpool_limits(2, "blas"):
        if counts() != {2}:
            pytest.skip("this BLAS cannot have two threads")
        with Shards(2) as shards:
            assert shards.map(counts, [()] * 2) == [{1}] * 2
        assert counts() == {2}
        assert shards.map(counts, [()] * 2) == [{1}] * 2            # it begins anew
        shards.close()
        assert counts() == {2}


@pytest.mark.skipif(importlib.util.find_spec("threadpoolctl") is None, reason="threadpoolctl is not installed")
def test_two_at_once_share_the_limit_whoever_is_closed_first():
    """In a process of its own whose BLAS has two threads: one while either is open, two afterwards."""
    code = """
import threadpoolctl, numpy
from tinygrad_tf.training import Shards
def blas():
    return {i["num_threads"] for i in threadpoolctl.threadpool_info() if i["user_api"] == "blas"}
for order in (0, 1), (1, 0):
    shards = Shards(2), Shards(3)
    for one in shards:
        one.map(lambda x: x, [(1,), (2,)])
    seen = [blas()]
    for i in order:
        shards[i].close()
        seen.append(blas())
    assert seen == [{1}, {1}, {2}], seen
"""
    variables = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "2")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **variables})
    assert done.returncode == 0 or "[{1}, {1}, {1}]" in done.stderr, done.stderr          # on one core BLAS never has two


def test_several_threads_may_be_the_first_to_use_it():
    for _ in range(20):
        errors, begin = [], threading.Barrier(4)

        def use(shards, errors=errors, begin=begin):
            begin.wait()
            try:
                assert shards.map(lambda x: x + 1, [(1,), (2,)]) == [2, 3]
            except Exception as error:
                errors.append(error)
        with Shards(2) as shards:
            users = [threading.Thread(target=use, args=(shards,)) for _ in range(4)]
            for user in users:
                user.start()
            for user in users:
                user.join(30)
        assert errors == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_threads_of_its_own():
    with Shards(2) as shards:
        shards.map(int, [()] * 2)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            os._exit(3 if shards.map(int, [()] * 2) == [0, 0] else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_a_process_ends_though_nobody_has_closed_it():
    code = "from tinygrad_tf.training import Shards; s = Shards(2); print(s.map(int, [()] * 2))"
    done = subprocess.run([sys.executable, "-c", code], env=runs.environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 0]\n", "")


# --- a run ---------------------------------------------------------------------------------------------------------------------------

def weights(trainer):
    return {name: p.array.tobytes() for name, p in trainer.model.state_dict().items()}


def losses(trainer):
    return trainer.metrics.column("train_loss")[1]


def ran(folder, **settings):
    trainer = runs.trainer(folder, **settings)
    trainer.run()
    return trainer


@pytest.mark.parametrize("settings", [{}, {"accumulation": 2}, {"experts": 4}, {"experts": 4, "balance": "bias"}, {"threads": 3},
                                      {"activations": "recomputed"}, {"precision": "float16"}, {"batch_size": 2, "threads": 8}],
                         ids=str)
def test_a_run_with_threads_is_that_of_one_but_for_rounding_and_has_the_same_bits_again(tmp_path, settings):
    settings = {"threads": 2, "steps": 5, **settings}
    one, two, again = (ran(tmp_path, out=out, **{**settings, **change}) for out, change in (("1", {"threads": 1}), ("2", {}), ("3", {})))
    assert weights(two) == weights(again) and weights(two) != weights(one)
    np.testing.assert_allclose(losses(two), losses(one), rtol=0.02 if settings.keys() & {"precision", "experts"} else 1e-4)


def test_it_is_interrupted_and_resumed_with_the_same_bits(tmp_path):
    settings = {"threads": 2, "dropout": 0.3, "accumulation": 2, "experts": 4, "steps": 8}
    whole, trainer = ran(tmp_path, out="whole", **settings), runs.trainer(tmp_path, **settings)
    assert trainer.run(should_stop=runs.stop_at(3, trainer)) is False
    resumed = Trainer.resume(trainer.folder)
    assert resumed.config.threads == 2 and resumed.run() is True and weights(resumed) == weights(whole)
    assert 'threads = 2\n' in (trainer.folder / "config.toml").read_text(encoding="utf-8")


def test_a_step_that_was_interrupted_is_made_again(tmp_path):
    whole, trainer = ran(tmp_path, out="whole", threads=2, dropout=0.3, steps=4), runs.trainer(tmp_path, threads=2, dropout=0.3, steps=4)
    work, calls = trainer._backward_of, []

    def interrupting(part, share):
        calls.append(share)
        if len(calls) == 3:
            _thread.interrupt_main()
        return work(part, share)
    trainer._backward_of = interrupting
    made = 0
    while trainer.step < 4:
        try:
            trainer.train_step()
        except KeyboardInterrupt:
            made += 1
    assert made == 1 and weights(trainer) == weights(whole)
    trainer.shards.close()


def test_threads_may_change_when_a_run_is_resumed(tmp_path):
    trainer = runs.trainer(tmp_path, threads=2, steps=4)
    trainer.run(should_stop=runs.stop_at(2, trainer))
    resumed = Trainer.resume(trainer.folder, threads=1)
    assert resumed.config == dataclasses.replace(trainer.config, threads=1) and resumed.run() is True
    assert Trainer.resume(trainer.folder).config.threads == 1


def test_a_configuration_from_before_there_were_threads_has_one():
    old = TrainConfig().to_dict()
    del old["threads"]
    assert TrainConfig.from_dict(old).threads == 1


def test_a_gpu_is_refused_before_any_work(tmp_path, gpu):
    with pytest.raises(ValueError, match="threads must be 1 on cuda, got 2"):
        runs.trainer(tmp_path, threads=2, device="cuda")


def test_the_command(tmp_path, monkeypatch, capsys):
    runs.write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--text", "text.txt", *runs.TINY_FLAGS, "--steps", "3", "--threads", "3"]) == 0
    assert "Threads: 3." in capsys.readouterr().out
    assert cli.main(["train", "--resume", "--steps", "4", "--threads", "9999"]) == 0
    assert "9999 threads on" in capsys.readouterr().err
    assert cli.main(["train", "--resume", "--steps", "5", "--threads", "0"]) == 2
    assert "threads must be at least 1" in capsys.readouterr().err
