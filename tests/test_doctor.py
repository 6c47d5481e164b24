"""The doctor: each planted fault of examples/26_doctor.py is named, healthy models are not, and nothing is changed by looking."""
import copy
import importlib.util
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import runs
from device import host

import tinygrad_tf as torch
from tinygrad_tf import nn, random
from tinygrad_tf.cli import main
from tinygrad_tf.data import ByteTokenizer, CharTokenizer, LMBatch, pack_sequences, pad_sequences
from tinygrad_tf.models import Encoder, EncoderClassifier, EncoderDecoder, MiniGPT
from tinygrad_tf.nn import functional as F
from tinygrad_tf.optim import SGD, AdamW
from tinygrad_tf.training import Case, Finding, Report, TrainConfig, Trainer, checks, doctor, examine
from tinygrad_tf.training.checks import distance
from tinygrad_tf.training.doctor import CHECKS
from tinygrad_tf.training.doctor_of_run import examine_run

PATH = Path(__file__).resolve().parent.parent / "examples" / "26_doctor.py"
spec = importlib.util.spec_from_file_location("doctor_example", PATH)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
V, T = 30, 12
FIRST = {cause: name for name, (cause, _) in reversed(example.FAULTS.items())}
# Each kernel takes the stand-in 40 ms, and a report has hundreds: there each check is run by itself, once.
reports = pytest.mark.host("whole reports, of which the stand-in needs minutes")


def ids(rows=4, more=1, seed=0):
    return torch.randint(4, V, (rows, T + more), generator=torch.Generator().manual_seed(seed))


def next_tokens(rows=4):
    found = ids(rows)
    return found[:, :-1], found[:, 1:]


def gpt(**options):
    torch.manual_seed(0)
    return MiniGPT(V, T, 16, 2, 32, 2, **{"dropout": 0.1, "norm_first": True, **options})


def texts(lengths=(13, 5, 9, 3)):
    return [row[:n] for row, n in zip(ids().tolist(), lengths)]


# --- what is planted is named, and nothing else ---------------------------------------------------------------------------

@reports
@pytest.mark.parametrize("name", example.FAULTS)
def test_the_planted_fault_is_named(name):
    report = example.report(example.planted(name))
    assert (report.causes, report.failed) == ([example.FAULTS[name][0]], {})
    assert all(f.evidence and f.advice and f.symptom for f in report)


@pytest.mark.parametrize("cause", [pytest.param(check.cause, marks=reports if check.cause == "does not learn" else ())
                                   for check in CHECKS if check.look.__module__ == checks.__name__])
def test_each_check_by_itself(cause):
    p, well = example.planted(FIRST[cause]), example.patient()
    p.known["checks"] = well.known["checks"] = [cause]
    assert (example.report(p).causes, example.report(well).causes, example.report(p).failed) == ([cause], [], {})


def test_every_check_has_a_planted_fault():
    assert {check.cause for check in CHECKS} == {cause for cause, _ in example.FAULTS.values()}


def test_causes_are_told_apart_by_name_and_explained_by_others_that_are_there():
    causes = [check.cause for check in CHECKS]
    assert len(causes) == len(set(causes))
    assert [cause for check in CHECKS for cause in check.explained_by if cause not in causes] == []
    assert [check.cause for check in CHECKS if not check.look.__doc__ or not check.advice] == []


def test_no_two_causes_explain_each_other_away():
    left = {check.cause: set(check.explained_by) for check in CHECKS}
    while roots := {cause for cause, reasons in left.items() if not reasons}:
        left = {cause: reasons - roots for cause, reasons in left.items() if cause not in roots}
    assert left == {}


@reports
@pytest.mark.parametrize("steps", [0, 25], ids=["untrained", "trained"])
@pytest.mark.parametrize("name", example.HEALTHY)
def test_no_false_alarm(name, steps):
    p = example.patient(**example.HEALTHY[name])
    report = example.report(example.trained(p, steps) if steps else p)
    assert (report.causes, report.failed) == ([], {})


