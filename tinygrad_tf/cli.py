"""The command line: `tinygrad-tf train`, `generate`, `evaluate`, `quantize`, `doctor`, `chat`, `embed`; `python -m tinygrad_tf …` too.

What a user can get wrong ends in one sentence on standard error and exit status 2; Ctrl-C ends with 130.
"""
import argparse
import dataclasses
import importlib.util
import math
import os
import shlex
import signal
import sys
import warnings
from pathlib import Path

from . import __version__, dtypes
from .backend import device, get_default_device, module_of, tune_allocator
from .creation import as_tensor
from .data import baselines, evaluation_batches, load_text, require_length, split_train_validation
from .generation import (
    Batch,
    ConcatKVCache,
    KVCache,
    ModelDraft,
    NGramDraft,
    PagedKVCache,
    QuantizedKVCache,
    RollingKVCache,
    Sampler,
    SpeculativeBatch,
    beam_search,
)
from .ops.quantize import Scheme
from .pretrained.commands import add_chat, add_embed
from .quantization.model import METHODS, quantize_model
from .quantization.table import as_text, compare
from .serialization import one_line, write_atomically
from .training import PRESETS, CheckpointWarning, TrainConfig, Trainer, evaluation, load_model
from .training.checkpoint import BEST, CHECKPOINT, checkpoints_in
from .training.config_file import read_config
from .training.doctor_of_run import examine_run
from .training.evaluation import predicted_bytes
from .training.monitor import Monitor
from .training.parts import encode_split
from .training.quantized import calibration_batch, load_any, save_quantized, title, variants, write_speed

PROGRAM = "python -m tinygrad_tf" if Path(sys.argv[0]).name == "__main__.py" else "tinygrad-tf"
RUNS = Path("runs")
MEASURED_ROWS = 16              # windows in a batch of the table of `quantize`
INTERRUPTED, READER_LEFT = 130, 141             # what a shell reports for SIGINT and for SIGPIPE: 128 + the signal's number
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
SETTINGS = [field.name for field in dataclasses.fields(TrainConfig)]
CHANGEABLE = "steps", "threads"                 # settings that --resume may bring
FLAGS = ["text", "out", "preset", *SETTINGS, "device"]                  # of train, and keys of its --config


class UserError(Exception):
    """Something to be told in one sentence, without a traceback."""


def main(argv=None):
    """Runs one command and returns its exit status."""
    prepare_streams()
    try:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = told
                warnings.simplefilter("always", CheckpointWarning)
                return run(argv)
        finally:
            sys.stdout.flush()                          # what fails here must not fail at exit, where nobody can catch it
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except BrokenPipeError:                             # `tinygrad-tf generate | head`: the reader has seen enough
        return leave_output(READER_LEFT)
    except (UserError, ValueError, OSError, FloatingPointError, MemoryError, ImportError) as error:
        return leave_output(fail(sentence(error), 2))


def run(argv):
    arguments = build_parser().parse_args(argv)
    if getattr(arguments, "config", None):
        take_from_config(arguments)
    if argv is None:
        shards = arguments.command is train             # which want one BLAS thread each
        use_threads(arguments.threads and 1 if shards else arguments.threads)
    check_installation()
    arguments.device = chosen_device(arguments.device)
    return arguments.command(arguments) or 0


def take_from_config(arguments):
    """What the file of --config says, where no flag does."""
    if arguments.resume is not None:
        raise UserError("--resume continues with the settings of the run; leave out --config")
    values = read_config(arguments.config, FLAGS)
    for name, value in values.items():
        if name in CONVERTED:
            value = CONVERTED[name](f"{arguments.config}: {name}", value)
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def texts_of(name, value):
    values = [value] if isinstance(value, str) else value
    if not (isinstance(values, list) and values and all(isinstance(text, str) for text in values)):
        raise UserError(f"{name} must be a string or a list of strings, got {value!r:.60}")
    return values


def string_of(name, value):
    if not isinstance(value, str):
        raise UserError(f"{name} must be a string, got {value!r:.60}")
    return value


