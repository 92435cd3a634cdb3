"""The errors a caller can meet. Each has a stable `code`; serving maps the codes one to one to statuses."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
MAX_PROBLEM = 4000
"""Characters of what is wrong with a file, long lists of names included."""
MAX_SHOWN = 200
"""Characters of a value that a message repeats: a prompt of a megabyte must not become a message of a megabyte."""


class Shown(str):
    """Words in place of a value that is none or too long, such as "empty" or "104857600 bytes": shown without
    quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shown(value: object) -> str:
    """The value as a message shows it: its repr, cut in the middle when long."""
    try:
        return cut(repr(value))
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply to be shown"
    except Exception:  # a caller's own class: the error to be told of is another one
        return f"a {type(value).__name__} that cannot be shown"


def told(error: BaseException) -> str:
    """An exception as a message shows it, whatever its class does."""
    try:
        return repr(error)
    except Exception:
        return f"a {type(error).__name__} that cannot be shown"


class OthersCode:
    """A context for what is called of somebody else's. What is raised there beyond `Exception`, as `SystemExit` and
    `CancelledError` are, is his, and would be taken for ours: it becomes a `RuntimeError`. `KeyboardInterrupt` passes.
    `name`: what has raised it, in its message."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, (Exception, KeyboardInterrupt)):
            raise RuntimeError(f"{self._name} has raised {told(error)}") from error


def in_one_line(error: BaseException) -> str:
    """What an exception says, without its line breaks; its class where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def counted(number: int, noun: str) -> str:
    """So many of something, as "1 token", "2 tokens" or "2 branches"."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "sh", "x")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def cut(text: str, most: int = MAX_SHOWN) -> str:
    """The text, without its middle when it has more than so many characters."""
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: one that begins with `name`, is spelled alike, or is a word of it."""
    known = tuple(known)
    begun = [other for other in known if len(name) > 2 and other.startswith(name)]
    alike = difflib.get_close_matches(name, known, 1)
    words = [other for other in known if other in re.split("[-_]", name)]
    return next(iter((*begun, *alike, *words)), None)


class PagedecError(ValueError):
    """The caller's fault, raised before any state has changed."""

    code: str = "INVALID_ARGUMENT"


class InvalidArgument(PagedecError):
    """A field has a value it may not have. `limit` says what it may have, as in "must be from 1 to 64"."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, limit: str) -> None:
        # All three go to Exception.args, so that the error survives pickling between processes.
        super().__init__(field, value, limit)
        self.field = field
        self.value = value
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.field} is {shown(self.value)}: {self.limit}"


class EngineClosed(InvalidArgument):
    """The engine that is to do something was closed, or has lost what drives it."""


@contextlib.contextmanager
def within(prefix: str) -> Iterator[None]:
    """Errors about a field are about `prefix` and the field."""
    try:
        yield
    except InvalidArgument as error:
        raise type(error)(f"{prefix}{error.field}", error.value, error.limit) from error.__cause__


class SessionLimit(InvalidArgument):
    """Sessions hold as much as they may: `field` is the engine argument, or the server's limit, that says so."""

    code = "RESOURCE_EXHAUSTED"


class SessionTooSmall(SessionLimit):
    """One call asks for more than sessions may ever hold: nothing that ends or is closed makes room for it."""

    code = "INVALID_ARGUMENT"


class BranchBusy(PagedecError):
    """A call on this branch of a session has not ended; others may run at the same time, on others."""

    code = "FAILED_PRECONDITION"

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name, what)
        self.name, self.what = name, what

    def __str__(self) -> str:
        return f"branch {self.name} has a call that still runs: {self.what} must wait until it has ended"


class BranchClosed(PagedecError):
    """There is no such branch any more."""

    code = "NOT_FOUND"

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"branch {self.name} {self.why}"


class FeatureNotAvailable(InvalidArgument):
    """The value is a sensible one, but this version cannot do what it asks for."""

    code = "UNIMPLEMENTED"


class AbsentFeature(FeatureNotAvailable, AttributeError):
    """There is no such method: also an AttributeError, so that `hasattr` says so."""

    def __init__(self, name: str, instead: str) -> None:
        super().__init__(name, Shown("not available in this version"), instead)
        self.args = name, instead  # so that the error survives pickling between processes


OR_TOKEN_IDS = "; or set skip_tokenizer_init=True and pass token ids"
"""What else helps where no tokenizer is to be had, but not whoever needs text."""


class ModelFileError(PagedecError):
    """A model's file is missing, damaged, or not what it says it is. `field` is the argument that `given` was given to,
    which names the file or what it is in; "" where it is not known."""

    code = "MODEL_FILE"

    def __init__(self, path: str | Path, problem: str, field: str = "", given: str = "") -> None:
        super().__init__(path, problem, field, given)
        self.path = path
        self.problem = problem
        self.field, self.given = field, given

    def __str__(self) -> str:
        where = f"{self.field} is {shown(self.given)}" if self.field else self.path
        return f"{where}: {cut(self.problem, MAX_PROBLEM)}"  # a hostile file may repeat anything


