"""A chat template at work, in a process of its own, which alone can be stopped: no loop of a template outlasts a limit of the system.

`chat.render` starts this file as a program: a request comes in, an answer goes out, both JSON. It imports nothing of the library.
"""
import json
import sys
from contextlib import suppress

KEPT = "range", "dict", "namespace"             # of Jinja's own globals; lipsum, cycler and joiner make text of nothing


class Refused(Exception):
    """What a template says of messages that it has no form for."""


def main():
    """The request: path, where modules are found; template, names; seconds, memory, characters, at most so many."""
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]
    environment = prepared()
    limit(request["seconds"], request["memory"])
    json.dump(answer(environment, request), sys.stdout)


def prepared():
    """Jinja's sandbox, with what published templates use besides."""
    import datetime

    from jinja2.sandbox import ImmutableSandboxedEnvironment
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals = {name: environment.globals[name] for name in KEPT}
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.datetime.now().strftime(form))
    return environment


def refuse(message):
    raise Refused(message)


def limit(seconds, memory):
    """Seconds of computing and bytes of memory, where the system can hold a process to them."""
    with suppress(ImportError):                 # Windows has no such module: there only the clock of who started this ends it
        import resource
        for kind, most in (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0):
            with suppress(ValueError, OSError):
                resource.setrlimit(kind, (most, most))


def answer(environment, request):
    """{"text": …}, {"refused": …} or {"error": …}."""
    try:
        text = environment.from_string(request["template"]).render(**request["names"])
        text.encode()                           # half a character is an error here, not a riddle for a tokenizer
    except Refused as error:
        return {"refused": str(error) or "it does not say why"}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}
    if len(text) > request["characters"]:
        return {"error": f"it writes {len(text)} characters, and at most {request['characters']} are read"}
    return {"text": text}


if __name__ == "__main__":
    main()