def preset_of(name, value):
    if value not in list(PRESETS):
        raise UserError(f"{name} must be one of {', '.join(sorted(PRESETS))}, got {value!r:.60}")
    return value


def whole_of(name, value):
    if type(value) is not int:
        raise UserError(f"{name} must be a whole number, got {value!r:.60}")
    return value


# Of the keys of --config that are no fields of TrainConfig, which checks its own.
CONVERTED = {"text": texts_of, "out": lambda name, value: Path(string_of(name, value)), "preset": preset_of, "device": string_of,
             "threads": whole_of}


def chosen_device(name):
    """The device of that name, or the default one. What is no device, or is not there, ends in one sentence before any work."""
    try:
        chosen = get_default_device() if name is None else device(name)
        module_of(chosen)
    except RuntimeError as error:
        raise UserError(one_line(error)) from None
    return chosen


def use_threads(wanted):
    """BLAS reads its number of threads when NumPy is loaded: for another number this process starts itself anew, once.

    One thread unless the flag or the environment says otherwise: BLAS threads wait by spinning, and beside other busy
    processes two of them can be ten times slower than one.
    """
    if wanted is not None and wanted < 1:
        raise UserError(f"--threads must be at least 1, got {wanted}")
    wanted = str(wanted or os.environ.get(THREADS[0]) or os.environ.get(THREADS[1]) or 1)
    if os.name == "posix" and os.environ.get(THREADS[0]) != wanted:
        os.environ.update(dict.fromkeys(THREADS, wanted))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare_streams():
    """Standard streams that exist and take any character: a closed one becomes /dev/null, a missing letter becomes "?"."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The lowest free descriptor is this very number: no file opened later can take its place.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if number == 0 else "w"))
    for out in (sys.stdout, sys.stderr):
        if hasattr(out, "reconfigure"):
            out.reconfigure(errors="replace")


def check_installation():
    """Before any work is done: what is missing says how to get it."""
    if missing := [name for name in ("safetensors", "tqdm", "matplotlib") if importlib.util.find_spec(name) is None]:
        raise UserError(f"the command line needs packages that are not installed: pip install {' '.join(missing)}")


def check_precision(name):
    """bfloat16 is a package of its own."""
    try:
        dtypes.numpy_dtype(name)
    except RuntimeError as error:
        raise UserError(one_line(error)) from None


def check_tokenizer(name):
    """Subwords need a package of their own."""
    if name == "bpe" and importlib.util.find_spec("regex") is None:
        raise UserError("--tokenizer bpe needs a package that is not installed: pip install regex")


def told(message, category, *where, **others):
    """A warning is one sentence too."""
    print(f"tinygrad-tf: {one_line(message)}", file=sys.stderr, flush=True)


def fail(message, status):
    """Says why, as far as anybody listens, and returns the exit status."""
    try:
        print(f"tinygrad-tf: {message}", file=sys.stderr, flush=True)
    except OSError:
        pass
    return status


def leave_output(status):
    """Returns the exit status; where standard output can take nothing more, Python is kept from trying it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def sentence(error):
    if isinstance(error, MemoryError):
        return "out of memory; use a smaller --batch-size, --context or --dim"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'the output'}: {error.strerror}"
    return one_line(error)


# --- arguments --------------------------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    """One sentence instead of the usage; and no abbreviations, which later flags would make ambiguous."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message):
        raise UserError(f"{one_line(message)}; see {self.prog} --help")


def build_parser():
    parser = Parser(PROGRAM, description="Train a small Transformer on text, and let it write.")
    parser.add_argument("--version", action="version", version=f"tinygrad_tf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_generate(commands)
    _add_evaluate(commands)
    _add_quantize(commands)
    _add_doctor(commands)
    add_chat(commands)
    add_embed(commands)
    for p in commands.choices.values():
        p.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: TINYGRAD_TF_DEVICE, else cpu); a run may be "
                                                          "resumed, and a model used, on another device than it was trained on")
        if p is not commands.choices["train"]:          # which has shards of a batch instead
            p.add_argument("--threads", type=int, metavar="N", help="threads of the matrix products (default: OPENBLAS_NUM_THREADS, else "
                                                                    "1; more are faster on an idle machine and slower on a busy one)")
    return parser


