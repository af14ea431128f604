"""The command line: verbs by argparse, settings by Hydra overrides. Start-up imports nothing else.

Exit codes: 0 done, 1 a run failed, refused all requests or lost some at a server, or the system
refused a file, 2 the command or its settings are wrong.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module

from tandem.cli.errors import RunFailed, line_of

VERBS = {
    "run": ("tandem.cli.run", "one run or a sweep (-m): predicted or measured, by backend=..."),
    "plan": (
        "tandem.cli.plan_command",
        "a training run predicted: does it fit, how long is a step, and why",
    ),
    "sweep": ("tandem.cli.sweep", "a grid of runs in parallel; resumes, survives failing points"),
    "collect": ("tandem.cli.collect", "one table of all runs in a folder"),
    "report": ("tandem.cli.report", "the page of a run or of a sweep: figures and their numbers"),
    "compare": (
        "tandem.cli.compare",
        "runs: how far off a prediction is, or which setting is better",
    ),
    "calibrate": (
        "tandem.cli.calibrate",
        "profile a device through the executor and fit its costs",
    ),
    "fidelity": (
        "tandem.cli.fidelity",
        "how far predictions of your workload are off: measured reruns, judged by bars",
    ),
    "trace": ("tandem.cli.trace", "import ShareGPT, Azure, BurstGPT, Mooncake, ...; export; show"),
    "list": ("tandem.cli.catalog", "what can be chosen: policies, traces, models, devices, ..."),
    "doctor": ("tandem.cli.doctor", "this machine and installation, to paste into a bug report"),
}
EXAMPLES = """examples:
  tandem run                                      the sample trace, simulated
  tandem run backend=cpu                          the sample trace, measured on this CPU
  tandem sweep policy=chunked_restart,static_restart arrival.rate=2,4,8
  tandem compare outputs/.../SIM outputs/.../CPU  both together, with a report
  tandem trace import ShareGPT_V3.json --tokenizer path/to/tokenizer --out sharegpt.parquet
"""
OPTIONS = """
options:
  --version      the version, and of a checkout its commit
  --completion   what completes verbs, groups and their choices in bash; for ~/.bashrc:
                   eval "$(tandem --completion)"

`tandem VERB --help` says more.
"""
COMPLETE = "--complete"  # what the shell asks, with the line so far
COMPLETION = f"""_tandem() {{
  local IFS=$'\\n'
  COMPREPLY=($(tandem {COMPLETE} "${{COMP_LINE:0:COMP_POINT}}" 2>/dev/null))
  [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
}}
complete -o default -F _tandem tandem"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code."""
    if argv is None:
        _in_utf8()
    # Memory of tables goes back to the system once they are written; Arrow's own pool keeps it.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    words = list(sys.argv[1:] if argv is None else argv)
    warnings_are_ours()
    if words and words[0] in VERBS:
        module, _ = VERBS[words[0]]
        return guarded(lambda: import_module(module).main(_with_one_config_dir(words)))
    return _without_verb(words)


def _with_one_config_dir(words: Sequence[str]) -> Sequence[str]:
    """The words behind the verb. ValueError where a second folder would hide the first one."""
    given = [word for word in words if word.partition("=")[0] in ("--config-dir", "-cd")]
    if len(given) > 1 and words[0] != "compare":  # which takes the folders of several runs
        raise ValueError("--config-dir is given twice: put your yaml files into one folder")
    return words[1:]


def _without_verb(words: Sequence[str]) -> int:
    """Help, where nothing is asked for too, the version, completion, or a usage error."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
    elif words[0] == "--version":
        from tandem.cli.doctor import version_line

        print(f"tandem {version_line()}")
    elif words[0] == "--completion":
        print(COMPLETION)
    elif words[0] == COMPLETE:
        from tandem.cli.catalog import completions

        print(*completions(" ".join(words[1:]), VERBS), sep="\n")
    else:
        near = get_close_matches(words[0], VERBS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(VERBS)}"
        print(f"tandem: {words[0]}: no such verb; {hint}", file=sys.stderr)
        return 2
    return 0


def _in_utf8() -> None:
    """Begins again in Python's UTF-8 mode where the locale names files otherwise.

    Else a folder with an umlaut is no text that Hydra's grammar, yaml or a report can hold.
    """
    is_first = os.environ.get("PYTHONUTF8") != "1"  # an option -X utf8=0 would win again
    if sys.getfilesystemencoding().lower() != "utf-8" and is_first:
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**os.environ, "PYTHONUTF8": "1"})


def warnings_are_ours() -> None:
    """Warnings go to stderr in the form of errors, each of them once.

    A search builds one model many times, and would warn each time.
    """
    told = set[str]()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_first = text not in told
        told.add(text)
        return is_first

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("tandem: %(message)s"))
        logging.lastResort.filters = [is_new]


def guarded(verb: Callable[[], int]) -> int:
    """The verb's exit code, its errors told in one line (all of them with HYDRA_FULL_ERROR=1)."""
    try:
        with _told_to_end():
            return verb()
    except (ValueError, RunFailed) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"tandem: {' '.join(line_of(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt as error:
        print("tandem: interrupted", file=sys.stderr)
        return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)
    except BrokenPipeError:  # `tandem list | head` is no error
        sys.stderr.close()
        return 0
    except OSError as error:  # no rights, no room, a folder where a file should be
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        where = error.filename2 or error.filename
        told = f"{where}: {error.strerror}" if where else str(error)
        print(f"tandem: {' '.join(told.split())}", file=sys.stderr)
        return 1


class Terminated(KeyboardInterrupt):
    """A signal to end: SIGTERM of `kill`, `timeout` or a cluster, SIGHUP of a terminal that closed.

    `number`: which of the two.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)  # simpy makes another one of its arguments
        self.number = number


@contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does: workers end, finished points are kept.

    A signal that is ignored (nohup) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def end(number: int, _: object) -> None:
        for fd in terminals:
            if not os.isatty(fd):  # hung up: a write there would fail
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)
        raise Terminated(number)

    told = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in told}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _help() -> str:
    width = max(map(len, VERBS)) + 2
    verbs = "\n".join(f"  {name:<{width}}{line}" for name, (_, line) in VERBS.items())
    about = "One policy object, simulated and measured."
    return f"usage: tandem VERB ...\n\n{about}\n\nverbs:\n{verbs}\n\n{EXAMPLES}{OPTIONS}"


if __name__ == "__main__":
    sys.exit(main())