class Masked(nn.Module):
    """A masked language model: each token is predicted from both sides."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(V, T, 16, 2, 32, 1), nn.Linear(16, V)

    def forward(self, tokens, targets=None):
        logits = self.head(self.encoder(tokens))
        return logits, F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1))


class Lora(nn.Module):
    """y = W x + B A x, B of zeros at first: A has a gradient of zeros then."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer, self.a, self.b = layer, nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.layer(x) + self.b(self.a(x))


class ByHand(nn.Module):
    """Logits alone, no dropout, a head of its own, a window."""

    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(V, 16), nn.TransformerBlock(16, 2, 32, 0.0, norm_first=True, window=4)
        self.head = Lora(nn.Linear(16, V))

    def forward(self, x):
        return self.head(self.block(self.embedding(x), causal=True))


class ShiftsByItself(MiniGPT):
    """Takes the ids as labels, and shifts them: the convention of another library."""

    def forward(self, token_ids, labels=None):
        logits, _ = super().forward(token_ids)
        return logits, F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))


class Positioned(MiniGPT):
    """Is told positions [T] and who may look at whom [T, T]."""

    def __init__(self):
        super().__init__(V, T, 16, 2, 32, 1, norm_first=True)

    def forward(self, token_ids, targets=None, position_ids=None, allowed=None):
        x = self.blocks[0](self.embedding(token_ids, position_ids), allowed=allowed)
        logits = self.lm_head(self.final_norm(x))
        return logits, F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1))


def masked():
    hidden = torch.rand(4, T) < 0.2
    return ids(more=0).masked_fill(hidden, 1), ids(more=0).masked_fill(~hidden, -100)


def with_checkpoints():
    model = gpt()
    model.checkpoint_blocks = True
    return model


WELL = {                        # name → (a model, a batch, what else is known)
    "one token": lambda: (MiniGPT(V, 1, 16, 2, 32, 1), (ids()[:, :1], ids()[:, 1:2]), {}),
    "two tokens, one row": lambda: (MiniGPT(V, 2, 16, 2, 32, 1), (ids(1)[:, :2], ids(1)[:, 1:3]), {}),
    "no targets": lambda: (gpt(), {"token_ids": ids(more=0)}, {}),
    "float64": lambda: (gpt().double(), next_tokens(), {}),
    "float16": lambda: (gpt().half(), next_tokens(), {}),
    "activations recomputed": lambda: (with_checkpoints(), next_tokens(), {}),
    "one expert, capacity, a bias": lambda: (
        gpt(ffn=lambda: nn.MoE(16, 32, 4, 1, router="softmax_topk", bias_rate=1e-3, capacity_factor=1.0)), next_tokens(), {}),
    "more dense experts than tokens choose": lambda: (
        gpt(ffn=lambda: nn.DenseMoE(16, 32, 12, 1, router="softmax_topk")), next_tokens(2), {}),
    "noisy router": lambda: (gpt(ffn=lambda: nn.MoE(16, 32, router="noisy_topk")), next_tokens(), {}),
    "padded on the right, and not masked": lambda: (gpt(), _padded("right"), {"tokenizer": LETTERS}),
    "logits alone, LoRA, a window": lambda: (ByHand(), next_tokens(), {}),
    "labels that the model shifts": lambda: (
        ShiftsByItself(V, T, 16, 2, 32, 1), {"token_ids": ids(more=0), "labels": ids(more=0)}, {}),
    "masked language model": lambda: (Masked(), masked(), {}),
    "masked language model, all places count": lambda: (Masked(), (masked()[0], ids(more=0)), {"causal": False}),
    "classifier": lambda: (EncoderClassifier(Encoder(V, T, 16, 2, 32, 1), 3), (ids(more=0), torch.tensor([0, 2, 1, 1])), {}),
    "padded classifier": lambda: (
        EncoderClassifier(Encoder(V, T, 16, 2, 32, 1), 3, "first"),
        {"tokens": ids(more=0), "targets": torch.tensor([0, 2, 1, 1]), "valid_tokens": ids(more=0) * 0 + torch.arange(T) < 7}, {}),
    "no ids at all": lambda: (
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)), (torch.randn(20, 4), torch.randint(0, 3, (20,))), {}),
    "regression": lambda: (
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), (torch.randn(20, 4), torch.randn(20, 1)), {"loss_of": F.mse_loss}),
    "more positions than tokens": lambda: (MiniGPT(260, 300, 16, 2, 32, 1), next_tokens(), {"tokenizer": ByteTokenizer()}),
    "a table that is rounded up": lambda: (MiniGPT(264, T, 16, 2, 32, 1), next_tokens(), {"tokenizer": ByteTokenizer()}),
    "as many rows as tokens, which share positions and a mask": lambda: (
        Positioned(), {"token_ids": ids(T)[:, :-1], "targets": ids(T)[:, 1:], "position_ids": torch.arange(T),
                       "allowed": torch.tril(torch.ones(T, T)).bool()}, {}),
    "a deep one": lambda: (MiniGPT(V, T, 16, 2, 32, 16, norm_first=True), next_tokens(), {}),
}
LETTERS = CharTokenizer("".join(chr(65 + i) for i in range(V - 4)))