def _add_train(commands):
    p = commands.add_parser("train", help="train MiniGPT on a text; writes checkpoints, metrics, pictures and a sample")
    p.add_argument("--text", nargs="+", metavar="TEXT", help="UTF-8 files, or the name of a corpus: python-docs (default), shakespeare")
    p.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: runs/minigpt, or the next free number)")
    p.add_argument("--resume", nargs="?", const=True, metavar="DIR", help="continue an interrupted run (default: the newest), or with "
                                                                             "--steps one that shall become longer; --threads may change")
    p.add_argument("--config", type=Path, metavar="FILE", help="flags in a TOML file, such as the config.toml of a run; flags that are "
                                                              "given beside it go first")
    p.add_argument("--preset", choices=sorted(PRESETS), help="sizes and schedule to start from (default: tiny)")
    for field in dataclasses.fields(TrainConfig):
        p.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), metavar=type(field.default).__name__.upper(),
                       help=f"{field.metadata['help']} (tiny: {field.default})")
    p.set_defaults(command=train)


def _add_run(p):
    p.add_argument("--run", type=Path, metavar="DIR", help=f"the run's folder, a file in it such as {BEST}, or a file of `quantize` "
                                                           f"(default: the newest in runs/)")


def _add_generate(commands):
    p = commands.add_parser("generate", help="let a trained model continue a prompt; how fast it read and wrote goes to standard error")
    _add_run(p)
    p.add_argument("--prompt", help="the text to continue (default: a new line)")
    p.add_argument("--max-new-tokens", type=int, default=400, metavar="N")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    p.add_argument("--seed", type=int, default=0)
    how = p.add_argument_group("which token comes next (in this order)")
    how.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: what is there already is less likely")
    how.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="taken from the logit of what is there already")
    how.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, as often as it is there")
    how.add_argument("--temperature", type=float, default=0.8, help="0 is greedy; 1 is the model's own distribution (default: 0.8)")
    how.add_argument("--top-k", type=int, default=None, metavar="K", help="draw among the K likeliest only")
    how.add_argument("--top-p", type=float, default=None, metavar="P", help="… among the fewest whose probabilities reach P")
    how.add_argument("--min-p", type=float, default=None, metavar="P", help="… among those at least P times as likely as the likeliest")
    how.add_argument("--beams", type=int, default=None, metavar="N", help="instead of drawing, and of all of the above: the likeliest text "
                                                                          "that a search with N beams finds, within the context")
    how.add_argument("--length-penalty", type=float, default=1.0, metavar="A", help="of beams: Σ ln p / length^A (default: 1)")
    work = p.add_argument_group("how it is computed (the text is the same, unless it says otherwise)")
    work.add_argument("--cache", choices=["preallocated", "concat", "paged", "rolling", "int8", "int4", "none"], default="preallocated",
                      help="keys and values of past tokens; rolling sees the last --window tokens, int8 and int4 are rounded: then the "
                           "text may differ")
    work.add_argument("--window", type=int, default=None, metavar="W", help="of the rolling cache (default: half of the context)")
    work.add_argument("--prefill-chunk", type=int, default=None, metavar="N", help="read the prompt N tokens at a time")
    work.add_argument("--at-limit", choices=["slide", "stop"], default="slide", help="at the end of the model's context: read the newer "
                                                                                     "half of it anew, or stop (default: slide)")
    work.add_argument("--draft", metavar="ngram|DIR", help="speculative decoding: proposals from the text itself, or from the model of "
                                                           "a smaller run; greedy texts are the same, others as likely")
    work.add_argument("--draft-tokens", type=int, default=4, metavar="K", help="how many tokens are proposed at a time (default: 4)")
    p.set_defaults(command=generate)