class NotFound(PagedecError):
    """There is no such thing by this name: a request, a session, a model, a decoder."""

    code = "NOT_FOUND"

    def __init__(self, kind: str, name: object, known: str = "") -> None:
        super().__init__(kind, name, known)
        self.kind = kind
        self.name = name
        self.known = known

    def __str__(self) -> str:
        return f"{self.kind} {shown(self.name)} does not exist" + (f"; {self.known}" if self.known else "")


class RequestError(PagedecError):
    """One request cannot be carried out as it stands; the others go on."""

    code = "FAILED_PRECONDITION"

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(request_id, problem)
        self.request_id = request_id
        self.problem = problem

    def __str__(self) -> str:
        return f"request {shown(self.request_id)}: {self.problem}"


class GivenUp(RequestError):
    """The engine was closed, or has lost what drives it, before the request was done."""


class DeviceError(RequestError):
    """A request cannot be carried out because nothing can: the device fails whatever it is asked."""

    code = "UNAVAILABLE"


class RequestsFailed(RequestError):
    """Some requests of a call could not be carried out; it is raised when the others are done.

    `outputs` has one output for each prompt, in their order: of those that failed with `error` set, and no answers; of
    scores, which have no `error`, the error itself. `errors` are all that went wrong; this one says what the first of
    them says.
    """

    def __init__(self, errors: Sequence[RequestError], outputs: Sequence[object]) -> None:
        super().__init__(errors[0].request_id, errors[0].problem)
        self.args = tuple(errors), tuple(outputs)  # so that the error survives pickling between processes
        self.errors, self.outputs = list(errors), list(outputs)

    def __str__(self) -> str:
        first = next((i for i, output in enumerate(self.outputs) if _error_of(output) is self.errors[0]), None)
        where = "" if first is None else f"outputs[{first}], "
        more = (
            f"; and {len(self.errors) - 1} more of {len(self.outputs)} requests failed" if len(self.errors) > 1 else ""
        )
        return f"{where}{self.errors[0]}{more}"


def unless_failed(outputs: Sequence[T | RequestError]) -> list[T]:
    """The outputs of several requests. Raises `RequestsFailed` with all of them where some have failed."""
    errors = [error for error in map(_error_of, outputs) if error is not None]
    if errors:
        raise RequestsFailed(errors, outputs) from errors[0]
    return [output for output in outputs if not isinstance(output, RequestError)]


def _error_of(output: object) -> RequestError | None:
    return output if isinstance(output, RequestError) else getattr(output, "error", None)


class CallInterrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of a call for many prompts. What ran is aborted.

    `outputs` has one entry for each prompt, in their order: its output where all of its answers had ended, else None.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        super().__init__(tuple(outputs))
        self.outputs = list(outputs)


class PoolWarning(UserWarning):
    """The KV pool holds less than one context: long sequences will be cut short."""


class DtypeWarning(UserWarning):
    """The numbers asked for are not computed in; others of their size are taken."""


class TokenizerWarning(UserWarning):
    """Tokens were added to the tokenizer that its model does not know: prompts with them are refused."""


class WeightsWarning(UserWarning):
    """The weights take more memory than there is: the system may end the process while they are loaded."""


class LinkWarning(UserWarning):
    """CUDA devices that share a model exchange their parts over the host: NCCL is faster, and is not there."""


class UnusedWarning(UserWarning):
    """A parameter of a request changes nothing beside the others, or tools change nothing in a chat's template."""


class WorkerLost(RuntimeError):
    """A worker process has ended in the middle of its work. The engine goes on with another one."""

    def __init__(self, pid: int, problem: str) -> None:
        super().__init__(
            pid, problem
        )  # both go to Exception.args, so that the error survives pickling between processes
        self.pid, self.problem = pid, problem

    def __str__(self) -> str:
        return f"the worker process {self.pid} {self.problem}"

    __repr__ = __str__


class WorkersGone(RuntimeError):
    """Workers cannot be brought back. All requests fail with that; another attempt is made for those that come."""

    def __init__(self, attempts: int, cause: str) -> None:
        super().__init__(attempts, cause)
        self.attempts, self.cause = attempts, cause

    def __str__(self) -> str:
        return f"the workers could not be brought back in {counted(self.attempts, 'attempt')}; the last: {self.cause}"

    __repr__ = __str__


class DeviceLost(RuntimeError):
    """A device carries nothing out for this process any more, as a GPU does not when one of its kernels has failed. The
    engine ends with that.

    `outputs` has one entry for each prompt of the call that it has ended, as `CallInterrupted` has them.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause, self.outputs = cause, list[Any]()

    def __str__(self) -> str:
        return f"the device is lost to this process, which must be started anew: {self.cause}"

    __repr__ = __str__


class InvariantError(RuntimeError):
    """Our own bug: something that cannot happen has happened. It fails the step and the requests in it."""

    code: ClassVar[str] = "INTERNAL"