def _padded(side):
    """A batch that does not say where its padding is."""
    batch = pad_sequences(texts(), LETTERS.pad_id, side)
    return batch.token_ids, batch.targets


@reports
@pytest.mark.parametrize("name", WELL)
def test_no_false_alarm_far_from_the_usual(name):
    torch.manual_seed(0)
    model, batch, known = WELL[name]()
    report = examine(model, batch, **known)
    assert (report.causes, report.failed) == ([], {})


@reports
def test_a_model_that_knows_its_batch_by_heart_need_not_learn_more():
    model, batch = gpt(dropout=0.0), next_tokens()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        loss = model(*batch)[1]
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert examine(model, batch).causes == []


# --- further faults -------------------------------------------------------------------------------------------------------

def source_padding_is_read():
    torch.manual_seed(0)
    model = EncoderDecoder(V, V, T, T, 16, 2, 32, 1)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args, kwargs: ((*args[:3], None, *args[4:]), kwargs), with_kwargs=True)
    source, target = pad_sequences(texts(), 0), pad_sequences(texts((4, 12, 7, 9)), 0)
    return model, {"source_ids": source.token_ids, "source_valid": source.valid_tokens, "target_ids": target.token_ids,
                   "targets": target.targets, "target_valid": target.valid_tokens}, {}


def an_empty_source():
    model, batch, known = source_padding_is_read()
    batch["source_valid"] = batch["source_valid"] & (torch.arange(4) > 0)[:, None]
    return EncoderDecoder(V, V, T, T, 16, 2, 32, 1), batch, known


def left_padding_that_nothing_tells_of():
    return gpt(), _padded("left"), {"tokenizer": LETTERS}


def trained_and_untied():
    model = gpt()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + torch.randn(V, 16))
    return model, next_tokens(), {}


def twins_in_a_model_of_ones_own():
    model = ByHand()
    model.head = nn.Linear(16, V)
    with torch.no_grad():
        model.head.weight.copy_(model.embedding.weight)
    return model, next_tokens(), {}


def zeroed_norm_before_the_head():
    model = gpt()
    with torch.no_grad():
        model.final_norm.weight.zero_()
    model.final_norm.requires_grad_(False)
    return model, next_tokens(), {"checks": ["dead layer"]}


def said_to_be_evaluated():
    return gpt(), next_tokens(), {"training": False}