def _add_evaluate(commands):
    p = commands.add_parser("evaluate", help="validation loss and perplexity beside the n-gram baselines")
    _add_run(p)
    p.add_argument("--text", nargs="+", metavar="TEXT", help="files or a corpus (default: the text of the run); its last 10 %% count")
    p.set_defaults(command=evaluate)


def _add_doctor(commands):
    p = commands.add_parser("doctor", help="what is wrong with a run, by name: its model, a batch, its tokenizer, its text; status 1 if "
                                           "something is")
    _add_run(p)
    p.add_argument("--text", nargs="+", metavar="TEXT", help="files or a corpus (default: the text of the run)")
    p.set_defaults(command=doctor)


def _add_quantize(commands):
    p = commands.add_parser("quantize", help="store a run's weights in 2 to 8 bits; a table of bytes, error, perplexity and speed",
                            description="Makes the linear layers of a run low-bit, several ways, and prints what each way costs and saves, "
                                        "measured on held-out text. --out writes one of them to a file, which generate and evaluate take "
                                        "as --run. Embeddings, norms, biases and the tied head stay float32.")
    p.add_argument("--run", type=Path, metavar="DIR", help="the run's folder (default: the newest in runs/)")
    p.add_argument("--out", type=Path, metavar="FILE", help="a new file for the weights that --bits, --group, --method … describe")
    p.add_argument("--bits", type=int, default=4, metavar="N", help="of a weight, 2 to 8 (default: 4)")
    p.add_argument("--group", default="32", metavar="N|channel|tensor", help="which weights share a float16 scale: N in a row, an output's "
                                                                             "whole row, or all (default: 32)")
    p.add_argument("--asymmetric", action="store_true", help="levels from the smallest to the largest weight, with a zero point, instead "
                                                             "of as many below 0 as above")
    p.add_argument("--method", choices=sorted(METHODS), default="gptq", help="rtn: round to nearest; awq: finer where inputs are large; "
                                                                             "gptq: errors repaired by later columns (default: gptq)")
    p.add_argument("--keep", action="append", default=[], metavar="MODULE", help="stays float32, with all below it, such as blocks.0; may "
                                                                                 "be given several times")
    p.add_argument("--calibration", type=int, default=32, metavar="N", help="windows of the training text that awq and gptq look at "
                                                                            "(default: 32)")
    p.add_argument("--text", nargs="+", metavar="TEXT", help="files or a corpus (default: the text of the run); its last 10 %% count")
    p.add_argument("--tokens", type=int, metavar="N", help="measure on the first N held-out tokens only (default: all)")
    p.add_argument("--no-table", action="store_true", help="measure nothing; only write --out")
    p.set_defaults(command=quantize)


# --- train ------------------------------------------------------------------------------------------------------------

def train(arguments):
    tune_allocator()
    trainer = start(arguments) if arguments.resume is None else resume(arguments)
    check_cores(trainer.config.threads)
    describe(trainer)
    resume_command = f"{PROGRAM} train --resume {shlex.quote(str(trainer.folder))}"
    try:
        complete = train_with_bar(trainer)
    except KeyboardInterrupt:
        return fail(f"stopped at once; continue from the last checkpoint with:  {resume_command}", INTERRUPTED)
    if not complete:
        print(f"Interrupted at step {trainer.step}; everything is saved. Continue with:  {resume_command}")
        return INTERRUPTED
    finish(trainer)


def start(arguments):
    """A new run, in a folder that holds none."""
    folder = arguments.out or free_folder()
    if checkpoints_in(folder):
        raise UserError(f"{folder} already holds a run: continue it with --resume {shlex.quote(str(folder))}, or name another --out")
    config = configuration(arguments)
    check_precision(config.precision)
    check_tokenizer(config.tokenizer)
    trainer = Trainer(config, arguments.text or ["python-docs"], folder, arguments.device, [Monitor()])
    folder.mkdir(parents=True, exist_ok=arguments.out is not None)      # two commands never choose one free folder
    return trainer


def resume(arguments):
    """A run as its checkpoint left it."""
    if given := [name for name in ("out", "preset", *SETTINGS) if getattr(arguments, name) is not None and name not in CHANGEABLE]:
        raise UserError(f"--resume continues with the folder and settings of the run; leave out --{given[0].replace('_', '-')}")
    folder = newest_run() if arguments.resume is True else Path(arguments.resume)
    trainer = Trainer.resume(folder, arguments.text, arguments.device, [Monitor()], arguments.steps, arguments.threads)
    print(f"Resuming {folder} at step {trainer.step} of {trainer.config.steps}.")
    return trainer


def configuration(arguments):
    """The preset with the flags that were given."""
    given = {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name) is not None}
    return dataclasses.replace(PRESETS[arguments.preset or "tiny"], **given)


def free_folder():
    """runs/minigpt, or runs/minigpt-2, -3, … if that is taken."""
    names = [RUNS / "minigpt"] + [RUNS / f"minigpt-{i}" for i in range(2, 10_000)]
    return next(folder for folder in names if not folder.exists())


def chosen_run(arguments):
    """The folder of --run, or the file that it names; by default the newest."""
    run = arguments.run or newest_run()
    return run.parent if run.name == CHECKPOINT and run.is_file() else run


def newest_run():
    found = [checkpoints[0] for folder in RUNS.glob("*/") if (checkpoints := checkpoints_in(folder))]
    if not found:
        raise UserError(f"there is no run in {RUNS}/ yet; train one with `{PROGRAM} train`, or name its folder")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def check_cores(threads):
    """More threads than cores take turns: nothing is wrong, and nothing won."""
    if threads > (cores := os.cpu_count() or 1):
        warnings.warn(f"{threads} threads on {cores} core{'s' * (cores > 1)}: no more than {cores} can run at once", stacklevel=2)


def describe(trainer):
    c, parameters = trainer.config, sum(p.numel() for p in trainer.model.parameters())
    print(f"Text: {' '.join(map(str, trainer.sources))}: {len(trainer.train_ids):,} {unit(trainer.tokenizer)}s to train on, "
          f"{len(trainer.validation_ids):,} held out, V_vocab = {trainer.tokenizer.vocab_size}.")
    print(f"Model: {c.layers} layers, C = {c.dim}, H = {c.heads}, T = {c.context}: {parameters:,} parameters. "
          f"{c.steps} steps of {c.batch_size} × {c.context} tokens. "
          f"{'' if c.precision == 'float32' else f'Precision: {c.precision}. '}{'' if c.threads == 1 else f'Threads: {c.threads}. '}"
          f"{'' if trainer.device.type == 'cpu' else f'Device: {trainer.device}. '}Folder: {trainer.folder}", flush=True)


def unit(tokenizer):
    """What a token is."""
    return {"char": "character", "byte": "byte"}.get(tokenizer.kind, "token")


def train_with_bar(trainer):
    """Trains under a progress bar. Ctrl-C finishes the step, saves, and returns False; a second one stops at once."""
    from tqdm import tqdm
    stop = StopSignal()
    bar = tqdm(total=trainer.config.steps, initial=trainer.step, unit=" steps", disable=None, dynamic_ncols=True)

    def report(step, loss, lr, tokens_per_second, validation_loss):
        bar.update()
        bar.set_postfix_str(f"loss {loss:.3f}, lr {lr:.1e}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        if validation_loss is not None:
            bar.write(f"step {step:5d}   training loss {loss:.3f}   validation loss {validation_loss:.4f}   "
                      f"{tokens_per_second:,.0f} tokens/s")
            sys.stdout.flush()
    with bar, stop:
        return trainer.run(should_stop=lambda: stop.requested, report=report)


class StopSignal:
    """Within its `with` block the first SIGINT or SIGTERM only sets `requested`; the next one acts as usual."""

    def __init__(self):
        self.requested, self.before = False, {}

    def __enter__(self):
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self._request)
        except ValueError:                              # not in the main thread: signals are not ours
            pass
        return self

    def _request(self, number, frame):
        self.requested = True
        self._restore()

    def _restore(self):
        while self.before:
            signal.signal(*self.before.popitem())

    def __exit__(self, *error):
        self._restore()