def a_mask_of_large_numbers():
    """−1e9 in place of −∞: a query without a key looks at all keys alike, and nothing is NaN."""
    class Large(example.PlainAttention):
        def forward(self, x, **options):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            blocked = torch.triu(torch.ones(T, T, device=x.device)).bool()
            return F.softmax((q @ k.transpose(-2, -1)).masked_fill(blocked, -1e9), dim=-1) @ v
    model = gpt()
    model.blocks[0].attention = Large(16)
    return model, next_tokens(), {"checks": ["all-masked row", "NaN or infinity"]}


def an_infinite_loss():
    model = gpt()
    model.lm_head.register_forward_hook(lambda module, args, out: out.clamp(max=0).log())
    return model, next_tokens(), {"checks": ["NaN or infinity"]}


def an_input_that_is_nan():
    x = torch.randn(5, 4)
    x[2, 1] = math.nan
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), (x, torch.tensor([0, 1, 2, 0, 1])), {}


def ids_that_are_too_large():
    inputs, targets = next_tokens()
    return gpt(), (inputs + 3, targets), {}


def no_targets_that_count():
    inputs, targets = next_tokens()
    return gpt(), (inputs, targets * 0 - 100), {}


def backward_that_raises():
    class Broken(torch.autograd.Function):
        def forward(self, x):
            return x.copy()

        def backward(self, dy):
            return dy[..., :1]
    torch.autograd.Function.registry.pop("Broken")          # the tests of all operations walk it
    model = gpt()
    model.blocks[0].register_forward_hook(lambda module, args, out: Broken.apply(out))
    return model, next_tokens(), {}


FURTHER = {
    "padding is read": [source_padding_is_read, left_padding_that_nothing_tells_of],
    "all-masked row": [an_empty_source, a_mask_of_large_numbers],
    "untied weights": [trained_and_untied, twins_in_a_model_of_ones_own],
    "dead layer": [zeroed_norm_before_the_head],
    "train/eval mode": [said_to_be_evaluated],
    "NaN or infinity": [an_infinite_loss, an_input_that_is_nan],
    "does not run": [ids_that_are_too_large, no_targets_that_count, backward_that_raises],
}


@reports
@pytest.mark.parametrize("cause, build", [(cause, build) for cause, builds in FURTHER.items() for build in builds],
                         ids=lambda x: getattr(x, "__name__", x))
def test_further_faults(cause, build):
    model, batch, known = build()
    assert examine(model, batch, **known).causes == [cause]


def test_the_operation_that_makes_nan_is_named_with_its_line():
    finding, = example.report(example.planted("a logarithm of what is negative"))
    assert "Log" in finding.evidence and "26_doctor.py" in finding.evidence


@reports
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["a causal mask that is off by one", "targets are two places ahead", ".detach() in the middle",
                                  "valid_tokens is forgotten", "ReLU below 0 everywhere", "a gradient of the wrong sign"])
def test_whatever_the_seed(name, seed):
    p = example.planted(name)
    assert example.examine(p.model, p.batch, seed=seed).causes == [example.FAULTS[name][0]]


# --- looking changes nothing ----------------------------------------------------------------------------------------------

def everything(model, optimizer):
    """All that a training step depends on, as comparable values."""
    arrays = [host(x).copy() for x in (*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None))]
    moments = [host(v).copy() for entry in optimizer.state.values() for v in entry.values()]
    wanted = [m._wanted.copy() for m in model.modules() if hasattr(m, "_wanted")]
    rest = ([m.training for m in model.modules()], [(id(p), id(p.grad), p.requires_grad, p.version.written) for p in model.parameters()],
            [len(m._forward_hooks) for m in model.modules()], [id(p) for p in optimizer.state], random.get_rng_state().tobytes(),
            [group["lr"] for group in optimizer.param_groups], torch.is_grad_enabled())
    return arrays + moments + wanted, rest