def finish(trainer):
    """The results: losses beside the baselines, the curves, and a sample."""
    ngrams = trainer.baselines()
    trainer.metrics.draw(ngrams, unit(trainer.tokenizer))
    print_comparison(final_loss(trainer), ngrams, trainer.tokenizer, trainer.validation_ids, trainer.validation_bytes)
    if trainer.step < trainer.config.steps:
        print(f"Ended early: the validation loss did not become better in {trainer.config.patience} evaluations. The best weights are in "
              f"{BEST}.")
    prompt = default_prompt(trainer.tokenizer)
    sample = written(trainer.model, trainer.tokenizer, prompt, 400, 0.8, trainer.config.seed)
    write_atomically(trainer.folder / "sample.txt", sample)
    print(f"\nA sample (temperature 0.8):\n{sample}\n")
    print(f"Written to {trainer.folder}/: {CHECKPOINT}, {BEST}, config.toml, metrics.csv, metrics.jsonl, speed.csv, loss.png, monitor.png, "
          f"sample.txt")


def final_loss(trainer):
    """The validation loss after the last step: the metrics have it, unless that step was made by other means than `run`."""
    steps, losses = trainer.metrics.column("validation_loss")
    return losses[-1] if len(steps) and steps[-1] == trainer.step else trainer.evaluate()


def print_comparison(loss, ngrams, tokenizer, ids, num_bytes):
    """Losses in nats a token; as bits per byte, of the num_bytes that ids[1:] say, they can be compared across tokenizers."""
    rows = {f"{n}-gram baseline": nats for n, nats in sorted(ngrams.items())} | {"MiniGPT, validation": loss}
    per = unit(tokenizer)
    print(f"\n{'':22s}{f'nats per {per}':>18s}   perplexity{'' if num_bytes is None else '   bits per byte'}")
    for name, nats in rows.items():
        bits = "" if num_bytes is None else f"{nats * (len(ids) - 1) / math.log(2) / num_bytes:16.4f}"
        print(f"  {name:20s}{nats:18.4f}   {evaluation.perplexity(nats):10.3f}{bits}")
    if num_bytes is None:
        print("No bits per byte: the held-out text has characters that are no tokens here, and what is unknown costs too little.")
    beaten = [f"{n}-gram" for n, nats in sorted(ngrams.items()) if loss < nats]
    print(f"MiniGPT beats: {', '.join(beaten)}." if beaten else
          f"MiniGPT is not better than {'letter' if per == 'character' else per} frequencies: train longer, or, if its loss rose, with a "
          f"smaller --lr.")


def knows(tokenizer, text):
    return tokenizer.unk_id is None or tokenizer.unk_id not in tokenizer.encode(text)


def default_prompt(tokenizer):
    """A line break, or, where that is no token, the first one that says something by itself."""
    texts = ("\n", *(tokenizer.decode([i]) for i in range(tokenizer.vocab_size)))
    return next(text for text in texts if text and len(tokenizer.encode(text)) and knows(tokenizer, text))


def written(model, tokenizer, prompt, max_new_tokens, temperature, seed):
    """A sample that continues a prompt, as long as asked for."""
    batch = Batch(model, tokenizer=tokenizer, max_rows=1, at_limit="slide")
    row = batch.add(prompt, max_new_tokens, sampler=Sampler(temperature), seed=seed)
    batch.run()
    return row.text


# --- generate and evaluate --------------------------------------------------------------------------------------------

def generate(arguments):
    if arguments.prompt == "":
        raise UserError("--prompt is empty; give at least one character, or leave it out")
    model, tokenizer, _ = load_any(chosen_run(arguments), arguments.device)
    prompt = arguments.prompt or default_prompt(tokenizer)
    check_prompt(tokenizer, prompt)
    if arguments.beams is not None:
        return print_beam(arguments, model, tokenizer, prompt)
    sampler = Sampler(arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p, arguments.repetition_penalty,
                      arguments.presence_penalty, arguments.frequency_penalty)
    batch = batch_of(arguments, model, tokenizer)
    row = batch.add(tokenizer.encode(prompt, errors="strict"), arguments.max_new_tokens, sampler=sampler, seed=arguments.seed,
                    stop=arguments.stop)
    print(prompt.lstrip("\n"), end="", flush=True)
    try:
        for row in batch:
            print(row.piece, end="", flush=True)
    finally:
        print(flush=True)
        print(batch.speed, file=sys.stderr)
    print(f"ended by {row.finish_reason}", file=sys.stderr)
    if arguments.draft:
        print(batch.report, file=sys.stderr)


def check_prompt(tokenizer, prompt):
    try:
        unknown = [character for character in prompt if not knows(tokenizer, character)]
    except ValueError as error:                         # half a character
        raise UserError(f"--prompt: {error}") from None
    if not len(tokenizer.encode(prompt)):
        raise UserError(f"--prompt {prompt!r} has no tokens for this model, which leaves blanks out: say something")
    if unknown:
        raise UserError(f"--prompt holds the character {unknown[0]!r}, which the model's text did not: leave it out")


def batch_of(arguments, model, tokenizer):
    """What writes the text: its cache, its draft, if there is one, and what it does at the end of the context."""
    options = {"use_cache": arguments.cache != "none", "max_rows": 1, "at_limit": arguments.at_limit,
               "prefill_chunk": arguments.prefill_chunk}
    cache = chosen_cache(arguments, model)
    if not arguments.draft:
        return Batch(model, cache, tokenizer, **options)
    return SpeculativeBatch(model, chosen_draft(arguments, tokenizer), cache, tokenizer, k=arguments.draft_tokens, **options)