@reports
@pytest.mark.parametrize("name", ["well", "leaks", "draws in evaluation", "raises", "NaN"])
def test_model_optimizer_and_streams_are_as_before_bit_for_bit(name):
    faults = {"leaks": "no causal mask", "draws in evaluation": "dropout that acts in evaluation", "raises": "a head of another width",
              "NaN": "a weight that is NaN"}
    p = example.patient(lambda: example.gpt(ffn=lambda: nn.MoE(example.C, 64, 4, bias_rate=1e-3)))
    example.trained(p, 2)
    if name != "well":
        example.FAULTS[faults[name]][1](p)
    p.model.blocks[0].eval()
    torch.randn(3)
    before, rest = everything(p.model, p.known["optimizer"])
    inputs = {key: host(p.batch[key]).copy() for key in p.batch.keys()}
    with torch.no_grad():
        example.report(p)
    example.report(p)
    after, rest_after = everything(p.model, p.known["optimizer"])
    assert rest_after[:-1] == rest[:-1] and rest_after[-1] is True
    assert len(before) == len(after)
    for a, b in zip(before, after):
        np.testing.assert_array_equal(a, b)
    for key in p.batch.keys():
        np.testing.assert_array_equal(host(p.batch[key]), inputs[key])


@reports
def test_the_next_random_number_is_the_one_that_it_would_have_been():
    torch.manual_seed(5)
    expected = torch.randn(4).tolist()
    torch.manual_seed(5)
    examine(gpt(), next_tokens(), seed=9)
    torch.manual_seed(5)
    model, batch = gpt(), next_tokens()
    torch.manual_seed(5)
    examine(model, batch)
    assert torch.randn(4).tolist() == expected


@reports
def test_two_reports_are_equal():
    p = example.planted("lr = 3")
    assert str(example.report(p)) == str(example.report(p))


# --- what it takes --------------------------------------------------------------------------------------------------------

@reports
def test_a_batch_is_told_in_any_of_three_ways():
    batch = pad_sequences(texts(), 0)
    pair = next_tokens()
    assert str(examine(gpt(), batch)) == str(examine(gpt(), dict(batch)))
    named = {"token_ids": pair[0], "targets": pair[1]}
    assert str(examine(gpt(), pair)) == str(examine(gpt(), LMBatch(*pair))) == str(examine(gpt(), named))


@pytest.mark.parametrize("model, batch, message", [
    ("gpt", None, "model must be an nn.Module, got 'gpt'"),
    (nn.Linear(2, 2), 5, "batch must be an LMBatch, a dict of the model's arguments, or \\(inputs, targets\\), got 5"),
    (nn.Linear(2, 2), [np.ones(2)], "batch must be"),
    (nn.Linear(2, 2), (np.ones(2), None), "must be tensors, but x is"),
], ids=["model", "number", "one array", "arrays"])
def test_what_is_no_model_or_batch_says_so(model, batch, message):
    with pytest.raises(TypeError, match=message):
        examine(model, batch)


def test_only_the_checks_that_are_asked_for():
    report = examine(gpt(), next_tokens(), checks=["leak of future tokens"])
    assert report.looked_at == ["leak of future tokens"] and report.skipped == {}
    with pytest.raises(ValueError, match="no check looks for 'gout'; there are: .*shifted labels"):
        examine(gpt(), next_tokens(), checks=["gout"])


@reports
def test_what_is_not_known_is_not_looked_at_and_said():
    report = examine(gpt(), {"token_ids": ids(more=0)})
    assert report.healthy and "shifted labels" in report.skipped and "leak of future tokens" not in report.looked_at
    assert report.skipped["shifted labels"] == "needs targets" and report.skipped["padding is read"] == "needs padding in the batch"
    assert "Not looked at:" in str(report) and set(report.looked_at) | set(report.skipped) == {c.cause for c in CHECKS}


def test_a_check_that_stumbles_is_told_and_hides_no_other(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", [])
    doctor.check("comes first", "s", "a", needs=(), explained_by=("finds late",))(lambda case: "evidence")
    doctor.check("stumbles", "s", "a", needs=())(lambda case: 1 / 0)
    doctor.check("finds", "s", "a", needs=())(lambda case: "evidence")
    doctor.check("finds two", "s", "a", needs=())(lambda case: iter(["one", None, Finding("another", "s", "two", "a")]))
    doctor.check("follows", "s", "a", needs=(), explained_by=("finds",))(lambda case: 1 / 0)
    doctor.check("finds late", "s", "a", needs=())(lambda case: "evidence")
    report = examine(gpt(), next_tokens())
    assert report.skipped == {"follows": "follows from: finds", "comes first": "follows from: finds late"}
    assert report.causes == ["finds", "finds two", "another", "finds late"] and not report.healthy
    assert report.failed == {"stumbles": "ZeroDivisionError: division by zero"} and "Could not be looked at:" in str(report)


@pytest.mark.parametrize("kept, why", [(lambda model: model.lm_head.weight * 2, "RuntimeError: deepcopy: only leaf tensors can be copied"),
                                       (lambda model: threading.Lock(), "TypeError: cannot pickle '_thread.lock' object")])
def test_a_model_that_cannot_be_copied_is_not_said_not_to_run(kept, why):
    model = gpt()
    model.kept = kept(model)
    report = examine(model, next_tokens(), checks=["does not run", "NaN or infinity", "untied weights"])
    assert report.causes == [] and report.looked_at == ["untied weights"] and not report.healthy
    assert list(report.failed) == ["does not run", "NaN or infinity"]
    assert all(said.startswith(f"the model cannot be copied, and checks work on copies: {why}") for said in report.failed.values())
    assert str(report).count("cannot be copied") == 1 and "as above" in str(report)


def test_the_report_reads_as_a_table():
    finding = Finding("shifted labels", "the loss stays near ln V_vocab", "100%", "shift")
    report = Report([finding, finding], ["shifted labels", "other"])
    assert list(report) == [finding] * 2 and len(report) == 2 and report.causes == ["shifted labels"] and not report.healthy
    assert str(report).splitlines()[:3] == ["2 findings by 2 checks.", "", "SHIFTED LABELS"]
    assert str(Report(looked_at=["x"])) == "Nothing found by 1 checks." and bool(Report())


def test_healthy_is_what_was_looked_at():
    assert examine(gpt(), next_tokens(), checks=["untied weights"]).healthy and not Report().healthy
    texts_alone = examine(gpt(), next_tokens(), checks=["duplicates in training"], train_ids=np.arange(100))
    assert texts_alone.looked_at == ["duplicates in training"] and not texts_alone.healthy and not texts_alone.failed
    assert not examine(gpt(), next_tokens(), checks=[]).healthy
    assert not examine(gpt(), next_tokens(), checks=["padding is read"]).healthy


def test_a_model_that_returns_nothing_is_not_healthy():
    class Forgets(MiniGPT):
        def forward(self, token_ids, targets=None):
            super().forward(token_ids, targets)
    report = examine(Forgets(V, T, 16, 2, 32, 1), next_tokens())
    assert not report.healthy and report.causes == [] and "shifted labels" in report.failed
    assert report.failed["does not run"] == ("forward returned None (NoneType), in which no tensor was found: let it return logits, or "
                                             "(logits, loss)")


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = gpt(dropout=0.0)


class ByPlace(Wrapped):
    def forward(self, ids, /):
        return self.inner(ids)[0]


class ByPlaces(Wrapped):
    def forward(self, ids, scale=1.0, targets=None, /):
        assert scale == 1.0 and targets is not None
        return self.inner(ids, targets)


class Star(Wrapped):
    def forward(self, *args):
        return self.inner(*args)


class StarOfTwo(Wrapped):
    def forward(self, *args, **kwargs):
        ids, targets = args
        return self.inner(ids, targets, **kwargs)


class StarOfOne(Wrapped):
    def forward(self, *args):
        ids, = args
        return self.inner(ids)[0]


@reports
@pytest.mark.parametrize("make", [ByPlace, ByPlaces, Star, StarOfTwo, StarOfOne])
def test_what_takes_its_arguments_by_place_runs(make):
    asked = ["does not run", "shifted labels", "leak of future tokens", "no gradient"]
    report = examine(make(), next_tokens(), checks=asked)
    assert report.healthy and report.looked_at == asked
    inputs, targets = next_tokens()
    assert examine(make(), (inputs, inputs), checks=asked).causes == ["shifted labels"]


def test_of_what_does_not_run_in_any_way_the_first_error_is_told():
    class Broken(Wrapped):
        def forward(self, *args):
            raise ValueError(f"{len(args)} arguments")
    finding, = examine(Broken(), next_tokens(), checks=["does not run"])
    assert finding.evidence == "ValueError: 2 arguments"


def test_a_model_writes_into_copies_of_its_batch():
    class Writes(MiniGPT):
        def forward(self, token_ids, targets=None):
            token_ids[:, 0] = (token_ids[:, 0] + 1) % V
            targets[:, -1] = -100
            return super().forward(token_ids, targets)
    batch = next_tokens()
    before = [x.tolist() for x in batch]
    assert examine(Writes(V, T, 16, 2, 32, 1), batch, checks=["does not run", "train/eval mode", "no gradient"]).healthy
    assert [x.tolist() for x in batch] == before


def test_an_input_with_a_history_gets_no_gradient():
    source = torch.randn(5, 4, requires_grad=True)
    report = examine(nn.Linear(4, 3), (source * 2, torch.tensor([0, 1, 2, 0, 1])), checks=["does not run", "no gradient"])
    assert report.healthy and source.grad is None


def test_anomaly_mode_around_it_changes_nothing():
    model = gpt()
    model.lm_head.register_forward_hook(lambda module, args, out: out.clamp(max=-1).log())
    with torch.autograd.detect_anomaly():
        report = examine(model, next_tokens(), checks=["does not run", "NaN or infinity"])
        assert torch.is_anomaly_enabled()
    assert report.causes == ["NaN or infinity"] and "Log (called at" in report.findings[0].evidence
    assert not torch.is_anomaly_enabled()


class ByNames(nn.Module):
    def forward(self, **named):
        return named["x"]


@pytest.mark.parametrize("known, error, message", [
    ({"optimizer": 3}, TypeError, r"optimizer must be an optimizer, such as optim.AdamW\(model.parameters\(\)\), got 3 \(int\)"),
    ({"optimizer": AdamW}, TypeError, "optimizer must be an optimizer"),
    ({"tokenizer": 3}, TypeError, r"tokenizer must be a tokenizer, such as data.ByteTokenizer\(\), got 3 \(int\)"),
    ({"tokenizer": ByteTokenizer}, TypeError, "tokenizer must be a tokenizer"),
    ({"scheduler": 3}, TypeError, "scheduler must be a schedule of optim.lr_scheduler, got 3"),
    ({"loss_of": 3}, TypeError, "loss_of must be a function, got 3"),
    ({"sampler": 0.8}, TypeError, "sampler must be a function, got 0.8"),
    ({"seed": None}, TypeError, "seed must be a whole number, got None"),
    ({"seed": 2**64}, ValueError, "expected a seed in"),
    ({"checks": "leak"}, TypeError, r"checks must be a list of causes, got 'leak' \(str\); write checks=\['leak of future tokens'\]"),
    ({"checks": 3}, TypeError, "checks must be a list of causes, got 3"),
], ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_what_else_is_known_is_of_its_kind(known, error, message):
    with pytest.raises(error, match=message):
        examine(gpt(), next_tokens(), **known)


def test_inputs_without_a_name_ask_for_one():
    x = torch.randn(2, 3)
    with pytest.raises(TypeError, match="ByNames.forward has no first argument.*give a dict"):
        examine(ByNames(), (x, x))
    assert examine(ByNames(), {"x": x}, checks=["does not run"]).healthy


def test_causes_may_come_from_any_iterable_and_any_seed_will_do():
    asked = ["does not run", "train/eval mode"]
    assert examine(gpt(), next_tokens(), checks=iter(asked), seed=2**64 - 1).looked_at == asked


# --- what is measured -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2, 3])
def test_agreement_is_1_at_the_shift_of_the_targets(shift):
    found = ids(more=6)
    case = Case(gpt(), (found[:, 3:3 + T], found[:, 3 + shift:3 + shift + T]))
    assert case.agreement(shift) == 1 and all(case.agreement(other) < 0.5 for other in range(-2, 4) if other != shift)


@pytest.mark.parametrize("make", [lambda: pad_sequences(texts(), 0), lambda: pad_sequences(texts(), 0, "left"),
                                  lambda: pack_sequences(texts(), T, 0)], ids=["right", "left", "packed"])
def test_right_targets_agree_wholly_in_every_layout(make):
    assert Case(gpt(), make()).agreement(1) == 1


@pytest.mark.parametrize("T", [1, 2, 3])
def test_short_rows_have_nothing_to_agree_with(T):
    case = Case(gpt(), (ids()[:, :T], ids()[:, 1:T + 1]))
    assert [case.agreement(shift) is None for shift in (-2, -1, 1, 2, 3)] == [T <= 2, T <= 1, T <= 1, T <= 2, T <= 3]


def test_distance_is_in_units_of_the_spread_and_nan_equals_nan():
    a = np.array([0.0, 2.0, math.nan])
    assert distance(a, a) == 0 and distance(a, a + 0.5) == 0.5 and distance(a[:0], a[:0]) == 0
    assert distance(a, np.zeros(3)) == math.inf and distance(np.ones(3), np.zeros(3)) == 1


def test_a_copy_of_the_optimizer_trains_the_copy_of_the_model():
    model = gpt()
    case = Case(model, next_tokens(), optimizer=SGD(model.parameters(), lr=1.0))
    copied, optimizer = case.copies()
    before = copy.deepcopy(copied.state_dict())
    case.run(copied)[1].backward()
    optimizer.step()
    assert any((host(before[name]) != host(x)).any() for name, x in copied.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and copied.lm_head.weight is copied.embedding.token.weight


# --- runs -----------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps on the default text."""
    folder = tmp_path_factory.mktemp("doctor")
    Trainer(TrainConfig(**{**runs.TINY, "steps": 4, "eval_every": 4}), ["python-docs"], folder / "run").run()
    (folder / "other.txt").write_text("Преобразователь читает слова, одно за другим. " * 30, encoding="utf-8")
    return folder / "run"


@reports
def test_a_run_is_examined_from_its_folder(run):
    report = examine_run(run)
    assert report.healthy
    assert {"shifted labels", "leak of future tokens", "tokenizer does not fit", "overlapping texts"} <= set(report.looked_at)
    assert "tokenizer does not fit" in examine_run(run, [str(run.parent / "other.txt")]).causes
    assert examine_run(run, checks=["does not learn"]).looked_at == ["does not learn"]


@reports
def test_the_command_says_it_with_its_status(run, capsys):
    assert main(["doctor", "--run", str(run)]) == 0
    assert "Nothing found by 2" in capsys.readouterr().out
    assert main(["doctor", "--run", str(run), "--text", str(run.parent / "other.txt")]) == 1
    assert "TOKENIZER DOES NOT FIT" in capsys.readouterr().out
    assert main(["doctor", "--run", str(run.parent / "nowhere")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


# --- the page -------------------------------------------------------------------------------------------------------------

def test_the_page_has_every_cause_and_the_table_as_printed(capsys):
    page = (PATH.parent.parent / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [check.cause for check in CHECKS if f"`{check.cause}`" not in page] == []
    example.print_table({name: [cause] for name, (cause, _) in example.FAULTS.items()})
    assert capsys.readouterr().out in page