def chosen_cache(arguments, model):
    layers, context = len(model.blocks), model.max_seq_len
    if arguments.window is not None and arguments.cache != "rolling":
        raise UserError(f"--window is of the rolling cache; add --cache rolling, or leave it out (got --cache {arguments.cache})")
    slack, rows = arguments.draft_tokens if arguments.draft else 0, arguments.beams or 1
    return {"preallocated": lambda: KVCache(layers, context), "concat": lambda: ConcatKVCache(layers),
            "paged": lambda: PagedKVCache(layers, rows * -(-(context + slack) // 16)),
            "rolling": lambda: RollingKVCache(layers, max(1, context // 2) if arguments.window is None else arguments.window, slack=slack),
            "int8": lambda: QuantizedKVCache(layers, context, bits=8), "int4": lambda: QuantizedKVCache(layers, context, bits=4),
            "none": lambda: None}[arguments.cache]()


def chosen_draft(arguments, tokenizer):
    if arguments.draft == "ngram":
        return NGramDraft()
    if Path(arguments.draft).resolve() == chosen_run(arguments).resolve():
        raise UserError(f"--draft {arguments.draft} is the run that is to write: name that with --run, and as the draft a smaller one")
    model, other, _ = load_any(Path(arguments.draft), arguments.device)
    if other != tokenizer:
        raise UserError(f"--draft {arguments.draft}: its vocabulary is another one; both models must be trained on one text")
    return ModelDraft(model)


def print_beam(arguments, model, tokenizer, prompt):
    """The best text of a beam search, as a whole: it is not known before."""
    if arguments.draft or arguments.stop:
        raise UserError("--beams searches for one whole text: leave out --draft and --stop")
    ids = tokenizer.encode(prompt, errors="strict")
    if len(ids) > model.max_seq_len:
        raise UserError(f"--beams cannot slide, and --prompt has {len(ids)} tokens, where the model's context is {model.max_seq_len}")
    best, *_ = beam_search(model, ids, arguments.max_new_tokens, num_beams=arguments.beams, length_penalty=arguments.length_penalty,
                           cache=chosen_cache(arguments, model), use_cache=arguments.cache != "none",
                           prefill_chunk=arguments.prefill_chunk)
    print(prompt.lstrip("\n") + tokenizer.decode(best.new_ids))
    print(f"ln p = {best.logprob:.2f}, {len(best.new_ids)} tokens, ended by {best.finish_reason}", file=sys.stderr)


def evaluate(arguments):
    tune_allocator()
    folder = chosen_run(arguments)
    model, tokenizer, state = load_any(folder, arguments.device)
    sources = arguments.text or state["sources"]
    text = load_text(sources)
    _, train_ids, validation_ids = encode_split(text, tokenizer)
    require_length(validation_ids, 1, "held-out text")
    loss = evaluation.evaluate(model, validation_ids, model.max_seq_len)
    print(f"{folder} on {' '.join(sources)}: {len(validation_ids):,} held-out {unit(tokenizer)}s; the n-grams counted the text before them")
    print_comparison(loss, baselines(train_ids, validation_ids, tokenizer.vocab_size), tokenizer, validation_ids,
                     predicted_bytes(tokenizer, validation_ids, split_train_validation(text)[1]))


# --- doctor -----------------------------------------------------------------------------------------------------------

def doctor(arguments):
    tune_allocator()
    run = chosen_run(arguments)
    report = examine_run(run, arguments.text, arguments.device)
    print(f"{run}: {report}")
    return 0 if report.healthy else 1


# --- quantize ---------------------------------------------------------------------------------------------------------

def quantize(arguments):
    tune_allocator()
    check_output(arguments)
    scheme = chosen_scheme(arguments)
    model, tokenizer, state = load_model(chosen_run(arguments), arguments.device)
    _, train_ids, validation_ids = encode_split(load_text(arguments.text or state["sources"]), tokenizer)
    batch = as_tensor(calibration_batch(train_ids, model.max_seq_len, arguments.calibration), device=arguments.device)

    def made(variant):
        print(f"making {title(*variant)}", file=sys.stderr)
        return quantize_model(model, *variant, batch, arguments.keep)
    chosen = (scheme, arguments.method)
    models = {chosen: made(chosen)}
    if arguments.out:
        save_quantized(arguments.out, models[chosen], state)
        print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes, {title(*chosen)}. Let it write with:  "
              f"{PROGRAM} generate --run {shlex.quote(str(arguments.out))}", flush=True)
    if not arguments.no_table:
        models = {title(*variant): models.get(variant) or made(variant) for variant in variants(*chosen)}
        print_table({"float32": model, **models}, validation_ids[:None if arguments.tokens is None else arguments.tokens + 1])


def print_table(models, ids):
    print(f"measuring on {len(ids):,} held-out tokens", file=sys.stderr)
    context = models["float32"].max_seq_len
    print(as_text(compare(models, list(evaluation_batches(ids, context, MEASURED_ROWS)), write_speed)))


def check_output(arguments):
    """Before any work is done: a file that there is stays, it may be a checkpoint."""
    if arguments.no_table and not arguments.out:
        raise UserError("--no-table leaves nothing to do; name a file with --out")
    if arguments.out and arguments.out.exists():
        raise UserError(f"--out {arguments.out} exists already; name a new file")
    if arguments.out and not arguments.out.resolve().parent.is_dir():
        raise UserError(f"--out {arguments.out}: there is no folder {arguments.out.resolve().parent}; make it first")
    for name in ("calibration", "tokens"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, got {value}")


def chosen_scheme(arguments):
    if arguments.group in ("channel", "tensor"):
        return Scheme(arguments.bits, not arguments.asymmetric, arguments.group)
    if not arguments.group.isdecimal():
        raise UserError(f"--group must be a number, channel or tensor, got {arguments.group!r}")
    return Scheme(arguments.bits, not arguments.asymmetric, "group", int(arguments.group))


if __name__ == "__main__":
    sys.exit(main())
